"""Two real engines on two nodes: decode pulls what prefill published there (vLLM 0.32, float32).

The nodes have an agent each; prefill's has a peer server and a process of its own, which tests kill
and stop. Each test starts with empty slabs and caches, and ends with both ledgers at baseline, no
staging in quarantine, and every load reported exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.connector_engine import BLOCK_SIZE, EngineProcess
from tests.contract.connector_node import MODEL, Node, prompt
from tests.contract.connector_peer import SECRET, PeerProcess
from tests.contract.cores import core_of
from tests.contract.tiny_models import LARGE_BLOCK_NUMBERS
from tests.equality import Reference, check_tokens
from tests.waiting import wait_until

pytestmark = [pytest.mark.contract, pytest.mark.slow]

BLOCKS = 25  # full blocks of 811 tokens
SLOT_BYTES = 4 * LARGE_BLOCK_NUMBERS  # float32
SLAB_BYTES = 40 * SLOT_BYTES
OUTPUT = 20  # not enough to fill a block more
TIMEOUT_S = 30.0
# A look-up that waits long for a busy machine shows no fault; a pull from a stopped peer ends so.
SECONDS = {"lookup_timeout_s": 10.0, "pull_timeout_s": 4.0}
CALM = (0, 0, 0)


@dataclass
class Nodes:
    peer: PeerProcess
    node: Node
    prefill: EngineProcess
    decode: EngineProcess
    ids: list[int]
    expected: Reference
    free_blocks: int
    hashes: list[bytes]

    def publish(self, handoff: str) -> None:
        """Prefill the prompt on the one node and leave its blocks there, under a hand-off."""
        result = self.prefill.call(
            "generate", f"p-{handoff}", self.ids, handoff=handoff, publish=True
        )
        check_tokens(result["tokens"], self.expected.until(1))
        assert result["report"]["published_blocks"] == BLOCKS

    def decode_all(self, handoff: str) -> dict[str, Any]:
        """Decode on the other node; the report."""
        result = self.decode.call(
            "generate", f"d-{handoff}", self.ids, OUTPUT, handoff=handoff,
            pull_from=self.peer.address,
        )  # fmt: skip
        check_tokens(result["tokens"], self.expected)
        return dict(result["report"])

    def hold_in_mid_pull(self, handoff: str, blocks: int) -> str:
        """Begin to decode, up to where so many blocks are in the engine; the request's name."""
        self.publish(handoff)
        self.decode.call("fault", "hold_after", blocks)
        name = f"d-{handoff}"
        self.decode.call(
            "add", name, self.ids, OUTPUT, handoff=handoff, pull_from=self.peer.address
        )
        self.decode.call("step_until_load", name)
        self.decode.call("wait_held")
        return name

    def finish(self, name: str) -> dict[str, Any]:
        """Let the held load go on, and run the request to its end; the report."""
        self.decode.call("fault", "let_go")
        result = self.decode.call("run", name)
        check_tokens(result["tokens"], self.expected)
        return dict(result["report"])

    def forget(self) -> None:
        """Leave the decode's node nothing of the prompt."""
        self.decode.call("synchronise")
        self.node.agent.clear(MODEL)
        assert self.decode.call("reset_prefix_cache")

    def failed_pulls(self, reason: str) -> int:
        """So far."""
        return int(self.decode.call("stats")["pulls_failed"].get(reason, 0))


