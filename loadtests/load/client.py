"""One streaming request to an OpenAI-compatible server, and what came of it.

Called by the runner, once a request. Speaks /v1/completions (token ids or text) or
/v1/chat/completions (text). Must not retry: what a user would have seen is what is told.

A failure of any kind is an Outcome of the sample, never an exception, and never a success that was
cut short: an answer has ended well only with its end mark, without an error on the way, and with
the number of tokens that was asked for where exact tokens were asked for.

Tokens of a chunk: the token ids that it carries, where the server returns them (vLLM's
`return_token_ids`); else one for each chunk with content. loadtests/load/metrics.py reconciles
that with usage.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from loadtests.load.records import Chunk, Outcome, Request, Sample

REQUEST_HEADER = "x-headwater-request"
DATA, EVENT, DONE = b"data:", b"event:", b"[DONE]"
EVENT_BYTES_MAX = 16 << 20
ERROR_BYTES_MAX = 64 << 10
DETAIL_CHARACTERS_MAX = 300
FAILED_REASONS = ("error", "abort")  # finish reasons of a server that gave up
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is asked, and how.

    url: with or without /v1. exact: as many tokens as asked for, whatever the model wants
    (`ignore_eos`), and a failure otherwise. extensions: whether vLLM's fields of a request may be
    sent; a server that knows none refuses them. timeout_s: for a whole answer. extra: further
    fields of each body; they win.
    """

    url: str
    model: str
    api: Literal["completions", "chat"] = "completions"
    exact: bool = True
    extensions: bool = True
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    api_key: str = field(default="", repr=False)
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in {"http", "https"} or not urlsplit(self.url).hostname:
            raise ValueError(f"{self.url!r} is no URL of a server, such as http://127.0.0.1:8000")

    @property
    def root(self) -> str:
        """Scheme, host and path before /v1."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/completions" if self.api == "completions" else "/v1/chat/completions"

    def check(self, requests: Iterable[Request]) -> None:
        """Raises ValueError where this API cannot say a request."""
        if self.api == "chat" and not all(isinstance(each.prompt, str) for each in requests):
            raise ValueError("chat takes text: use a text workload, or the completions API")

    def body(self, request: Request) -> bytes:
        """Of one request that was checked."""
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        if self.extensions:
            fields |= {"ignore_eos": self.exact, "return_token_ids": True}
        return json.dumps(fields | dict(self.extra)).encode()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def has_content(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def has_content(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.has_content())


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Event).decode


class _Failed(Exception):
    """The answer ended badly."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


@dataclass(slots=True)
class _Answer:
    """What has come so far."""

    chunks: list[Chunk] = field(default_factory=list)
    usage: _Usage | None = None
    status: int | None = None
    request_id: str = ""
    tells_ids: bool = False
    done: bool = False

    def take(self, payload: bytes, at_s: float) -> None:
        """One event. Mutates. Raises _Failed."""
        try:
            event = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as odd:
            raise _Failed(Outcome.MALFORMED, f"{odd}: {_one_line(payload)}") from odd
        if bytes(event.error) != b"null":
            raise _Failed(Outcome.ERROR_EVENT, message_in(payload))
        if event.usage is not None:
            self.usage = event.usage
        tokens = 0
        for choice in event.choices:
            if choice.finish_reason in FAILED_REASONS:
                detail = f"the server gave up: finish reason {choice.finish_reason}"
                raise _Failed(Outcome.ERROR_EVENT, detail)
            tokens += self._tokens(choice)
        if tokens:
            self.chunks.append(Chunk(at_s, tokens))

    def _tokens(self, choice: _Choice) -> int:
        if choice.token_ids:
            self.tells_ids = True
            return len(choice.token_ids)
        # Text without ids, of a server that tells them, was held back from earlier tokens.
        return int(choice.has_content() and not self.tells_ids)


