import json
from collections import Counter
from collections.abc import Iterator

import pytest

from kvcache.events import EventBatch
from router.decision import Decision, RouteRequest
from router.errors import BlockSizeMismatch, NoWorker, UnknownWorker
from router.route import Router
from router.settings import RouterSettings
from router.workers import Role, State, WorkerReport, WorkerView
from tests.unit.kvcache.directory_truth import Writer, block

B = 32


@pytest.fixture
def router() -> Iterator[Router]:
    core = Router(RouterSettings(seed=7))
    yield core
    core.validate()


def add(router: Router, *workers: str, node: str = "a", state: State = "ready") -> None:
    for worker in workers:
        role: Role = "prefill" if worker[0] == "p" else "decode"
        router.add_worker(WorkerView(worker, "m", role, node, B, state, slots=8))


def ask(
    tokens: int = 800,
    *,
    first: int = 0,
    excluded: tuple[str, ...] = (),
    needs: bool | None = None,
    resume: int = 0,
    model: str = "m",
    any_role: bool = False,
) -> RouteRequest:
    hashes = tuple(block(first + n) for n in range((tokens + resume) // B))
    return RouteRequest(
        "r",
        model,
        tokens,
        hashes,
        resume_tokens=resume,
        excluded=frozenset(excluded),
        needs_prefill_worker=needs,
        any_role=any_role,
    )


def cached(source: str, blocks: int, first: int = 0) -> EventBatch:
    return Writer(source).store(*range(first, first + blocks))


def busy(router: Router, worker: str, streams: int, tokens: int = 0) -> None:
    router.worker_report(worker, WorkerReport(streams, 0, tokens), 0.0)


def test_a_long_cold_prompt_is_prefilled_elsewhere_and_a_short_one_is_not(router: Router) -> None:
    add(router, "p1", "d1")
    assert router.route(ask(800), 0.0).prefill == "p1"
    short = router.route(ask(20), 0.0)
    assert (short.prefill, short.decode, short.reason) == (None, "d1", "short_prompt")


def test_a_prompt_cached_on_a_decode_worker_is_not_prefilled_again(router: Router) -> None:
    add(router, "p1", "p2", "d1", "d2")
    router.apply_batch(cached("engine:d2", 24))
    decision = router.route(ask(800), 0.0)
    assert (decision.prefill, decision.decode) == (None, "d2")
    assert decision.reason == "prefix_on_decode"
    assert decision.cached_tokens == 24 * B
    assert decision.compute_tokens == 800 - 24 * B


def test_a_warm_prefill_worker_is_preferred_to_a_cold_one(router: Router) -> None:
    add(router, "p1", "p2", "d1")
    router.apply_batch(cached("engine:p2", 20))
    decision = router.route(ask(1600), 0.0)
    assert (decision.prefill, decision.reason) == ("p2", "prefix_on_prefill")


def test_a_warm_worker_with_a_long_queue_loses_to_a_cold_idle_one(router: Router) -> None:
    add(router, "p1", "p2", "d1")
    router.apply_batch(cached("engine:p2", 20))
    busy(router, "p2", 4, tokens=5000)
    assert router.route(ask(1600), 0.0).prefill == "p1"


def test_the_longest_leading_match_wins_not_a_fragment_from_the_middle(router: Router) -> None:
    # RT-03: d1 holds X = blocks 0-9, d2 holds Y = blocks 10-19; the prompt is Y + X.
    add(router, "d1", "d2")
    router.apply_batch(cached("engine:d1", 10))
    router.apply_batch(cached("engine:d2", 10, first=10))
    hashes = tuple(block(n) for n in [*range(10, 20), *range(10)])
    decision = router.route(RouteRequest("r", "m", 20 * B + 1, hashes), 0.0)
    assert (decision.decode, decision.cached_tokens) == ("d2", 10 * B)
    # Names are chained: another first token gives every block of the prompt another name.
    assert router.route(ask(20 * B, first=100), 0.0).cached_tokens == 0


def test_a_slab_counts_for_its_own_node_and_is_only_listed_for_others(router: Router) -> None:
    add(router, "d1", node="a")
    add(router, "d2", node="b")
    router.apply_batch(cached("slab:b", 20))
    assert router.route(ask(), 0.0).decode == "d2"
    there = router.route(ask(excluded=("d2",)), 0.0)
    assert (there.decode, there.cached_tokens, there.elsewhere_tokens) == ("d1", 0, 20 * B)


def test_prefill_and_decode_are_paired_on_one_node_only(router: Router) -> None:
    add(router, "p1", "d1", node="a")
    add(router, "d2", node="b")
    decision = router.route(ask(1600), 0.0)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    pairs = {(c.prefill, c.decode) for c in decision.candidates}
    assert pairs == {(None, "d1"), (None, "d2"), ("p1", "d1")}


def test_a_node_that_cannot_hand_over_is_not_asked_to(router: Router) -> None:
    add(router, "p1", "d1")
    router.set_handoff("a", usable=False)
    assert router.route(ask(1600), 0.0).reason == "no_prefill_worker"
    router.set_handoff("a", usable=True)
    assert router.route(ask(1600), 0.0).prefill == "p1"


def test_blocks_of_a_degraded_source_do_not_count_and_the_decision_says_so(router: Router) -> None:
    add(router, "d1", "d2")
    writer = Writer("engine:d1")
    router.apply_batch(writer.store(*range(20)))
    exact = router.route(ask(), 0.0)
    assert (exact.prefix_information, exact.cached_tokens) == ("exact", 20 * B)
    writer.store(50)
    router.apply_batch(writer.store(51))
    decision = router.route(ask(), 0.0)
    assert decision.prefix_information == "degraded"
    assert decision.degraded_sources == ("engine:d1",)
    assert decision.cached_tokens == 0
    router.apply_snapshot(writer.snapshot())
    assert router.route(ask(), 0.0).prefix_information == "exact"


def test_a_streaming_decode_worker_is_spared_the_prompt(router: Router) -> None:
    add(router, "p1", "d1")
    assert router.route(ask(60), 0.0).prefill is None
    busy(router, "d1", 6)
    decision = router.route(ask(60), 0.0)
    assert decision.prefill == "p1"
    assert decision.caused_weight > 0.3


def test_a_long_queue_at_the_prefill_worker_leaves_the_prompt_to_the_decode_worker(
    router: Router,
) -> None:
    add(router, "p1", "d1")
    busy(router, "p1", 5, tokens=8000)
    decision = router.route(ask(800), 0.0)
    assert (decision.prefill, decision.reason) == (None, "prefill_busy")


def test_the_weight_of_caused_delay_rises_with_load(router: Router) -> None:
    add(router, "p1", "d1")
    weights = []
    for streams in (0, 4, 8, 16):
        busy(router, "d1", streams)
        weights.append(router.route(ask(), 0.0).caused_weight)
    assert weights == pytest.approx([0.3, 0.65, 1.0, 1.0])


def test_idle_traffic_is_spread_over_equal_workers(router: Router) -> None:
    add(router, *(f"d{n}" for n in range(4)), *(f"p{n}" for n in range(8)))
    decisions = [router.route(ask(), 0.0) for _ in range(80)]
    assert set(Counter(d.decode for d in decisions).values()) == {20}
    assert len({d.prefill for d in decisions}) == 8


def test_idle_traffic_is_spread_over_many_nodes() -> None:
    router = Router(RouterSettings(nodes_priced_max=4))
    for n in range(40):
        add(router, f"d{n}", node=f"node-{n}")
    chosen = Counter(router.route(ask(), 0.0).decode for _ in range(400))
    assert len(chosen) == 40
    router.apply_batch(cached("engine:d33", 20))
    assert router.route(ask(), 0.0).decode == "d33"
    rest = tuple(f"d{n}" for n in range(40) if n != 5)
    assert router.route(ask(excluded=rest), 0.0).decode == "d5"


def test_the_same_calls_give_the_same_decisions_and_another_seed_another_order() -> None:
    def run(seed: int) -> list[bytes]:
        router = Router(RouterSettings(seed=seed))
        add(router, "p1", "p2", "d1", "d2", "d3")
        return [router.route(ask(), 0.0).as_json() for _ in range(6)]

    assert run(1) == run(1)
    assert any(run(1) != run(seed) for seed in range(2, 12))


def test_requests_go_round_a_worker_that_is_excluded_draining_or_lost(router: Router) -> None:
    add(router, "p1", "d1", "d2", "d3")
    add(router, "d2", state="draining")
    add(router, "d3", state="stalled")
    assert not router.is_ready("d2")
    assert router.route(ask(), 0.0).decode == "d1"
    with pytest.raises(NoWorker) as none:
        router.route(ask(excluded=("d1",)), 0.0)
    assert (none.value.model, none.value.role) == ("m", "decode")
    add(router, "d2")
    assert router.route(ask(excluded=("d1",)), 0.0).decode == "d2"


def test_workers_that_drain_take_work_only_where_all_do(router: Router) -> None:
    add(router, "p1", "d1", "d2")
    for name in ("d1", "d2"):
        add(router, name, state="draining")
    with pytest.raises(NoWorker):
        router.route(ask(), 0.0)
    assert not router.is_ready("d1")
    add(router, "p1", state="draining")
    decided = router.route(ask(800), 0.0)
    assert decided.decode in {"d1", "d2"}
    assert router.is_ready("d1") and router.is_ready("p1")
    assert router.is_leaving("m") and router.slots("m") == 0
    add(router, "d1", state="stalled")
    assert router.route(ask(), 0.0).decode == "d2"
    add(router, "d3")
    assert router.route(ask(), 0.0).decode == "d3"
    assert not router.is_ready("d2")
    assert not router.is_leaving("m")
    router.validate()


def test_a_prefill_worker_can_be_insisted_on_and_forbidden(router: Router) -> None:
    add(router, "p1", "d1")
    assert router.route(ask(20, needs=True), 0.0).prefill == "p1"
    forbidden = router.route(ask(800, needs=False), 0.0)
    assert (forbidden.prefill, forbidden.reason) == (None, "prefill_not_wanted")
    with pytest.raises(NoWorker) as none:
        router.route(ask(needs=True, excluded=("p1",)), 0.0)
    assert none.value.role == "prefill"


def test_prefill_workers_serve_everything_when_any_role_will_do(router: Router) -> None:
    add(router, "p1", "p2")
    with pytest.raises(NoWorker) as none:
        router.route(ask(), 0.0)
    assert none.value.role == "decode"
    decision = router.route(ask(any_role=True, excluded=("p1",)), 0.0)
    assert (decision.prefill, decision.decode, decision.reason) == (None, "p2", "any_role")


def test_resumed_tokens_count_as_tokens_to_be_computed(router: Router) -> None:
    add(router, "d1")
    fresh, resumed = router.route(ask(100), 0.0), router.route(ask(100, resume=300), 0.0)
    assert resumed.compute_tokens == fresh.compute_tokens + 300
    assert resumed.predicted_ttft_ms > fresh.predicted_ttft_ms + 500.0
    router.apply_batch(cached("engine:d1", 12))
    assert router.route(ask(100, resume=300), 0.0).cached_tokens == 12 * B


def test_models_do_not_see_each_other(router: Router) -> None:
    add(router, "d1")
    router.add_worker(WorkerView("x", "n", "decode", "a", 64))
    assert router.route(ask(model="n"), 0.0).decode == "x"
    with pytest.raises(NoWorker):
        router.route(ask(model="unknown"), 0.0)
    with pytest.raises(BlockSizeMismatch, match="block_size 64"):
        router.add_worker(WorkerView("d9", "m", "decode", "a", 64))


def test_a_vanished_worker_leaves_nothing_behind(router: Router) -> None:
    add(router, "p1", "d1", "d2")
    router.apply_batch(cached("engine:d1", 20))
    router.submitted("a", "d1", 100, 0.0)
    assert router.slots("m") == 16
    assert router.remove_worker("d1") == 1
    assert router.remove_worker("d1") == 0
    assert not router.ended("a")
    assert not router.submitted("b", "d1", 1, 0.0)
    assert router.slots("m") == 8
    assert router.apply_batch(cached("engine:d1", 20)) == ()
    assert router.index.streams() == ()
    assert router.route(ask(), 0.0).cached_tokens == 0
    with pytest.raises(UnknownWorker):
        router.load("d1", 0.0)
    add(router, "d1")
    assert router.load("d1", 0.0).in_flight == 0


def test_a_decision_explains_itself_and_its_terms_add_up(router: Router) -> None:
    add(router, "p1", "p2", "d1", "d2")
    router.apply_batch(cached("engine:d1", 5))
    router.apply_batch(cached("slab:a", 9))
    busy(router, "d2", 3, tokens=100)
    decision = router.route(ask(), 0.0)
    body = json.loads(decision.as_json())
    assert body["candidates_total"] == len(body["candidates"]) == 6
    for candidate in body["candidates"]:
        assert candidate["cost_ms"] == pytest.approx(sum(candidate["terms"].values()))
        assert candidate["slab_cached_tokens"] == 9 * B
    costs = [candidate["cost_ms"] for candidate in body["candidates"]]
    assert costs == sorted(costs)
    chosen = (body["prefill"], body["decode"])
    assert chosen in [(c["prefill"], c["decode"]) for c in body["candidates"]]


def test_samples_change_the_prediction(router: Router) -> None:
    add(router, "p1", "d1")
    before = router.route(ask(needs=True), 0.0).predicted_ttft_ms
    for _ in range(100):
        router.observe_prefill("p1", 800, 80.0, pairs=800 * 400)
    after = router.route(ask(needs=True), 0.0).predicted_ttft_ms
    assert after == pytest.approx(80.0, rel=0.1)
    assert before > 1600.0


def test_equal_machines_stay_equal_whatever_one_of_them_teaches(router: Router) -> None:
    add(router, "p1", "d1")
    for _ in range(100):
        router.observe_prefill("p1", 164, 600.0, pairs=164 * 1600)
    (with_p, without_p) = sorted(
        router.route(ask(1700), 0.0).candidates, key=lambda c: c.prefill is None
    )
    assert with_p.terms.compute_ms == pytest.approx(without_p.terms.compute_ms)
    assert router.route(ask(1700), 0.0).prefill == "p1"


def serve(router: Router, requests: int, concurrency: int) -> tuple[Counter[str], int]:
    """RT-01 in small: a shared 800-token prompt, prefill in turn, 120 decode steps each, reports
    that show nothing. Returns the shares, and the largest difference of streams in flight.
    """
    shares: Counter[str] = Counter()
    decoding: dict[str, tuple[str, float]] = {}
    prefilling: dict[str, tuple[Decision, float]] = {}
    now_s, sent, worst = 0.0, 0, 0
    while sent < requests or decoding or prefilling:
        while sent < requests and len(decoding) + len(prefilling) < concurrency:
            decision, name = router.route(ask(800 + sent), now_s), f"a{sent}"
            sent += 1
            shares[decision.decode] += 1
            if decision.prefill is None:
                router.submitted(name, decision.decode, decision.compute_tokens, now_s)
                decoding[name] = (decision.decode, now_s + 3.6)
            else:
                router.submitted(name, decision.prefill, decision.compute_tokens, now_s)
                router.planned(name, decision.decode, now_s)
                prefilling[name] = (decision, now_s + 0.1 * (1 + len(prefilling)))
        now_s += 0.1
        for name, (decision, until_s) in list(prefilling.items()):
            if now_s >= until_s:
                router.ended(name)
                router.submitted(name + "d", decision.decode, 1, now_s)
                router.first_token(name + "d")
                decoding[name + "d"] = (decision.decode, now_s + 3.6)
                del prefilling[name]
        for name, (_, until_s) in list(decoding.items()):
            if now_s >= until_s:
                router.ended(name)
                del decoding[name]
        for worker in ("d1", "d2"):
            router.worker_report(worker, WorkerReport(0, 0, 0), now_s)
        loads = [router.load(worker, now_s).in_flight for worker in ("d1", "d2")]
        worst = max(worst, abs(loads[0] - loads[1]))
    return shares, worst


def test_reports_that_zero_counters_make_no_hot_worker(router: Router) -> None:
    add(router, "p1", "d1", "d2")
    router.apply_batch(cached("engine:d1", 24))
    router.apply_batch(cached("slab:a", 24))
    shares, worst = serve(router, requests=40, concurrency=12)
    assert max(shares.values()) <= 2 * min(shares.values())
    assert worst <= 3
    assert all(load.in_flight == 0 for load in router.load_snapshot(1e6))


def test_a_burst_of_long_prompts_is_spread_over_the_decode_workers(router: Router) -> None:
    add(router, "p1", "d1", "d2")
    for n in range(8):
        decision = router.route(ask(800, first=1000 * n, needs=True), 0.0)
        router.submitted(str(n), "p1", decision.compute_tokens, 0.0)
        router.planned(str(n), decision.decode, 0.0)
    loads = [router.load(worker, 0.0).in_flight for worker in ("d1", "d2")]
    assert loads == [4, 4]
