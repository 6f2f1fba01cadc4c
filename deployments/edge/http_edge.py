"""What happens to an HTTP request before and after vLLM's own application sees it.

An ASGI middleware: names the request (`x-headwater-request`), bounds its body, refuses what no
part of us could work with (reserved fields, other encodings, text that is none), notes whose it
is, asks admission (429 with Retry-After). http_answer.py carries the answer back. Everything else
of the API is vLLM's. Called by ingress.py. Must not know tokens or workers.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from deployments.edge.answer_names import (
    DRAWN_NAME,
    NAME_HEADER,
    draw_name,
    valid_name,
)
from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send, route_path
from deployments.edge.http_answer import Answer, Exchange
from deployments.edge.http_errors import ApiError, choices_in, of_failure, too_many_choices
from deployments.edge.key_gate import HOLDER, Holder, Refused
from deployments.edge.lone_surrogates import lone_surrogate
from deployments.edge.request_body import RequestBody
from deployments.edge.request_bounds import beyond_bounds
from deployments.edge.tenants import Tenant, TenantUnclear, alone
from deployments.edge.unserved import unserved
from deployments.valid_names import NAME_CHARS_MAX

REQUEST_HEADER = b"x-headwater-request"
# Every route of vLLM's application (0.32, task "generate") that asks the engine for tokens.
GENERATE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/systemone",
        "/inference/v1/generate",
        "/generative_scoring",
        "/invocations",
    }
)
# Fields through which vLLM's server would let a client steer transfers between engines.
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "kv_hints")
REFUSED_SAMPLING_FIELD = "extra_args"  # of sampling_params, which /inference/v1/generate takes
# A route's pattern ends in $, which a last line end passes too: such a path is another spelling.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


@dataclass(slots=True)
class HttpTrace:
    """One HTTP request; seen by the engine client through ``CURRENT_TRACE``."""

    trace_id: str
    received_s: float
    tenant: Tenant = field(default_factory=alone)  # until its headers or its key say
    key: str = ""  # the name of its API key, where keys are set
    beyond_key: bool = False  # refused: more answers at once than its key allows
    status: int | None = None  # of the answer, once it has begun
    engine_requests: int = 0  # made of it so far; counted by the engine client


CURRENT_TRACE: ContextVar[HttpTrace | None] = ContextVar("headwater_trace", default=None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted, and when it would be."""

    retry_after_s: float
    reason: str
    status: int = 429


@dataclass(frozen=True, slots=True)
class FlowFailure:
    """How the request flow ended a request that it could not finish."""

    status: int
    code: str
    message: str


class EdgeEvents(Protocol):
    """What the edge asks of the rest of the ingress."""

    def admit(self, trace_id: str, body_bytes: int) -> Refusal | None:
        """Reserve a place; None means admitted, and ``release`` must follow."""

    def release(self, trace_id: str) -> None:
        """The HTTP request is over."""

    def ended(self, trace: HttpTrace) -> None:
        """A request that asked for tokens is over, admitted or not."""

    def first_byte(self, trace_id: str) -> bool:
        """A body chunk leaves now; True once no choice's first token is still to come."""

    def failure(self, trace_id: str) -> FlowFailure | None:
        """How the flow failed this request; None when it did not."""


