"""Tells an ASGI application that its client has gone, where Serve would only cancel its task.

Serve cancels the replica's task when a client disconnects. vLLM's handlers for answers at once run
in a task of their own and listen for `http.disconnect` (entrypoints/serve/utils/api_utils.py,
with_cancellation, 0.32): a cancellation from outside leaves that task running for the whole answer.
Called by ingress.py, innermost round vLLM's application.
"""

from __future__ import annotations

import asyncio

from deployments.edge.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send

GRACE_S = 2.0


class DisconnectOnCancel:
    """Runs the application in a task; a cancellation becomes a disconnect, then a cancel."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry. Raises CancelledError again once the application has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()
        task = asyncio.ensure_future(self._app(scope, _until(gone, receive), send))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            gone.set()
            await asyncio.wait([task], timeout=GRACE_S)
            task.cancel()
            raise


def _until(gone: asyncio.Event, receive: Receive) -> Receive:
    """``receive``, or a disconnect as soon as the client is known to have gone."""

    async def received() -> AsgiMessage:
        waiting = asyncio.create_task(gone.wait())
        message = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([waiting, message], return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
            return {"type": "http.disconnect"}
        finally:
            waiting.cancel()
            message.cancel()

    return received
