"""Lets pages of other origins use the API from a browser, where an operator has named them.

An ASGI middleware round the key gate: browsers send no key in a preflight, and a page can read an
error only with these headers, whoever made it. Operator routes never carry them, and credentials
that a browser adds by itself are never allowed: a page has to know a key. Called by ingress.py.
Must not know keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send, route_path
from deployments.edge.http_errors import ApiError, body_of
from deployments.edge.key_gate import is_api

ANY_ORIGIN = "*"
PREFLIGHT_MAX_AGE_S = 600
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, x-headwater-request, retry-after"
# Field names as a preflight lists them; anything else is not repeated.
_FIELD_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_VARY = (b"vary", b"Origin")
Headers = list[tuple[bytes, bytes]]


class Cors:
    """The middleware. One instance an ingress; without origins it does nothing."""

    def __init__(self, app: AsgiApp, allowed_origins: Sequence[str]) -> None:
        """allowed_origins: as browsers send them (http://host:port), or "*" for every origin."""
        self._app = app
        self._any = ANY_ORIGIN in allowed_origins
        self._allowed = frozenset(origin.encode() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or not self._allowed or not is_api(route_path(scope)):
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"])
        origin = asked.get(b"origin")
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in asked
        if origin is not None and is_preflight:
            await _send_whole(send, *self._preflight(origin, asked, route_path(scope)))
            return
        added = self._headers_for(origin)

        async def sent(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, sent)

    def _headers_for(self, origin: bytes | None) -> Headers:
        """What an answer to this origin carries."""
        if self._any:
            allowed = b"*"
        elif origin in self._allowed:
            allowed = origin
        else:
            return [_VARY]
        varies = [] if self._any else [_VARY]
        exposed = (b"access-control-expose-headers", _EXPOSED)
        return [(b"access-control-allow-origin", allowed), exposed, *varies]

    def _preflight(
        self, origin: bytes, asked: dict[bytes, bytes], path: str
    ) -> tuple[int, Headers, bytes]:
        """Status, headers and body."""
        if not self._any and origin not in self._allowed:
            told = origin[:200].decode("latin-1")
            message = f"Origin {told!r} is not allowed here: http.allowed_origins does not name it."
            body = body_of(ApiError(403, message, "forbidden"), path)
            return 403, [(b"content-type", b"application/json"), _VARY], body
        headers = [
            *self._headers_for(origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", str(PREFLIGHT_MAX_AGE_S).encode()),
        ]
        names = asked.get(b"access-control-request-headers", b"")
        if _FIELD_NAMES.fullmatch(names):  # "*" would leave out Authorization
            headers.append((b"access-control-allow-headers", names))
        if asked.get(b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return 204, headers, b""


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    if body:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
