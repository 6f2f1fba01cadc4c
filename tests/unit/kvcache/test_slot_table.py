from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvcache.blocks import BlockRef, FilledBlock, Grant, Refusal
from kvcache.events import BlockRemoved, BlockStored, Cleared
from kvcache.leases import Owner
from kvcache.slot_table import SlotTable
from tests.unit.kvcache.examples import DECODE, MODEL, PREFILL, block, chain

TTL_S = 10.0
OTHER = Owner("prefill-1", 3)


@pytest.fixture
def table() -> Iterator[SlotTable]:
    table = SlotTable(MODEL, slots_total=4)
    yield table
    table.validate()


def allocate(
    table: SlotTable,
    hashes: Sequence[bytes],
    owner: Owner = PREFILL,
    handoff: str | None = None,
    now_s: float = 0.0,
    ttl_s: float = TTL_S,
) -> list[Grant | Refusal]:
    return list(table.allocate(owner, hashes, ttl_s, handoff, TTL_S, now_s))


def grants(outcomes: Sequence[Grant | Refusal]) -> list[Grant]:
    assert all(isinstance(outcome, Grant) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Grant)]


def filled(granted: Sequence[Grant], first_parent: bytes | None = None) -> list[FilledBlock]:
    parents = [first_parent, *(grant.hash for grant in granted)]
    return [g.filled(parent, 7) for g, parent in zip(granted, parents, strict=False)]


def publish(
    table: SlotTable,
    hashes: Sequence[bytes],
    owner: Owner = PREFILL,
    handoff: str | None = None,
    now_s: float = 0.0,
    parent: bytes | None = None,
) -> list[Grant]:
    granted = grants(allocate(table, hashes, owner, handoff, now_s))
    accepted = table.publish(owner, filled(granted, parent), handoff, now_s)
    assert all(accepted), accepted
    return granted


def lease(
    table: SlotTable,
    hashes: Sequence[bytes],
    owner: Owner = DECODE,
    key: str = "load",
    takes_over: str | None = None,
    now_s: float = 0.0,
) -> tuple[BlockRef, ...]:
    return table.lease_prefix(owner, key, hashes, TTL_S, takes_over, now_s)


def test_a_published_block_is_found_with_its_generation_and_checksum(table: SlotTable) -> None:
    (granted,) = publish(table, chain(1))
    assert lease(table, chain(3)) == (BlockRef(block(1), granted.slot, granted.generation, 7),)
    assert table.ledger(0.0).leased_slots == 1


def test_a_filling_block_is_not_found(table: SlotTable) -> None:
    allocate(table, chain(1))
    assert lease(table, chain(1)) == ()
    assert table.ledger(0.0).leases == ()


def test_a_prefix_ends_at_the_first_hole(table: SlotTable) -> None:
    publish(table, [block(1), block(3)])
    assert [ref.hash for ref in lease(table, chain(3))] == [block(1)]


def test_generations_are_never_used_twice(table: SlotTable) -> None:
    seen = set()
    for _ in range(5):
        (granted,) = grants(allocate(table, chain(1)))
        seen.add(granted.generation)
        table.abandon(PREFILL, [granted])
    assert len(seen) == 5


def test_a_stale_generation_cannot_publish(table: SlotTable) -> None:
    (old,) = grants(allocate(table, chain(1)))
    table.abandon(PREFILL, [old])
    (new,) = grants(allocate(table, chain(1)))
    assert table.publish(PREFILL, filled([old]), None, 0.0) == (False,)
    assert table.publish(PREFILL, filled([new]), None, 0.0) == (True,)
    assert table.counters.refused_stale_total == 1


def test_nobody_publishes_anothers_grant_or_another_name(table: SlotTable) -> None:
    (granted,) = grants(allocate(table, chain(1)))
    wrong_name = FilledBlock(block(9), None, granted.slot, granted.generation, 7)
    assert table.publish(OTHER, filled([granted]), None, 0.0) == (False,)
    assert table.publish(PREFILL, [wrong_name], None, 0.0) == (False,)
    nowhere = FilledBlock(block(1), None, 1 << 60, granted.generation, 7)
    assert table.publish(PREFILL, [nowhere], None, 0.0) == (False,)
    assert table.publish(PREFILL, filled([granted]), None, 0.0) == (True,)
    assert table.publish(PREFILL, filled([granted]), None, 0.0) == (False,)


