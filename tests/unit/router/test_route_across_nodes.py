"""Prefill on one node, decode on another: paired where slabs can be read, priced by the pull."""

from collections.abc import Iterator

import pytest

from kvcache.events import slab_source
from router.decision import RouteRequest
from router.errors import NoWorker
from router.route import Router
from router.settings import RouterSettings
from router.workers import Role, WorkerView
from tests.unit.kvcache.directory_truth import Writer, block

B = 32


@pytest.fixture
def router() -> Iterator[Router]:
    core = Router(RouterSettings(seed=7))
    yield core
    core.validate()


def add(router: Router, worker: str, node: str, peer: str = "10.0.0.1:7000") -> None:
    role: Role = "prefill" if worker[0] == "p" else "decode"
    router.add_worker(WorkerView(worker, "m", role, node, B, slots=8, slab_peer=peer))


def ask(tokens: int = 1600, *, needs: bool | None = None, without: str = "") -> RouteRequest:
    hashes = tuple(block(n) for n in range(tokens // B))
    excluded = frozenset({without} if without else ())
    return RouteRequest("r", "m", tokens, hashes, excluded=excluded, needs_prefill_worker=needs)


def held(router: Router, node: str, blocks: int) -> None:
    router.apply_batch(Writer(slab_source(node)).store(*range(blocks)))


def learn_pulls(router: Router, worker: str, ms_per_block: float) -> None:
    for blocks in (8, 16, 32, 48) * 20:
        router.observe_pull(worker, blocks, 2.0 + ms_per_block * blocks)


def test_prefill_and_decode_on_nodes_of_their_own_are_paired(router: Router) -> None:
    add(router, "p1", "a")
    add(router, "d1", "b")
    decision = router.route(ask(), 0.0)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    pairs = {(c.prefill, c.decode) for c in decision.candidates}
    assert pairs == {(None, "d1"), ("p1", "d1")}
    assert decision.candidates_total == 2


def test_a_slab_that_cannot_be_read_is_no_partner(router: Router) -> None:
    add(router, "p1", "a", peer="")
    add(router, "d1", "b")
    assert router.route(ask(), 0.0).prefill is None
    with pytest.raises(NoWorker):
        router.route(ask(needs=True), 0.0)


def test_a_node_without_its_agent_neither_gives_nor_pulls(router: Router) -> None:
    for worker, node in (("p1", "a"), ("d1", "b"), ("d2", "c")):
        add(router, worker, node)
    router.set_handoff("b", usable=False)
    assert router.route(ask(needs=True), 0.0).decode == "d2"
    router.set_handoff("a", usable=False)
    assert router.route(ask(), 0.0).prefill is None


def test_the_own_node_is_preferred_while_pulling_costs_more_than_loading(router: Router) -> None:
    add(router, "p1", "a")
    add(router, "d1", "a")
    add(router, "d2", "b")
    decision = router.route(ask(needs=True), 0.0)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    pairs = {(c.prefill, c.decode): c.terms.handoff_ms for c in decision.candidates}
    assert pairs["p1", "d2"] > pairs["p1", "d1"]
    assert router.route(ask(needs=True, without="d1"), 0.0).decode == "d2"


def test_blocks_of_another_node_are_pulled_where_that_is_quicker_than_computing(
    router: Router,
) -> None:
    add(router, "d1", "a")
    add(router, "d2", "b")
    held(router, "b", 40)
    there = router.route(ask(without="d2"), 0.0)
    assert (there.decode, there.pull_from) == ("d1", "b")
    assert there.cached_tokens == 40 * B
    assert there.compute_tokens == 1600 - 40 * B
    assert there.candidates[0].pulled_tokens == 40 * B
    assert there.elsewhere_tokens == 40 * B


def test_over_a_slow_link_the_prompt_is_computed_instead(router: Router) -> None:
    add(router, "d1", "a")
    add(router, "d2", "b")
    held(router, "b", 40)
    learn_pulls(router, "d1", ms_per_block=500.0)
    there = router.route(ask(without="d2"), 0.0)
    assert (there.decode, there.pull_from, there.cached_tokens) == ("d1", "", 0)
    assert there.elsewhere_tokens == 40 * B


def test_what_the_own_slab_has_is_not_pulled(router: Router) -> None:
    add(router, "d1", "a")
    add(router, "d2", "b")
    held(router, "a", 10)
    held(router, "b", 40)
    there = router.route(ask(without="d2"), 0.0)
    assert there.candidates[0].slab_cached_tokens == 10 * B
    assert there.candidates[0].pulled_tokens == 30 * B
    held_more = router.route(ask(10 * B + 1, without="d2"), 0.0)
    assert (held_more.pull_from, held_more.cached_tokens) == ("", 10 * B)


def test_in_a_large_model_of_single_role_nodes_idle_prefill_nodes_are_found(
    router: Router,
) -> None:
    for n in range(40):
        add(router, f"p{n}", f"a{n:02}")
        add(router, f"d{n}", f"b{n:02}")
    chosen = set()
    for n in range(60):
        decision = router.route(ask(needs=True), float(n))
        chosen.add(decision.prefill)
        router.submitted(str(n), str(decision.prefill), decision.compute_tokens, float(n))
    assert len(chosen) >= 20
