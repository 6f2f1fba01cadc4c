"""Clients as the tests need them: exact token prompts, streams, and ways to go away."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.conftest import MODEL, Cluster
from tests.equality import Reference

TIMEOUT_S = 120.0


@dataclass
class Streamed:
    """What a stream gave: token ids, text, usage, errors, in order of arrival."""

    trace_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False


def body_of(ids: list[int], **params: Any) -> dict[str, Any]:
    """A completion body with greedy sampling."""
    return {
        "model": MODEL,
        "prompt": ids,
        "temperature": 0,
        "max_tokens": 24,
        "return_token_ids": True,
        **params,
    }


def complete(cluster: Cluster, ids: list[int], **params: Any) -> tuple[dict[str, Any], str]:
    """One completion at once: its body, and the name of its record."""
    reply = cluster.http.post("/v1/completions", json=body_of(ids, **params))
    assert reply.status_code == 200, reply.text
    return dict(reply.json()), reply.headers["x-headwater-request"]


LEADS = {"logprobs": 2, "return_tokens_as_token_ids": True}
"""Parameters of a completion from which reference_of can tell how far each token led."""


def reference_of(choice: dict[str, Any]) -> Reference:
    """A choice's tokens, to compare with; asked for with LEADS.

    The leads are those of the model's own log probabilities: nearly right with mild penalties, and
    of no use with a seed.
    """
    tokens = [int(token) for token in choice["token_ids"]]
    leads = []
    for token, among in zip(tokens, choice["logprobs"]["top_logprobs"], strict=True):
        chosen = among.pop(f"token_id:{token}")
        leads.append(abs(chosen - max(among.values())))
    return Reference(tokens, leads)


def reference(cluster: Cluster, ids: list[int], **params: Any) -> Reference:
    """What a completion answers, to compare others with. Caches stay warm: let prompts differ."""
    body, _ = complete(cluster, ids, **LEADS, **params)
    return reference_of(body["choices"][0])


def stream(
    cluster: Cluster,
    body: dict[str, Any],
    *,
    path: str = "/v1/completions",
    on_tokens: Callable[[Streamed], None] = lambda _so_far: None,
) -> Streamed:
    """Read a stream to its end; ``on_tokens`` is called after each event."""
    got = Streamed()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with cluster.http.stream("POST", path, json=asked, timeout=TIMEOUT_S) as reply:
        assert reply.status_code == 200, reply.read()
        got.trace_id = reply.headers["x-headwater-request"]
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                got.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                got.errors.append(event["error"])
                continue
            got.usage = event.get("usage") or got.usage
            for choice in event["choices"]:
                got.token_ids += choice.get("token_ids") or []
                got.text += choice.get("text") or ""
                got.finish_reason = choice.get("finish_reason") or got.finish_reason
            on_tokens(got)
    return got


@contextmanager
def raw_stream(
    cluster: Cluster, body: dict[str, Any], name: str, *, streams: bool = True
) -> Iterator[RawStream]:
    """A request over a bare socket, so that the test decides how it ends.

    ``name`` is sent as X-Request-Id, which is part of the request's id in all logs. ``streams``
    False asks for the answer at once.
    """
    where = urlsplit(cluster.endpoint)
    assert where.hostname is not None
    connection = socket.create_connection((where.hostname, where.port or 80), timeout=TIMEOUT_S)
    try:
        payload = json.dumps({**body, "stream": streams}).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: headwater\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n"
            + f"X-Request-Id: {name}\r\n".encode()
            + f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        yield RawStream(connection)
    finally:
        connection.close()


class RawStream:
    """The client's end of a bare connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.received = b""

    def read_until(self, condition: Callable[[bytes], bool]) -> None:
        """Read until what came satisfies the condition."""
        while not condition(self.received):
            part = self._connection.recv(65536)
            assert part, f"stream ended early: {self.received[-300:]!r}"
            self.received += part

    def read_events(self, count: int) -> None:
        """Read until so many events with choices came."""
        self.read_until(lambda got: got.count(b'"choices"') >= count)

    def leave(self, way: str) -> None:
        """Go away: "close" (FIN) or "reset" (RST)."""
        {"close": self.close, "reset": self.reset}[way]()

    def close(self) -> None:
        """Go away in an orderly manner (FIN)."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def reset(self) -> None:
        """Go away at once (RST)."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()