@pytest.fixture(scope="module")
def nodes(large_block_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    model, ids = str(large_block_model), prompt()
    folder = tmp_path_factory.mktemp("nodes")
    secret = folder / "secret"
    secret.write_bytes(SECRET + b"\n")
    for name in ("a", "b"):
        (folder / name).mkdir()
    peer = PeerProcess(folder / "a", SLAB_BYTES)
    node = Node(folder / "b", SLAB_BYTES)
    engines = []
    try:
        for role, socket_path in (("prefill", peer.socket_path), ("decode", node.socket_path)):
            extra = {
                "agent_socket": socket_path, "owner": f"{role}-1", "role": role, "model": MODEL,
                "secret_file": str(secret), **SECONDS,
            }  # fmt: skip
            engines.append(EngineProcess(model, extra, core=core_of(len(engines))))
        prefill, decode = (engine.ready() for engine in engines)
        # Slabs and caches are empty: nothing but plain computation, on one engine.
        plain = prefill.call("generate", "plain", ids, OUTPUT)
        assert plain["report"]["loaded_blocks"] == plain["report"]["local_tokens"] == 0
        assert len(set(plain["tokens"])) > OUTPUT // 3, "a poor prompt proves little"
        hashes = prefill.call("hashes", "plain")
        free = decode.call("free_blocks")
        reference = Reference(plain["tokens"], plain["leads"])
        yield Nodes(peer, node, prefill, decode, ids, reference, free, hashes)
    finally:
        for engine in engines:
            engine.close()
        node.agent.close()
        peer.close()


@pytest.fixture(autouse=True)
def clean(nodes: Nodes) -> Iterator[None]:
    for engine in (nodes.prefill, nodes.decode):
        assert engine.call("reset_prefix_cache")
    nodes.peer.call("clear")
    nodes.node.agent.clear(MODEL)
    yield
    for engine in (nodes.prefill, nodes.decode):
        engine.call("settle")
        engine.call("synchronise")
        stats = engine.call("stats")
        assert len(stats["load_reports"]) == stats["loads_total"], "not each load reported once"
        assert stats["loads_in_progress"] == 0
        assert engine.call("free_blocks") == nodes.free_blocks
    wait_until(
        lambda: nodes.decode.call("stats")["staging_quarantined"] == 0,
        timeout_s=TIMEOUT_S,
        what="the staging to leave its quarantine",
    )
    theirs, ours = nodes.peer.ledger_without_leases(), nodes.node.ledger()
    assert ours.leases == ()
    for ledger in (theirs, ours):
        assert (ledger.leased_slots, ledger.filling, ledger.quarantined) == CALM


def test_decode_pulls_the_whole_prompt_from_the_other_node_and_goes_on_with_equal_tokens(
    nodes: Nodes,
) -> None:
    nodes.publish("h1")
    assert [lease.key for lease in nodes.peer.call("ledger").leases] == ["h1"]
    before = nodes.decode.call("stats")
    report = nodes.decode_all("h1")
    assert (report["pulled_blocks"], report["loaded_blocks"]) == (BLOCKS, BLOCKS)
    assert (report["lookup_blocks"], report["peer_blocks"]) == (0, BLOCKS)
    assert report["pull_failure"] is report["load_failure"] is None
    assert 0.0 < report["pull_s"] <= report["load_s"]
    # Of the prompt at most one block was computed; the rest is one token a step.
    assert report["computed_tokens"] - (OUTPUT - 1) <= BLOCK_SIZE
    after = nodes.decode.call("stats")
    assert after["blocks_pulled_total"] - before["blocks_pulled_total"] == BLOCKS
    assert after["bytes_pulled_total"] - before["bytes_pulled_total"] == BLOCKS * SLOT_BYTES
    assert nodes.peer.ledger_without_leases().counters.handoffs_taken_total > 0
    digests = [engine.call("cache_digest", name) for engine, name in (
        (nodes.prefill, "p-h1"), (nodes.decode, "d-h1"),
    )]  # fmt: skip
    assert digests[0] == digests[1]


def test_what_the_own_slab_has_is_loaded_from_there_and_only_the_rest_is_pulled(
    nodes: Nodes,
) -> None:
    own = 10
    nodes.decode.call("generate", "begun", nodes.ids[: own * BLOCK_SIZE + 5], 1)
    nodes.decode.call("synchronise")
    assert nodes.node.ledger().published == own
    assert nodes.decode.call("reset_prefix_cache")
    nodes.publish("h2")
    report = nodes.decode_all("h2")
    assert (report["lookup_blocks"], report["peer_blocks"]) == (own, BLOCKS)
    assert (report["loaded_blocks"], report["pulled_blocks"]) == (BLOCKS, BLOCKS - own)


@pytest.mark.full
def test_a_peer_that_is_killed_in_mid_pull_is_a_recompute(nodes: Nodes) -> None:
    name = nodes.hold_in_mid_pull("h3", blocks=3)
    nodes.peer.kill()
    report = nodes.finish(name)
    assert report["pull_failure"] == report["load_failure"] == "unavailable"
    assert 3 <= report["pulled_blocks"] < BLOCKS
    assert report["pulled_blocks"] + report["failed_blocks"] == BLOCKS

    # While it is away, requests do without it; the node that comes back is pulled from.
    nodes.forget()
    assert nodes.decode_all("h3-away")["pull_failure"] == "unreachable"
    nodes.prefill.call("wait_connected", connected=False)
    nodes.peer.start()
    nodes.prefill.call("wait_connected", connected=True)
    nodes.forget()
    assert nodes.prefill.call("reset_prefix_cache")
    nodes.publish("h3-back")
    assert nodes.decode_all("h3-back")["pulled_blocks"] == BLOCKS


@pytest.mark.full
def test_a_peer_that_stands_still_in_mid_pull_is_given_up_in_time(nodes: Nodes) -> None:
    name = nodes.hold_in_mid_pull("h4", blocks=3)
    nodes.peer.stop()
    try:
        report = nodes.finish(name)
    finally:
        nodes.peer.go_on()
    assert report["pull_failure"] == "timed_out"
    assert 3 <= report["pulled_blocks"] < BLOCKS
    assert report["pulled_blocks"] + report["failed_blocks"] == BLOCKS


def test_a_corrupt_slot_at_the_peer_is_recomputed_and_leaves_its_slab(nodes: Nodes) -> None:
    nodes.publish("h5")
    nodes.peer.call("corrupt", nodes.hashes[10])
    failed = nodes.failed_pulls("corrupt")
    retired = nodes.peer.call("ledger").counters.retired_total
    report = nodes.decode_all("h5")
    assert (report["pulled_blocks"], report["failed_blocks"]) == (10, 15)
    assert report["pull_failure"] == "corrupt"
    assert nodes.failed_pulls("corrupt") == failed + 1
    wait_until(
        lambda: nodes.peer.call("ledger").published == BLOCKS - 1,
        timeout_s=TIMEOUT_S,
        what="the bad slot to go out of use",
    )
    assert nodes.peer.call("ledger").counters.retired_total == retired + 1


def test_a_node_of_another_cluster_gives_nothing_and_costs_nothing(nodes: Nodes) -> None:
    nodes.publish("h6")
    failed = nodes.failed_pulls("not_trusted")
    result = nodes.decode.call(
        "generate", "d-h6", nodes.ids, OUTPUT, pull_from=nodes.peer.untrusted
    )
    check_tokens(result["tokens"], nodes.expected)
    report = result["report"]
    assert (report["pull_failure"], report["loaded_blocks"]) == ("not_trusted", 0)
    assert report["failed_blocks"] == 0
    assert nodes.failed_pulls("not_trusted") == failed + 1
    assert nodes.peer.call("end_handoff", "h6")


def test_an_abort_in_mid_pull_is_reported_once_and_leaves_nothing_on_either_node(
    nodes: Nodes,
) -> None:
    name = nodes.hold_in_mid_pull("h7", blocks=3)
    nodes.decode.call("abort", name)
    nodes.decode.call("step", 3)
    # The peer's thread may still write into them: vLLM must not have given them to anybody.
    assert nodes.decode.call("free_blocks") == nodes.free_blocks - BLOCKS
    nodes.decode.call("fault", "let_go")
    nodes.decode.call("settle")
    stats = nodes.decode.call("stats")
    assert stats["load_reports"].count(name) == 1 and stats["loads_in_progress"] == 0
    # What came before the abort must not have become anybody's cache.
    again = nodes.decode.call("generate", f"{name}-again", nodes.ids, OUTPUT)
    check_tokens(again["tokens"], nodes.expected)
    assert again["report"]["local_tokens"] == 0


def test_a_request_that_is_aborted_before_it_loads_ends_its_handoff_at_the_peer(
    nodes: Nodes,
) -> None:
    nodes.publish("h8")
    nodes.decode.call("add", "d-h8", nodes.ids, OUTPUT, handoff="h8", pull_from=nodes.peer.address)
    nodes.decode.call("abort", "d-h8")
    nodes.decode.call("settle")
    assert nodes.peer.ledger_without_leases().published == BLOCKS


def test_blocks_that_came_while_prefill_computed_are_loaded_from_the_own_node(
    nodes: Nodes,
) -> None:
    before = nodes.decode.call("stats")["blocks_prefetched_total"]
    nodes.decode.call("prefetch", "h9", nodes.hashes, nodes.peer.address)
    nodes.publish("h9")

    def brought() -> int:
        return int(nodes.decode.call("stats")["blocks_prefetched_total"]) - before

    wait_until(lambda: brought() == BLOCKS, timeout_s=TIMEOUT_S, what=lambda: f"{brought()} blocks")
    report = nodes.decode_all("h9")
    assert (report["prefetched_blocks"], report["lookup_blocks"]) == (BLOCKS, BLOCKS)
    assert (report["loaded_blocks"], report["pulled_blocks"]) == (BLOCKS, 0)
    assert report["computed_tokens"] - (OUTPUT - 1) <= BLOCK_SIZE
    digests = [engine.call("cache_digest", name) for engine, name in (
        (nodes.prefill, "p-h9"), (nodes.decode, "d-h9"),
    )]  # fmt: skip
    assert digests[0] == digests[1]


def test_a_decode_that_comes_in_the_middle_of_a_prefetch_has_all_of_both_and_leaves_no_lease(
    nodes: Nodes,
) -> None:
    nodes.publish("h10")
    nodes.decode.call("prefetch", "h10", nodes.hashes, nodes.peer.address)
    report = nodes.decode_all("h10")  # wherever the prefetch is by then
    assert report["prefetched_blocks"] + report["pulled_blocks"] == report["loaded_blocks"]
    assert report["loaded_blocks"] == BLOCKS
    assert nodes.peer.ledger_without_leases().published == BLOCKS
