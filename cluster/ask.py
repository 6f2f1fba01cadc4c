"""A streaming chat client for a running endpoint: `ChatStream`, and `ask` for one question.

Used by serve's greeting, the chat command and the demo. Standard library only, so that it says what
any client would see; it speaks to the endpoint directly, whatever proxies the environment names.
Each request carries the API key that credentials.py knows for it.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from cluster import credentials
from cluster.errors import AnswerError, StartError

CHAT_PATH = "/v1/chat/completions"
REQUEST_HEADER = "x-headwater-request"
DATA = b"data:"
DONE = b"[DONE]"
MESSAGE_CHARACTERS_MAX = 400
TIMEOUT_S = 120.0
_KEY_HINTS: Mapping[int, str] = MappingProxyType(
    {
        http.client.UNAUTHORIZED: f" ({credentials.KEY_VARIABLE} is where this command finds one)",
        http.client.FORBIDDEN: f" (an operator's goes into {credentials.KEY_VARIABLE})",
    }
)
CONNECTIONS: Mapping[str, type[http.client.HTTPConnection]] = MappingProxyType(
    {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is asked. extra: further fields of the body; they win over the others."""

    model: str
    messages: Sequence[Message]
    max_tokens: int = 64
    temperature: float = 0.0
    extra: Mapping[str, object] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON body of a streaming request that ends with its usage."""
        fields: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the endpoint counted them. cached: of the prompt, found in a KV cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer, or what had come of it.

    ttft_s: request sent to first content. decode_s: first to last content.
    usage: None if the stream was left before its end.
    """

    text: str
    ttft_s: float
    trace_id: str
    decode_s: float = 0.0
    usage: Usage | None = None
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one per second; None with fewer than two, or without usage."""
        if self.usage is None or self.usage.completion_tokens < 2 or self.decode_s <= 0:  # noqa: PLR2004 - the first one has no interval
            return None
        return (self.usage.completion_tokens - 1) / self.decode_s


class ChatStream:
    """One answer on its way: iterate over its text; leave the `with` block to hang up.

    Everything may raise AnswerError, whose message is one line. Leaving early (a break, Ctrl-C)
    closes the connection, by which the server learns that nobody listens any more.
    """

    def __init__(
        self, endpoint: str, request: ChatRequest, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._connection = connect(endpoint, timeout_s)
        self._credentials = credentials.headers(endpoint)
        self._path = urlsplit(endpoint).path.rstrip("/") + CHAT_PATH
        self._request = request
        self._response: http.client.HTTPResponse | None = None
        self._sent_s = self._first_s = self._last_s = time.monotonic()
        self._parts: list[str] = []
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self.trace_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        """Send the request, once, and yield each piece of text as it comes; none is empty."""
        try:
            yield from self._texts()
        except (OSError, UnicodeError, http.client.HTTPException) as failed:
            where = f"{self._connection.host}:{self._connection.port}"
            what = str(failed) or type(failed).__name__
            raise AnswerError(f"the connection to {where} failed: {what}") from failed

    def close(self) -> None:
        """Hang up. Harmless when the answer is complete."""
        if self._response is not None:
            self._response.close()  # the connection alone would leave the socket to it
        self._connection.close()

    def answer(self) -> Answer:
        """What has come so far."""
        first_s = self._first_s if self._parts else time.monotonic()
        return Answer(
            text="".join(self._parts),
            ttft_s=first_s - self._sent_s,
            trace_id=self.trace_id,
            decode_s=self._last_s - self._first_s,
            usage=self._usage,
            finish_reason=self._finish_reason,
        )

    def _texts(self) -> Iterator[str]:
        self._sent_s = time.monotonic()
        headers = {
            "content-type": "application/json",
            "connection": "close",
            **self._credentials,
        }
        self._connection.request("POST", self._path, self._request.body(), headers)
        self._response = response = self._connection.getresponse()
        self.trace_id = response.headers.get(REQUEST_HEADER, "")
        if response.status != http.client.OK:
            raise AnswerError(refusal(response.status, response.read()))
        for line in response:
            if not line.startswith(DATA):
                continue
            payload = line.removeprefix(DATA).strip()
            if payload == DONE:
                return
            yield from self._event(payload)
        if self._finish_reason is None:
            raise AnswerError("the connection ended before the answer did")

    def _event(self, payload: bytes) -> Iterator[str]:
        try:
            event = json.loads(payload)
            if "error" in event:
                raise AnswerError(f"the answer ended in an error: {_message_in(event)}")
            self._usage = _usage(event.get("usage")) or self._usage
            for choice in event["choices"]:
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                text = choice["delta"].get("content") or ""
                if text:
                    self._note(text)
                    yield text
        except (ValueError, LookupError, TypeError, AttributeError) as odd:
            raise AnswerError(f"the endpoint sent no chat event: {_one_line(payload)}") from odd

    def _note(self, text: str) -> None:
        self._last_s = time.monotonic()
        if not self._parts:
            self._first_s = self._last_s
        self._parts.append(text)


def ask(
    endpoint: str,
    model: str,
    question: str,
    on_text: Callable[[str], object],
    *,
    max_tokens: int = 64,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Stream one chat answer. Raises StartError when the endpoint answers with an error."""
    request = ChatRequest(model, (Message("user", question),), max_tokens)
    try:
        with ChatStream(endpoint, request, timeout_s=timeout_s) as stream:
            for text in stream:
                on_text(text)
            return stream.answer()
    except AnswerError as failed:
        raise StartError(str(failed)) from failed


