"""What every transport keeps: each test runs over shared memory and over TCP."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading

import pytest

from kvcache.errors import (
    CorruptBlock,
    PullCancelled,
    PullTimedOut,
    RegistrationRefused,
    StaleBlock,
    StoreUnavailable,
)
from kvcache.protocol import Wait
from kvcache.store import Grant
from kvcache.transport.interface import LeasedRun
from kvcache.transport.tcp import TcpSettings
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import MODEL, SLOTS, block, chain, content
from tests.unit.kvcache.steps import granted
from tests.unit.kvcache.transport.conftest import (
    ONE_STREAM,
    TTL_S,
    MakeNode,
    MakeReader,
    Node,
    Reader,
    checked,
)


def test_blocks_come_in_order_with_the_bytes_that_were_published(
    node: Node, reader: Reader
) -> None:
    names = chain(SLOTS)
    node.publish(names)
    run = reader.lease(names)
    with reader.source.read(run.blocks, TIMEOUT_S) as pull:
        found = [(b.index, checked(b)) for b in pull]
    assert found == list(enumerate(names))


def test_what_is_yielded_cannot_be_written_to(node: Node, reader: Reader) -> None:
    node.publish(chain(1))
    with reader.source.read(reader.lease(chain(1)).blocks, TIMEOUT_S) as pull:
        assert not next(pull).data.flags.writeable


def test_only_the_published_prefix_is_leased(node: Node, reader: Reader) -> None:
    node.publish([block(1), block(2), block(4)])
    run = reader.lease(chain(5))
    assert [ref.hash for ref in run.blocks] == chain(2)
    (lease,) = node.agent.ledger(MODEL).leases
    assert (lease.key, lease.blocks) == ("load", 2)


def test_no_match_leases_nothing(node: Node, reader: Reader) -> None:
    node.publish([block(2)])
    assert reader.lease(chain(2)) == LeasedRun("load", ())
    assert node.lease_keys() == []


def test_the_rest_of_a_run_can_be_pulled_alone(node: Node, reader: Reader) -> None:
    node.publish(chain(6))
    run = reader.lease(chain(6))
    assert reader.pull(run.blocks[2:5]) == chain(6)[2:5]


def test_a_pull_of_nothing_yields_nothing(node: Node, reader: Reader) -> None:
    assert reader.pull(()) == []


def test_one_lease_serves_one_pull_after_another(node: Node, reader: Reader) -> None:
    node.publish(chain(3))
    run = reader.lease(chain(3))
    assert reader.pull(run.blocks) == reader.pull(run.blocks) == chain(3)


@pytest.mark.parametrize(("slots", "streams"), [(1, 1), (1, 4), (2, 1), (3, 2), (8, 4)])
def test_any_staging_and_any_number_of_streams_carry_a_run(
    node: Node, make_tcp_reader: MakeReader, slots: int, streams: int
) -> None:
    node.publish(chain(SLOTS))
    settings = TcpSettings(streams=streams)
    reader = make_tcp_reader(node.server.endpoint, settings=settings, staging_slots=slots)
    run = reader.lease(chain(SLOTS))
    for _ in range(3):
        assert reader.pull(run.blocks) == chain(SLOTS)


def test_release_ends_the_lease(node: Node, reader: Reader) -> None:
    node.publish(chain(2))
    reader.lease(chain(2))
    reader.source.release("load")
    eventually(lambda: node.lease_keys() == [], "the lease to end")


def test_a_lease_ends_at_its_deadline_on_the_agents_clock(node: Node, reader: Reader) -> None:
    node.publish(chain(2))
    reader.lease(chain(2))
    node.later(TTL_S - 0.1)
    assert node.lease_keys() == ["load"]
    node.later(0.2)
    eventually(lambda: node.lease_keys() == [], "the lease to expire")


def test_a_handoff_is_taken_over_in_the_same_step(node: Node, reader: Reader) -> None:
    node.publish(chain(2), "hand-over")
    assert node.lease_keys() == ["hand-over"]
    reader.source.lease("load", chain(2), TTL_S, "hand-over").result(TIMEOUT_S)
    assert node.lease_keys() == ["load"]
    assert node.agent.ledger(MODEL).counters.handoffs_taken_total == 1


def test_a_handoff_can_be_ended(node: Node, reader: Reader) -> None:
    node.publish(chain(2), "hand-over")
    reader.lease([block(99)])  # connected, and requests are done in order
    reader.source.end_handoff("hand-over")
    eventually(lambda: node.lease_keys() == [], "the hand-off to end")


def test_two_readers_may_use_the_same_key(node: Node, make_reader: MakeReader) -> None:
    node.publish(chain(3))
    one, two = make_reader(node, "one"), make_reader(node, "two")
    one.lease(chain(1))
    two.lease(chain(3))
    one.source.release("load")
    eventually(lambda: node.lease_keys() == ["load"], "one of two leases to end")
    assert two.pull(two.lease(chain(3)).blocks) == chain(3)


def test_an_answer_given_up_leaves_no_lease(node: Node, reader: Reader) -> None:
    node.publish(chain(2))
    reader.source.lease("given up", chain(2), TTL_S).give_up()
    reader.lease(chain(2), "kept")
    assert node.lease_keys() == ["kept"]


# Blocks that are still being computed


def waiting(reader: Reader, more_than: int, wait_s: float = TTL_S) -> LeasedRun:
    wait = Wait(more_than, "hand-over", wait_s)
    return reader.source.lease("load", chain(4), TTL_S, wait=wait).result(TIMEOUT_S)


def test_a_lease_waits_until_more_is_published(node: Node, reader: Reader) -> None:
    node.publish(chain(1), "hand-over")
    wait = Wait(1, "hand-over", TTL_S)
    pending = reader.source.lease("load", chain(4), TTL_S, wait=wait)
    assert len(reader.lease(chain(1), "meanwhile").blocks) == 1, "others are answered meanwhile"
    assert not pending.done()
    node.publish([block(2), block(3)], "hand-over")
    run = pending.result(TIMEOUT_S)
    assert [ref.hash for ref in run.blocks][:2] == chain(2)
    assert run.handoff_open


def test_a_lease_that_waits_for_less_than_there_is_is_answered_at_once(
    node: Node, reader: Reader
) -> None:
    node.publish(chain(2), "hand-over")
    assert len(waiting(reader, more_than=1).blocks) == 2


def test_a_growing_lease_keeps_its_blocks_and_ends_as_one(node: Node, reader: Reader) -> None:
    node.publish(chain(2), "hand-over")
    first = waiting(reader, more_than=0)
    node.publish([block(3), block(4)], "hand-over")
    second = waiting(reader, more_than=len(first.blocks))
    assert second.blocks[: len(first.blocks)] == first.blocks
    assert reader.pull(second.blocks) == chain(4)
    assert sorted(node.lease_keys()) == ["hand-over", "load"]


def test_a_lease_stops_waiting_when_the_writer_gives_up(node: Node, reader: Reader) -> None:
    node.publish(chain(1), "hand-over")
    wait = Wait(1, "hand-over", TTL_S)
    pending = reader.source.lease("load", chain(4), TTL_S, wait=wait)
    reader.lease([block(99)], "settle")
    assert not pending.done()
    node.writer.end_handoff("hand-over")
    run = pending.result(TIMEOUT_S)
    assert (len(run.blocks), run.handoff_open) == (1, False)


def test_a_lease_stops_waiting_at_its_deadline(node: Node, reader: Reader) -> None:
    node.publish(chain(1))
    pending = reader.source.lease("load", chain(2), TTL_S, wait=Wait(1, None, 5.0))
    reader.lease([block(99)], "settle")
    node.later(4.9)
    reader.lease([block(99)], "settle")
    assert not pending.done()
    node.later(0.2)
    assert len(pending.result(TIMEOUT_S).blocks) == 1


def test_a_wait_given_up_leaves_no_lease_and_no_wait(node: Node, reader: Reader) -> None:
    node.publish(chain(1), "hand-over")
    reader.source.lease("load", chain(4), TTL_S, wait=Wait(1, "hand-over", TTL_S)).give_up()
    reader.lease([block(99)], "settle")
    node.publish(chain(4)[1:])
    assert node.lease_keys() == ["hand-over"]


# Faults


def test_a_pull_that_is_late_raises_and_gives_its_staging_back(node: Node, reader: Reader) -> None:
    node.publish(chain(2))
    run = reader.lease(chain(2))
    with pytest.raises(PullTimedOut), reader.source.read(run.blocks, 0.0) as pull:
        next(pull)
    reader.at_baseline()


def test_a_pull_cancelled_in_the_middle_ends_at_its_next_step(node: Node, reader: Reader) -> None:
    node.publish(chain(SLOTS))
    with reader.source.read(reader.lease(chain(SLOTS)).blocks, TIMEOUT_S) as pull:
        assert checked(next(pull)) == block(1)
        canceller = threading.Thread(target=pull.cancel)
        canceller.start()
        canceller.join(TIMEOUT_S)
        with pytest.raises(PullCancelled):
            collections.deque(pull, maxlen=0)
    reader.at_baseline()
    assert reader.pull(reader.lease(chain(SLOTS)).blocks) == chain(SLOTS), "the next one is whole"


def test_a_consumer_that_stops_in_the_middle_gives_its_staging_back(
    node: Node, reader: Reader
) -> None:
    node.publish(chain(SLOTS))
    run = reader.lease(chain(SLOTS))
    with reader.source.read(run.blocks, TIMEOUT_S) as pull:
        next(pull)
    reader.at_baseline()
    assert list(pull) == [], "a closed pull yields nothing"
    assert reader.pull(run.blocks) == chain(SLOTS)


def test_a_pull_without_a_free_staging_slot_times_out(node: Node, reader: Reader) -> None:
    node.publish(chain(1))
    run = reader.lease(chain(1))
    slots = reader.staging.acquire("somebody", 100, 0.0)
    with pytest.raises(PullTimedOut, match="staging"):
        reader.source.read(run.blocks, 0.01)
    assert reader.staging.ledger().exhausted_total == 1
    reader.staging.release(slots)


def test_a_corrupt_block_is_refused_and_retired_and_those_before_it_are_not(
    node: Node, reader: Reader
) -> None:
    node.publish(chain(4))
    run = reader.lease(chain(4))
    node.agent._arenas[MODEL].slab._mapping.slots[run.blocks[2].slot][7] ^= 4
    found = []
    with pytest.raises(CorruptBlock), reader.source.read(run.blocks, TIMEOUT_S) as pull:
        found.extend(map(checked, pull))
    assert found == chain(2)
    eventually(lambda: node.agent.ledger(MODEL).retired == 1, "the agent to look for itself")
    assert reader.lease(chain(4)).blocks == run.blocks[:2]


def test_a_slot_reused_since_it_was_leased_is_stale(node: Node, reader: Reader) -> None:
    node.publish(chain(2))
    run = reader.lease(chain(2))
    reader.source.release("load")
    eventually(lambda: node.lease_keys() == [], "the lease to end")
    node.agent.clear(MODEL)
    node.publish(chain(SLOTS, start=100))  # into every slot
    with pytest.raises(StaleBlock), reader.source.read(run.blocks, TIMEOUT_S) as pull:
        next(pull)
    reader.at_baseline()


def test_a_slot_reused_in_the_middle_of_a_pull_is_stale_from_there_on(
    node: Node, reader: Reader
) -> None:
    names = chain(SLOTS)
    node.publish(names)
    run = reader.lease(names)
    found = []
    with reader.source.read(run.blocks, TIMEOUT_S) as pull:
        found.append(checked(next(pull)))
        reader.source.release("load")
        eventually(lambda: node.lease_keys() == [], "the lease to end")
        node.agent.clear(MODEL)
        node.publish(chain(SLOTS, start=100))
        with pytest.raises(StaleBlock):
            found.extend(map(checked, pull))
    assert found == names[: len(found)]
    assert len(found) < SLOTS, "the window holds fewer than all"


@pytest.mark.parametrize(
    ("field", "ours", "difference"),
    [
        ("revision", "other", "revision: other here, main there"),
        ("block_size", 64, "block_size: 64 here, 32 there"),
        ("isa", "avx512", "isa: avx512 here, avx2 there"),
    ],
)
def test_other_blocks_are_refused_by_the_name_of_the_field(
    node: Node, make_reader: MakeReader, field: str, ours: object, difference: str
) -> None:
    stranger = make_reader(node, "stranger", **{field: ours})
    with pytest.raises(StoreUnavailable):
        stranger.lease(chain(1))
    error = stranger.source.last_error
    assert isinstance(error, RegistrationRefused)
    assert error.differences == (difference,)
    assert not stranger.source.connected


def test_a_model_that_the_node_does_not_have_is_a_miss(
    node: Node, make_tcp_reader: MakeReader
) -> None:
    stranger = make_tcp_reader(node.server.endpoint, model="other")
    with pytest.raises(StoreUnavailable, match="other has no blocks here"):
        stranger.lease(chain(1))


def test_closing_a_source_ends_its_leases(node: Node, make_tcp_reader: MakeReader) -> None:
    node.publish(chain(2))
    reader = make_tcp_reader(node.server.endpoint)
    reader.lease(chain(2))
    reader.source.close()
    eventually(lambda: node.lease_keys() == [], "the lease to end")
    with pytest.raises(StoreUnavailable):
        reader.lease(chain(2))
    with pytest.raises(StoreUnavailable):
        reader.source.read((), TIMEOUT_S)


def test_closing_a_source_ends_a_pull_in_its_middle(
    node: Node, make_tcp_reader: MakeReader
) -> None:
    node.publish(chain(SLOTS))
    reader = make_tcp_reader(node.server.endpoint, settings=ONE_STREAM)
    found = []
    with reader.source.read(reader.lease(chain(SLOTS)).blocks, TIMEOUT_S) as pull:
        found.append(checked(next(pull)))
        reader.source.close()
        with pytest.raises(StoreUnavailable, match=r"closed|lost"):
            found.extend(map(checked, pull))
    assert len(found) < SLOTS
    reader.at_baseline()


def test_a_node_that_is_gone_is_a_miss(node: Node, reader: Reader) -> None:
    node.publish(chain(SLOTS))
    run = reader.lease(chain(SLOTS))
    node.server.close()
    node.agent.close()
    eventually(lambda: not reader.source.connected, "the loss to be noticed")
    with pytest.raises(StoreUnavailable):
        reader.lease(chain(2))
    with pytest.raises(StoreUnavailable), reader.source.read(run.blocks, TIMEOUT_S) as pull:
        list(pull)


def test_nodes_with_equal_names_give_their_own_bytes(
    make_node: MakeNode, make_reader: MakeReader
) -> None:
    nodes = [make_node(), make_node()]
    names = chain(3)
    for number, node in enumerate(nodes):
        blocks = []
        for grant in granted(node.writer, names):
            source = content(bytes([number]) + grant.hash)
            blocks.append(node.writer.fill(grant, None, source))
        assert all(node.writer.publish(blocks).result(TIMEOUT_S))
    readers = [make_reader(node) for node in nodes]
    runs = [reader.lease(names) for reader in readers]
    for number, (reader, run) in enumerate(zip(readers, runs, strict=True)):
        with reader.source.read(run.blocks, TIMEOUT_S) as pull:
            assert [checked(b, bytes([number])) for b in pull] == names


def test_many_readers_pull_at_once(node: Node, make_reader: MakeReader) -> None:
    names = chain(SLOTS)
    node.publish(names)
    readers = [make_reader(node, f"reader-{number}") for number in range(6)]
    found: list[list[bytes]] = []

    def pull(reader: Reader) -> None:
        run = reader.lease(names)
        found.extend(reader.pull(run.blocks) for _ in range(5))
        reader.source.release("load")

    threads = [threading.Thread(target=pull, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == [names] * 30


def test_threads_share_one_source_and_its_staging(node: Node, reader: Reader) -> None:
    names = chain(SLOTS)
    node.publish(names)
    run = reader.lease(names)
    found: list[list[bytes]] = []
    threads = [
        threading.Thread(target=lambda: found.append(reader.pull(run.blocks))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == [names] * 8


def test_bytes_of_a_pull_under_a_hot_writer_are_never_another_blocks(
    node: Node, reader: Reader
) -> None:
    """Without a lease, slots are reused at any moment: each block is right, or is not yielded."""
    is_over = threading.Event()

    def rewrite() -> None:
        for start in itertools.cycle((1, 100)):
            if is_over.is_set():
                return
            names = chain(SLOTS, start)
            outcomes = node.writer.allocate(names, TTL_S).result(TIMEOUT_S)
            grants = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
            filled = [node.writer.fill(grant, None, content(grant.hash)) for grant in grants]
            node.writer.publish(filled).result(TIMEOUT_S)

    writer = threading.Thread(target=rewrite)
    writer.start()
    yielded: list[bytes] = []
    try:
        for _ in range(300):
            run = reader.lease(chain(SLOTS))
            reader.source.release("load")
            with (
                contextlib.suppress(StaleBlock),
                reader.source.read(run.blocks, TIMEOUT_S) as pull,
            ):
                yielded.extend(map(checked, pull))
    finally:
        is_over.set()
        writer.join(TIMEOUT_S)
    assert yielded, "some came through"
