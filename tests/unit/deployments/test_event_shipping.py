"""What an agent tells the directory, and what the directory answers."""

from __future__ import annotations

from deployments.event_shipping import ASK_INTERVAL_S, EventShipping, Message, take_shipment
from kvcache.directory import DirectoryCore
from kvcache.directory_types import Freshness
from kvcache.events import BlockStored, Snapshot
from kvcache.journal import Journal

SOURCE, MODEL = "slab:a", "m"


class Node:
    """An agent with one model, whose directory may be replaced behind its back."""

    def __init__(self) -> None:
        self.journal = Journal(SOURCE, "one", MODEL)
        self.blocks: list[bytes] = []
        self.models: tuple[str, ...] = ()
        self.shipping = EventShipping(self.snapshot)
        self.directory = DirectoryCore("first")
        self.now_s = 0.0

    def snapshot(self, model: str) -> Snapshot:
        assert model == MODEL
        return self.journal.snapshot(tuple(self.blocks))

    def publish(self, name: bytes) -> None:
        self.models = (MODEL,)
        self.blocks.append(name)
        self.journal.add((BlockStored(name, None, MODEL),))

    def ship(self) -> list[Message]:
        """One turn of the shipping thread; returns all that it sent."""
        self.now_s += ASK_INTERVAL_S
        messages = self.shipping.shipment(self.journal.drain(), self.models, self.now_s)
        assert messages is not None
        answer = take_shipment(self.directory, SOURCE, messages)
        wanted = self.shipping.resync(answer, self.models)
        if wanted:
            take_shipment(self.directory, SOURCE, wanted)
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
    node.directory = DirectoryCore("second")
    node.ship()
    assert node.is_known()
    assert node.ship() == [], "once is enough"


def test_a_busy_agent_tells_all_to_a_directory_that_started_anew_unnoticed() -> None:
    node = node_with_a_block()
    node.directory = DirectoryCore("second")
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
    assert [type(message) for message in sent] == [Snapshot]


def test_a_quiet_agent_asks_once_an_interval() -> None:
    node = node_with_a_block()
    now_s = node.now_s + ASK_INTERVAL_S / 2
    assert node.shipping.shipment([], node.models, now_s) is None
    assert node.shipping.shipment([], node.models, now_s + ASK_INTERVAL_S) == []
