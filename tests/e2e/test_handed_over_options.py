"""Each option of a request holds over a hand-over: cold and streamed through prefill and decode,
then again at once from a cache, with the same answer. (That both equal a plain engine's answers is
test_equality's business.)
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.client import LEADS, TIMEOUT_S, body_of, raw_stream, reference_of
from tests.e2e.conftest import Cluster
from tests.e2e.corpus import BLOCK, CONTEXT, EOS, prompt
from tests.equality import check_tokens
from tests.tiers import full
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LENGTH = 13 * BLOCK + 7
ALL_TOKENS = list(range(49_152))


def one_stream(cluster: Cluster, body: dict[str, Any]) -> tuple[dict[int, Any], Any, str]:
    """Stream a completion: choices by index, usage, record's name."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with cluster.http.stream("POST", "/v1/completions", json=asked, timeout=TIMEOUT_S) as reply:
        assert reply.status_code == 200, reply.read()
        trace = reply.headers["x-headwater-request"]
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                start = {"text": "", "token_ids": [], "ends": [], "logprobs": []}
                choice = choices.setdefault(part["index"], start)
                choice["text"] += part["text"]
                choice["token_ids"] += part.get("token_ids") or []
                choice["logprobs"] += (part.get("logprobs") or {}).get("top_logprobs") or []
                if part["finish_reason"]:
                    choice["ends"].append((part["finish_reason"], part["stop_reason"]))
    return choices, usage, trace


def was_handed_over(cluster: Cluster, trace: str) -> bool:
    """Whether a choice of the request went from a prefill to a decode worker."""
    records = cluster.http.get(f"/headwater/requests/{trace}").json()["records"]
    roles = [[a["role"] for a in record["attempts"]] for record in records]
    assert all(a["outcome"] != "lost" for r in records for a in r["attempts"])
    return ["prefill", "decode"] in roles


SEEDED = {"temperature": 0.8, "seed": 17}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "min and max tokens": {"min_tokens": 20, "max_tokens": 40},
    "min tokens equal max tokens": {"min_tokens": 12, "max_tokens": 12},
    "end held off for two tokens": {"min_tokens": 2, "logit_bias": {str(EOS): 100}},
    "end ignored": {"ignore_eos": True, "logit_bias": {str(EOS): 100}, "max_tokens": 6},
    "stop tokens held off": {"min_tokens": 5, "stop_token_ids": ALL_TOKENS[::2]},
    "two choices": {**SEEDED, "n": 2, "max_tokens": 30},
    "four choices": {**SEEDED, "n": 4, "max_tokens": 30},
    "two choices that end at once": {**SEEDED, "n": 2, "min_tokens": 1, "logit_bias": {"2": 100}},
    "no alternatives": {"logprobs": 0, "max_tokens": 8},
    "five alternatives": {"logprobs": 5, "max_tokens": 8},
    "twenty alternatives": {"logprobs": 20, "max_tokens": 8},
    "alternatives of two choices": {**SEEDED, "n": 2, "logprobs": 3, "max_tokens": 6},
    "echo": {"echo": True, "max_tokens": 4},
    "bad words": {"bad_words": [" the", " of"]},
    "penalties": {"frequency_penalty": 1.2, "presence_penalty": 0.5, "max_tokens": 30},
}
# Others of their kind are in each run.
MORE_OF_A_KIND = ["five alternatives", "min and max tokens", "no alternatives", "two choices"]


@pytest.mark.parametrize(
    "name", [*(name for name in OPTIONS if name not in MORE_OF_A_KIND), *full(MORE_OF_A_KIND)]
)
def test_an_option_gives_the_same_streamed_over_a_hand_over_and_at_once_from_a_cache(
    cluster: Cluster, name: str
) -> None:
    options = OPTIONS[name]
    body = body_of(prompt(LENGTH, 5200 + list(OPTIONS).index(name)), **{"max_tokens": 20} | options)
    choices, usage, trace = one_stream(cluster, body)
    assert was_handed_over(cluster, trace)
    # Greedy choices may part at a tie, where their leads are known.
    has_leads = not {"logprobs", "echo", "seed"} & options.keys()
    whole = cluster.http.post("/v1/completions", json=body | (LEADS if has_leads else {})).json()
    assert sorted(choices) == list(range(options.get("n", 1)))
    assert len(whole["choices"]) == len(choices)
    for at_once in whole["choices"]:
        streamed = choices[at_once["index"]]
        if has_leads and not check_tokens(streamed["token_ids"], reference_of(at_once), name):
            continue
        assert streamed["token_ids"] == at_once["token_ids"]
        assert streamed["text"] == at_once["text"]
        assert streamed["ends"] == [(at_once["finish_reason"], at_once["stop_reason"])]
        if "logprobs" in options:
            given = at_once["logprobs"]["top_logprobs"]
            assert len(given) == len(streamed["token_ids"])
            for mine, other in zip(streamed["logprobs"], given, strict=True):
                assert mine == pytest.approx(other, abs=1e-3)
                # The sampled token is among them, or comes on top.
                assert options["logprobs"] <= len(mine) <= options["logprobs"] + 1
    lengths = [len(choice["token_ids"]) for choice in choices.values()]
    assert min(lengths) >= options.get("min_tokens", 1)
    assert max(lengths) <= options.get("max_tokens", 20)
    for counts in (usage, whole["usage"]):
        assert counts["prompt_tokens"] == LENGTH, "counted once, whatever n is"
        assert counts["completion_tokens"] == sum(lengths)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {str(EOS): 100}},
        {"stop_token_ids": ALL_TOKENS},
        {"max_tokens": 1},
        {"max_tokens": 1, "logprobs": 20},
        {"max_tokens": 1, "min_tokens": 1, "logit_bias": {str(EOS): 100}},
    ],
    ids=["end of sequence", "stop token", "one token", "one with logprobs", "one, end held off"],
)
def test_an_answer_that_ends_with_its_first_token_never_reaches_a_decode_worker(
    cluster: Cluster, options: dict[str, Any]
) -> None:
    ids = prompt(LENGTH, 5300 + len(json.dumps(options)))
    before = {w["id"]: w["generated_tokens_total"] for w in cluster.status()["workers"]}
    choices, usage, trace = one_stream(cluster, body_of(ids, **options))
    record = cluster.record(trace)
    assert [(a["role"], a["outcome"]) for a in record["attempts"]] == [("prefill", "finished")]
    assert len(choices[0]["token_ids"]) == usage["completion_tokens"] == 1
    (end,) = choices[0]["ends"]
    assert end[0] == ("length" if options.get("max_tokens") == 1 else "stop")
    after = {w["id"]: w["generated_tokens_total"] for w in cluster.status()["workers"]}
    assert sum(after.values()) - sum(before.values()) == 1


