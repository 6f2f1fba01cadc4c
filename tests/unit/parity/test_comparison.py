"""The parity check fails on every kind of difference that it is there for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.parity.comparison import ABSENT, Difference, differences
from tests.e2e.parity.known import KNOWN, NOT_COMPARED, Known, NotCompared, unexplained
from tests.e2e.parity.normal_form import compare
from tests.e2e.parity.replies import Event, Reply

BODY = {
    "id": "cmpl-0123456789abcdef",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "a fox",
            "token_ids": [5, 6],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {"tokens": ["a", " fox"], "token_logprobs": [-0.5, -1.25]},
        }
    ],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
}
PLAIN = Reply(200, {"content-type": "application/json"}, BODY)


def found(ours: Reply, plain: Reply = PLAIN) -> list[Difference]:
    return compare(plain, ours)


def changed(change: Callable[[Any], Any]) -> Reply:
    body = copy.deepcopy(BODY)
    change(body)
    return Reply(200, {"content-type": "application/json"}, body)


def test_equal_replies_have_no_difference() -> None:
    assert found(PLAIN) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda b: b["choices"][0].update(text="a box"), "body.choices[0].text"),
        (lambda b: b["choices"][0]["token_ids"].append(7), "body.choices[0].token_ids[2]"),
        (lambda b: b["choices"][0]["token_ids"].pop(), "body.choices[0].token_ids[1]"),
        (lambda b: b["choices"][0].update(finish_reason="stop"), "body.choices[0].finish_reason"),
        (lambda b: b["choices"][0].update(stop_reason="x"), "body.choices[0].stop_reason"),
        (lambda b: b["choices"][0].pop("stop_reason"), "body.choices[0].stop_reason"),
        (lambda b: b["choices"][0].update(index=0.0), "body.choices[0].index"),
        (lambda b: b["choices"][0].update(index=False), "body.choices[0].index"),
        (lambda b: b.update(service_tier=None), "body.service_tier"),
        (lambda b: b["usage"].update(prompt_tokens=4), "body.usage.prompt_tokens"),
        (
            lambda b: b["usage"]["prompt_tokens_details"].update(cached_tokens=32),
            "body.usage.prompt_tokens_details.cached_tokens",
        ),
        (
            lambda b: b["choices"][0]["logprobs"].update(token_logprobs=[-0.5, -1.252]),
            "body.choices[0].logprobs.token_logprobs[1]",
        ),
        (lambda b: b.update(id="mine"), "body.id"),
        (lambda b: b.update(id="chatcmpl-0123456789abcdef"), "body.id"),
        (lambda b: b["choices"].append(BODY), "body.choices[1]"),
        (lambda b: b.update(usage=[]), "body.usage"),
    ],
)
def test_each_kind_of_difference_in_a_body_is_found(
    change: Callable[[Any], Any], path: str
) -> None:
    assert [difference.path for difference in found(changed(change))] == [path]


def test_status_headers_and_a_lost_reply_are_compared() -> None:
    assert [d.path for d in found(Reply(400, PLAIN.headers, BODY))] == ["status"]
    assert [d.path for d in found(Reply(200, {"content-type": "text/plain"}, BODY))] == [
        "headers.content-type"
    ]
    assert [d.path for d in found(Reply(200, {}, BODY))] == ["headers.content-type"]
    lost = Reply(0, lost="ReadError")
    assert [d.path for d in found(lost)] == [d.path for d in found(lost, lost)] == ["lost"]


def test_numbers_within_the_tolerance_are_equal() -> None:
    near = changed(lambda b: b["choices"][0]["logprobs"].update(token_logprobs=[-0.5009, -1.2491]))
    assert found(near) == []


@pytest.mark.parametrize(
    ("plain", "ours", "is_equal"),
    [(7, 8, False), (99, 98, False), (5_000, 5_001, True), (5_000, 5_002, False)],
)
def test_only_ranks_far_down_may_be_off_by_little(plain: int, ours: int, *, is_equal: bool) -> None:
    assert (list(differences({"rank": plain}, {"rank": ours}, "p")) == []) == is_equal
    assert list(differences({"n": plain}, {"n": ours}, "p"))


# ---- what is known ------------------------------------------------------------------------------


def test_a_difference_is_known_only_for_its_requests_paths_and_statuses() -> None:
    known = Known("r", r"body\..*", ("a",), (200, 400))
    assert known.covers("a", Difference("status", 200, 400))
    assert not known.covers("a", Difference("status", 200, 500))
    assert known.covers("a", Difference("body.id", 1, ABSENT))
    assert not known.covers("a", Difference("headers.allow", 1, ABSENT))
    assert not known.covers("b", Difference("body.id", 1, ABSENT))
    assert not Known("r", ".*").covers("a", Difference("status", 200, 400))


def test_what_is_not_compared_must_be_there_on_both_sides() -> None:
    entry = NotCompared("r", r"body\.code")
    assert entry.covers("a", Difference("body.code", 400, "invalid_value"))
    assert not entry.covers("a", Difference("body.code", 400, ABSENT))
    assert not entry.covers("a", Difference("body.message", "x", "y"))


def test_nothing_but_codes_and_params_of_errors_goes_unseen_everywhere() -> None:
    error = {"message": "m", "type": "t", "param": None, "code": 400}
    plain = Reply(400, {}, {"error": error})
    for name in error:
        ours = Reply(400, {}, {"error": {**error, name: "other"}})
        left = unexplained("completions: any", found(ours, plain))
        assert bool(left) == (name not in {"code", "param"}), name


@pytest.mark.parametrize(
    ("plain", "ours", "paths"),
    [
        (
            {"detail": "Not Found"},
            {"error": {"message": "Not Found", "type": "t", "param": None, "code": None}},
            ["body.shape", "body.type"],
        ),
        (
            {"error": {"message": "m", "type": "t", "param": None, "code": None}},
            {"type": "error", "error": {"message": "m", "type": "t", "details": {"x": 1}}},
            ["body.shape"],
        ),
        ({"detail": "Not Found"}, {"detail": "Gone"}, ["body.message"]),
        ({"detail": "m"}, {"detail": "m", "more": 1}, None),
        ({"detail": "m"}, "m", None),
        ({"detail": "m"}, {"error": "m"}, None),
    ],
)
def test_what_an_error_says_is_compared_whatever_its_envelope(
    plain: Any, ours: Any, paths: list[str] | None
) -> None:
    left = [difference.path for difference in found(Reply(404, {}, ours), Reply(404, {}, plain))]
    assert left == paths if paths is not None else left


def test_a_stream_that_is_refused_at_once_says_what_the_error_says() -> None:
    error = {"error": {"message": "m", "type": "t", "param": None, "code": 400}}
    plain = Reply(200, {}, events=(Event(None, error), Event(None, "[DONE]")))
    assert [d.path for d in found(Reply(400, {}, error), plain)] == [
        "refused in a stream that ends with",
        "status",
    ]
    other = {"error": {**error["error"], "message": "n"}}
    assert "body.message" in [d.path for d in found(Reply(400, {}, other), plain)]


def test_every_entry_has_a_reason() -> None:
    assert all(len(entry.reason) > 20 for entry in (*KNOWN, *NOT_COMPARED))