class HttpEdge:
    """The middleware. One instance an ingress."""

    def __init__(
        self,
        app: AsgiApp,
        events: EdgeEvents,
        *,
        body_bytes_max: int,
        tenant_of: Callable[[Iterable[tuple[bytes, bytes]]], Tenant],
        choices_max: int | None = None,
        explain: Callable[[BaseException], bytes] | None = None,
    ) -> None:
        """``tenant_of``: whose a request of these headers is; may raise TenantUnclear.

        ``choices_max``: engine requests at once, which bounds n and lists of prompts.

        ``explain``: the JSON body that the application would answer to an exception.
        """
        self._app = app
        self._events = events
        self._body_bytes_max = body_bytes_max
        self._tenant_of = tenant_of
        self._choices_max = choices_max
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope).rstrip("/") or "/"
        if _CONTROL.search(path):
            nothing = ApiError(404, "There is nothing at this path.", "not_found")
            await Answer(send, Exchange(path)).refuse(nothing)
            return
        if scope["method"] not in WITH_BODY:
            await self._pass(scope, receive, Answer(send, Exchange(path)))
            return
        generates = scope["method"] == "POST" and path in GENERATE_PATHS
        trace = HttpTrace(scope.get(DRAWN_NAME) or draw_name(), time.monotonic())
        if generates:  # a redirect from a last slash would be another request, and count as one
            scope = {**scope, "path": scope["path"].rstrip("/")}
        try:
            await self._answer(trace, path, scope, receive, send, generates=generates)
        finally:
            if generates:
                self._events.ended(trace)

    async def _answer(
        self,
        trace: HttpTrace,
        path: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        generates: bool,
    ) -> None:
        """Refuse the request, or let vLLM answer it."""
        refused = Answer(send, Exchange(path, ((REQUEST_HEADER, trace.trace_id.encode()),)))
        try:
            raw = await _read_body(receive, self._body_bytes_max)
        except _ClientGone:
            return
        if raw is None:
            message = f"Request body is larger than {self._body_bytes_max} bytes."
            await refused.refuse(ApiError(413, message, "request_too_large"))
            trace.status = refused.status
            return
        body = RequestBody(raw)
        if (error := self._fault_of(trace, scope, body, generates=generates)) is not None:
            await refused.refuse(error)
        elif not generates:
            await self._pass(scope, _replay(raw, receive), Answer(send, Exchange(path, body=raw)))
        elif (refusal := self._events.admit(trace.trace_id, len(raw))) is not None:
            await _refuse_busy(refused, refusal)
        else:
            try:
                if (over := self._beyond_its_key(scope, body)) is None:
                    del body  # what was read of it can be many times as large, and streams are long
                    await self._generate(trace, path, scope, receive, send, raw)
                    return
                trace.beyond_key = True
                await refused.refuse(over.error, over.headers)
            finally:
                self._events.release(trace.trace_id)
        trace.status = refused.status

    def _fault_of(
        self, trace: HttpTrace, scope: Scope, body: RequestBody, *, generates: bool
    ) -> ApiError | None:
        """Why this request is refused; without a reason, the trace's tenant is set."""
        error = _fault_of(scope, body, generates=generates)
        holder: Holder | None = scope.get(HOLDER)
        if error is None and holder is not None:
            trace.key, trace.tenant = holder.name, holder.tenant
        elif error is None and generates:
            try:
                trace.tenant = self._tenant_of(scope["headers"])
            except TenantUnclear as unclear:
                error = ApiError(400, str(unclear), "invalid_value")
        if error is None and generates and self._choices_max is not None:
            # Not left to vLLM: it begins with a list's first prompts, and has no room for a later.
            error = too_many_choices(body, self._choices_max, route_path(scope))
        return error

    def _beyond_its_key(self, scope: Scope, body: RequestBody) -> Refused | None:
        """Why its key does not let it have as many answers as it asks for."""
        holder: Holder | None = scope.get(HOLDER)
        if holder is None or not holder.counts_answers:
            return None
        n, prompts = choices_in(body.asked)
        return holder.asks_for(n * prompts)

    async def _generate(
        self,
        trace: HttpTrace,
        path: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes,
    ) -> None:
        """Let vLLM answer, under the request's name and with what the flow knows of its failure."""
        name = trace.trace_id

        def failure() -> ApiError | None:
            failed = self._events.failure(name)
            if failed is None:
                return None
            return of_failure(failed.code, failed.message, failed.status, path, body)

        exchange = Exchange(
            path=path,
            headers=((REQUEST_HEADER, name.encode()),),
            body=body,
            failure=failure,
            explain=self._explain,
            first_byte=lambda: self._events.first_byte(name),
        )
        answer = Answer(send, exchange)
        token = CURRENT_TRACE.set(trace)
        try:
            await self._pass(scope, _replay(body, receive), answer)
        finally:
            CURRENT_TRACE.reset(token)
            trace.status = answer.status

    async def _pass(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        raised: Exception | None = None
        try:
            await self._app(_with_safe_request_id(scope), receive, answer.send)
        except Exception as error:  # noqa: BLE001 - logged, and told to the client
            raised = error
        await answer.finish(raised)


class _ClientGone(Exception):
    """The client went before its request was whole: there is nobody to answer."""


async def _read_body(receive: Receive, bytes_max: int) -> bytes | None:
    """The whole body, or None when it is too large. Raises _ClientGone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > bytes_max:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body once, then whatever the server says (a disconnect)."""
    given = False

    async def replayed() -> AsgiMessage:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _refused_field(body: RequestBody) -> str | None:
    """The first reserved field that the body sets to anything but null.

    Only where vLLM reads them do they count: a message's text, a tool's schema or metadata may
    hold these words.
    """
    found = body.fields
    sampling = found.get("sampling_params")
    if isinstance(sampling, dict) and sampling.get(REFUSED_SAMPLING_FIELD) is not None:
        return f"sampling_params.{REFUSED_SAMPLING_FIELD}"
    return next((name for name in REFUSED_FIELDS if found.get(name) is not None), None)


def _with_safe_request_id(scope: Scope) -> Scope:
    """Drop an X-Request-Id that is long or holds anything but a safe set of characters.

    vLLM repeats it in every chunk and log line.
    """
    if scope["type"] != "http":
        return scope
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() != NAME_HEADER or valid_name(value)
    ]
    return {**scope, "headers": kept}


