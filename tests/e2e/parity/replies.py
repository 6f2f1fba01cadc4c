"""Sends requests of the parity corpus and keeps what came back, whole and unjudged."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.parity.asking import Ask

TIMEOUT_S = 120.0
EVENT_STREAM = "text/event-stream"
DONE = "[DONE]"


@dataclass(frozen=True)
class Event:
    """One server-sent event. ``data`` is JSON, or the text as it is where it is none ([DONE])."""

    name: str | None
    data: Any


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        headers: those of ``HEADERS`` that were there.
        body: JSON, or text where it is none; None for a stream.
        events: of a stream; None for an answer at once.
        lost: what broke the exchange instead of an answer; empty if nothing did.
        received_s: when it had come, in Unix time: which of its values are times of just then.

    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    events: tuple[Event, ...] | None = None
    lost: str = ""
    received_s: float = field(default_factory=time.time, compare=False)


class BrokenStream(Exception):
    """A stream that is not one of server-sent events, or ends within one."""


HEADERS = ("content-type", "allow", "location", "retry-after")


def replies_to(http: httpx.Client, asks: Iterable[Ask], at_once: int = 1) -> dict[str, Reply]:
    """Each request's answer by name.

    Requests of one salt, and those without a salt, are sent one after the other, in order. Of other
    salts, whose caches are separate, up to `at_once` are in flight. A salt with a request for
    several choices has the server to itself: a choice finds the first one's blocks, if they are
    computed by then.
    """
    session = uuid.uuid4().hex
    lanes: dict[str | None, list[Ask]] = {}
    for ask in asks:
        lanes.setdefault(ask.salt, []).append(ask)

    def send_all(lane: list[Ask]) -> list[tuple[str, Reply]]:
        return [(ask.name, send(http, ask, session)) for ask in lane]

    alone = [lane for lane in lanes.values() if any(map(has_several_choices, lane))]
    beside = [lane for lane in lanes.values() if lane not in alone]
    with ThreadPoolExecutor(at_once) as senders:
        told = [*senders.map(send_all, beside)]
    return dict(chain.from_iterable([*told, *map(send_all, alone)]))


def has_several_choices(ask: Ask) -> bool:
    """Whether the server makes several sequences of it."""
    if not isinstance(ask.body, dict):
        return False
    prompts = ask.body.get("prompt")
    is_list = isinstance(prompts, list) and not all(isinstance(one, int) for one in prompts)
    return ask.body.get("n", 1) != 1 or is_list


def send(http: httpx.Client, ask: Ask, session: str) -> Reply:
    """One exchange. ``session`` keeps salts of one run apart from those of another."""
    body = ask.body
    if ask.salt is not None:
        body = {**body, "cache_salt": f"{session} {ask.salt}"}
    # A connection each: uvicorn ends one on which a handler raised, as the next request is sent.
    headers = {"connection": "close"}
    if body is not None:
        headers["content-type"] = "application/json"
    headers |= ask.headers
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        reply = http.request(
            ask.method, ask.path, content=content, headers=headers, timeout=TIMEOUT_S
        )
        return reply_of(reply.status_code, dict(reply.headers), reply.text)
    except (httpx.HTTPError, BrokenStream) as error:
        return Reply(0, lost=f"{type(error).__name__}: {error}")


def reply_of(status: int, headers: dict[str, str], text: str) -> Reply:
    """Take an answer apart."""
    kept = {name: headers[name] for name in HEADERS if name in headers}
    if "location" in kept:
        kept["location"] = urlsplit(kept["location"]).path
    if kept.get("content-type", "").startswith(EVENT_STREAM):
        return Reply(status, kept, events=tuple(events_of(text)))
    return Reply(status, kept, body=json_or_text(text))


def events_of(text: str) -> Iterable[Event]:
    """The events of a whole stream. Raises BrokenStream."""
    frames = text.split("\n\n")
    if frames.pop():
        raise BrokenStream(f"ends within an event: {text[-200:]!r}")
    for frame in frames:
        fields = {name: value for name, _, value in (f.partition(": ") for f in frame.split("\n"))}
        if "data" not in fields or fields.keys() - {"event", "data"}:
            raise BrokenStream(f"no event: {frame!r}")
        yield Event(fields.get("event"), json_or_text(fields["data"]))


def json_or_text(text: str) -> Any:
    """Parsed if it is JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
