"""Lets in who has a key, once keys are set: before a body is read, or a route is known.

An ASGI middleware round everything else. Open without a key are GET and HEAD of /health and /ready,
and nothing more: no unknown route, no OPTIONS, no WebSocket. An API key opens the API's routes, an
operator's key all. What a key may use is in key_limits.py. The key itself goes no further than
here: the application sees neither of its headers, and http_edge.py the name and tenant alone.

Called by ingress.py. Must not read bodies, or name a key in a log or an answer.
"""

from __future__ import annotations

import base64
import binascii
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deployments.edge.asgi import AsgiApp, Receive, Scope, Send, route_path
from deployments.edge.http_errors import ApiError, body_of
from deployments.edge.key_file import KeyFile
from deployments.edge.key_limits import Exceeded, KeyLimiter
from deployments.edge.keys import KeyEntry, KeyScope, KeyTable
from deployments.edge.tenants import API_KEY, AUTHORIZATION, Tenant, Tenants, TenantUnclear

HOLDER = "headwater.key"  # of the scope: a Holder
OPEN_PATHS = frozenset({"/health", "/ready"})
OPEN_METHODS = frozenset({"GET", "HEAD"})
# What an API key opens (vLLM 0.32's own routes but for those that tell of other people's requests);
# whatever else there is, or will be, takes an operator's.
API_PREFIXES = ("/v1/", "/inference/v1/")
API_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/generative_scoring",
        "/invocations",
        "/ping",
        "/version",
        "/openapi.json",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
    }
)
REFUSALS = ("missing", "unknown", "forbidden", "unclear", "requests", "tokens", "concurrent")
_SAME_ORIGIN = b"same-origin"  # Sec-Fetch-Site of a page of ours
_OF_PAGES = frozenset({_SAME_ORIGIN, b"none"})  # or of an address that was typed
_POLICY_VIOLATION = 1008
_LIMITS = {
    "requests": "This API key may make {} requests a minute.",
    "tokens": "This API key may use {} tokens a minute.",
    "concurrent": "This API key may have {} answers at once.",
}
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request goes no further."""

    reason: str
    error: ApiError
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(slots=True)
class Holder:
    """Whose key a request has shown.

    counts_answers: their number matters to a limit of its. answers: how many it was let in for.
    """

    name: str
    scope: KeyScope
    tenant: Tenant
    counts_answers: bool
    more: Callable[[int], Refused | None]
    answers: int = 1

    def asks_for(self, answers: int) -> Refused | None:
        """Its body is known: it wants so many at once. Mutates."""
        refused = None
        if answers > self.answers:
            refused = self.more(answers - self.answers)
        if refused is None:
            self.answers = answers
        return refused


class KeyGate:
    """The middleware. One instance an ingress."""

    def __init__(
        self,
        app: AsgiApp,
        keys: KeyFile,
        tenants: Tenants,
        limiter: KeyLimiter,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        """on_refused: called with method, path and status of a request that goes no further."""
        self._app = app
        self._keys = keys
        self._tenants = tenants
        self._limiter = limiter
        self._clock = clock
        self._on_refused = on_refused
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        table = self._keys.table
        if table is None or scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        path, method = route_path(scope), str(scope.get("method", "WEBSOCKET"))
        if path in OPEN_PATHS and method in OPEN_METHODS:
            await self._app({**scope, "headers": _without_keys(scope["headers"])}, receive, send)
            return
        found = self._entry_of(table, scope["headers"], path)
        if isinstance(found, KeyEntry):
            await self._limited(found, path, method, scope, receive, send)
        else:
            await self._refuse(found, path, method, scope, receive, send)

    async def _limited(
        self, entry: KeyEntry, path: str, method: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            tenant = self._tenants.of_key(entry.tenant, scope["headers"])
        except TenantUnclear as unclear:
            refused = Refused("unclear", ApiError(400, str(unclear), "invalid_value"))
            await self._refuse(refused, path, method, scope, receive, send)
            return
        use = self._limiter.begin(entry, self._clock())
        if isinstance(use, Exceeded):
            await self._refuse(_of_limit(use), path, method, scope, receive, send)
            return

        def more(extra: int) -> Refused | None:
            over = self._limiter.more(entry, use, extra, self._clock())
            if over is None:
                return None
            self.refused[over.limit] += 1
            return _of_answers(1 + extra, over) if extra >= over.allowed else _of_limit(over)

        limits = entry.limits
        counts = limits.concurrent is not None or limits.requests_per_min is not None
        holder = Holder(entry.name, entry.scope, tenant, counts, more)
        inner = {**scope, "headers": _without_keys(scope["headers"]), HOLDER: holder}
        try:
            await self._app(inner, receive, send)
        finally:
            self._limiter.end(use, holder.answers)

    def _entry_of(self, table: KeyTable, headers: Headers, path: str) -> KeyEntry | Refused:
        """The key of these headers, if it opens this path."""
        given = _Given.of(headers)
        if not given.keys:
            return _no_key(
                "missing", "No API key was given: send Authorization: Bearer KEY.", given
            )
        if len(given.keys) > 1:
            return _no_key("unclear", "Two different API keys were given; send one.", given)
        entry = table.find(next(iter(given.keys)))
        if entry is None or (given.is_basic and entry.scope is not KeyScope.OPERATOR):
            return _no_key("unknown", "The API key is not valid.", given)
        if given.is_basic and given.is_elsewhere:
            # A browser adds what it was told at a prompt to every site's requests to us.
            return _forbidden("Another site's page may not use this browser's sign-in.")
        if entry.scope is not KeyScope.OPERATOR and not is_api(path):
            return _forbidden("This takes an operator's key; an API key opens the API alone.")
        return entry

    async def _refuse(
        self,
        refused: Refused,
        path: str,
        method: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.refused[refused.reason] += 1
        self._on_refused(method, path, refused.error.status)
        kind = "http"
        if scope["type"] == "websocket":
            await receive()  # its "connect"
            if "websocket.http.response" not in scope.get("extensions", {}):
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
                return
            kind = "websocket.http"
        body = body_of(refused.error, path)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *refused.headers,
        ]
        status = refused.error.status
        await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
        await send({"type": f"{kind}.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class _Given:
    """What a request's headers show. keys: all different ones."""

    keys: frozenset[bytes]
    is_basic: bool  # from a browser's own prompt
    wants_page: bool
    is_page_s_own: bool  # a page of this very site made it
    is_elsewhere: bool  # a page of another site made it

    @classmethod
    def of(cls, headers: Headers) -> _Given:
        """OpenAI's header, Anthropic's, and what browsers send."""
        keys: set[bytes] = set()
        is_basic = wants_page = False
        fetch_site = origin = host = b""
        for name, value in headers:
            lower = name.lower()
            if lower == API_KEY:
                keys.add(value.strip())
            elif lower == AUTHORIZATION:
                scheme, _, rest = value.strip().partition(b" ")
                if scheme.lower() == b"basic":
                    is_basic = True
                    keys.add(_password(rest))
                else:
                    keys.add(rest.strip() if scheme.lower() == b"bearer" else value.strip())
            elif lower == b"accept":
                wants_page = wants_page or b"text/html" in value
            elif lower == b"sec-fetch-site":
                fetch_site = value.strip().lower()
            elif lower == b"origin":
                origin = value.strip().lower()
            elif lower == b"host":
                host = value.strip().lower()
        # Over plain HTTP browsers tell Sec-Fetch-Site to loopback alone, and Origin to all.
        is_elsewhere = bool(origin) and origin.partition(b"://")[2] != host
        if fetch_site:
            is_elsewhere = fetch_site not in _OF_PAGES
        is_page_s_own = fetch_site == _SAME_ORIGIN
        return cls(frozenset(keys - {b""}), is_basic, wants_page, is_page_s_own, is_elsewhere)


