"""Headwater answers as a plain vLLM server did (tests/references), token for token, in float32."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import AT_ONCE, Cluster
from tests.e2e.corpus import CASES, Case
from tests.e2e.plain_vllm import answer, corpus_answers
from tests.equality import Reference, check_tokens
from tests.references import Recorded
from tests.tiers import full

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LOGPROB_TOLERANCE = 1e-3
LONG_TOKENS = 700


def is_long(case: Case) -> bool:
    """Whether computing its prompt takes seconds on a slow CPU."""
    prompt = case.body.get("prompt", "")
    return len(prompt) >= LONG_TOKENS and case.name != "length 1024"


LONG = [case for case in CASES if is_long(case)]
SHORT = [case for case in CASES if not is_long(case)]


@pytest.fixture(scope="module")
def answers(cluster: Cluster, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of each case."""
    cases = SHORT if request.config.getoption("--quick") else CASES
    return corpus_answers(cluster.http, cases, AT_ONCE)


@pytest.mark.parametrize("case", SHORT + full(LONG), ids=lambda case: case.name)
def test_answer_equals_that_of_a_plain_engine(
    answers: dict[str, Any], reference: dict[str, Recorded], case: Case
) -> None:
    check_answer(answers[case.name], reference[case.name], case.name)


def check_answer(got: dict[str, Any], recorded: Recorded, name: str) -> None:
    """The answer has the recorded tokens, up to a tie; without a tie all else is equal too."""
    assert got["status"] == recorded.answer["status"] == 200, got["body"]
    mine, plain = got["body"], recorded.answer["body"]
    assert len(mine["choices"]) == len(plain["choices"])
    choices = list(zip(mine["choices"], plain["choices"], strict=True))
    equal = [check_tokens(a["token_ids"], tokens(b, recorded), name) for a, b in choices]
    for a, b in choices:
        assert a["index"] == b["index"]
    if not all(equal):
        return
    for a, b in choices:
        assert a["finish_reason"] == b["finish_reason"]
        assert a.get("stop_reason") == b.get("stop_reason")
        assert a.get("text") == b.get("text")
        assert a.get("message", {}).get("content") == b.get("message", {}).get("content")
        assert_close(a.get("logprobs"), b.get("logprobs"))
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert mine["usage"][count] == plain["usage"][count]


def tokens(choice: dict[str, Any], recorded: Recorded) -> Reference:
    """A choice's tokens and leads. Which row of a step is whose is unknown where there are several:
    there the least of all stands for each."""
    ids = choice["token_ids"]
    if len(recorded.answer["body"]["choices"]) > 1:
        return Reference(ids, [recorded.lead_min] * len(ids))
    return Reference(ids, [step[0] for step in recorded.leads[: len(ids)]])


def assert_close(a: Any, b: Any) -> None:
    """Equal structure and text, numbers within the tolerance."""
    if isinstance(a, float) or isinstance(b, float):
        assert a == pytest.approx(b, abs=LOGPROB_TOLERANCE)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
    else:
        assert a == b


@pytest.mark.full
def test_streamed_text_equals_the_text_at_once(cluster: Cluster) -> None:
    for case in CASES:
        if case.path != "/v1/chat/completions" or case.body.get("logprobs"):
            continue
        whole = answer(cluster.http, case.path, case.body)["body"]["choices"][0]
        streamed = cluster_stream(cluster, case)
        assert streamed == whole["message"]["content"], case.name


def cluster_stream(cluster: Cluster, case: Case) -> str:
    import json

    body = {"model": "SmolLM2-135M-Instruct", "stream": True, **case.body}
    parts = []
    with cluster.http.stream("POST", case.path, json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: ") and "[DONE]" not in line:
                event = json.loads(line[6:])
                assert "error" not in event
                parts += [c["delta"].get("content") or "" for c in event["choices"]]
    return "".join(parts)
