"""Nodes in processes of their own, killed and stopped while a reader pulls from them."""

from __future__ import annotations

import pytest

from kvcache.errors import PullTimedOut, StoreUnavailable
from kvcache.transport.pull import WindowedPull
from kvcache.transport.staging import StagingState
from kvcache.transport.tcp import TcpSettings, TcpSource
from tests.unit.kvcache.conftest import TIMEOUT_S, eventually
from tests.unit.kvcache.examples import block, chain
from tests.unit.kvcache.transport.conftest import ONE_STREAM, MakeReader, Reader, checked
from tests.unit.kvcache.transport.nodes import BLOCKS, NodeProcess, Spawn, spawn

__all__ = ["spawn"]
pytestmark = pytest.mark.slow

PULL_S = 2.0


def one_stream(make_tcp_reader: MakeReader, node: NodeProcess, silence_s: float = 5.0) -> Reader:
    """Two blocks on their way at most, so that a pull of BLOCKS is always in its middle."""
    settings = TcpSettings(1, ONE_STREAM.window_slots, silence_timeout_s=silence_s)
    return make_tcp_reader(node.endpoint, settings=settings)


def test_a_peer_killed_in_the_middle_of_a_pull_is_a_miss_from_there_on(
    spawn: Spawn, make_tcp_reader: MakeReader
) -> None:
    node = spawn()
    reader = one_stream(make_tcp_reader, node)
    run = reader.lease(chain(BLOCKS))
    found = []
    with reader.source.read(run.blocks, TIMEOUT_S) as pull:
        found.append(checked(next(pull)))
        node.kill()
        with pytest.raises(StoreUnavailable, match=r"the peer is lost|no peer at"):
            found.extend(map(checked, pull))
    assert found == chain(BLOCKS)[: len(found)]
    assert len(found) < BLOCKS
    reader.at_baseline()
    eventually(lambda: not reader.source.connected, "the control connection to end")


def test_a_peer_stopped_in_the_middle_of_a_pull_costs_no_more_than_its_deadline(
    spawn: Spawn, make_tcp_reader: MakeReader
) -> None:
    node = spawn()
    reader = one_stream(make_tcp_reader, node)
    run = reader.lease(chain(BLOCKS))
    found = []
    with reader.source.read(run.blocks, PULL_S) as pull:
        found.append(checked(next(pull)))
        node.stop()
        with pytest.raises(PullTimedOut):
            found.extend(map(checked, pull))
    assert found == chain(BLOCKS)[: len(found)]
    assert len(found) < BLOCKS
    assert reader.staging.ledger().quarantined_total > 0, "what flew when time was up"
    reader.at_baseline()
    assert isinstance(reader.source, TcpSource)
    assert reader.source.stats().streams_aborted_total == 1
    node.go_on()
    assert reader.pull(run.blocks) == chain(BLOCKS), "on a connection of its own"


def test_a_cancelled_pull_keeps_its_staging_until_its_transfers_are_over(
    spawn: Spawn, make_tcp_reader: MakeReader
) -> None:
    node = spawn()
    reader = one_stream(make_tcp_reader, node)
    run = reader.lease(chain(BLOCKS))
    assert reader.pull(run.blocks) == chain(BLOCKS)
    node.stop()
    with reader.source.read(run.blocks, TIMEOUT_S) as pull:
        assert isinstance(pull, WindowedPull)
        eventually(lambda: len(pull._flying) == 2, "both slots of the window to be asked for")
        pull.cancel()
    ledger = reader.staging.ledger()
    assert (ledger.free, ledger.held, ledger.quarantined) == (2, 0, 2)
    (use,) = ledger.uses
    assert (use.slots, use.state) == (2, StagingState.QUARANTINED)
    assert use.owner == "{}:{}".format(*node.endpoint)
    node.go_on()
    reader.at_baseline()
    assert reader.pull(run.blocks) == chain(BLOCKS), "on the same connection"
    assert isinstance(reader.source, TcpSource)
    assert reader.source.stats().connections_total == 1


def test_a_stopped_peer_fails_leases_after_its_silence(
    spawn: Spawn, make_tcp_reader: MakeReader
) -> None:
    node = spawn()
    reader = one_stream(make_tcp_reader, node, silence_s=2.0)
    reader.lease(chain(1))
    node.stop()
    with pytest.raises(StoreUnavailable, match="silent"):
        reader.lease(chain(1), "unanswered")
    with pytest.raises(StoreUnavailable):
        reader.lease(chain(1), "refused at once")
    assert not reader.source.connected
    node.go_on()

    def answers() -> bool:
        pending = reader.source.lease("again", chain(1), 1.0)
        try:
            return len(pending.result(TIMEOUT_S).blocks) == 1
        except StoreUnavailable:
            return False

    eventually(answers, "the peer to be found again")


def test_a_peer_that_came_back_holds_other_generations(
    spawn: Spawn, make_tcp_reader: MakeReader
) -> None:
    first = spawn()
    reader = one_stream(make_tcp_reader, first)
    before = reader.lease(chain(2)).blocks
    first.kill()
    eventually(lambda: not reader.source.connected, "the loss to be noticed")
    spawn(first.endpoint[1])

    def again() -> bool:
        try:
            run = reader.source.lease("again", chain(2), 30.0).result(TIMEOUT_S)
        except StoreUnavailable:
            return False
        assert run.blocks != before
        return reader.pull(run.blocks) == chain(2)

    eventually(again, "the new incarnation to be read")
    assert [ref.hash for ref in before] == [block(1), block(2)]
