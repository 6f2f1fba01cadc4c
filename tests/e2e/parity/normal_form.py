"""A reply without what is random by nature, and without the accident of where a stream was cut.

Random by nature, and replaced: ids that a server draws (the same id keeps the same stand-in, so
that references still count), and clock times (xgrammar puts one into its messages). Everything
else stays.

Where a stream was cut: vLLM sends what is there when its consumer looks, so that a chunk carries
one token or several. Neighbouring deltas of one kind are therefore joined; a delta that ends a
choice may be joined to the one before it. With several choices, the order between choices is
chance too: chunks are held by choice. Nothing else of the sequence is given up.

An error is taken out of its envelope, whose shape is compared by name: so that what it says can be
compared although the shapes are not the same. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from tests.e2e.parity.comparison import Difference, differences
from tests.e2e.parity.replies import Event, Reply

_DRAWN = re.compile(
    r"(?P<kind>(?:[a-z]+[-_])*?)"
    r"(?:[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})"
)
_ID_KEYS = frozenset({"id", "item_id", "call_id", "response_id", "tool_call_id", "request_id"})
_CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\]")
_TIME_KEYS = frozenset({"created", "created_at", "completed_at"})
CLOCK_TOLERANCE_S = 86_400
# What a later chunk of a choice goes on with, in /v1/completions and /v1/chat/completions.
_GROWING = frozenset(
    {"content", "text", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset"}
)
_FIRST_ONLY = frozenset({"prompt_token_ids"})
_APART = "<chunks that cannot be joined>"
_ENDING = ("finish_reason", "stop_reason")
_NAMED_DELTAS = {
    "response.output_text.delta": ("delta", "logprobs"),
    "response.function_call_arguments.delta": ("delta",),
    "response.reasoning_text.delta": ("delta",),
}


def compare(plain: Reply, ours: Reply) -> list[Difference]:
    """All differences of two replies. A reply that was lost differs from any other."""
    if plain.lost or ours.lost:
        return [Difference("lost", plain.lost, ours.lost)]
    return list(differences(normal(plain), normal(ours)))


def normal(reply: Reply) -> dict[str, Any]:
    """The reply as plain data, to be compared."""
    names = _Names(reply.received_s)
    form: dict[str, Any] = {"status": reply.status, "headers": dict(reply.headers)}
    if reply.events is None:
        body = names.without_chance(reply.body)
        form["body"] = _said(body) if reply.status >= HTTPStatus.BAD_REQUEST else body
    else:
        events = [Event(e.name, names.without_chance(e.data)) for e in reply.events]
        if events and isinstance(events[0].data, dict) and "error" in events[0].data:
            form["body"] = _said(events[0].data)
            form["refused in a stream that ends with"] = [event.data for event in events[1:]]
        else:
            form["stream"] = _stream(events)
    return form


def _said(body: Any) -> Any:
    """An error without its envelope; what is none of the known shapes stays as it is."""
    if not isinstance(body, dict):
        return body
    error, nothing = body.get("error"), {"type": None, "param": None, "code": None}
    if body.keys() == {"detail"}:
        return {"shape": "FastAPI", **nothing, "message": body["detail"]}
    if not isinstance(error, dict):
        return body
    if body.keys() == {"error"} and error.keys() == {"message", *nothing}:
        return {"shape": "OpenAI", **error}
    if body.keys() == {"type", "error"} and error.keys() - {"details"} == {"message", "type"}:
        return {"shape": "Anthropic", **nothing, **_without(error, ("details",))}
    return body


class _Names:
    """Stand-ins for drawn ids, in order of appearance, and for times near now_s."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._known: dict[str, str] = {}

    def without_chance(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self.without_chance(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self.without_chance(one) for one in value]
        if key in _ID_KEYS and isinstance(value, str):
            return self._stand_in(value)
        if key in _TIME_KEYS and _is_near(value, self._now_s):
            return f"<{type(value).__name__}: now>"
        if key == "message" and isinstance(value, str):
            return _CLOCK.sub("[now]", value)
        return value

    def _stand_in(self, value: str) -> str:
        drawn = _DRAWN.fullmatch(value)
        if drawn is None:
            return value
        return self._known.setdefault(value, f"{drawn['kind']}<{len(self._known) + 1}>")


def _is_near(value: Any, now_s: float) -> bool:
    """Whether it is a time, in seconds, near now."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value - now_s) < CLOCK_TOLERANCE_S


# ---- streams ------------------------------------------------------------------------------------


def _stream(events: list[Event]) -> dict[str, Any]:
    if any(event.name is not None for event in events):
        return {"events": _named(events)}
    return _chunks(events)


def _named(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events of /v1/responses and /v1/messages, neighbouring deltas joined."""
    joined: list[dict[str, Any]] = []
    numbers: list[int] = []
    for event in events:
        data = dict(event.data) if isinstance(event.data, dict) else {"text": event.data}
        if "sequence_number" in data:
            numbers.append(data.pop("sequence_number"))
        now = {"event": event.name, **data}
        if not (joined and _join_named(joined[-1], now)):
            joined.append(now)
    if numbers:
        # Consecutive from the first: the numbers themselves depend on the cuts.
        joined.append({"first number": numbers[0], "consecutive": numbers == _upwards(numbers)})
    return joined


def _upwards(numbers: list[int]) -> list[int]:
    return list(range(numbers[0], numbers[0] + len(numbers)))


def _join_named(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Add a delta to the one before it, if both are of one kind."""
    growing = _NAMED_DELTAS.get(str(now["event"]))
    if growing is not None:
        if _without(before, growing) != _without(now, growing):
            return False
        for name in growing:
            before[name] = before[name] + now[name]
        return True
    if now["event"] == before["event"] == "content_block_delta":
        growing = ("text", "partial_json")
        if before["index"] != now["index"]:
            return False
        mine, its = before["delta"], now["delta"]
        if mine.keys() != its.keys() or _without(mine, growing) != _without(its, growing):
            return False
        before["delta"] = {k: v + its[k] if k in growing else v for k, v in mine.items()}
        return True
    return False


def _without(data: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in names}


def _chunks(events: Iterable[Event]) -> dict[str, Any]:
    """Chunks of /v1/completions and /v1/chat/completions, by choice."""
    choices: dict[int, list[dict[str, Any]]] = {}
    after: list[Any] = []
    for event in events:
        chunk = event.data
        if not isinstance(chunk, dict) or not chunk.get("choices"):
            after.append(chunk)
            continue
        if after:
            after.append("then a chunk with choices")
        rest = _without(chunk, ("choices",))
        for choice in chunk["choices"]:
            mine = choices.setdefault(choice["index"], [])
            # What a chunk says beside its choices goes with the choice: usage so far, the end.
            now = {**choice, "chunk": rest}
            joined = _joined_choice(mine[-1], now) if mine else None
            mine[-1:] = [joined] if joined is not None else [*mine[-1:], now]
    return {"choices": {str(i): runs for i, runs in sorted(choices.items())}, "after": after}


def _joined_choice(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any] | None:
    """Two neighbouring chunks of a choice as one, or None if more than text and companions grew."""
    if before.get("finish_reason") is not None or "role" in before.get("delta", {}):
        return None  # nothing follows an end, and the opening chunk of a chat stands alone
    ends = now.get("finish_reason") is not None
    joined = dict(before)
    for name in before.keys() | now.keys():
        if name in _ENDING or (ends and name not in before):
            joined[name] = now.get(name)
        elif name == "chunk":
            joined[name] = now[name]
            added = now[name].keys() - before[name].keys()
            if before[name].keys() - now[name].keys() or (added and not ends):
                return None
        elif name == "delta":
            joined[name] = _joined_delta(before[name], now[name])
        elif name in _FIRST_ONLY and now.get(name) is None:
            pass
        elif name not in now or name not in before:
            return None
        else:
            joined[name] = _grown(name, before[name], now[name])
        if joined[name] is _APART:
            return None
    return joined


def _joined_delta(before: dict[str, Any], now: dict[str, Any]) -> Any:
    """A chat's deltas as one: equal kinds, or an end that adds nothing."""
    if not now:
        return before
    if before.keys() != now.keys():
        return _APART
    joined = {
        name: _joined_calls(before[name], now[name])
        if name == "tool_calls"
        else _grown(name, before[name], now[name])
        for name in before
    }
    return _APART if _APART in joined.values() else joined


def _joined_calls(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[Any]:
    """Tool calls so far: a call that has no id goes on with the arguments of the last one."""
    calls = [dict(call) for call in before]
    for call in now:
        if "id" in call or call["index"] != calls[-1]["index"]:
            calls.append(call)
            continue
        mine, its = calls[-1]["function"], call["function"]
        arguments = (mine.get("arguments") or "") + (its.get("arguments") or "")
        calls[-1] = {**calls[-1], "function": {**mine, **its, "arguments": arguments}}
    return calls


def _grown(name: str, before: Any, now: Any) -> Any:
    """One field after both chunks; _APART if it is none that grows and has changed."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        grown = {key: _grown(key, before[key], now[key]) for key in before}
        return _APART if _APART in grown.values() else grown
    if name in _GROWING and type(before) is type(now) and isinstance(before, str | list):
        return before + now
    return before if before == now else _APART