def _fault_of(scope: Scope, body: RequestBody, *, generates: bool) -> ApiError | None:
    """Why nobody needs to look at this request: nothing of us could work with it."""
    encoding = dict(scope["headers"]).get(b"content-encoding", b"identity").lower()
    if encoding not in {b"identity", b""}:
        message = f"Content-Encoding {encoding[:40].decode('latin-1')!r} is not read; send none."
        return ApiError(415, message, "unsupported_media_type")
    if generates and (field := _refused_field(body)) is not None:
        message = f"Field {field!r} is reserved for transfers between workers; leave it out."
        return ApiError(400, message, "unsupported_parameter", field)
    if generates and _has_long_id(body):
        message = f"A request_id may have {NAME_CHARS_MAX} characters: each chunk repeats it."
        return ApiError(400, message, "invalid_value", "request_id")
    if generates and _outlives_its_request(body):
        message = "Field 'store' must be true or false; what runs in the background is not kept."
        return ApiError(400, message, "invalid_value", "store")
    path = route_path(scope).rstrip("/")
    if (costly := beyond_bounds(body, path, generates=generates)) is not None:
        return costly
    if (unanswerable := unserved(body, path)) is not None:
        return unanswerable
    where = lone_surrogate(body)
    if where is not None:
        message = "A text holds half of a surrogate pair: no character, which no model can read."
        return ApiError(400, message, "invalid_value", where or None)
    return None


def _has_long_id(body: RequestBody) -> bool:
    """Whether the body names its request at length."""
    name = body.fields.get("request_id")
    return isinstance(name, str) and len(name) > NAME_CHARS_MAX


def _outlives_its_request(body: RequestBody) -> bool:
    """Whether vLLM would answer it after its HTTP exchange, past every limit, and keep it for ever.

    vLLM (0.32) refuses background without store, but takes the text "false" for a store that is on.
    """
    return bool(body.fields.get("background")) and isinstance(body.fields.get("store"), str)


async def _refuse_busy(answer: Answer, refusal: Refusal) -> None:
    seconds = max(1, math.ceil(refusal.retry_after_s))  # sooner would be refused again
    message = f"{refusal.reason} Try again in about {seconds} s."
    error = ApiError(refusal.status, message, "overloaded")
    await answer.refuse(error, ((b"retry-after", str(seconds).encode()),))
