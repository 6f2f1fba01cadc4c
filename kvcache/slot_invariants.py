"""What must be true of a slot table after every step (DESIGN §6, I2, I3 and I9).

Called by SlotTable.validate only, which tests run after every step and the agent now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.leases import LeaseBook
from kvcache.slot import Slot, SlotState


def check_rows(rows: Sequence[Slot], free: Sequence[int], named: dict[bytes, int]) -> None:
    """Asserts that each row agrees with its state, the free list and the index of names."""
    expected_names: dict[bytes, int] = {}
    expected_free: set[int] = set()
    generations: set[int] = set()
    for slot, row in enumerate(rows):
        is_written = row.state in (SlotState.FILLING, SlotState.QUARANTINED)
        assert (row.owner is not None) == is_written, (slot, row)
        assert (row.hash == b"") == (row.state is SlotState.FREE), (slot, row)
        if row.state in (SlotState.FILLING, SlotState.PUBLISHED):
            assert row.hash not in expected_names, f"two slots hold {row.hash.hex()}"
            expected_names[row.hash] = slot
        if row.state is SlotState.FREE:
            expected_free.add(slot)
        if row.generation:
            assert row.generation not in generations, f"generation used twice: {slot} {row}"
            generations.add(row.generation)
    assert named == expected_names
    assert len(free) == len(expected_free), "a slot is free twice, or lost"
    assert set(free) == expected_free


def check_leases(rows: Sequence[Slot], leases: LeaseBook, named: dict[bytes, int]) -> None:
    """Asserts that leases hold published slots, and await only what is not published."""
    leases.validate()
    for lease in leases.all():
        for slot in lease.slots:
            assert rows[slot].state in (SlotState.PUBLISHED, SlotState.RETIRED), (slot, lease)
        for block in lease.awaits:
            slot_named = named.get(block)
            assert slot_named is None or rows[slot_named].state is SlotState.FILLING
    for slot, row in enumerate(rows):
        assert row.state is not SlotState.RETIRED or leases.is_pinned(slot), "retired for ever"
