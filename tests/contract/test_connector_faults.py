"""Damaged, lost and half-stored blocks with a real engine: every answer is as without any reuse.

Scenarios FR-05 and DIR-05, and what an abort in the worst moment leaves in the engine's own cache
(vLLM 0.32, float32). The transports' and the store's part, with a thousand faults, is in
tests/unit/kvcache/connector/test_fault_campaign.py.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcache.transport.wire import HEADER_BYTES, TRAILER_BYTES
from tests.contract.connector_engine import BLOCK_SIZE
from tests.contract.connector_node import MODEL, Node
from tests.contract.connector_two_slabs import SLOT_BYTES, TwoSlabs, full_blocks, prompts
from tests.contract.tiny_models import LAYERS
from tests.equality import check_blocks, check_tokens

pytestmark = [pytest.mark.contract, pytest.mark.slow]

SLOTS = 100
OUTPUT = 8
UNIT_BYTES = HEADER_BYTES + SLOT_BYTES + TRAILER_BYTES
HEADER_FIELDS = [*range(20), *range(32, 64)]  # the rest is padding

Blocks = Sequence[bytes]
Damage = Callable[[TwoSlabs, Node, Blocks, random.Random], None]


@pytest.fixture(scope="module")
def slabs(large_block_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoSlabs]:
    slabs = TwoSlabs(tmp_path_factory.mktemp("slabs"), SLOTS, large_block_model)
    yield slabs
    slabs.close()


@pytest.fixture(autouse=True)
def clean(slabs: TwoSlabs) -> Iterator[None]:
    slabs.forget()
    free_blocks = slabs.engine.call("free_blocks")
    yield
    slabs.at_baseline(free_blocks)


def a_bit(slabs: TwoSlabs, node: Node, blocks: Blocks, rng: random.Random) -> None:
    slot = slabs.slot_of(node, rng.choice(blocks))
    slot[rng.randrange(SLOT_BYTES)] ^= np.uint8(1 << rng.randrange(8))


def a_bit_of_a_header(slabs: TwoSlabs, node: Node, blocks: Blocks, rng: random.Random) -> None:
    header = slabs.header_of(node, rng.choice(blocks))
    header[rng.choice(HEADER_FIELDS)] ^= np.uint8(1 << rng.randrange(8))


def a_payload_that_is_gone(slabs: TwoSlabs, node: Node, blocks: Blocks, rng: random.Random) -> None:
    slabs.slot_of(node, rng.choice(blocks))[:] = 0


def two_payloads_swapped(slabs: TwoSlabs, node: Node, blocks: Blocks, rng: random.Random) -> None:
    one, other = (slabs.slot_of(node, block) for block in rng.sample(list(blocks), 2))
    one[:], other[:] = other.copy(), one.copy()


def a_bit_on_the_wire(slabs: TwoSlabs, _: Node, blocks: Blocks, rng: random.Random) -> None:
    """Of what the last connection carries: the one before was a pull that went well."""
    offset = rng.randrange(len(blocks) * UNIT_BYTES)
    slabs.proxy.flip(slabs.proxy.connections - 1, offset, bit=rng.randrange(8))


IN_OWN = (a_bit, a_payload_that_is_gone, a_bit_of_a_header, two_payloads_swapped)
IN_OTHER = (a_bit_on_the_wire, a_bit, a_payload_that_is_gone)


def counted(slabs: TwoSlabs) -> Counter[str]:
    """Failed loads so far, by reason."""
    return Counter(slabs.engine.call("stats")["load_failures"])


@pytest.mark.full
def test_fr_05_of_sixty_requests_thirty_meet_damage_between_look_up_and_load(
    slabs: TwoSlabs,
) -> None:
    rng = random.Random(5)
    asked = prompts(60, tokens=110)
    before = counted(slabs)
    reasons: Counter[str] = Counter()
    for number, ids in enumerate(asked):
        expected = slabs.compute(f"plain-{number}", ids, OUTPUT)
        blocks = slabs.engine.call("hashes", f"plain-{number}")[: full_blocks(ids)]
        is_pulled, is_damaged = number % 4 >= 2, number % 2 == 1
        if is_pulled:
            slabs.move_to_other(blocks)
        name = f"reuse-{number}"
        slabs.hold(name, ids, OUTPUT, slabs.address if is_pulled else "")
        if is_damaged:
            kinds: tuple[Damage, ...] = IN_OTHER if is_pulled else IN_OWN
            damage = kinds[number // 4 % len(kinds)]
            damage(slabs, slabs.other if is_pulled else slabs.own, blocks, rng)
        result = slabs.let_go(name)
        report = result["report"]
        check_tokens(result["tokens"], expected, f"{number}, {report}")
        assert (report["load_failure"] is not None) == is_damaged, (number, report)
        if is_damaged:
            reasons[report["load_failure"]] += 1
            assert report["failed_blocks"] == len(blocks) - report["loaded_blocks"] > 0
        else:
            assert report["loaded_blocks"] == len(blocks)
    assert reasons.total() == 30
    assert counted(slabs) - before == reasons
    sys.stdout.write(f"\nfaults caught with a real engine: {dict(reasons)}\n")


@pytest.mark.full
def test_fr_05_a_channel_cut_halfway_through_a_prompt_of_3000_tokens(slabs: TwoSlabs) -> None:
    (ids,) = prompts(1, tokens=3000)
    assert len(ids) == 3000
    expected = slabs.compute("plain-3000", ids, OUTPUT)
    blocks = slabs.engine.call("hashes", "plain-3000")[: full_blocks(ids)]
    slabs.move_to_other(blocks)
    assert slabs.engine.call("reset_prefix_cache")
    half = len(blocks) // 2
    slabs.engine.call("fault", "hold_after", half)
    slabs.engine.call("add", "cut", ids, OUTPUT, pull_from=slabs.address)
    slabs.engine.call("step_until_load", "cut")
    slabs.engine.call("wait_held")
    slabs.proxy.cut()
    result = slabs.let_go("cut")
    check_tokens(result["tokens"], expected)
    report = result["report"]
    assert half <= report["loaded_blocks"] < len(blocks)
    assert report["failed_blocks"] == len(blocks) - report["loaded_blocks"]
    assert report["pull_failure"] == report["load_failure"] == "unavailable"
    # What had come was used: the rest of the prompt was computed, and a token a step.
    recomputed = len(ids) - report["loaded_blocks"] * BLOCK_SIZE
    assert report["computed_tokens"] == recomputed + OUTPUT - 1


@pytest.mark.full
def test_dir_05_blocks_whose_store_failed_or_was_cut_short_are_never_used(slabs: TwoSlabs) -> None:
    rng = random.Random(9)
    asked = prompts(20, tokens=110, seed=8)
    references = [slabs.compute(f"ref-{n}", ids, OUTPUT) for n, ids in enumerate(asked)]
    slabs.forget()
    stats = slabs.engine.call("stats")
    retired = slabs.own.ledger().counters.retired_total
    fills = 0
    for number, ids in enumerate(asked):
        blocks = len(ids) // BLOCK_SIZE
        fills += blocks
        if number % 5 == 0:
            slabs.engine.call("store_fault", "fail_fill", rng.randrange(blocks))
        elif number % 5 in {2, 4}:
            for skip in rng.sample(range(blocks), 2):
                slabs.engine.call("store_fault", "cut_fill", skip)
        result = slabs.engine.call("generate", f"first-{number}", ids, OUTPUT)
        check_tokens(result["tokens"], references[number], f"first {number}")
    failed, cut = slabs.engine.call("store_faults_done")
    slabs.engine.call("synchronise")
    assert failed + cut >= fills / 5
    assert slabs.own.ledger().published <= fills - failed, "a failed store is not found"

    caught, passes = 0, 0
    while True:
        passes += 1
        assert passes <= 4, "two blocks of a prompt at most were cut: each pass finds one"
        assert slabs.engine.call("reset_prefix_cache"), "the device's cache is cleared"
        was = counted(slabs)
        for number, ids in enumerate(asked):
            result = slabs.engine.call("generate", f"again-{passes}-{number}", ids, OUTPUT)
            check_tokens(result["tokens"], references[number], f"{number}, {result['report']}")
        found = counted(slabs) - was
        caught += found.total()
        assert set(found) <= {"corrupt"}
        if not found:
            break
    failed, cut = slabs.engine.call("store_faults_done")
    after = slabs.engine.call("stats")
    assert caught == cut, "each block that was cut short was found, once"
    assert after["publish_failures_total"] - stats["publish_failures_total"] == failed
    slabs.engine.call("synchronise")
    ledger = slabs.own.ledger()
    assert ledger.counters.retired_total - retired == cut, "and has left the slab"
    for number, ids in enumerate(asked):
        names = slabs.engine.call("hashes", f"ref-{number}")[: full_blocks(ids)]
        assert slabs.looked_up(names) == len(names), "what was recomputed is there instead"
    sys.stdout.write(f"\nstores that failed: {failed}, cut short: {cut}, all caught\n")


@pytest.mark.parametrize("steps_after", [0, 1])
@pytest.mark.parametrize("first_bad", [0, 3])
@pytest.mark.parametrize("pulled", [False, True], ids=["own slab", "pulled"])
def test_an_abort_between_a_failed_load_and_its_recompute_leaves_a_cache_that_others_may_hit(
    slabs: TwoSlabs, *, pulled: bool, first_bad: int, steps_after: int
) -> None:
    local, tag = 3, f"{pulled}-{first_bad}-{steps_after}"
    (ids,) = prompts(1, tokens=330, seed=11)
    expected = slabs.compute(f"plain-{tag}", ids, OUTPUT)
    blocks = slabs.engine.call("hashes", f"plain-{tag}")[: full_blocks(ids)]
    truth = slabs.engine.call("cached_blocks", f"plain-{tag}")
    assert slabs.engine.call("reset_prefix_cache")
    slabs.engine.call("overwrite_cache")  # what is not written anew is not right by chance
    # Another request has brought the first blocks into the engine's own cache.
    slabs.engine.call("generate", f"short-{tag}", ids[: local * BLOCK_SIZE + 1], 1)
    slabs.engine.call("synchronise")
    if pulled:
        slabs.move_to_other(blocks)

    slabs.engine.call("fault", "hold")
    slabs.engine.call("add", f"gone-{tag}", ids, OUTPUT, pull_from=slabs.address if pulled else "")
    slabs.engine.call("step_until_load", f"gone-{tag}")
    slabs.engine.call("wait_held")
    bad = blocks[local + first_bad]
    slabs.slot_of(slabs.other if pulled else slabs.own, bad)[:] = 0
    slabs.engine.call("fault", "let_go")
    slabs.engine.call("step_until_load_is_reported", f"gone-{tag}")
    slabs.engine.call("step", steps_after)
    slabs.engine.call("abort", f"gone-{tag}")
    slabs.engine.call("settle")

    cached = slabs.engine.call("cached_blocks", f"plain-{tag}")
    assert len(cached) >= local
    check_blocks(cached, truth, LAYERS)
    for node in (slabs.own, slabs.other):
        node.agent.clear(MODEL)  # only its own cache could help, or harm
    again = slabs.engine.call("generate", f"again-{tag}", ids, OUTPUT)
    check_tokens(again["tokens"], expected)
    assert again["report"]["local_tokens"] >= local * BLOCK_SIZE
    assert again["report"]["loaded_blocks"] == 0