def _password(encoded: bytes) -> bytes:
    """The password of Basic credentials, whatever the user's name; empty where there is none."""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2].strip()
    except binascii.Error:
        return b""


def is_api(path: str) -> bool:
    """Whether an API key opens it; all else is for operators."""
    return path.startswith(API_PREFIXES) or (path.rstrip("/") or "/") in API_PATHS | OPEN_PATHS


def _without_keys(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [one for one in headers if one[0].lower() not in {AUTHORIZATION, API_KEY}]


def _no_key(reason: str, message: str, given: _Given) -> Refused:
    challenge = b'Basic realm="Headwater: an operator\'s key as the password", charset="UTF-8"'
    # A page's own request without a key: the browser tries again with what it was told before.
    asks_again = given.is_page_s_own and not given.keys
    how = challenge if given.wants_page or asks_again else b"Bearer"
    error = ApiError(401, message, "invalid_api_key")
    return Refused(reason, error, ((b"www-authenticate", how),))


def _forbidden(message: str) -> Refused:
    return Refused("forbidden", ApiError(403, message, "forbidden"))


def _of_limit(exceeded: Exceeded) -> Refused:
    seconds = max(1, math.ceil(exceeded.retry_after_s))  # sooner would be refused again
    message = _LIMITS[exceeded.limit].format(exceeded.allowed)
    error = ApiError(429, f"{message} Try again in about {seconds} s.", "rate_limit_exceeded")
    return Refused(exceeded.limit, error, ((b"retry-after", str(seconds).encode()),))


def _of_answers(answers: int, exceeded: Exceeded) -> Refused:
    """It would never be let in."""
    message = f"{answers} answers at once are more than this API key may have: {exceeded.allowed}."
    return Refused(exceeded.limit, ApiError(400, message, "invalid_value"))


def as_json(gate: KeyGate, keys: KeyFile, limiter: KeyLimiter, now_s: float) -> dict[str, Any]:
    """What operators may know of the keys: names, never keys or their digests."""
    table = keys.table
    entries = () if table is None else table.entries
    return {
        "closed": table is not None,
        "problem": keys.problem,
        "read_age_s": None if keys.loaded_s is None else now_s - keys.loaded_s,
        "refused_total": dict(gate.refused),
        "keys": [
            {
                "name": entry.name,
                "scope": entry.scope.value,
                "tenant": entry.tenant,
                "running": use.running if use else 0,
                "requests_total": use.requests_total if use else 0,
                "tokens_total": use.tokens_total if use else 0,
                "refused_total": dict(use.refused) if use else {},
            }
            for entry, use in ((one, limiter.uses.get(one.name)) for one in entries)
        ],
    }
