"""An endpoint that answers as scripted, over real HTTP on a free loopback port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-model"
Sender = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Endpoint:
    """The scripted answers, in order, and what was asked."""

    url: str = ""
    answers: list[Sender] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    objects: dict[str, object] = field(default_factory=dict)
    hung_up: threading.Event = field(default_factory=threading.Event)

    def questions(self) -> list[list[tuple[str, str]]]:
        """Role and content of each request's messages."""
        return [[(m["role"], m["content"]) for m in body["messages"]] for body in self.asked]


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """A running one."""
    state = Endpoint(objects={"/v1/models": {"data": [{"id": MODEL, "max_model_len": 4096}]}})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _note_headers(self) -> None:
            state.headers.append({name.lower(): value for name, value in self.headers.items()})

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._note_headers()
            found = state.objects.get(self.path)
            send_json(
                {"error": {"message": "nothing\nhere"}} if found is None else found,
                404 if found is None else 200,
            )(self)

        def do_POST(self) -> None:
            self._note_headers()
            state.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            try:
                state.answers.pop(0)(self)
            except OSError:
                state.hung_up.set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send_json(body: object, status: int) -> Sender:
    """A whole JSON answer."""

    def send(to: BaseHTTPRequestHandler) -> None:
        content = json.dumps(body).encode()
        to.send_response(status)
        to.send_header("content-length", str(len(content)))
        to.end_headers()
        to.wfile.write(content)

    return send


def begin_stream(to: BaseHTTPRequestHandler) -> None:
    """Headers of a stream."""
    to.send_response(200)
    to.send_header("content-type", "text/event-stream")
    to.send_header("transfer-encoding", "chunked")
    to.send_header("x-headwater-request", "trace-1")
    to.end_headers()


def send_event(to: BaseHTTPRequestHandler, payload: str) -> None:
    """One SSE event in one HTTP chunk."""
    line = f"data: {payload}\n\n".encode()
    to.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")


def delta(content: str | None, finish_reason: str | None = None) -> str:
    """A chunk of a chat answer."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": None})


def usage(prompt: int, completion: int, cached: int | None) -> str:
    """The last chunk. cached None: without details, as when nothing is known."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"choices": [], "usage": {**counts, "prompt_tokens_details": details}})


def stream(events: Sequence[str], *, end: bool = True) -> Sender:
    """A streamed answer of these events; without ``end`` the connection is cut after them."""

    def send(to: BaseHTTPRequestHandler) -> None:
        begin_stream(to)
        for event in events:
            send_event(to, event)
        if end:
            send_event(to, "[DONE]")
            to.wfile.write(b"0\r\n\r\n")
        else:
            to.close_connection = True

    return send


def answer(text: str, *, prompt: int = 20, cached: int | None = 0) -> Sender:
    """A good answer, a word an event."""
    words = [part + " " for part in text.split()]
    events = [delta(""), *(delta(word) for word in words), delta(None, "stop")]
    return stream([*events, usage(prompt, len(words), cached)])


def until_hung_up(first: Callable[[BaseHTTPRequestHandler], object]) -> Sender:
    """``first``, then text for ever, until the client goes."""

    def send(to: BaseHTTPRequestHandler) -> None:
        first(to)
        while True:
            send_event(to, delta("on "))

    return send
