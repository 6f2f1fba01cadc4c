"""Leases that wait for blocks still being computed: the pure book."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from kvcache.blocks import FilledBlock, Grant
from kvcache.errors import ProtocolError
from kvcache.ledger import WaitInfo
from kvcache.protocol import LeasePrefix, Wait
from kvcache.slot_table import SlotTable
from kvcache.waits import WAITS_MAX, LeaseWaits
from tests.unit.kvcache.examples import DECODE, MODEL, PREFILL, SLOTS, chain

NOW_S = 100.0


class Book:
    """A slot table, its waits, and requests of DECODE."""

    def __init__(self) -> None:
        self.table = SlotTable(MODEL, SLOTS)
        self.waits = LeaseWaits(self.table)

    def publish(self, count: int, start: int = 1) -> None:
        names = chain(count, start)
        outcomes = self.table.allocate(PREFILL, names, 60.0, "hand-over", 60.0, NOW_S)
        grants = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
        filled = [FilledBlock(g.hash, None, g.slot, g.generation, 0) for g in grants]
        assert all(self.table.publish(PREFILL, filled, None, NOW_S))

    def ask(
        self,
        more_than: int,
        request_id: int = 1,
        handoff: str | None = "hand-over",
        *,
        was_open: bool = False,
    ) -> bool:
        wait = Wait(more_than, handoff, 10.0, was_open)
        request = LeasePrefix(request_id, "load", tuple(chain(4)), 30.0, None, wait)
        return self.waits.put_off(DECODE, request, NOW_S)

    def due(self, now_s: float = NOW_S) -> list[int]:
        return [request.request_id for _, request in self.waits.take_due(now_s)]


@pytest.fixture
def book() -> Iterator[Book]:
    book = Book()
    yield book
    book.table.validate()


def test_a_lease_that_does_not_wait_is_never_put_off(book: Book) -> None:
    assert not book.waits.put_off(DECODE, LeasePrefix(1, "load", (), 1.0, None), NOW_S)


def test_more_blocks_than_named_make_it_due(book: Book) -> None:
    book.publish(1)
    assert book.ask(more_than=1)
    assert book.due() == []
    book.publish(1, start=2)
    assert book.due() == [1]
    assert len(book.waits) == 0


def test_blocks_after_a_gap_do_not(book: Book) -> None:
    book.publish(1)
    assert book.ask(more_than=1)
    book.publish(2, start=3)
    assert book.due() == []


def test_all_that_was_asked_for_is_enough(book: Book) -> None:
    book.publish(4)
    assert not book.ask(more_than=4)


def test_a_handoff_that_was_open_and_has_ended_makes_it_due(book: Book) -> None:
    assert book.ask(more_than=0)
    assert book.due() == [], "it was never open: the writer may still begin"
    book.publish(1)
    assert book.ask(more_than=1, request_id=2)
    assert book.due() == [1]
    book.table.end_handoff("hand-over")
    assert book.due() == [2]


def test_a_handoff_that_ended_between_two_questions_is_told_at_once(book: Book) -> None:
    book.publish(1)
    book.table.end_handoff("hand-over")
    assert not book.ask(more_than=1, was_open=True)
    assert book.ask(more_than=1), "for all that is known here it may still begin"
    book.publish(1, start=2)
    assert book.due() == [1]
    assert book.ask(more_than=2, was_open=True), "it is open"


def test_time_makes_it_due(book: Book) -> None:
    assert book.ask(more_than=0, handoff=None)
    assert book.waits.next_deadline_s() == NOW_S + 10.0
    assert book.due(NOW_S + 9.9) == []
    assert book.due(NOW_S + 10.0) == [1]
    assert book.waits.next_deadline_s() == math.inf


def test_the_ledger_tells_who_waits_for_what_and_for_how_long(book: Book) -> None:
    book.publish(1)
    assert book.ask(more_than=1)
    assert book.waits.infos(NOW_S + 2.5) == (WaitInfo("load", DECODE.name, 4, 2.5, 7.5),)
    assert book.due(NOW_S + 10.0) == [1]
    assert book.waits.infos(NOW_S + 10.0) == ()


def test_one_request_id_waits_once(book: Book) -> None:
    assert book.ask(more_than=0)
    with pytest.raises(ProtocolError):
        book.ask(more_than=0)


def test_a_lost_connection_waits_for_nothing(book: Book) -> None:
    assert book.ask(more_than=0)
    book.waits.drop(PREFILL.connection)
    assert len(book.waits) == 1
    book.waits.drop(DECODE.connection)
    assert len(book.waits) == 0


def test_giving_a_lease_up_names_what_must_be_answered(book: Book) -> None:
    assert book.ask(more_than=0)
    assert book.waits.give_up(PREFILL, "load") == []
    assert [request.request_id for request in book.waits.give_up(DECODE, "load")] == [1]
    assert len(book.waits) == 0


def test_the_book_is_bounded(book: Book) -> None:
    assert all(book.ask(more_than=0, request_id=n) for n in range(WAITS_MAX))
    assert not book.ask(more_than=0, request_id=WAITS_MAX)
