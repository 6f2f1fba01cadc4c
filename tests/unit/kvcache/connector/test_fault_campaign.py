"""Each kind of damage to blocks, many times at random places: all caught, counted and recomputed.

Whatever was loaded before the damage has the right bytes, nothing after it was touched, all of that
is reported for recomputing, and one reason is counted for each fault. Then the next request finds
what was recomputed in the damaged block's place. Vllm's part is in tests/contract.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.agent import AgentServer
from kvcache.arena import Arena
from kvcache.connector.records import RequestReport, TransferParams
from kvcache.slab import HEADER_BYTES
from kvcache.slot import SlotState
from kvcache.store import BlockStore, Grant
from kvcache.transport.wire import HEADER_BYTES as WIRE_HEADER_BYTES
from kvcache.transport.wire import TRAILER_BYTES
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.connector.tcp_worker import NAMES, MakeWorker, Worker, make_worker
from tests.unit.kvcache.connector.test_pull_over_tcp import node
from tests.unit.kvcache.examples import LAYOUT, MODEL, SLOT_BYTES, chain, content, registration
from tests.unit.kvcache.steps import TTL_S, publish, settled
from tests.unit.kvcache.transport.conftest import Node, make_node
from tests.unit.kvcache.transport.nodes import BLOCKS
from tests.unit.kvcache.transport.proxy import FlippingProxy

__all__ = ["make_node", "make_worker", "node"]
pytestmark = pytest.mark.slow

MANY, SOME = 200, 40
OWN_SLAB = TransferParams()
STRANGERS = chain(BLOCKS, start=1000)
# Of a header's 64 bytes: generation, checksum, state and name; the rest is padding.
HEADER_FIELDS = [*range(20), *range(32, 64)]
UNIT_BYTES = WIRE_HEADER_BYTES + SLOT_BYTES + TRAILER_BYTES

Damage = Callable[["Books", random.Random], int]


class Books:
    """One node's slab as damage sees it: by place in the prompt, 0 to BLOCKS - 1."""

    def __init__(self, agent: AgentServer, writer: BlockStore) -> None:
        self.agent = agent
        self.writer = writer

    @property
    def arena(self) -> Arena:
        return self.agent._arenas[MODEL]

    def slot(self, place: int) -> int:
        return self.arena.table._rows.named[NAMES[place]]

    def bytes_of(self, place: int) -> NDArray[np.uint8]:
        return self.arena.slab._mapping.slots[self.slot(place)]

    def header_of(self, place: int) -> NDArray[np.uint8]:
        return self.arena.slab._mapping.headers.reshape(-1, HEADER_BYTES)[self.slot(place)]

    def publish_missing(self) -> None:
        """What an engine recomputes is published again, where the slab has lost it."""
        outcomes = self.writer.allocate(NAMES, TTL_S).result(TIMEOUT_S)
        grants = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
        filled = [self.writer.fill(grant, None, content(grant.hash)) for grant in grants]
        assert all(self.writer.publish(filled).result(TIMEOUT_S))

    def reuse_all(self, lease: str, reader: BlockStore) -> None:
        """The reader's lease is gone, and so are its blocks: each slot holds another one."""
        reader.release(lease)
        settled(reader)
        self.agent.clear(MODEL)
        publish(self.writer, STRANGERS)


# Each kind of damage returns how many blocks it leaves damaged.


def flip(data: NDArray[np.uint8], offset: int, rng: random.Random) -> None:
    data[offset] ^= np.uint8(1 << rng.randrange(8))


def a_bit_of_a_slot(books: Books, rng: random.Random) -> int:
    flip(books.bytes_of(rng.randrange(BLOCKS)), rng.randrange(SLOT_BYTES), rng)
    return 1


def a_bit_of_a_header(books: Books, rng: random.Random) -> int:
    flip(books.header_of(rng.randrange(BLOCKS)), rng.choice(HEADER_FIELDS), rng)
    return 1


def a_slot_that_was_stored_in_part(books: Books, rng: random.Random) -> int:
    books.bytes_of(rng.randrange(BLOCKS))[rng.randrange(SLOT_BYTES) :] = 0
    return 1


def two_layers_of_a_slot_swapped(books: Books, rng: random.Random) -> int:
    layers = books.bytes_of(rng.randrange(BLOCKS)).reshape(LAYOUT.layers, LAYOUT.layer_bytes)
    one, other = rng.sample(range(LAYOUT.layers), 2)
    layers[[one, other]] = layers[[other, one]]
    return 1


def two_slots_swapped(books: Books, rng: random.Random) -> int:
    one, other = (books.bytes_of(place) for place in rng.sample(range(BLOCKS), 2))
    one[:], other[:] = other.copy(), one.copy()
    return 2