def get_json(
    endpoint: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """One JSON object from the endpoint. Raises AnswerError."""
    connection = connect(endpoint, timeout_s)
    try:
        where = urlsplit(endpoint).path.rstrip("/") + path
        sent = {**credentials.headers(endpoint, path), **(headers or {})}
        connection.request("GET", where, headers=sent)
        response = connection.getresponse()
        content = response.read()
        if response.status != http.client.OK:
            raise AnswerError(refusal(response.status, content))
        found = json.loads(content)
    except (OSError, ValueError, http.client.HTTPException) as failed:
        what = str(failed) or type(failed).__name__
        raise AnswerError(f"{endpoint}{path} does not answer as expected: {what}") from failed
    finally:
        connection.close()
    if not isinstance(found, dict):
        raise AnswerError(f"{endpoint}{path} does not answer with a JSON object")
    return found


def connect(endpoint: str, timeout_s: float) -> http.client.HTTPConnection:
    """A connection that opens when it is first used. Raises AnswerError for an odd URL."""
    try:
        where = urlsplit(endpoint)
        connection = CONNECTIONS[where.scheme]
        return connection(where.hostname or "", where.port, timeout=timeout_s)
    except (KeyError, ValueError, http.client.InvalidURL) as odd:
        example = "http://127.0.0.1:8000"
        raise AnswerError(f"{endpoint!r} is not the URL of an endpoint, such as {example}") from odd


def _usage(found: Mapping[str, Any] | None) -> Usage | None:
    if not found:
        return None
    details = found.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=found["prompt_tokens"],
        completion_tokens=found.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
    )


def refusal(status: int, content: bytes) -> str:
    """One line on an answer that is none, with the endpoint's own words."""
    try:
        message = _message_in(json.loads(content))
    except (ValueError, AttributeError):
        message = _one_line(content)
    hint = _KEY_HINTS.get(status, "")
    return f"the endpoint refused: {status} {message}{hint}".rstrip()


def _message_in(body: Mapping[str, Any]) -> str:
    """OpenAI's error shape, or whatever it is."""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else None
    return _one_line(str(message or error).encode())


def _one_line(content: bytes) -> str:
    words = " ".join(content.decode(errors="replace").split())
    cut = len(words) > MESSAGE_CHARACTERS_MAX
    return words[:MESSAGE_CHARACTERS_MAX] + "..." if cut else words