def test_a_second_writer_of_the_same_block_is_told_that_it_is_in_progress(
    table: SlotTable,
) -> None:
    (granted,) = grants(allocate(table, chain(1)))
    assert allocate(table, chain(1), OTHER) == [Refusal.IN_PROGRESS]
    table.publish(PREFILL, filled([granted]), None, 0.0)
    assert allocate(table, chain(1), OTHER) == [Refusal.PRESENT]


def test_the_same_name_twice_in_one_call_is_granted_once(table: SlotTable) -> None:
    first, second = allocate(table, [block(1), block(1)])
    assert isinstance(first, Grant)
    assert second is Refusal.IN_PROGRESS


def test_an_expired_fill_is_quarantined_and_its_late_publish_refused(table: SlotTable) -> None:
    (granted,) = grants(allocate(table, chain(1)))
    table.expire(TTL_S)
    assert table.ledger(TTL_S).quarantined == 1
    (other,) = grants(allocate(table, chain(1), OTHER, now_s=TTL_S))
    assert other.slot != granted.slot, "the first writer may still be writing"
    assert table.publish(PREFILL, filled([granted]), None, TTL_S) == (False,)
    assert table.ledger(TTL_S).quarantined == 0
    assert table.publish(OTHER, filled([other]), None, TTL_S) == (True,)


def test_a_publish_at_its_deadline_is_late_even_before_any_sweep(table: SlotTable) -> None:
    (granted,) = grants(allocate(table, chain(1)))
    assert table.publish(PREFILL, filled([granted]), None, TTL_S) == (False,)
    assert table.ledger(TTL_S).free == 4


def test_quarantine_ends_when_the_owner_abandons_or_its_socket_ends(table: SlotTable) -> None:
    first, second = grants(allocate(table, chain(2)))
    table.expire(TTL_S)
    table.abandon(PREFILL, [first])
    assert table.ledger(TTL_S).quarantined == 1
    table.owner_lost(PREFILL.connection, TTL_S, writer_gone=False)
    assert table.ledger(TTL_S).quarantined == 1, "it may still write"
    table.owner_lost(PREFILL.connection, TTL_S, writer_gone=True)
    assert table.ledger(TTL_S).free == 4
    assert second.slot in range(4)


def test_losing_an_owner_whose_process_is_gone_frees_what_it_filled(table: SlotTable) -> None:
    allocate(table, chain(2))
    allocate(table, [block(9)], OTHER)
    table.owner_lost(PREFILL.connection, 0.0, writer_gone=True)
    assert (table.ledger(0.0).free, table.ledger(0.0).filling) == (3, 1)


def test_a_dropped_owner_that_lives_keeps_its_slots_in_quarantine(table: SlotTable) -> None:
    (granted,) = grants(allocate(table, chain(1)))
    table.owner_lost(PREFILL.connection, 0.0, writer_gone=False)
    assert table.ledger(0.0).quarantined == 1
    assert table.writes_of(PREFILL.connection) == 1
    refilled = grants(allocate(table, chain(3), OTHER))
    assert granted.slot not in {grant.slot for grant in refilled}


def test_an_owners_load_leases_end_with_it_and_its_handoffs_soon_after(table: SlotTable) -> None:
    publish(table, chain(1), handoff="hand-over")
    lease(table, chain(1), PREFILL)
    table.owner_lost(PREFILL.connection, 1.0, writer_gone=True)
    (left,) = table.ledger(1.0).leases
    assert left.handoff
    assert left.expires_in_s == 2.0
    table.expire(3.0)
    assert table.ledger(3.0).leased_slots == 0


def test_an_owners_loss_never_lengthens_a_handoff(table: SlotTable) -> None:
    publish(table, chain(1), handoff="hand-over")
    table.owner_lost(PREFILL.connection, TTL_S - 1.0, writer_gone=True)
    (left,) = table.ledger(TTL_S - 1.0).leases
    assert left.expires_in_s == 1.0


def test_room_is_made_by_evicting_the_least_recently_used(table: SlotTable) -> None:
    for number in (1, 2, 3, 4):
        publish(table, [block(number)])
    lease(table, [block(1)])
    table.release(DECODE, "load")
    publish(table, [block(5)])
    assert set(table.published()) == {block(1), block(3), block(4), block(5)}


