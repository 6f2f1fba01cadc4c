"""`headwater accept` at the command line, and its client over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cli
from cluster.accept_client import HttpClient, Question
from cluster.commands import accept
from cluster.demo_client import Worker
from cluster.errors import AnswerError, KillRefusedError
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.fake_accepted import FakeAccepted

QUESTION = Question("once", "a salt", 3)


def no_kill(_worker: Worker) -> None:
    raise KillRefusedError("not here")


@pytest.fixture
def endpoint() -> Iterator[fake_endpoint.Endpoint]:
    with fake_endpoint.endpoint() as running:
        yield running


def client_of(endpoint: fake_endpoint.Endpoint) -> HttpClient:
    return HttpClient(endpoint.url, no_kill)


def event(tokens: list[int], *, prompt: list[int] | None = None) -> str:
    """A chunk of a completion, as vLLM sends it with these options."""
    choice = {
        "index": 0,
        "text": "…",
        "token_ids": tokens,
        "prompt_token_ids": prompt,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-0.25] * len(tokens),
            "top_logprobs": [{f"token_id:{token}": -0.25, "token_id:9": -2} for token in tokens],
        },
    }
    return json.dumps({"choices": [choice], "usage": None})


def answer(cached: int) -> list[str]:
    return [event([4], prompt=[1, 2]), event([5, 6]), fake_endpoint.usage(2, 3, cached)]


def test_the_client_takes_tokens_logprobs_prompt_and_cached_tokens_from_a_stream(
    endpoint: fake_endpoint.Endpoint,
) -> None:
    endpoint.answers.append(fake_endpoint.stream(answer(32)))
    seen: list[int] = []
    reply = client_of(endpoint).complete(QUESTION, lambda so_far: seen.append(len(so_far.tokens)))
    assert (reply.trace_id, reply.prompt, reply.tokens) == ("trace-1", [1, 2], [4, 5, 6])
    assert reply.logprobs[1] == {5: -0.25, 9: -2.0}
    assert reply.cached_tokens == 32
    assert seen[:2] == [1, 3]
    (body,) = endpoint.asked
    assert body["cache_salt"] == "a salt"
    assert body["max_tokens"] == body["min_tokens"] == 3
    assert body["temperature"] == 0 and body["ignore_eos"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event([4])], "3 tokens were asked for, 1 came"),
        (['{"error": {"message": "worker gone"}}'], "worker gone"),
        (["{}"], "no completion event"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_in_one_line(
    endpoint: fake_endpoint.Endpoint, events: list[str], words: str
) -> None:
    endpoint.answers.append(fake_endpoint.stream(events))
    with pytest.raises(AnswerError, match=words):
        client_of(endpoint).complete(QUESTION)


def test_a_stream_that_is_cut_is_an_error_in_one_line(endpoint: fake_endpoint.Endpoint) -> None:
    endpoint.answers.append(fake_endpoint.stream(answer(0), end=False))
    with pytest.raises(AnswerError, match=r"ended before the answer did|failed"):
        client_of(endpoint).complete(QUESTION)


def test_a_refusal_gives_the_endpoints_words(endpoint: fake_endpoint.Endpoint) -> None:
    endpoint.answers.append(fake_endpoint.send_json({"error": {"message": "too long"}}, 400))
    with pytest.raises(AnswerError, match="400 too long"):
        client_of(endpoint).complete(QUESTION)


def test_an_api_key_goes_with_every_question(
    endpoint: fake_endpoint.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_API_KEY", "k-1")
    endpoint.answers.append(fake_endpoint.stream(answer(0)))
    client_of(endpoint).complete(QUESTION)
    assert [given["authorization"] for given in endpoint.headers] == ["Bearer k-1"] * 2


def test_an_endpoint_that_is_not_headwater_is_named(endpoint: fake_endpoint.Endpoint) -> None:
    endpoint.objects["/headwater/status"] = {"hello": 1}
    with pytest.raises(AnswerError, match="is it Headwater"):
        client_of(endpoint).status()


def test_without_a_cluster_it_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["accept", "--state-dir", str(tmp_path)]) == 1
    assert "./headwater serve" in capsys.readouterr().err


def test_an_address_at_which_nobody_answers_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["accept", "--url", "http://127.0.0.1:9"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_number_of_seeds_that_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["accept", "--seeds", "0"])
    assert "0 is not in 1.." in capsys.readouterr().err


class Connected(FakeAccepted):
    """In the client's place."""

    model = "fake-model"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Connected:
    fake = Connected()
    monkeypatch.setattr(accept, "HttpClient", lambda *_args, **_options: fake)
    return fake


def run(*words: str) -> int:
    return cli.main(["accept", "--url", "http://elsewhere", "--seeds", "1", *words])


def test_it_prints_a_table_and_a_verdict_and_ends_with_0(
    cluster: Connected, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    for check in ("equality", "hand-off", "bandwidth", "ledger"):
        assert any(check in line and "PASS" in line for line in shown.splitlines())
    assert any("resume" in line and "NOT CHECKED" in line for line in shown.splitlines())
    assert "give --kill" in shown
    assert shown.splitlines()[-1].startswith("ACCEPTED")


def test_a_failed_check_is_shown_with_its_reason_and_ends_with_1(
    cluster: Connected, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wrong_after = 0
    assert run() == 1
    shown = capsys.readouterr().out
    assert any("equality" in line and "FAIL" in line for line in shown.splitlines())
    assert "nats apart" in shown
    assert shown.splitlines()[-1].startswith("NOT ACCEPTED: equality")


def test_for_machines_it_is_one_json_object(
    cluster: Connected, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["accepted"] is True
    assert body["verdict"].startswith("ACCEPTED")
    assert {c["check"]: c["result"] for c in body["checks"]}["resume"] == "NOT CHECKED"


def test_the_bound_on_bandwidth_can_be_set(
    cluster: Connected, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--floor-gb-s", "50") == 1
    assert "under 50" in capsys.readouterr().out


def test_a_worker_of_another_cluster_is_not_killed() -> None:
    with pytest.raises(KillRefusedError, match="another cluster's"):
        accept.no_kill(Worker("d-1", "decode", 1, "ready"))
