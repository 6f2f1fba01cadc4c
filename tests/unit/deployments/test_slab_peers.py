"""Which slab another node reads, and where: told by workers, kept while agents come and go.

Workers and links are real but for vLLM and Ray (test_stuck_engine.py).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from deployments.ingress.worker_views import WorkerViews
from deployments.links import frames
from router.route import Router
from tests.unit.deployments.engine_world import worker
from tests.unit.deployments.test_stuck_engine import linked
from tests.unit.deployments.view_world import MEMBER, member, welcome_of

FIRST, SECOND = "10.0.0.5:4000", "10.0.0.5:4001"


def views_of(*nodes: str) -> tuple[WorkerViews, Router]:
    router = Router()
    views = WorkerViews(router, block_size=32, stall_s=20.0)
    for number, node in enumerate(nodes, start=1):
        one = member(f"d{number}", "decode", node)
        views.joined(welcome_of(one), node)
    return views, router


def test_a_slab_is_read_where_a_worker_of_its_node_says() -> None:
    views, router = views_of("a", "b")
    views.heard("d1", frames.Load(slab_peer=FIRST), 0.0)
    assert (views.slab_peer("a"), views.slab_peer("b"), views.slab_peer("c")) == (FIRST, "", "")
    assert views.slab_peer("") == ""
    known = router.view("d1")
    assert known is not None and known.slab_peer == FIRST


def test_the_address_goes_with_the_last_worker_of_its_node() -> None:
    views, router = views_of("a", "a")
    for name in ("d1", "d2"):
        views.heard(name, frames.Load(slab_peer=FIRST), 0.0)
    for name, left in (("d1", FIRST), ("d2", "")):
        views.left(name)
        router.remove_worker(name)
        assert views.slab_peer("a") == left
    router.validate()


def test_a_worker_that_says_it_again_or_stalls_changes_nothing_of_it() -> None:
    views, router = views_of("a")
    views.heard("d1", frames.Load(slab_peer=FIRST), 0.0)
    before = router.view("d1")
    views.heard("d1", frames.Load(slab_peer=FIRST), 1.0)
    assert router.view("d1") is before
    assert before is not None
    views.heard("d1", frames.Load(slab_peer=FIRST, stalled_s=33.0), 2.0)
    assert router.view("d1") == replace(before, state="stalled")


async def test_an_agent_that_starts_anew_is_followed_over_the_same_link() -> None:
    async with worker() as here:
        here.server.loop.slab_peer = FIRST
        async with linked(here) as ingress:
            await ingress.until(lambda: ingress.views.slab_peer(MEMBER.node) == FIRST)
            here.server.loop.slab_peer = SECOND
            await ingress.until(lambda: ingress.views.slab_peer(MEMBER.node) == SECOND)
            here.server.loop.slab_peer = ""
            await ingress.until(lambda: ingress.views.slab_peer(MEMBER.node) == "")
            assert ingress.changes == []


async def test_the_first_word_of_a_worker_tells_it() -> None:
    async with worker() as here:
        here.server.loop.slab_peer = FIRST
        async with linked(here) as ingress:
            await ingress.until(lambda: bool(ingress.loads))
            assert ingress.loads[0].slab_peer == FIRST


async def test_an_attempt_takes_the_address_to_the_connector() -> None:
    async with worker() as here, linked(here) as ingress:
        for name, pull_from in (("far", FIRST), ("near", "")):
            submit = frames.Submit(name, "decode", name.encode(), [], "r~1", pull_from)
            here.server.received("i1", submit)
        await ingress.until(lambda: here.engine.transfers.keys() == {"far", "near"})
        assert here.engine.transfers["far"] == {
            "handoff": "r~1",
            "publish_handoff": False,
            "pull_from": FIRST,
            "publishes": True,
        }
        assert here.engine.transfers["near"]["pull_from"] == ""


def test_a_worker_of_an_older_release_tells_of_no_slab() -> None:
    now = msgspec.msgpack.decode(msgspec.msgpack.encode(frames.Load(running=3, slab_peer=FIRST)))
    older = msgspec.msgpack.encode(now[: frames.Load.__struct_fields__.index("slab_peer")])
    assert msgspec.msgpack.decode(older, type=frames.Load) == frames.Load(running=3)