def test_children_are_evicted_before_their_parents(table: SlotTable) -> None:
    publish(table, chain(4))
    publish(table, [block(9)])
    assert set(table.published()) == {block(1), block(2), block(3), block(9)}


def test_leased_blocks_are_never_evicted(table: SlotTable) -> None:
    publish(table, chain(4))
    lease(table, chain(4))
    assert allocate(table, [block(9)]) == [Refusal.NO_ROOM]
    table.release(DECODE, "load")
    assert isinstance(allocate(table, [block(9)])[0], Grant)


def test_an_unleased_parent_goes_when_only_its_children_are_leased(table: SlotTable) -> None:
    publish(table, chain(4))
    lease(table, chain(3, start=2))
    publish(table, [block(9)])
    assert block(1) not in table.published()


def test_what_was_found_present_is_not_evicted_by_the_same_call(table: SlotTable) -> None:
    publish(table, chain(4))
    outcomes = allocate(table, [*chain(4), block(9)])
    assert outcomes == [Refusal.PRESENT] * 4 + [Refusal.NO_ROOM]
    outcomes = allocate(table, [block(4), block(9)])
    assert outcomes[0] is Refusal.PRESENT
    assert isinstance(outcomes[1], Grant)
    assert block(4) in table.published()


def test_a_handoff_protects_present_blocks_at_once(table: SlotTable) -> None:
    publish(table, chain(2))
    assert allocate(table, chain(2), handoff="hand-over") == [Refusal.PRESENT] * 2
    assert table.ledger(0.0).leased_slots == 2


def test_a_handoff_protects_a_block_from_the_step_that_publishes_it(table: SlotTable) -> None:
    granted = grants(allocate(table, chain(2), handoff="hand-over"))
    (info,) = table.ledger(0.0).leases
    assert (info.blocks, info.awaited) == (0, 2)
    table.publish(PREFILL, filled(granted), None, 0.0)
    (info,) = table.ledger(0.0).leases
    assert (info.blocks, info.awaited) == (2, 0)


def test_a_handoff_protects_what_another_worker_publishes(table: SlotTable) -> None:
    granted = grants(allocate(table, chain(1), OTHER))
    assert allocate(table, chain(1), handoff="hand-over") == [Refusal.IN_PROGRESS]
    assert table.ledger(0.0).leased_slots == 0
    table.publish(OTHER, filled(granted), None, 0.0)
    assert table.ledger(0.0).leased_slots == 1


def test_a_handoff_that_ended_is_not_opened_again_by_a_publish(table: SlotTable) -> None:
    granted = grants(allocate(table, chain(1), handoff="hand-over"))
    assert table.end_handoff("hand-over")
    assert table.publish(PREFILL, filled(granted), "hand-over", 0.0) == (True,)
    assert table.ledger(0.0).leases == ()


def test_a_publish_may_join_another_open_handoff(table: SlotTable) -> None:
    granted = grants(allocate(table, chain(1)))
    allocate(table, [block(9)], handoff="hand-over")
    table.publish(PREFILL, filled(granted), "hand-over", 0.0)
    assert table.ledger(0.0).leased_slots == 1


def test_a_load_takes_a_handoff_over_in_one_step(table: SlotTable) -> None:
    publish(table, chain(2), handoff="hand-over")
    assert len(lease(table, chain(2), takes_over="hand-over")) == 2
    (info,) = table.ledger(0.0).leases
    assert (info.key, info.owner, info.blocks) == ("load", DECODE.name, 2)
    table.release(DECODE, "load")
    assert table.ledger(0.0).leased_slots == 0


def test_a_handoff_ends_even_if_the_load_matches_nothing(table: SlotTable) -> None:
    publish(table, chain(1), handoff="hand-over")
    assert lease(table, [block(9)], takes_over="hand-over") == ()
    assert table.ledger(0.0).leases == ()


def test_one_name_may_be_a_load_lease_and_a_handoff(table: SlotTable) -> None:
    publish(table, chain(1), handoff="request-1")
    lease(table, chain(1), key="request-1")
    table.release(DECODE, "request-1")
    (info,) = table.ledger(0.0).leases
    assert info.handoff


