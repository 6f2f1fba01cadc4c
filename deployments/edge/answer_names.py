"""Names every answer: `x-request-id`, which OpenAI's clients show as ``_request_id``.

The client's own name where it sent a valid one, else one that is drawn here, which is then also
the request's `x-headwater-request`. Serve's proxy does the same for what comes through it.
Called by ingress.py, outermost.
"""

from __future__ import annotations

import uuid

from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from deployments.valid_names import VALID_NAME

NAME_HEADER = b"x-request-id"
DRAWN_NAME = "headwater.drawn_name"  # of the scope: the name, where the client gave none


def draw_name() -> str:
    """A new one."""
    return uuid.uuid4().hex


def valid_name(header: bytes) -> bool:
    """Whether a client's x-request-id is used as it is."""
    return VALID_NAME.fullmatch(header.decode("latin-1")) is not None


class NamedAnswers:
    """The middleware."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == NAME_HEADER]
        if len(given) == 1 and valid_name(given[0]):
            told = given[0]
        else:
            drawn = draw_name()
            told, scope = drawn.encode(), {**scope, DRAWN_NAME: drawn}

        async def sent(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                kept = [h for h in message.get("headers", ()) if h[0].lower() != NAME_HEADER]
                message["headers"] = [*kept, (NAME_HEADER, told)]
            await send(message)

        await self._app(scope, receive, sent)
