"""Which workers an ingress takes: those that agree with it, and with each other, in everything.

Real links on loopback; membership as Serve would tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from deployments.flow.flow_types import FlowLimits
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.membership import MEMBERS, Member
from deployments.ingress.worker_links import ABSENT_TICKS, WorkerLinks
from deployments.links import frames
from deployments.links.link_server import LinkServer
from deployments.node.directory_actor import DirectorySettings
from tests.unit.deployments.link_world import PATIENT, SECRET, WAIT_S, Seen, cut, encode_outputs
from tests.waiting import wait_until

SHARED = {
    "model": "m",
    "revision": "0f1e2d",
    "dtype": "float32",
    "kv_dtype": "auto",
    "block_size": "32",
    "hash_algorithm": "sha256_cbor",
    "hash_root": "00ff",
    "build": "vllm 0.32.0, cpu",
    "max_model_len": "2048",
}
OTHERS = {
    "revision": "a9b8c7",
    "dtype": "bfloat16",
    "kv_dtype": "fp8",
    "block_size": "64",
    "hash_algorithm": "sha256",
    "hash_root": "1234",
    "build": "vllm 0.33.0, cpu",
    "max_model_len": "1024",
}
CONFIGURED = ("model", "block_size", "dtype", "max_model_len")  # as cluster/application fills it in


@dataclass
class User:
    """Notes who joined, and who was lost."""

    joined: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    rejected: list[frames.Rejected] = field(default_factory=list)

    def worker_joined(self, member: Member, welcome: frames.Welcome) -> None:
        assert member.worker == welcome.worker
        self.joined.append(member.worker)

    def received(self, worker: str, message: frames.Message) -> None:
        if isinstance(message, frames.Rejected):
            self.rejected.append(message)

    def worker_leaves(self, worker: str, *, draining: bool) -> None:
        pass

    def worker_lost(self, worker: str, reason: str, *, is_member: bool) -> None:
        self.lost.append(worker)


@dataclass
class Site:
    """Workers that listen, and an ingress that follows membership."""

    links: WorkerLinks
    user: User
    servers: dict[str, LinkServer] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    async def start(self, worker: str, role: str, **differing: str) -> None:
        """Start a worker whose settings differ so, and wait until the ingress has judged it."""
        namespace = {**SHARED, **differing}
        welcome = frames.Welcome(worker, "i", namespace["model"], role, "n", 1, namespace, 8, 8)
        server = LinkServer(SECRET, welcome, Seen(), encode_outputs)
        port = await server.start("127.0.0.1")
        self.servers[worker] = server
        self.members[worker] = Member(worker, role, role, "m", "127.0.0.1", port, 1, "n")
        MEMBERS.replace("test", list(self.members.values()))
        await until(lambda: worker in self.links.open or worker in self.links.refused)

    async def stop(self, worker: str) -> None:
        """End a worker, and wait until the ingress knows."""
        self.servers.pop(worker).close()
        del self.members[worker]
        MEMBERS.replace("test", list(self.members.values()))
        await until(lambda: worker not in self.links.open)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, timeout_s=WAIT_S, what="the ingress's verdict")


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    expected = {name: SHARED[name] for name in CONFIGURED}
    settings = ClientSettings(
        model="m",
        block_size=32,
        context_tokens_max=2048,
        expected_namespace=expected,
        directory=DirectorySettings(app="test"),
        limits=FlowLimits(),
        links=PATIENT,
        reconnect_s=0.01,
        refused_retry_s=0.05,
    )
    user = User()
    made = Site(WorkerLinks(settings, "ingress", SECRET, user), user)
    made.links.start()
    try:
        yield made
    finally:
        MEMBERS.replace("test", [])
        made.links.close()
        await until(lambda: not made.links._keeping)
        for server in made.servers.values():
            server.close()
            for peer in list(server._peers.values()):
                cut(peer.writer)


@pytest.mark.parametrize("name", sorted(OTHERS))
async def test_a_decode_worker_with_another_setting_is_refused_with_both_values(name: str) -> None:
    async with site() as here:
        await here.start("p1", "prefill")
        await here.start("d1", "decode", **{name: OTHERS[name]})
        refusal = here.links.refused["d1"]
        assert name in refusal
        assert SHARED[name] in refusal
        assert OTHERS[name] in refusal
        assert [other for other in OTHERS if f" {other} is " in refusal] == [name]
        # The request goes on at whom it knows; nothing is ever given to the other one.
        assert here.user.joined == ["p1"]
        assert here.user.lost == []


async def test_workers_that_agree_in_everything_serve_side_by_side() -> None:
    async with site() as here:
        for worker, role in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
            await here.start(worker, role)
        assert here.links.refused == {}
        assert here.user.joined == ["p1", "d1", "d2"]


async def test_a_field_that_one_worker_does_not_know_counts_as_different() -> None:
    async with site() as here:
        await here.start("p1", "prefill")
        await here.start("d1", "decode", quantization="int8")
        assert here.links.refused["d1"].count("absent") == 1
        assert "quantization is int8" in here.links.refused["d1"]


async def test_once_all_of_the_old_revision_have_gone_the_new_one_serves() -> None:
    async with site() as here:
        await here.start("d1", "decode")
        await here.start("d2", "decode", revision="a9b8c7")
        assert "d2" in here.links.refused
        await here.stop("d1")
        await until(lambda: "d2" in here.links.open)
        assert here.links.refused == {}


async def test_what_fits_no_frame_is_rejected_for_its_client_and_all_else_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as here:
        await here.start("d1", "decode")
        seen = here.servers["d1"]._events
        assert isinstance(seen, Seen)
        assert await seen.next_kind() == ("joined", "ingress")
        monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 1000)
        for attempt, size in (("small", 10), ("large", 1000), ("next", 10)):
            here.links.send("d1", frames.Submit(attempt, "decode", bytes(size), [], None))
        here.links.send("d1", frames.Prefetch("handoff", [bytes(1000)], ""))
        assert here.user.rejected == [], "the caller is not called back within its own turn"
        for attempt in ("small", "next"):
            kind, _, message = await seen.next()
            assert kind == "received"
            assert isinstance(message, frames.Submit) and message.attempt == attempt
        (rejected,) = here.user.rejected
        assert (rejected.attempt, rejected.client_fault) == ("large", True)
        assert "the limit is 1000" in rejected.message
        assert (list(here.links.open), here.user.lost) == (["d1"], [])


async def test_a_link_to_a_worker_that_leaves_ends_once_nobody_needs_it() -> None:
    async with site() as here:
        await here.start("p1", "prefill")
        await here.start("d1", "decode")
        del here.members["d1"]
        MEMBERS.replace("test", list(here.members.values()))

        def tick(*, needs: str = "") -> set[str]:
            here.links.let_go(lambda worker: worker == needs)
            return {w for w, link in here.links.open.items() if not link._writer.is_closing()}

        for _ in range(ABSENT_TICKS - 1):
            assert tick() == {"p1", "d1"}, "it may come back"
        assert tick(needs="d1") == {"p1", "d1"}
        assert tick() == {"p1"}
        await until(lambda: not here.servers["d1"].is_linked)
        await until(lambda: here.user.lost == ["d1"])
        assert here.links.open.keys() == {"p1"}


async def test_a_worker_that_is_missing_for_a_moment_keeps_its_link() -> None:
    async with site() as here:
        await here.start("d1", "decode")
        for present in (*[[]] * (ABSENT_TICKS - 1), list(here.members.values()), *[[]] * 2):
            MEMBERS.replace("test", present)
            here.links.let_go(lambda _: False)
        assert not here.links.open["d1"]._writer.is_closing()