def test_a_stop_string_in_the_first_token_ends_the_answer_and_the_decode_attempt(
    cluster: Cluster,
) -> None:
    ids = prompt(LENGTH, 5400)
    # Each token is " the" then, the first one too, which the prefill worker makes.
    body = body_of(ids, max_tokens=400, logit_bias={"260": 100}, stop=["the"])
    choices, usage, trace = one_stream(cluster, body)
    assert choices[0]["ends"] == [("stop", "the")]
    assert choices[0]["text"].strip() == ""
    assert usage["completion_tokens"] == 1
    record = cluster.record(trace)
    assert record["outcome"] == "finished"
    assert record["attempts"][0]["role"] == "prefill"
    # What the decode worker made before the abort reached it, nothing like 400.
    assert record["output_tokens"] <= 4


@pytest.mark.full
def test_one_of_four_choices_goes_on_when_the_others_have_ended(cluster: Cluster) -> None:
    ids = prompt(LENGTH, 5500)
    body = body_of(ids, n=4, temperature=1.3, seed=3, max_tokens=60, stop=["\n", "."])
    choices, usage, _ = one_stream(cluster, body)
    assert [len(choices[i]["ends"]) for i in range(4)] == [1] * 4
    lengths = [len(choices[i]["token_ids"]) for i in range(4)]
    assert len(set(lengths)) > 1, "they end apart"
    assert usage["completion_tokens"] == sum(lengths)


def test_a_client_that_leaves_four_choices_midway_ends_all_four(cluster: Cluster) -> None:
    before = cluster.status()["requests"]["outcomes"]
    body = body_of(prompt(LENGTH, 5600), n=4, temperature=0.8, seed=5, max_tokens=600)
    with raw_stream(cluster, {**body, "ignore_eos": True}, "four-choices") as raw:
        raw.read_until(lambda got: all(f'"index":{i},'.encode() in got for i in range(4)))
        raw.reset()
        wait_until(
            lambda: not any(cluster.status()["requests"]["in_flight"].values()),
            timeout_s=20,
            what="all choices ended",
        )
    after = cluster.status()["requests"]["outcomes"]
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "cancelled": 4
    }


@pytest.mark.full
@pytest.mark.parametrize("short_by", [1, 2, BLOCK])
def test_an_answer_fills_the_context_to_its_last_token_over_a_hand_over(
    cluster: Cluster, short_by: int
) -> None:
    ids = prompt(CONTEXT - short_by, 5700 + short_by)
    body = body_of(ids, ignore_eos=True, max_tokens=short_by)
    choices, usage, trace = one_stream(cluster, body)
    assert choices[0]["ends"] == [("length", None)]
    assert len(choices[0]["token_ids"]) == usage["completion_tokens"] == short_by
    roles = [a["role"] for a in cluster.record(trace)["attempts"]]
    assert roles == (["prefill"] if short_by == 1 else ["prefill", "decode"])


def test_too_many_alternatives_are_refused(cluster: Cluster) -> None:
    reply = cluster.http.post("/v1/completions", json=body_of(prompt(LENGTH, 5800), logprobs=21))
    assert reply.status_code == 400
    assert "20" in reply.json()["error"]["message"]


@pytest.mark.full
def test_limits_of_chat_are_those_of_the_decode_leg_whichever_field_carries_them(
    cluster: Cluster,
) -> None:
    text = "Tell me about rivers, boats and the sea, at length, please. " * 30
    base = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "ignore_eos": True,
    }
    lengths = []
    for limits in (
        {"min_tokens": 20, "max_tokens": 40},
        {"min_tokens": 20, "max_completion_tokens": 40},
        {"min_tokens": 20, "max_completion_tokens": 35, "max_tokens": 40},
    ):
        reply = cluster.http.post("/v1/chat/completions", json={**base, **limits})
        assert reply.status_code == 200, reply.text
        lengths.append(reply.json()["usage"]["completion_tokens"])
    assert lengths == [40, 40, 35]
    assert all(short <= long for short, long in pairwise([20, *sorted(lengths)]))
