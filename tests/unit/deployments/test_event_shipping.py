"""What an agent tells the directory, and what the directory answers."""

from __future__ import annotations

from deployments.node.event_shipping import (
    ASK_INTERVAL_S,
    AUDIT_INTERVAL_S,
    GONE_S,
    SILENT_S,
    DirectoryIntake,
    EventShipping,
)
from kvcache.directory import DirectoryCore
from kvcache.directory_types import Freshness
from kvcache.events import (
    BlockRemoved,
    BlockStored,
    Message,
    Snapshot,
    SourceModels,
    StreamDigest,
    digest,
)
from kvcache.journal import Journal

SOURCE, MODEL = "slab:a", "m"


class Node:
    """An agent with one model, whose directory may be replaced behind its back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.replace_directory("first")
        self.start()

    def start(self, incarnation: str = "one") -> None:
        """A life of the agent, with nothing in its slab."""
        self.incarnation = incarnation
        self.journal = Journal(SOURCE, incarnation, MODEL)
        self.blocks: list[bytes] = []
        self.models: tuple[str, ...] = ()
        self.shipping = EventShipping(self.snapshot, self.audit)

    def replace_directory(self, epoch: str) -> None:
        self.directory = DirectoryCore(epoch)
        self.intake = DirectoryIntake(self.directory)

    def snapshot(self, model: str) -> Snapshot:
        assert model == MODEL
        return self.journal.snapshot(tuple(self.blocks))

    def audit(self) -> list[SourceModels | StreamDigest]:
        found: list[SourceModels | StreamDigest] = [
            SourceModels(SOURCE, self.incarnation, self.models)
        ]
        if self.models:
            found.append(self.journal.audit(len(self.blocks), digest(self.blocks)))
        return found

    def publish(self, name: bytes) -> None:
        self.models = (MODEL,)
        self.blocks.append(name)
        self.journal.add((BlockStored(name, None, MODEL),))

    def evict(self, name: bytes) -> None:
        self.blocks.remove(name)
        self.journal.add((BlockRemoved(name),))

    def ship(self, after_s: float = ASK_INTERVAL_S) -> list[Message]:
        """One turn of the shipping thread; returns all that it sent."""
        self.now_s += after_s
        messages = self.shipping.shipment(self.journal.drain(), self.models, self.now_s)
        assert messages is not None
        answer = self.intake.take(SOURCE, messages, self.now_s)
        wanted = self.shipping.resync(answer, self.models)
        if wanted:
            self.intake.take(SOURCE, wanted, self.now_s)
        return [*messages, *wanted]

    def is_known(self) -> bool:
        is_exact = self.directory.freshness(SOURCE, MODEL) is Freshness.EXACT
        return is_exact and set(self.directory.hashes(SOURCE, MODEL)) == set(self.blocks)


def node_with_a_block() -> Node:
    node = Node()
    node.publish(b"x" * 32)
    node.ship()
    assert node.is_known()
    return node


def test_an_idle_agent_tells_all_to_a_directory_that_started_anew_unnoticed() -> None:
    node = node_with_a_block()
    node.replace_directory("second")
    node.ship()
    assert node.is_known()
    assert node.ship() == [], "once is enough"


def test_a_busy_agent_tells_all_to_a_directory_that_started_anew_unnoticed() -> None:
    node = node_with_a_block()
    node.replace_directory("second")
    node.publish(b"y" * 32)
    node.ship()
    assert node.is_known()


def test_after_a_lost_shipment_snapshots_follow() -> None:
    node = node_with_a_block()
    node.publish(b"y" * 32)
    node.journal.drain()
    node.shipping.directory_lost()
    node.ship()
    assert node.is_known()


def test_a_first_answer_asks_for_nothing_twice() -> None:
    node = Node()
    node.models = (MODEL,)
    sent = node.ship()
    assert [type(message) for message in sent] == [Snapshot, SourceModels, StreamDigest]


def test_a_quiet_agent_asks_once_an_interval() -> None:
    node = node_with_a_block()
    now_s = node.now_s + ASK_INTERVAL_S / 2
    assert node.shipping.shipment([], node.models, now_s) is None
    assert node.shipping.shipment([], node.models, now_s + ASK_INTERVAL_S) == []


def test_a_block_that_the_directory_lost_is_found_by_the_next_digest_and_a_snapshot_follows() -> (
    None
):
    node = node_with_a_block()
    stream = node.directory._streams[SOURCE, MODEL]
    stream.replace(Snapshot(SOURCE, "one", stream.sequence, MODEL, ()))
    node.directory._blocks = 0
    assert node.ship() == [], "not due yet"
    sent = node.ship(AUDIT_INTERVAL_S)
    assert [type(message) for message in sent] == [SourceModels, StreamDigest, Snapshot]
    assert node.is_known()
    assert node.directory.counters.digests_differ_total == 1
    assert node.directory.counters.degraded_total == {"digest": 1}


def test_a_busy_agents_digests_are_compared_and_raise_no_false_alarm() -> None:
    node = node_with_a_block()
    for n in range(205):
        node.publish(n.to_bytes(32, "big"))
        if n % 3 == 0:
            node.evict((n // 3).to_bytes(32, "big"))
        node.ship(0.05)
    counters = node.directory.counters
    assert counters.digests_equal_total == 3, "one an interval"
    assert counters.digests_differ_total == 0
    assert counters.degraded_total == {}
    assert node.is_known()


def test_a_last_batch_that_was_lost_without_a_word_is_noticed_by_the_digests_alone() -> None:
    node = node_with_a_block()
    node.publish(b"y" * 32)
    node.journal.drain()  # lost: nobody knows of it, and nothing comes after it
    node.ship(AUDIT_INTERVAL_S)
    assert node.directory.freshness(SOURCE, MODEL) is Freshness.EXACT, "it may be on its way"
    node.ship(AUDIT_INTERVAL_S)
    assert node.is_known()
    assert node.directory.counters.degraded_total == {"gap": 1}
    assert node.directory.counters.digests_differ_total == 0


def test_what_a_restarted_agent_held_before_vanishes_before_any_worker_is_back() -> None:
    node = node_with_a_block()
    node.start("two")
    node.ship()
    assert node.directory.streams() == ()
    node.publish(b"y" * 32)
    node.ship()
    assert node.is_known()


def test_a_silent_agents_blocks_do_not_count_and_all_is_well_when_it_goes_on() -> None:
    node = node_with_a_block()
    node.intake.look(node.now_s + SILENT_S)
    assert node.is_known()
    node.intake.look(node.now_s + SILENT_S + 0.1)
    assert node.directory.freshness(SOURCE, MODEL) is Freshness.DEGRADED
    node.ship(SILENT_S + 1.0)
    assert node.is_known()


def test_a_node_that_comes_back_with_its_old_slab_after_it_was_given_up_is_known_again() -> None:
    node = node_with_a_block()
    node.intake.look(node.now_s + GONE_S + 0.1)
    assert node.directory.streams() == ()
    node.ship(GONE_S + 1.0)
    assert node.is_known()
    node.intake.look(node.now_s + 1.0)
    assert node.is_known()