def two_slots_swapped_with_their_headers(books: Books, rng: random.Random) -> int:
    places = rng.sample(range(BLOCKS), 2)
    for part in (books.bytes_of, books.header_of):
        one, other = map(part, places)
        one[:], other[:] = other.copy(), one.copy()
    return 2


def a_slot_that_is_being_filled_again(books: Books, rng: random.Random) -> int:
    slot = books.slot(rng.randrange(BLOCKS))
    books.arena.slab._mapping.state[slot] = SlotState.FILLING
    books.arena.slab._mapping.generation[slot] += 1
    return 1


CORRUPT, STALE = "corrupt", "stale"
IN_SLABS = pytest.mark.parametrize(
    ("damage", "times", "reason"),
    [
        (a_bit_of_a_slot, MANY, CORRUPT),
        (a_bit_of_a_header, MANY, STALE),
        (a_slot_that_was_stored_in_part, SOME, CORRUPT),
        (two_layers_of_a_slot_swapped, SOME, CORRUPT),
        (two_slots_swapped, SOME, CORRUPT),
        (two_slots_swapped_with_their_headers, SOME, STALE),
        (a_slot_that_is_being_filled_again, SOME, STALE),
    ],
)


@pytest.fixture(scope="module")
def faults_caught() -> Iterator[Counter[str]]:
    """Of all tests here, by reason; shown at the end (pytest -s)."""
    total: Counter[str] = Counter()
    yield total
    sys.stdout.write(f"\nfaults caught: {total.total()}, {dict(total)}\n")


class Campaign:
    """A worker, and the slab that it loads from: its own, or another node's by `params`."""

    def __init__(
        self, worker: Worker, books: Books, params: TransferParams, total: Counter[str]
    ) -> None:
        self.worker = worker
        self.books = books
        self.params = params
        self.total = total
        self.caught = 0

    def held_load(self) -> str:
        """A load that has looked up and leased, but has read nothing. The name of its lease."""
        worker = self.worker
        worker.cache.rows[:] = 0
        worker.session.faults.hold()
        worker.begin(self.params)
        assert worker.session.faults.held.wait(TIMEOUT_S)
        return "load:decode-1:r:1"

    def caught_by(self, report: RequestReport) -> str:
        """The reason; after a look at what the engine's cache holds, and what is recomputed."""
        assert report.load_failure is not None, "a fault was not caught"
        assert report.failed_blocks == BLOCKS - report.loaded_blocks > 0
        assert self.worker.cache.has(report.loaded_blocks), "a wrong byte got through"
        self.caught += 1
        self.total[report.load_failure] += 1
        return report.load_failure

    def next_load(self) -> RequestReport:
        """Once what was missing has been recomputed and published, as the engine does."""
        store = self.worker.session.store()
        assert store is not None
        settled(store)  # the agent has heard what the reader found
        eventually(lambda: self.books.agent.ledger(MODEL).leases == (), "leases to end")
        self.books.publish_missing()
        self.worker.cache.rows[:] = 0
        self.worker.begin(self.params)
        return self.worker.end()

    def recompute(self) -> None:
        """The next request loads all of it, right."""
        report = self.next_load()
        assert (report.load_failure, report.loaded_blocks) == (None, BLOCKS)
        assert self.worker.cache.has(BLOCKS)

    def run(self, damage: Damage, times: int) -> int:
        """Damage and recompute, so many times. How many loads failed for it."""
        failed = 0
        for seed in range(times):
            self.held_load()
            damaged = damage(self.books, random.Random(seed))
            report, loads = self.worker.let_go(), 0
            while loads == 0 or report.load_failure is not None:
                self.caught_by(report)
                loads += 1
                assert loads <= damaged, "what was damaged stays so"
                report = self.next_load()  # may find the second block of two, if not both at once
            assert report.loaded_blocks == BLOCKS
            assert self.worker.cache.has(BLOCKS)
            failed += loads
        return failed

    def counted(self) -> dict[str, int]:
        return dict(self.worker.session.stats().load_failures)


@pytest.fixture
def own_slab(make_worker: MakeWorker, faults_caught: Counter[str]) -> Iterator[Campaign]:
    worker = make_worker()
    path = worker.agent.socket_path
    with closing(BlockStore.connect(path, registration("writer"), TIMEOUT_S)) as writer:
        publish(writer, NAMES)
        yield Campaign(worker, Books(worker.agent, writer), OWN_SLAB, faults_caught)


@pytest.fixture
def other_slab(make_worker: MakeWorker, node: Node, faults_caught: Counter[str]) -> Campaign:
    node.agent.end_handoff(MODEL, "h1")
    params = TransferParams(pull_from=node.server.address)
    return Campaign(make_worker(), Books(node.agent, node.writer), params, faults_caught)


@IN_SLABS
def test_damage_in_the_own_slab_is_caught_counted_and_recomputed(
    own_slab: Campaign, damage: Damage, times: int, reason: str
) -> None:
    failed = own_slab.run(damage, times)
    assert own_slab.counted() == {reason: failed}
    assert own_slab.caught == failed >= times


