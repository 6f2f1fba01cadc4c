"""What the ledger says of slots that are being filled: who, since when, until when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.blocks import Grant
from kvcache.ledger import FillInfo
from kvcache.slot_table import SlotTable
from tests.unit.kvcache.examples import DECODE, MODEL, PREFILL, chain

TTL_S = 10.0


@pytest.fixture
def table() -> Iterator[SlotTable]:
    table = SlotTable(MODEL, slots_total=4)
    yield table
    table.validate()


def test_fills_are_told_by_owner_with_the_oldest_age_and_the_first_deadline(
    table: SlotTable,
) -> None:
    table.allocate(PREFILL, chain(2), TTL_S, None, TTL_S, 1.0)
    table.allocate(PREFILL, chain(1, start=7), TTL_S, None, TTL_S, 3.0)
    table.allocate(DECODE, chain(1, start=9), TTL_S, None, TTL_S, 4.0)
    assert table.ledger(5.0).fills == (
        FillInfo(PREFILL.name, "filling", 3, 4.0, 6.0),
        FillInfo(DECODE.name, "filling", 1, 1.0, 9.0),
    )
    assert table.ledger(5.0) == table.scan(5.0)


def test_an_overdue_fill_is_told_as_quarantined_until_its_owner_is_gone(table: SlotTable) -> None:
    table.allocate(PREFILL, chain(1), TTL_S, None, TTL_S, 1.0)
    table.expire(12.0)
    assert table.ledger(12.0).fills == (FillInfo(PREFILL.name, "quarantined", 1, 11.0, -1.0),)
    table.owner_lost(PREFILL.connection, 12.0, writer_gone=True)
    assert table.ledger(12.0).fills == ()


def test_a_published_block_has_no_fill(table: SlotTable) -> None:
    (grant,) = table.allocate(PREFILL, chain(1), TTL_S, None, TTL_S, 1.0)
    assert isinstance(grant, Grant)
    table.publish(PREFILL, [grant.filled(None, 7)], None, 2.0)
    assert table.ledger(3.0).fills == ()
