"""Where a stream was cut makes no difference; anything else in it does."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.e2e.parity.normal_form import compare
from tests.e2e.parity.replies import BrokenStream, Event, Reply, events_of, reply_of

HEADERS = {"content-type": "text/event-stream; charset=utf-8"}
ID = "chatcmpl-0123456789abcdef"
OTHER_ID = "chatcmpl-6f1c2a0e-93ab-4c1d-8e2f-0123456789ab"


def chunk(delta: dict[str, Any] | None, index: int = 0, **more: Any) -> dict[str, Any]:
    """A chunk of a chat; None: one without choices."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    of_choice = {k: more.pop(k) for k in ("logprobs", "finish_reason", "stop_reason") if k in more}
    choices = [] if delta is None else [{**choice, **of_choice}]
    return {"id": ID, "created": int(time.time()), "choices": choices, **more}


def stream(*chunks: Any) -> Reply:
    events = [Event(None, one) for one in (*chunks, "[DONE]")]
    return Reply(200, HEADERS, events=tuple(events))


def paths(plain: Reply, ours: Reply) -> list[str]:
    return [difference.path for difference in compare(plain, ours)]


OPENING = chunk({"role": "assistant", "content": ""})
USAGE = chunk(None, usage={"completion_tokens": 2})
CHUNKS = [
    OPENING,
    chunk({"content": "a"}),
    chunk({"content": " fox"}),
    chunk({"content": "."}, finish_reason="length", stop_reason=None, system_fingerprint="f"),
    USAGE,
]
PLAIN = stream(*CHUNKS)


def test_neighbouring_deltas_may_be_cut_anywhere() -> None:
    end = {"finish_reason": "length", "stop_reason": None, "system_fingerprint": "f"}
    assert paths(PLAIN, stream(OPENING, chunk({"content": "a fox."}, **end), USAGE)) == []
    apart = stream(OPENING, chunk({"content": "a fox."}), chunk({}, **end), USAGE)
    assert paths(PLAIN, apart) == []


@pytest.mark.parametrize(
    "chunks",
    [
        CHUNKS[1:],  # no opening chunk
        CHUNKS[:-1],  # no usage
        [OPENING, chunk({"content": "a fox"}), USAGE],  # no end
        [OPENING, chunk({"content": "a box."}, finish_reason="length", stop_reason=None), USAGE],
        [OPENING, chunk({"content": "a fox."}, finish_reason="stop", stop_reason=None), USAGE],
        [USAGE, OPENING, chunk({"content": "a fox."}, finish_reason="length", stop_reason=None)],
        [OPENING, chunk({"reasoning": "a fox."}, finish_reason="length", stop_reason=None), USAGE],
        [OPENING, *CHUNKS],  # opened twice
    ],
)
def test_anything_but_the_cuts_is_found(chunks: list[dict[str, Any]]) -> None:
    assert paths(PLAIN, stream(*chunks))


def test_a_missing_end_mark_is_found() -> None:
    assert PLAIN.events is not None
    cut = Reply(200, HEADERS, events=PLAIN.events[:-1])
    assert paths(PLAIN, cut) == ["stream.after[1]"]


def test_an_error_in_place_of_the_end_is_found() -> None:
    broken = stream(OPENING, chunk({"content": "a"}), {"error": {"message": "m"}})
    assert paths(PLAIN, broken)


def test_chunks_of_several_choices_may_interleave_but_not_lose_their_order() -> None:
    a1, a2 = chunk({"content": "a"}, 0), chunk({"content": "b"}, 0)
    b1, b2 = chunk({"content": "c"}, 1), chunk({"content": "d"}, 1)
    assert paths(stream(a1, b1, a2, b2), stream(b1, b2, a1, a2)) == []
    assert paths(stream(a1, b1, a2, b2), stream(a2, b1, a1, b2)) == [
        "stream.choices.0[0].delta.content"
    ]


def test_usage_that_goes_along_must_come_with_every_chunk() -> None:
    first, second = chunk({"content": "a"}, usage={"n": 1}), chunk({"content": "b"}, usage={"n": 2})
    whole = chunk({"content": "ab"}, usage={"n": 2})
    assert paths(stream(first, second), stream(whole)) == []
    assert paths(stream(first, second), stream(first, chunk({"content": "b"})))


def test_logprobs_and_token_ids_grow_with_their_text() -> None:
    def of(text: str, *numbers: float) -> dict[str, Any]:
        return {
            "id": "cmpl-0123456789abcdef",
            "choices": [
                {
                    "index": 0,
                    "text": text,
                    "logprobs": {"token_logprobs": list(numbers)},
                    "finish_reason": None,
                }
            ],
        }

    assert paths(stream(of("a", -1.0), of("b", -2.0)), stream(of("ab", -1.0, -2.0))) == []
    assert paths(stream(of("a", -1.0), of("b", -2.0)), stream(of("ab", -1.0, -2.5)))
    assert paths(stream(of("a", -1.0), of("b", -2.0)), stream(of("ab", -1.0)))


