"""The ingress's links to all workers that membership names: made, kept, watched, given up.

One task a worker. Called by engine_client, which is told of workers that came, spoke and were
lost (LinkUser), on its own event loop. Must not know requests or routing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from deployments.errors import LinkError, LinkRefused
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.membership import MEMBERS, Member
from deployments.links import frames
from deployments.links.link import WorkerLink, open_link

log = logging.getLogger("headwater.ingress")

ABSENT_TICKS = 6  # 3 s; Serve's replicas wait 2 s for requests on their way before they end


class LinkUser(Protocol):
    """Who uses the links. Each call comes on the event loop."""

    def worker_joined(self, member: Member, welcome: frames.Welcome) -> None:
        """A link is up."""

    def received(self, worker: str, message: frames.Message) -> None:
        """A message came. An exception ends the link, and is logged."""

    def worker_leaves(self, worker: str, *, draining: bool) -> None:
        """Serve takes a linked worker away, or has it back."""

    def worker_lost(self, worker: str, reason: str, *, is_member: bool) -> None:
        """A link ended; ``is_member``: Serve did not take the worker away before."""


class WorkerLinks:
    """All links of one ingress."""

    def __init__(
        self, settings: ClientSettings, ingress: str, secret: bytes, user: LinkUser
    ) -> None:
        self._settings = settings
        self._ingress = ingress
        self._secret = secret
        self._user = user
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._stop_listening: Callable[[], None] = lambda: None
        self.open: dict[str, WorkerLink] = {}
        self._absent: Counter[str] = Counter()  # ticks since a linked worker was no member
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}  # why there is no link now, for those that are tried again

    def start(self) -> None:
        """Follow membership from now on. Call it on the event loop."""
        loop = asyncio.get_running_loop()

        def changed() -> None:  # in the thread where Serve routes
            loop.call_soon_threadsafe(self._members_changed)

        self._stop_listening = MEMBERS.listen(changed)
        self._members_changed()

    def send(self, worker: str, message: frames.Message) -> None:
        """A worker without a link is already known as lost, or will be within this turn.

        What fits no frame is not sent; whoever asked for an attempt hears that it is rejected.
        """
        link = self.open.get(worker)
        if link is None:
            return
        try:
            link.send(message)
        except LinkError as too_large:
            log.error("%s not sent to %s: %s", type(message).__name__, worker, too_large)  # noqa: TRY400 - no bug of ours
            if isinstance(message, frames.Submit):
                answer = frames.Rejected(message.attempt, str(too_large), client_fault=True)
                # Not within the caller's turn, in the middle of what it has to send.
                asyncio.get_running_loop().call_soon(self._user.received, worker, answer)

    def let_go(self, is_needed: Callable[[str], bool]) -> None:
        """End links to workers that Serve has taken away and that nobody needs: they wait for that.

        Call it every tick. Not at once: Serve may tell of its replicas in pieces, and where all end
        it tells an ingress of its workers some seconds before it ends the ingress itself.
        """
        present = MEMBERS.present()
        for worker, link in self.open.items():
            self._absent[worker] = 0 if worker in present else self._absent[worker] + 1
            if self._absent[worker] >= ABSENT_TICKS and not is_needed(worker):
                link.close()

    def close(self) -> None:
        """End all links."""
        self._stop_listening()
        for task in self._keeping.values():
            task.cancel()

    def _members_changed(self) -> None:
        present = MEMBERS.present()
        for worker, member in present.items():
            if worker not in self._keeping:
                self._keeping[worker] = asyncio.create_task(self._keep(member), name=worker)
        for worker in self.open:
            self._user.worker_leaves(worker, draining=worker not in present)

    async def _keep(self, member: Member) -> None:
        """Connect, receive until the link ends, and again while the worker is a member."""
        try:
            while MEMBERS.present().get(member.worker) == member:
                wait_s = await self._link_once(member)
                await asyncio.sleep(wait_s)
        finally:
            del self._keeping[member.worker]
            self.refused.pop(member.worker, None)
            self.failed.pop(member.worker, None)

    async def _link_once(self, member: Member) -> float:
        """One life of a link; returns the seconds to wait before the next."""
        settings = self._settings
        try:
            link = await open_link(
                member.host,
                member.port,
                self._ingress,
                self._secret,
                settings.expected_namespace,
                settings.links,
            )
        except LinkRefused as refused:
            log.error("%s refused: %s", member.worker, refused)  # noqa: TRY400 - no bug of ours
            self.refused[member.worker] = str(refused)
            return settings.refused_retry_s
        except LinkError as failed:
            log.warning("%s: %s", member.worker, failed)
            self.failed[member.worker] = str(failed)
            return settings.reconnect_s
        if link.welcome.worker != member.worker:  # another worker has its port by now
            link.close()
            return settings.reconnect_s
        differing = self._unlike_the_others(link.welcome)
        if differing:
            log.error("%s refused: %s", member.worker, differing)
            self.refused[member.worker] = differing
            link.close()
            return settings.refused_retry_s
        await self._use(member, link)
        return settings.reconnect_s

    def _unlike_the_others(self, welcome: frames.Welcome) -> str:
        """What keeps a worker from serving beside those that are linked; empty if nothing does.

        The ingress cannot know all of it (the weights' checksum, say): workers must agree. A
        request that began at one of them may have to go on at any other.
        """
        for link in self.open.values():
            other = link.welcome
            if other.model == welcome.model and other.worker != welcome.worker:
                names = sorted(other.namespace.keys() | welcome.namespace.keys())
                differing = [
                    f"{name} is {welcome.namespace.get(name, 'absent')} here, "
                    f"{other.namespace.get(name, 'absent')} at {other.worker}"
                    for name in names
                    if other.namespace.get(name) != welcome.namespace.get(name)
                ]
                if differing:
                    return "workers differ: " + "; ".join(differing)
        return ""

    async def _use(self, member: Member, link: WorkerLink) -> None:
        worker = member.worker
        self.open[worker] = link
        self.refused.pop(worker, None)
        self.failed.pop(worker, None)
        reason = "link cancelled"
        try:
            self._user.worker_joined(member, link.welcome)
            self._user.worker_leaves(worker, draining=worker not in MEMBERS.present())
            reason = await link.run(lambda message: self._user.received(worker, message))
        except Exception as fault:
            log.exception("%s: what it sent cannot be used", worker)
            reason = f"what it sent cannot be used: {fault}"
        finally:
            del self.open[worker], self._absent[worker]
            link.close()
            log.warning("%s lost: %s", worker, reason)
            self.failed[worker] = f"link lost: {reason}"
            is_member = worker in MEMBERS.present()
            self._user.worker_lost(worker, reason, is_member=is_member)
