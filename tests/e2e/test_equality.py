"""Headwater answers as a plain vLLM engine does, token for token, in float32."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Cluster
from tests.e2e.corpus import CASES, Case
from tests.e2e.plain_vllm import answer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LOGPROB_TOLERANCE = 1e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answer_equals_that_of_a_plain_engine(
    cluster: Cluster, reference: dict[str, Any], case: Case
) -> None:
    expected = reference[case.name]
    got = answer(cluster.http, case.path, case.body)
    assert got["status"] == expected["status"] == 200, (got["body"], expected["body"])
    mine, plain = got["body"], expected["body"]
    assert len(mine["choices"]) == len(plain["choices"])
    for a, b in zip(mine["choices"], plain["choices"], strict=True):
        assert a["index"] == b["index"]
        assert a["token_ids"] == b["token_ids"]
        assert a["finish_reason"] == b["finish_reason"]
        assert a.get("stop_reason") == b.get("stop_reason")
        assert a.get("text") == b.get("text")
        assert a.get("message", {}).get("content") == b.get("message", {}).get("content")
        assert_close(a.get("logprobs"), b.get("logprobs"))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert mine["usage"][name] == plain["usage"][name]


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
