import pytest

from router.cost import CostModel, Work, WorkerCost, cost_terms, decode_terms, prefill_terms
from router.settings import RouterSettings


def cost() -> WorkerCost:
    return CostModel(RouterSettings()).add_worker("w", "m")


def work(
    total: int = 800, engine: int = 0, slab: int = 0, in_flight: int = 0, queued: int = 0
) -> Work:
    return Work(total, 32, 128, 0.5, engine, slab, in_flight, queued, None, 4)


def test_only_uncached_tokens_are_computed_and_only_what_the_engine_lacks_is_loaded() -> None:
    w = cost()
    cold = prefill_terms(w, work())
    in_slab = prefill_terms(w, work(slab=20))
    in_engine = prefill_terms(w, work(engine=20, slab=10))
    both = prefill_terms(w, work(engine=10, slab=20))
    assert cold[1] == pytest.approx(800 * 2.0 + 50.0 * 0.32)
    assert in_slab[1] == in_engine[1] == both[1] < cold[1] / 4
    assert (cold[2], in_slab[2], in_engine[2], both[2]) == (0.0, 22.0, 0.0, 12.0)


def test_the_same_tokens_cost_more_behind_a_longer_context() -> None:
    assert cost().prefill_ms(100, 8000) > cost().prefill_ms(100, 0)


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_tokens() -> None:
    _, local = decode_terms(cost(), work(total=64, engine=2), 1.0)
    assert local[1] > 0.0


def test_a_handed_over_request_loads_what_the_decode_engine_lacks_and_computes_the_tail() -> None:
    w = cost()
    cold, _ = decode_terms(w, work(total=800 + 7), 1.0)
    warm, _ = decode_terms(w, work(total=800 + 7, engine=20), 1.0)
    assert cold[3] == pytest.approx(40.0 + (2.0 + 25.0) + 14.0)
    assert warm[3] == pytest.approx(40.0 + (2.0 + 5.0) + 14.0)
    assert cold[:3] == (0.0, 0.0, 0.0)


def test_a_prompt_computed_on_a_decode_worker_is_charged_for_each_stream_it_stalls() -> None:
    w = cost()
    idle, busy = (decode_terms(w, work(in_flight=n), 1.0)[1][5] for n in (0, 3))
    growth = 0.5 * 3.0 * 3 * 128
    assert busy - growth == pytest.approx(3 * idle)
    free = decode_terms(w, work(in_flight=0), 0.0)[1][5]
    assert free == 0.0


def test_waiting_begins_when_slots_or_blocks_run_out() -> None:
    w = cost()
    some, full, beyond = (decode_terms(w, work(in_flight=n), 1.0)[0][4] for n in (3, 4, 8))
    assert some < 50.0 < full < beyond
    tight = work(in_flight=1)
    tight.free_blocks = 10
    assert decode_terms(w, tight, 1.0)[0][4] > 1000.0
    roomy = work(in_flight=1)
    roomy.free_blocks = 1000
    assert decode_terms(w, roomy, 1.0)[0][4] < 50.0


def test_the_terms_of_a_pair_are_the_sums() -> None:
    terms = cost_terms((1.0, 2.0, 3.0, 0.0, 0.0, 4.0), (0.0, 0.0, 0.0, 5.0, 6.0, 7.0))
    assert (terms.queue_ms, terms.handoff_ms, terms.caused_ms) == (1.0, 5.0, 11.0)


def test_samples_teach_all_workers_of_a_kind_but_no_other_model_or_machine() -> None:
    costs = CostModel(RouterSettings())
    costs.add_worker("a", "m")
    for _ in range(100):
        costs.observe_prefill("a", 512, 512 * 0.1, pairs=512 * 256)
        costs.observe_step("a", 4, 10.0)
        costs.observe_load("a", 25, 100.0)
        costs.observe_handoff("a", 15.0)
    newcomer = costs.add_worker("b", "m")
    assert newcomer.prefill_ms(512, 0) == pytest.approx(51.2, rel=0.1)
    assert newcomer.step_ms(4) == pytest.approx(10.0, rel=0.1)
    assert newcomer.load_ms(25) == pytest.approx(100.0, rel=0.1)
    assert newcomer.handoff.first == pytest.approx(15.0, rel=0.1)
    assert costs.add_worker("c", "other").prefill_ms(512, 0) > 1000.0
    assert costs.add_worker("d", "m", "slower").prefill_ms(512, 0) > 1000.0
    costs.remove_worker("a")
    costs.observe_prefill("a", 512, 1.0, pairs=0.0)
    costs.validate()
