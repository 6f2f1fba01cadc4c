"""The router in front of more prompts than it may remember, and what it says it left out."""

from __future__ import annotations

from hashlib import sha256

from kvcache.events import BlockStored, EventBatch
from router.decision import RouteRequest
from router.route import Router
from router.settings import RouterSettings
from router.workers import WorkerView
from tests.unit.kvcache.directory_truth import Writer, block

B = 32
PROMPTS, TOKENS = 20_000, 500
BLOCKS_MAX = 30_000
WORKERS = ("d1", "d2")


def names_of(prompt: int) -> tuple[bytes, ...]:
    """Block names of a prompt like no other."""
    return tuple(sha256(f"{prompt} {n}".encode()).digest() for n in range(TOKENS // B))


def ask(number: int, hashes: tuple[bytes, ...]) -> RouteRequest:
    return RouteRequest(f"r{number}", "m", TOKENS, hashes)


def test_twenty_thousand_prompts_leave_a_bounded_index_in_which_warm_prefixes_still_match() -> None:
    router = Router(RouterSettings(index_blocks_max=BLOCKS_MAX))
    for worker in WORKERS:
        router.add_worker(WorkerView(worker, "m", "decode", "a", B, slots=8))
    sequences = dict.fromkeys(WORKERS, 0)
    warm = names_of(-1)
    largest = missed = 0
    for number in range(PROMPTS):
        is_warm = number % 100 == 0  # one prefix in a hundred requests is all that is in use
        hashes = warm if is_warm else names_of(number)
        decision = router.route(ask(number, hashes), 0.01 * number)
        missed += is_warm and number > 0 and decision.cached_tokens == 0
        worker = decision.decode
        router.submitted(f"r{number}", worker, decision.compute_tokens, 0.01 * number)
        router.ended(f"r{number}")
        if is_warm and decision.cached_tokens:
            continue
        # What a worker says once it has computed the prompt. It never takes a block back.
        sequences[worker] += 1
        stored = tuple(BlockStored(name, None, "m") for name in hashes)
        source = f"engine:{worker}"
        router.apply_batch(EventBatch(source, "i1", sequences[worker], "m", stored))
        largest = max(largest, router.index.blocks("m"))
    assert missed == 0
    assert largest <= BLOCKS_MAX
    unique = (PROMPTS - PROMPTS // 100) * len(warm)
    assert router.index.evicted_total("m") >= unique - BLOCKS_MAX > 0
    # What is kept of each stream beside the index is bounded too, and all books are closed.
    assert sum(view.blocks for view in router.index.streams()) <= BLOCKS_MAX
    assert all(load.in_flight == 0 for load in router.load_snapshot(1e9))
    assert router.fallbacks_total == {"no_hashes": 0, "engine_in_doubt": 0, "slab_in_doubt": 0}
    router.validate()


def test_a_prompt_without_block_names_is_routed_by_load_and_counted() -> None:
    router = Router()
    router.add_worker(WorkerView("d1", "m", "decode", "a", B, slots=8))
    router.route(ask(0, ()), 0.0)
    assert router.fallbacks_total["no_hashes"] == 1
    router.route(RouteRequest("r1", "m", B - 1), 0.0)  # no full block: nothing is missing
    assert router.fallbacks_total["no_hashes"] == 1


def test_a_decision_that_leaves_doubtful_blocks_out_is_counted_by_whose_they_are() -> None:
    router = Router()
    router.add_worker(WorkerView("d1", "m", "decode", "a", B, slots=8))
    writer = Writer("engine:d1")
    router.apply_batch(writer.store(0))
    router.route(ask(0, (block(0),)), 0.0)
    writer.store(1)
    router.apply_batch(writer.store(2))  # a gap: what d1 holds is in doubt
    router.route(ask(1, (block(0),)), 0.0)
    assert router.fallbacks_total == {"no_hashes": 0, "engine_in_doubt": 1, "slab_in_doubt": 0}
    router.apply_snapshot(writer.snapshot())
    router.route(ask(2, (block(0),)), 0.0)
    assert router.fallbacks_total["engine_in_doubt"] == 1