def test_arguments_of_a_tool_call_may_be_cut_anywhere_but_calls_stay_apart() -> None:
    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        name = {"name": "w"} if more else {}
        one = {"index": index, "function": {**name, "arguments": arguments}, **more}
        return chunk({"tool_calls": [one]})

    first = call(0, "", id="chatcmpl-tool-0123456789abcdef", type="function")
    plain = stream(first, call(0, '{"a":'), call(0, "1}"))
    assert paths(plain, stream(first, call(0, '{"a":1}'))) == []
    assert paths(plain, stream(first, call(0, '{"a":2}')))
    assert paths(plain, stream(first, call(1, '{"a":1}', id="x", type="function")))
    assert paths(plain, stream(call(0, '{"a":1}', type="function")))


# ---- named events -------------------------------------------------------------------------------


def named(*events: dict[str, Any]) -> Reply:
    return Reply(200, HEADERS, events=tuple(Event(e["type"], e) for e in events))


def delta(text: str, number: int, item: str = "msg_0123456789abcdef") -> dict[str, Any]:
    kind = "response.output_text.delta"
    rest = {"item_id": item, "logprobs": [], "sequence_number": number}
    return {"type": kind, "delta": text, **rest}


def test_deltas_of_a_response_are_joined_and_its_numbers_must_be_consecutive() -> None:
    done = {"type": "response.completed", "sequence_number": 2}
    plain = named(delta("a", 0), delta("b", 1), done)
    assert paths(plain, named(delta("ab", 0), {**done, "sequence_number": 1})) == []
    assert paths(plain, named(delta("ab", 0), done)) == ["stream.events[2].consecutive"]
    assert paths(plain, named(delta("ac", 0), {**done, "sequence_number": 1}))
    assert paths(plain, named(delta("ab", 0)))
    other = delta("b", 1, "msg_fedcba9876543210")
    assert paths(plain, named(delta("a", 0), other, done))


def test_deltas_of_a_message_are_joined_within_their_block() -> None:
    def block(text: str, index: int = 0, kind: str = "text") -> dict[str, Any]:
        one = {"type": f"{kind}_delta", kind: text}
        return {"type": "content_block_delta", "index": index, "delta": one}

    stop = {"type": "message_stop"}
    plain = named(block("a"), block("b"), stop)
    assert paths(plain, named(block("ab"), stop)) == []
    assert paths(plain, named(block("a"), block("b", 1), stop))
    assert paths(plain, named(block("a"), block("b", 0, "thinking"), stop))
    assert paths(plain, named(block("ab")))


def test_the_name_of_an_event_is_compared() -> None:
    plain = Reply(200, HEADERS, events=(Event("ping", {"type": "ping"}),))
    assert paths(plain, Reply(200, HEADERS, events=(Event("pong", {"type": "ping"}),)))
    assert paths(plain, Reply(200, HEADERS, events=(Event(None, {"type": "ping"}),)))


# ---- chance -------------------------------------------------------------------------------------


def test_drawn_ids_and_times_are_replaced_and_references_kept() -> None:
    def body(one: str, two: str, created: Any) -> Reply:
        return Reply(200, {}, {"id": one, "items": [{"item_id": two}], "created": created})

    now = int(time.time())
    plain = body(ID, ID, now)
    assert paths(plain, body(OTHER_ID, OTHER_ID, now + 30)) == []
    assert paths(plain, body(OTHER_ID, ID, now)) == ["body.items[0].item_id"]
    assert paths(plain, body(ID, ID, 17)) == ["body.created"]
    assert paths(plain, body(ID, ID, float(now))) == ["body.created"]
    assert paths(plain, body("chatcmpl-mine", "chatcmpl-mine", now)) == [
        "body.id",
        "body.items[0].item_id",
    ]


def test_only_the_clock_in_a_message_is_replaced() -> None:
    def error(message: str) -> Reply:
        rest = {"type": "t", "param": None, "code": 400}
        return Reply(400, {}, {"error": {"message": message, **rest}})

    plain = error("[20:21:09] <path>:83: unclosed")
    assert paths(plain, error("[20:22:32] <path>:83: unclosed")) == []
    assert paths(plain, error("[20:22:32] <path>:84: unclosed")) == ["body.message"]


# ---- what is read off the wire ------------------------------------------------------------------


def test_a_stream_is_read_event_by_event() -> None:
    text = f"event: a\ndata: {json.dumps({'x': 1})}\n\ndata: [DONE]\n\n"
    assert list(events_of(text)) == [Event("a", {"x": 1}), Event(None, "[DONE]")]
    assert reply_of(200, HEADERS, text).events == (Event("a", {"x": 1}), Event(None, "[DONE]"))


@pytest.mark.parametrize("text", ["data: 1", "data: 1\n\ndata: 2", "event: a\n\n", "junk\n\n"])
def test_a_stream_that_breaks_off_or_holds_no_events_is_told(text: str) -> None:
    with pytest.raises(BrokenStream):
        list(events_of(text))


def test_a_redirect_keeps_its_path_but_not_its_host() -> None:
    reply = reply_of(307, {"location": "http://127.0.0.1:80/v1/models", "date": "x"}, "")
    assert reply == Reply(307, {"location": "/v1/models"}, "")
