"""AgentServer and BlockStore over a real socket, in threads of one process."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvcache.agent import IDLE_WAIT_S, AgentServer
from kvcache.errors import (
    CorruptBlock,
    RegistrationRefused,
    StaleBlock,
    UnknownModel,
)
from kvcache.events import BlockRemoved, BlockStored
from kvcache.store import BlockRef, BlockStore, Refusal, checksum
from tests.unit.kvcache.conftest import TIMEOUT_S, Connect, FakeClock, eventually
from tests.unit.kvcache.examples import (
    MODEL,
    SLAB_BYTES,
    SLOT_BYTES,
    SLOTS,
    block,
    chain,
    content,
    registration,
)
from tests.unit.kvcache.steps import TTL_S, granted, leased, publish, read, settled


def test_what_one_worker_publishes_another_reads(agent: AgentServer, connect: Connect) -> None:
    prefill, decode = connect("prefill-0"), connect("decode-0")
    publish(prefill, chain(3), handoff="hand-over")
    refs = decode.lease_prefix("load", chain(5), TTL_S, "hand-over").result(TIMEOUT_S)
    assert [ref.hash for ref in refs] == chain(3)
    for ref in refs:
        assert np.array_equal(read(decode, ref), content(ref.hash))
    (info,) = agent.ledger(MODEL).leases
    assert (info.owner, info.blocks) == ("decode-0", 3)
    decode.release("load")
    settled(decode)
    assert agent.ledger(MODEL).leased_slots == 0
    assert agent.ledger(MODEL).published == 3


def test_slots_are_aligned_and_readers_cannot_write_them(
    agent: AgentServer, connect: Connect
) -> None:
    store = connect("w", slot_bytes=1000)
    assert store.slots.shape == (SLAB_BYTES // 1024, 1000)
    assert store.slots.strides == (1024, 1)
    assert store.slots.ctypes.data % 4096 == 0
    with pytest.raises(ValueError, match="read-only"):
        store.slots[0, 0] = 1
    assert agent.ledger(MODEL).slots_total == store.slots.shape[0]


def test_a_worker_with_other_blocks_is_refused_by_name(
    agent: AgentServer, connect: Connect
) -> None:
    connect("w-0")
    with pytest.raises(RegistrationRefused) as refused:
        connect("w-1", block_size=64, isa="avx512")
    assert refused.value.differences == (
        "block_size: 64 here, 32 there",
        "isa: avx512 here, avx2 there",
    )
    eventually(lambda: len(agent.sessions()) == 1, "the refused connection to end")


def test_a_slot_larger_than_the_slab_is_refused(agent: AgentServer, connect: Connect) -> None:
    with pytest.raises(RegistrationRefused, match="no room"):
        connect("w-0", slot_bytes=SLAB_BYTES + 1)
    assert agent.models() == ()


def test_models_have_arenas_of_their_own(agent: AgentServer, connect: Connect) -> None:
    one, other = connect("w-0"), connect("w-1", model="other", block_size=64, slot_bytes=2048)
    publish(one, chain(2))
    assert leased(other, chain(2)) == ()
    publish(other, chain(1))
    assert agent.ledger(MODEL).published == 2
    assert agent.ledger("other").published == 1
    batches = agent.drain_events()
    assert {(batch.model, batch.sequence) for batch in batches} == {(MODEL, 1), ("other", 1)}
    with pytest.raises(UnknownModel):
        agent.ledger("never heard of")


def test_a_second_writer_sees_in_progress_then_present(
    agent: AgentServer, connect: Connect
) -> None:
    first, second = connect("w-0"), connect("w-1")
    (grant,) = granted(first, chain(1))
    assert second.allocate(chain(1), TTL_S).result(TIMEOUT_S) == (Refusal.IN_PROGRESS,)
    first.publish([first.fill(grant, None, content(block(1)))]).result(TIMEOUT_S)
    assert second.allocate(chain(1), TTL_S).result(TIMEOUT_S) == (Refusal.PRESENT,)


def test_nothing_fits_when_all_is_leased(agent: AgentServer, connect: Connect) -> None:
    store = connect("w")
    publish(store, chain(SLOTS))
    assert len(leased(store, chain(SLOTS))) == SLOTS
    assert store.allocate([block(99)], TTL_S).result(TIMEOUT_S) == (Refusal.NO_ROOM,)


def test_a_grant_cannot_be_written_after_it_was_published_or_abandoned(
    agent: AgentServer, connect: Connect
) -> None:
    store = connect("w")
    one, two = granted(store, chain(2))
    store.publish([store.fill(one, None, content(one.hash))]).result(TIMEOUT_S)
    store.abandon([two])
    for grant in (one, two):
        with pytest.raises(StaleBlock), store.filling(grant):
            pass
    settled(store)
    assert agent.ledger(MODEL).free == SLOTS - 1


def test_a_reader_whose_block_was_replaced_is_told(agent: AgentServer, connect: Connect) -> None:
    store = connect("w")
    publish(store, chain(1))
    (ref,) = leased(store, chain(1))
    store.release("load")
    publish(store, chain(SLOTS, start=11))
    with pytest.raises(StaleBlock):
        read(store, ref)


def test_corrupted_bytes_are_never_served_and_the_block_goes(
    agent: AgentServer, connect: Connect
) -> None:
    writer, reader = connect("w-0"), connect("w-1")
    (grant,) = granted(writer, chain(1))
    with writer.filling(grant) as slot:
        slot[:] = content(grant.hash)
        filled = grant.filled(None, checksum(slot))
        assert writer.publish([filled]).result(TIMEOUT_S) == (True,)
        slot[17] ^= 1  # a writer that goes on after it said that it was done
    (ref,) = leased(reader, chain(1))
    with pytest.raises(CorruptBlock):
        read(reader, ref)
    settled(reader)
    assert agent.ledger(MODEL).retired == 1
    assert leased(reader, chain(1), "again") == ()
    reader.release("load")
    settled(reader)
    assert agent.ledger(MODEL).free == SLOTS
    publish(writer, chain(1))


def test_a_readers_false_alarm_removes_nothing(agent: AgentServer, connect: Connect) -> None:
    store = connect("w")
    publish(store, chain(1))
    (ref,) = leased(store, chain(1))
    wrong = BlockRef(ref.hash, ref.slot, ref.generation, ref.checksum ^ 1)
    with pytest.raises(StaleBlock):
        read(store, wrong)
    assert np.array_equal(read(store, ref), content(block(1)))


def test_reads_are_never_torn_under_a_hot_writer(agent: AgentServer, connect: Connect) -> None:
    writer, reader = connect("w-0"), connect("w-1")
    stop = threading.Event()
    failures: list[BaseException] = []

    def rewrite() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                publish(writer, [block(1000 + number)])
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            failures.append(error)

    thread = threading.Thread(target=rewrite)
    thread.start()
    accepted = stale = 0
    while accepted + stale < 300 and not failures:
        names = agent.snapshot_events(MODEL).hashes
        for name in names[:2]:
            for ref in leased(reader, [name]):
                reader.release("load")  # on purpose: nothing protects what is read now
                try:
                    assert np.array_equal(read(reader, ref), content(name))
                    accepted += 1
                except StaleBlock:
                    stale += 1
    stop.set()
    thread.join()
    assert failures == []
    assert accepted > 0


def test_deadlines_run_on_the_agents_clock(
    agent: AgentServer, connect: Connect, clock: FakeClock
) -> None:
    store = connect("w")
    publish(store, chain(1), handoff="hand-over")
    (grant,) = granted(store, [block(2)], ttl_s=5.0)
    clock.now_s += 5.0
    agent.wake()
    eventually(lambda: agent.ledger(MODEL).quarantined == 1, "the fill to expire")
    assert store.publish([grant.filled(None, 1)]).result(TIMEOUT_S) == (False,)
    assert agent.ledger(MODEL).quarantined == 0
    clock.now_s += TTL_S
    agent.wake()
    eventually(lambda: agent.ledger(MODEL).leased_slots == 0, "the hand-off to expire")
    assert agent.ledger(MODEL).counters.leases_expired_total == 1


def test_closing_frees_grants_and_load_leases_and_orphans_handoffs(
    agent: AgentServer, connect: Connect, clock: FakeClock
) -> None:
    store = connect("w")
    publish(store, chain(2), handoff="hand-over")
    leased(store, chain(1))
    granted(store, [block(9)])
    store.close()
    eventually(lambda: agent.sessions() == (), "the connection to end")
    ledger = agent.ledger(MODEL)
    assert (ledger.free, ledger.filling, ledger.published) == (SLOTS - 2, 0, 2)
    (info,) = ledger.leases
    assert (info.handoff, info.expires_in_s) == (True, 2.0)
    clock.now_s += 2.0
    agent.wake()
    eventually(lambda: agent.ledger(MODEL).leases == (), "the orphan to expire")


def test_what_nobody_waits_for_goes_back(agent: AgentServer, connect: Connect) -> None:
    store = connect("w")
    publish(store, chain(1))
    store.allocate([block(5), block(6)], TTL_S).give_up()
    store.lease_prefix("load", chain(1), TTL_S).give_up()
    settled(store)
    settled(store)  # the grants go back when their answer comes
    ledger = agent.ledger(MODEL)
    assert (ledger.filling, ledger.leased_slots) == (0, 0)
    assert ledger.counters.abandoned_total == 2


def test_an_ingress_ends_a_handoff_through_the_agent(agent: AgentServer, connect: Connect) -> None:
    store = connect("w")
    publish(store, chain(1), handoff="hand-over")
    assert agent.end_handoff(MODEL, "hand-over")
    assert not agent.end_handoff(MODEL, "hand-over")
    assert agent.ledger(MODEL).leased_slots == 0
    publish(store, [block(2)], handoff="another")
    store.end_handoff("another")
    settled(store)
    assert agent.ledger(MODEL).leased_slots == 0


def test_snapshots_and_batches_fit_together(agent: AgentServer, connect: Connect) -> None:
    store = connect("w")
    publish(store, chain(2))
    snapshot = agent.snapshot_events(MODEL)
    assert (snapshot.source, snapshot.incarnation) == ("slab:n0", agent.incarnation)
    assert set(snapshot.hashes) == set(chain(2))
    publish(store, chain(SLOTS, start=11))
    replica = set(snapshot.hashes)
    sequences = []
    for batch in agent.drain_events():
        sequences.append(batch.sequence)
        for event in batch.events if batch.sequence > snapshot.sequence else ():
            if isinstance(event, BlockStored):
                replica.add(event.hash)
            elif isinstance(event, BlockRemoved):
                replica.discard(event.hash)
    assert sequences == list(range(1, len(sequences) + 1))
    assert replica == set(agent.snapshot_events(MODEL).hashes) == set(chain(SLOTS, start=11))


def test_whoever_ships_events_is_called_when_there_are_some(socket_path: str) -> None:
    called = threading.Event()
    agent = AgentServer(socket_path, SLAB_BYTES, on_events=called.set)
    store = BlockStore.connect(socket_path, registration("w"), TIMEOUT_S)
    publish(store, chain(1))
    assert called.wait(TIMEOUT_S)
    assert len(agent.drain_events()) == 1
    called.clear()
    agent.clear(MODEL)
    assert called.wait(TIMEOUT_S)
    store.close()
    agent.close()


def test_the_headers_are_written_before_a_slot_is_granted_again(
    agent: AgentServer, connect: Connect
) -> None:
    store = connect("w")
    publish(store, chain(1))
    (ref,) = leased(store, chain(1))
    store.release("load")
    hashes = chain(SLOTS, start=11)
    assert len(granted(store, hashes)) == SLOTS
    assert not store._current().view.holds(ref)
    assert store.slots[ref.slot].size == SLOT_BYTES


def test_an_agent_without_workers_sleeps(tmp_path: Path) -> None:
    server = AgentServer(str(tmp_path / "agent.sock"), 1 << 20)
    try:
        assert server._wait_s() == IDLE_WAIT_S
    finally:
        server.close()
