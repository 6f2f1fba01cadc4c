"""The load thread and the publisher, without vllm: a numpy array stands for the engine's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcache.connector.config import ConnectorConfig
from kvcache.connector.copies import BlockCopies, HostCopies
from kvcache.connector.device_copies import DeviceCopies
from kvcache.connector.errors import ConnectorMisconfigured
from kvcache.connector.faults import LoadFaults
from kvcache.connector.loader import BlockLoader
from kvcache.connector.planes import planes_of
from kvcache.connector.publisher import Publisher
from kvcache.connector.records import (
    LoadJob,
    LoadResult,
    OfferedBlock,
    RequestReport,
    SaveJob,
    TransferParams,
)
from kvcache.connector.stats import Counters
from kvcache.store import BlockStore
from tests.unit.kvcache.connector.fake_store import FakeStore
from tests.unit.kvcache.connector.stub_streams import StubStreams

if TYPE_CHECKING:
    from kvcache.connector.layout import EngineCache

NAMES = [bytes([index]) * 32 for index in range(8)]
CONFIG = ConnectorConfig("socket", "w1", "decode", "m")


class FakeCache:
    """16 blocks of 64 bytes, each full of its own number."""

    slot_bytes = 64

    def __init__(self) -> None:
        self.rows = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 64, axis=1)

    def copy_out(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        slot[:] = self.rows[block_id]

    def copy_in(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        self.rows[block_id] = slot


class World:
    def __init__(self, at_once: int | None) -> None:
        """at_once: the device's way of copying, so many blocks a call; None: the host's."""
        self.store, self.cache = FakeStore(slots=16), FakeCache()
        self.counters, self.faults = Counters(), LoadFaults()
        cache = cast("EngineCache", self.cache)
        copies: BlockCopies = HostCopies(cache)
        self.streams = StubStreams()
        if at_once is not None:
            planes = planes_of({"layer 0": torch.from_numpy(self.cache.rows)}, 16)
            size = at_once * self.cache.slot_bytes
            copies = DeviceCopies(planes, self.streams, size, slab=None)
        self.at_once = copies.blocks_at_once
        loader, publisher = (self.connected, self.counters, self.faults), (CONFIG, self.counters)
        self.loader = BlockLoader(cache, *loader, copies=copies)
        self.publisher = Publisher(cache, *publisher, self.connected, copies)

    def connected(self) -> BlockStore | None:
        return cast("BlockStore", self.store) if self.store.connected else None

    def save_job(self, blocks: int, handoff: str | None = None) -> SaveJob:
        allocation = self.store.allocate(NAMES[:blocks], 1.0, handoff)
        offered = tuple(OfferedBlock(i, NAMES[i], NAMES[i - 1] if i else None) for i in range(8))
        return SaveJob("r", handoff, offered[:blocks], allocation, RequestReport())  # type: ignore[arg-type]

    def load(self, blocks: int) -> LoadJob:
        refs = [self.store.blocks[name] for name in NAMES[:blocks]]
        self.store.leases["lease"] = tuple(refs)
        return LoadJob("r", "lease", refs, list(range(8, 8 + blocks)))

    def finished(self) -> LoadResult:
        """Ends the loader, so that whatever it reports is all that it ever will."""
        self.loader.close()
        (result,) = self.loader.take_finished()
        assert self.loader.take_finished() == [] and self.loader.in_progress == 0
        return result


@pytest.fixture(params=[None, 3], ids=["host", "device, three at once"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.loader.close()
    assert not made.store.leases
    assert not made.store.filling_slots


def test_what_is_published_is_what_is_loaded(world: World) -> None:
    job = world.save_job(8)
    world.publisher.publish([job])
    world.publisher.publish([])
    assert job.report.published_blocks == 8
    world.loader.submit(world.load(8))
    result = world.finished()
    assert (result.loaded_blocks, result.failed_block_ids, result.reason) == (8, (), None)
    assert (world.cache.rows[8:] == world.cache.rows[:8]).all()


def test_a_corrupt_block_ends_the_load_and_everything_after_it_counts_as_bad(
    world: World,
) -> None:
    world.publisher.publish([world.save_job(8)])
    world.store.memory[world.store.blocks[NAMES[3]].slot][0] ^= 1
    world.loader.submit(world.load(8))
    result = world.finished()
    assert (result.loaded_blocks, result.reason) == (3, "corrupt")
    assert result.failed_block_ids == (11, 12, 13, 14, 15)
    assert (world.cache.rows[11] == 11).all(), "unverified bytes reached the engine"


def test_a_load_waits_on_the_device_for_what_was_computed_before_it_was_submitted() -> None:
    world = World(3)
    world.publisher.publish([world.save_job(8)])
    world.faults.hold()
    world.streams.log.clear()
    world.loader.submit(world.load(8))
    (mark,) = world.streams.log  # on this thread, before the load's own thread does anything
    world.faults.let_go()
    assert world.finished().loaded_blocks == 8
    assert world.streams.log.count(f"scatter waits for {mark}") == 3


def test_of_the_blocks_copied_at_once_a_corrupt_one_lets_none_reach_the_engine(
    world: World,
) -> None:
    world.publisher.publish([world.save_job(8)])
    world.store.memory[world.store.blocks[NAMES[5]].slot][0] ^= 1
    world.loader.submit(world.load(8))
    result = world.finished()
    whole = 5 // world.at_once * world.at_once
    assert (result.loaded_blocks, result.reason) == (whole, "corrupt")
    assert result.failed_block_ids == tuple(range(8 + whole, 16))
    for row in range(8 + whole, 16):
        assert (world.cache.rows[row] == row).all()


def test_an_agent_that_goes_while_a_load_waits_is_a_failed_load(world: World) -> None:
    world.publisher.publish([world.save_job(8)])
    world.faults.hold()
    world.loader.submit(world.load(8))
    world.store.connected = False
    result = world.finished()
    assert (result.loaded_blocks, result.reason) == (0, "unavailable")
    world.store.leases.clear()


def test_an_aborted_load_stops_and_is_still_reported(world: World) -> None:
    world.publisher.publish([world.save_job(8)])
    world.faults.hold()
    job = world.load(8)
    world.loader.submit(job)
    job.aborted = True
    result = world.finished()
    assert (result.loaded_blocks, result.failed_block_ids, result.reason) == (0, (), None)
    assert (world.cache.rows[8] == 8).all()


def test_an_unforeseen_error_does_not_end_the_thread_or_lose_the_report(world: World) -> None:
    world.publisher.publish([world.save_job(8)])
    job = world.load(8)
    job.block_ids = [99] * 8
    world.loader.submit(job)
    assert world.finished().reason == "internal"


def test_present_blocks_and_a_full_slab_are_counted_and_skipped(world: World) -> None:
    world.publisher.publish([world.save_job(2)])
    world.store.free = world.store.free[:3]
    job = world.save_job(8, handoff="h")
    world.publisher.publish([job])
    report = job.report
    assert (report.present_blocks, report.published_blocks, report.no_room_blocks) == (2, 3, 3)


def test_no_answer_to_an_allocation_skips_the_publication(world: World) -> None:
    world.store.answers_held = True
    job = world.save_job(8)
    world.publisher.publish([job])
    assert job.report.degraded and job.report.published_blocks == 0


def test_a_grant_of_an_earlier_agent_is_not_written(world: World) -> None:
    job = world.save_job(8)
    assert job.allocation.done()
    world.store.filling_slots.clear()
    world.publisher.publish([job])
    assert job.report.published_blocks == 0 and not world.store.memory.any()


def test_an_unknown_setting_names_the_nearest_right_one() -> None:
    extra = {"agent_socket": "s", "owner": "w", "role": "decode", "model": "m", "lease_ttl": 3}
    with pytest.raises(ConnectorMisconfigured, match=r"'lease_ttl'.*did you mean lease_ttl_s"):
        ConnectorConfig.from_extra(extra)


def test_transfer_params_of_a_request_without_ours_ask_for_nothing() -> None:
    assert TransferParams.of(None) == TransferParams.of({"other": 1}) == TransferParams()
    asked = {"headwater": {"handoff": "h", "publish_handoff": True}}
    assert TransferParams.of(asked) == TransferParams("h", publish_handoff=True)


def test_an_agent_that_hangs_cannot_fill_our_memory(world: World) -> None:
    for _ in range(1100):
        world.store.answers_held = False
        job = world.save_job(1)
        world.store.blocks.clear()
        assert job.allocation.done()
        world.store.answers_held = True
        world.publisher.publish([job])
        world.store.free = list(range(16))
    assert len(world.publisher._unacknowledged) <= 1025
    world.store.filling_slots.clear()
