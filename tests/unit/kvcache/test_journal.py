from __future__ import annotations

from kvcache.events import BlockEvent, BlockRemoved
from kvcache.journal import BATCHES_MAX, EVENTS_PER_BATCH_MAX, Journal
from tests.unit.kvcache.examples import block


def journal() -> Journal:
    return Journal("slab:n0", "incarnation", "model")


def removed(count: int) -> tuple[BlockEvent, ...]:
    return tuple(BlockRemoved(block(number)) for number in range(count))


def test_steps_without_events_make_no_batch() -> None:
    one = journal()
    one.add(())
    assert one.drain() == []
    assert one.snapshot(()).sequence == 0


def test_batches_are_numbered_and_bounded_in_size() -> None:
    one = journal()
    one.add(removed(EVENTS_PER_BATCH_MAX + 1))
    one.add(removed(1))
    sizes = [(batch.sequence, len(batch.events)) for batch in one.drain()]
    assert sizes == [(1, EVENTS_PER_BATCH_MAX), (2, 1), (3, 1)]
    assert one.snapshot(()).sequence == 3


def test_batches_that_nobody_drains_leave_a_gap_that_shows() -> None:
    one = journal()
    for _ in range(BATCHES_MAX + 5):
        one.add(removed(1))
    batches = one.drain()
    assert len(batches) == BATCHES_MAX
    assert batches[0].sequence == 6