def session_for(target: Target) -> aiohttp.ClientSession:
    """A session whose every request has a connection of its own, as different users have.

    A kept connection may be closed by the server at the moment in which it is used again, which
    would be a failure of the load generator's making.
    """
    headers = {"content-type": "application/json"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(
            total=target.timeout_s, sock_connect=target.connect_timeout_s
        ),
        headers=headers,
    )


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: Request,
    clock: Clock,
    *,
    due_s: float,
    measured: bool = True,
) -> Sample:
    """Send one request now and read its answer to the end."""
    body = target.body(request)
    answer = _Answer()
    outcome, detail = Outcome.OK, ""
    sent_s = clock()
    try:
        async with session.post(target.root + target.path, data=body) as reply:
            answer.status = reply.status
            answer.request_id = reply.headers.get(REQUEST_HEADER, "")
            await _read(reply, answer, clock)
        _check_length(answer, request, exact=target.exact)
    except _Failed as failed:
        outcome, detail = failed.outcome, str(failed)
    except aiohttp.ConnectionTimeoutError as failed:
        outcome, detail = Outcome.UNREACHABLE, _words(failed)
    except TimeoutError:
        outcome, detail = Outcome.TIMED_OUT, f"no end within {target.timeout_s:g} s"
    except aiohttp.ClientConnectorError as failed:
        outcome, detail = Outcome.UNREACHABLE, _words(failed)
    except (aiohttp.ClientPayloadError, aiohttp.ClientOSError, OSError) as failed:
        outcome, detail = Outcome.CUT, _words(failed)
    except aiohttp.ServerDisconnectedError:
        outcome, detail = Outcome.CUT, "the connection ended before the answer"
    except aiohttp.ClientError as failed:
        outcome, detail = Outcome.MALFORMED, _words(failed)
    usage = answer.usage
    details = usage.prompt_tokens_details if usage else None
    return Sample(
        index=request.index,
        group=request.group,
        due_s=due_s,
        sent_s=sent_s,
        ended_s=clock(),
        outcome=outcome,
        chunks=tuple(answer.chunks),
        input_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        cached_tokens=details.cached_tokens if details else None,
        measured=measured,
        status=answer.status,
        detail=detail,
        request_id=answer.request_id,
    )


async def _read(reply: aiohttp.ClientResponse, answer: _Answer, clock: Clock) -> None:
    """Raises _Failed, and aiohttp's errors."""
    if reply.status != HTTPStatus.OK:
        content = await _head_of(reply)
        raise _Failed(Outcome.REFUSED, f"{reply.status} {message_in(content)}".rstrip())
    if reply.content_type != "text/event-stream":
        content = await _head_of(reply)
        if _is_error(content):
            raise _Failed(Outcome.ERROR_EVENT, message_in(content))
        detail = f"no stream but {reply.content_type}: {_one_line(content)}"
        raise _Failed(Outcome.MALFORMED, detail)
    async for payload, at_s in _payloads(reply, clock):
        if payload == DONE:
            answer.done = True
            return
        answer.take(payload, at_s)
    raise _Failed(Outcome.CUT, "the stream ended without its end mark")


async def _payloads(
    reply: aiohttp.ClientResponse, clock: Clock
) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each event, and when it was read. Raises _Failed for one that has no end.

    Not aiohttp's lines, which end at 128 KiB: a server may repeat the prompt in its first event.
    """
    rest = b""
    async for content in reply.content.iter_any():
        at_s = clock()
        *lines, rest = (rest + content).split(b"\n")
        if len(rest) > EVENT_BYTES_MAX:
            raise _Failed(Outcome.MALFORMED, f"an event of more than {EVENT_BYTES_MAX} bytes")
        failing = False
        for line in lines:
            if line.startswith(DATA):
                payload = line.removeprefix(DATA).strip()
                if failing:
                    raise _Failed(Outcome.ERROR_EVENT, message_in(payload))
                yield payload, at_s
            elif line.startswith(EVENT):
                failing = line.removeprefix(EVENT).strip() == b"error"


def _check_length(answer: _Answer, request: Request, *, exact: bool) -> None:
    counted = sum(chunk.tokens for chunk in answer.chunks)
    told = answer.usage.completion_tokens if answer.usage else None
    if not counted:
        raise _Failed(Outcome.WRONG_LENGTH, "the answer has no token")
    if not exact:
        return
    # Chunks are no count of tokens where ids are not told: usage is the only one then.
    if told is None or answer.tells_ids:
        _same(counted, "streamed", request)
    if told is not None:
        _same(told, "in usage", request)


def _same(tokens: int, where: str, request: Request) -> None:
    if tokens != request.output_tokens:
        detail = f"{tokens} tokens {where}, {request.output_tokens} asked for"
        raise _Failed(Outcome.WRONG_LENGTH, detail)


async def _head_of(reply: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for part in reply.content.iter_any():
        content += part
        if len(content) >= ERROR_BYTES_MAX:
            break
    return content


def _is_error(content: bytes) -> bool:
    try:
        body = json.loads(content)
    except ValueError:
        return False
    return isinstance(body, dict) and (bool(body.get("error")) or body.get("object") == "error")


def message_in(content: bytes) -> str:
    """A server's words on an error, in one line: OpenAI's shape, or whatever it is."""
    try:
        body: Any = json.loads(content)
    except ValueError:
        return _one_line(content)
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return _one_line(str(message or error).encode())


def _one_line(content: bytes) -> str:
    words = " ".join(content.decode(errors="replace").split())
    cut = len(words) > DETAIL_CHARACTERS_MAX
    return words[:DETAIL_CHARACTERS_MAX] + "..." if cut else words


def _words(error: Exception) -> str:
    return _one_line(str(error).encode()) or type(error).__name__
