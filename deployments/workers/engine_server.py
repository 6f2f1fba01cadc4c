"""One engine's loop, served over links: requests in, outputs out, drained at the end.

The engine thread and the links' event loop meet here. Called by worker.py, on the event loop of
its replica. Must not know Ray.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from deployments.engine.settings import EngineSettings
from deployments.links import frames
from deployments.links.link_server import LinkServer, LinkServerSettings
from deployments.workers.engine_loop import EngineLoop, LoopSinks, StepDelivery

if TYPE_CHECKING:
    from deployments.engine.inprocess import InprocessEngine

log = logging.getLogger("headwater.worker")

DRAIN_POLL_S = 0.05
ENGINE_END_TIMEOUT_S = 5.0


class EngineServer:
    """Build it on the event loop; then ``build`` and ``listen``, and ``drain`` in the end."""

    def __init__(
        self,
        settings: EngineSettings,
        engine: Callable[[EngineSettings], InprocessEngine],
        *,
        queue_max: int,
        cores: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._event_loop = asyncio.get_running_loop()
        sinks = LoopSinks(deliver=self._deliver_from_engine, send=self._send_from_engine)
        self.loop = EngineLoop(
            settings, engine, sinks, queue_max=queue_max, cores=cores, clock=clock
        )
        self._clock = clock
        self._load = frames.Load()
        self._links: LinkServer | None = None

    async def build(self) -> None:
        """Build the engine in its thread. Raises what that raised."""
        self.loop.start()
        await asyncio.to_thread(self.loop.wait_built)
        self._load = self.loop.load_when_built

    async def listen(
        self,
        host: str,
        secret: bytes,
        welcome: frames.Welcome,
        encode_outputs: Callable[[Sequence[object]], bytes],
        settings: LinkServerSettings | None = None,
    ) -> int:
        """Take links from now on; returns the port."""
        self._links = LinkServer(secret, welcome, self, encode_outputs, settings)
        self._links.load_now = self.load_now
        return await self._links.start(host)

    async def drain(self, *, stall_s: float, finish_s: float = math.inf) -> None:
        """Finish what is here for at most finish_s, then end.

        Until then, or until no ingress is linked any more: one closes its link when it needs us no
        longer, and a request that is at prefill now may need the last decode worker. What is left
        then, or is in an engine that stands for stall_s, goes on elsewhere from the tokens so far:
        an ingress takes the end of its link for that, and for no death of a worker that Serve has
        taken away. Its blocks are released here before the engine ends.
        """
        await self._while_it_works(
            stall_s, until_s=self._clock() + finish_s, is_linked=self._is_linked
        )
        left = self.loop.attempts
        await asyncio.sleep(DRAIN_POLL_S)  # the last outputs are on their way to the links
        if self._links is not None:
            self._links.close()
        if left:
            log.info("%d requests go on elsewhere", left)
            self.loop.abort_all()
            await self._while_it_works(stall_s)
        await asyncio.sleep(DRAIN_POLL_S)  # and from the links to the network
        self.loop.stop()
        if self.loop.stalled_s() <= stall_s:  # the process ends as we return
            await asyncio.to_thread(self.loop.wait_ended, ENGINE_END_TIMEOUT_S)

    async def _while_it_works(
        self,
        stall_s: float,
        *,
        until_s: float = math.inf,
        is_linked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when nothing is here, or the engine stands, or it is until_s."""
        while (  # noqa: ASYNC110 - the thread has no event of this loop
            (not self.loop.idle or is_linked())
            and self.loop.stalled_s() <= stall_s
            and self._clock() < until_s
        ):
            await asyncio.sleep(DRAIN_POLL_S)

    def _is_linked(self) -> bool:
        return self._links is not None and self._links.is_linked

    def load_now(self) -> frames.Load:
        """The engine thread's last word, how long ago the thread last turned, and our slab."""
        now = {"stalled_s": self.loop.stalled_s(), "slab_peer": self.loop.slab_peer}
        return msgspec.structs.replace(self._load, **now)

    def unlinked_s(self) -> float:
        """Seconds in which no ingress has used a link; 0 before we listen."""
        return 0.0 if self._links is None else self._links.unused_s()

    # ---- from the engine thread -------------------------------------------------------------

    def _deliver_from_engine(self, deliveries: list[StepDelivery], load: frames.Load) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, deliveries, load)

    def _send_from_engine(self, ingress: str | None, message: frames.Message) -> None:
        self._event_loop.call_soon_threadsafe(self._send, ingress, message)

    def _deliver(self, deliveries: list[StepDelivery], load: frames.Load) -> None:
        self._load = load
        if self._links is not None:
            for delivery in deliveries:
                self._links.deliver(delivery.ingress, delivery.outputs, delivery.timings)

    def _send(self, ingress: str | None, message: frames.Message) -> None:
        if self._links is None:
            return
        if ingress is None:
            self._links.broadcast(message)
        else:
            self._links.send(ingress, message)

    # ---- from the links (link_server.LinkEvents) --------------------------------------------

    def ingress_joined(self, ingress: str) -> None:
        """A link is up: its ingress needs to know our prefix cache."""
        self.loop.owner_joined(ingress)

    def ingress_left(self, ingress: str) -> None:
        """A link is gone: its attempts end here."""
        self.loop.owner_left(ingress)

    def received(self, ingress: str, message: frames.Message) -> None:
        """One message from an authenticated ingress."""
        if isinstance(message, frames.Submit):
            self.loop.submit(ingress, message)
        elif isinstance(message, frames.Abort):
            self.loop.abort(ingress, message.attempts)
        elif isinstance(message, frames.EndHandoffs):
            self.loop.end_handoffs(message.handoffs)
        elif isinstance(message, frames.Prefetch):
            self.loop.prefetch(ingress, message)
        elif isinstance(message, frames.Resync):
            self.loop.owner_joined(ingress)
        elif isinstance(message, frames.AskLedger):
            self.loop.tell_ledger(ingress)
        else:
            log.warning("unexpected %s from %s ignored", type(message).__name__, ingress)