@IN_SLABS
def test_damage_in_another_nodes_slab_is_caught_counted_and_recomputed(
    other_slab: Campaign, damage: Damage, times: int, reason: str
) -> None:
    failed = other_slab.run(damage, times // 2)
    counted = Counter(other_slab.counted())
    # The other node's agent may retire the second of two damaged blocks while it is pulled again:
    # that pull meets a stale slot.
    retired_meanwhile = counted - Counter({reason: failed})
    assert set(retired_meanwhile) <= {STALE}
    assert counted.total() == failed
    assert counted[reason] >= times // 2, "each first load meets the damage itself"
    assert dict(other_slab.worker.session.stats().pulls_failed) == counted
    assert other_slab.caught == failed >= times // 2


def test_slots_that_were_reused_under_an_ended_lease_are_stale(own_slab: Campaign) -> None:
    reader = own_slab.worker.session.store()
    assert reader is not None
    for _ in range(SOME):
        lease = own_slab.held_load()
        own_slab.books.reuse_all(lease, reader)
        assert own_slab.caught_by(own_slab.worker.let_go()) == STALE
        own_slab.books.agent.clear(MODEL)
        own_slab.recompute()
    assert own_slab.counted() == {STALE: SOME}


def test_reads_that_fail_are_counted_and_recomputed(own_slab: Campaign) -> None:
    for number in range(SOME):
        own_slab.held_load()
        own_slab.worker.session.faults.fail_next(skip=number % BLOCKS)
        report = own_slab.worker.let_go()
        assert own_slab.caught_by(report) == "unavailable"
        assert report.loaded_blocks == number % BLOCKS
        own_slab.recompute()
    assert own_slab.counted() == {"unavailable": SOME}


def test_aborted_loads_touch_nothing_more_and_are_counted_apart(own_slab: Campaign) -> None:
    worker = own_slab.worker
    for number in range(SOME):
        loaded = number % BLOCKS
        worker.cache.rows[:] = 0
        worker.session.faults.hold_after(loaded)
        worker.begin(OWN_SLAB)
        assert worker.session.faults.held.wait(TIMEOUT_S)
        worker.side.finish("r", aborted=True)
        worker.session.faults.let_go()
        (result,) = eventually(worker.loader.take_finished, "the load's end")
        # The block that it stood at was begun before the abort, and is whole.
        assert (result.aborted, result.failed_block_ids) == (True, ())
        assert worker.cache.has(result.loaded_blocks)
        own_slab.total["aborted"] += 1
        assert result.loaded_blocks == min(loaded + 1, BLOCKS)
        own_slab.recompute()
    # One that was at its last block had nothing left to stop.
    whole = sum(number % BLOCKS == BLOCKS - 1 for number in range(SOME))
    assert worker.session.stats().loads_aborted_total == SOME - whole
    assert own_slab.counted() == {}


def test_a_bit_flipped_on_the_wire_is_caught_counted_and_recomputed(
    make_worker: MakeWorker, node: Node, faults_caught: Counter[str]
) -> None:
    node.agent.end_handoff(MODEL, "h1")
    rng = random.Random(3)
    with FlippingProxy(node.server.endpoint) as proxy:
        params = TransferParams(pull_from="{}:{}".format(*proxy.endpoint))
        worker = make_worker()
        campaign = Campaign(worker, Books(node.agent, node.writer), params, faults_caught)
        campaign.recompute()  # connection 0 asks, the last one carries blocks
        reasons: Counter[str] = Counter()
        for _ in range(MANY):
            campaign.held_load()
            offset = rng.randrange(BLOCKS * UNIT_BYTES)
            proxy.flip(proxy.connections - 1, offset, bit=rng.randrange(8))
            report = worker.let_go()
            assert report.loaded_blocks <= offset // UNIT_BYTES
            reasons[campaign.caught_by(report)] += 1
            campaign.recompute()
        assert proxy.hits == campaign.caught == MANY
        assert reasons.keys() == {CORRUPT, "unavailable"}  # a payload; a header or trailer
        assert campaign.counted() == reasons
        assert node.agent.ledger(MODEL).counters.retired_total == 0, "the slab's own are good"
        worker.session.peers.close()  # type: ignore[union-attr]  # before the proxy's end


def test_a_header_that_is_damaged_is_mended_so_that_its_block_can_be_read_again(
    own_slab: Campaign,
) -> None:
    own_slab.held_load()
    before = own_slab.books.header_of(3).copy()
    flip(own_slab.books.header_of(3), 8, random.Random(0))
    assert own_slab.caught_by(own_slab.worker.let_go()) == STALE
    own_slab.recompute()
    assert np.array_equal(own_slab.books.header_of(3), before)
    assert own_slab.books.agent.ledger(MODEL).counters.retired_total == 0