def test_two_workers_may_use_the_same_lease_key(table: SlotTable) -> None:
    publish(table, chain(1))
    lease(table, chain(1), DECODE, "same")
    lease(table, chain(1), OTHER, "same")
    table.release(DECODE, "same")
    assert table.ledger(0.0).leased_slots == 1


def test_a_lease_key_used_again_replaces_the_lease(table: SlotTable) -> None:
    publish(table, chain(3))
    lease(table, chain(3))
    lease(table, chain(1))
    assert table.ledger(0.0).leased_slots == 1
    assert lease(table, [block(9)]) == ()
    assert table.ledger(0.0).leases == ()
    assert table.counters.leases_replaced_total == 2


def test_a_deadline_is_not_extended_by_more_blocks(table: SlotTable) -> None:
    publish(table, chain(1), handoff="hand-over", now_s=0.0)
    publish(table, [block(2)], handoff="hand-over", now_s=5.0, parent=block(1))
    (info,) = table.ledger(5.0).leases
    assert (info.blocks, info.expires_in_s) == (2, 5.0)
    table.expire(TTL_S)
    assert table.ledger(TTL_S).leased_slots == 0


def test_another_owner_that_opens_the_same_handoff_gets_a_deadline_of_its_own(
    table: SlotTable,
) -> None:
    publish(table, chain(1), handoff="hand-over")
    table.owner_lost(PREFILL.connection, 1.0, writer_gone=True)
    allocate(table, chain(1), OTHER, handoff="hand-over", now_s=2.0)
    (info,) = table.ledger(2.0).leases
    assert (info.owner, info.blocks, info.expires_in_s) == (OTHER.name, 1, TTL_S)


def test_releasing_what_is_not_there_is_counted_and_no_error(table: SlotTable) -> None:
    assert not table.release(DECODE, "never")
    assert not table.end_handoff("never")
    assert table.counters.release_unknown_total == 2


def test_leases_are_bounded() -> None:
    table = SlotTable(MODEL, slots_total=4, leases_max=2)
    publish(table, chain(1))
    assert lease(table, chain(1), key="one")
    assert lease(table, chain(1), key="two")
    assert lease(table, chain(1), key="three") == ()
    assert allocate(table, chain(1), handoff="four") == [Refusal.PRESENT]
    assert table.counters.leases_refused_total == 2
    table.validate()


def test_a_block_found_wrong_is_taken_out_when_its_last_lease_ends(table: SlotTable) -> None:
    (granted,) = publish(table, chain(1))
    lease(table, chain(1))
    assert table.retire(granted.slot, granted.generation)
    assert not table.retire(granted.slot, granted.generation)
    assert table.ledger(0.0).retired == 1
    assert lease(table, chain(1), OTHER) == ()
    (again,) = publish(table, chain(1))
    assert again.slot != granted.slot
    table.release(DECODE, "load")
    assert table.ledger(0.0).retired == 0


def test_events_tell_what_is_held(table: SlotTable) -> None:
    publish(table, chain(2))
    assert table.take_events() == (
        BlockStored(block(1), None, MODEL),
        BlockStored(block(2), block(1), MODEL),
    )
    lease(table, chain(2))
    table.release(DECODE, "load")
    assert table.take_events() == ()
    publish(table, chain(3, start=11))
    events = table.take_events()
    assert events[0] == BlockRemoved(block(2))


def test_clearing_drops_everything_that_is_published(table: SlotTable) -> None:
    publish(table, chain(2))
    lease(table, chain(1))
    table.take_events()
    table.clear()
    assert table.take_events() == (Cleared(MODEL),)
    assert table.published() == ()
    table.release(DECODE, "load")
    assert table.ledger(0.0).free == 4


def test_a_block_that_names_itself_as_parent_can_still_be_evicted(table: SlotTable) -> None:
    granted = grants(allocate(table, chain(4)))
    table.publish(PREFILL, [g.filled(g.hash, 7) for g in granted], None, 0.0)
    assert isinstance(allocate(table, [block(9)])[0], Grant)


def test_blocks_that_name_each_other_as_parents_can_still_be_evicted(table: SlotTable) -> None:
    granted = grants(allocate(table, chain(4)))
    ring = [g.filled(granted[n - 1].hash, 7) for n, g in enumerate(granted)]
    table.publish(PREFILL, ring, None, 0.0)
    assert isinstance(allocate(table, [block(9)])[0], Grant)
