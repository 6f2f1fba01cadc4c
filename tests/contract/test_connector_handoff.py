"""Two real engines, prefill and decode, share blocks through a real agent (vLLM 0.32, float32).

Each test starts with an empty slab and empty engine caches, and ends with a ledger at baseline: no
lease, no slot being filled, and every asynchronous load reported exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.blocks import Grant
from kvcache.identity import Layout, Namespace
from kvcache.store import BlockStore, Registration
from tests.contract.connector_engine import BLOCK_SIZE, EngineProcess
from tests.contract.connector_node import MODEL, Node, prompt
from tests.contract.cores import core_of
from tests.contract.tiny_models import LARGE_BLOCK_NUMBERS
from tests.equality import Reference, check_tokens

pytestmark = [pytest.mark.contract, pytest.mark.slow]

BLOCKS = 25  # full blocks of 811 tokens
SLOT_BYTES = 4 * LARGE_BLOCK_NUMBERS  # float32
OUTPUT = 20  # not enough to fill a block more


@dataclass
class Cluster:
    node: Node
    prefill: EngineProcess
    decode: EngineProcess
    ids: list[int]
    expected: Reference
    free_blocks: int
    hashes: list[bytes]

    def publish(self, name: str, handoff: str) -> dict[str, Any]:
        """Prefill the prompt and publish its blocks under a hand-off lease."""
        result = self.prefill.call("generate", name, self.ids, handoff=handoff, publish=True)
        check_tokens(result["tokens"], self.expected.until(1))
        return dict(result["report"])


@pytest.fixture(scope="module")
def cluster(large_block_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model, ids = str(large_block_model), prompt()
    node = Node(tmp_path_factory.mktemp("node"), slab_bytes=40 * SLOT_BYTES)
    engines = []
    try:
        for role in ("prefill", "decode"):
            extra = {
                "agent_socket": node.socket_path, "owner": f"{role}-1", "role": role,
                "model": MODEL,
            }  # fmt: skip
            engines.append(EngineProcess(model, extra, core=core_of(len(engines))))
        prefill, decode = (engine.ready() for engine in engines)
        # The slab is empty and so is its own cache: nothing but plain computation.
        plain = prefill.call("generate", "plain", ids, OUTPUT)
        assert plain["report"]["loaded_blocks"] == plain["report"]["local_tokens"] == 0
        assert len(set(plain["tokens"])) > OUTPUT // 3, "a poor prompt proves little"
        hashes = prefill.call("hashes", "plain")
        assert set(hashes[:BLOCKS]) == set(node.agent.snapshot_events(MODEL).hashes)
        free = decode.call("free_blocks")
        reference = Reference(plain["tokens"], plain["leads"])
        yield Cluster(node, prefill, decode, ids, reference, free, hashes)
    finally:
        for engine in engines:
            engine.close()
        node.agent.close()


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    for engine in (cluster.prefill, cluster.decode):
        assert engine.call("reset_prefix_cache")
    cluster.node.agent.clear(MODEL)
    yield
    for engine in (cluster.prefill, cluster.decode):
        engine.call("settle")
        engine.call("synchronise")
        stats = engine.call("stats")
        assert len(stats["load_reports"]) == stats["loads_total"], "not each load reported once"
        assert stats["loads_in_progress"] == 0
        assert engine.call("free_blocks") == cluster.free_blocks
    ledger = cluster.node.ledger()
    assert (ledger.leases, ledger.leased_slots, ledger.filling, ledger.quarantined) == ((), 0, 0, 0)


def test_decode_loads_what_prefill_published_and_goes_on_with_equal_tokens(
    cluster: Cluster,
) -> None:
    published = cluster.publish("p1", "h1")
    assert published["published_blocks"] == BLOCKS
    ledger = cluster.node.ledger()
    assert [(lease.key, lease.blocks) for lease in ledger.leases] == [("h1", BLOCKS)]
    decoded = cluster.decode.call("generate", "d1", cluster.ids, OUTPUT, handoff="h1")
    check_tokens(decoded["tokens"], cluster.expected)
    report = decoded["report"]
    assert report["loaded_blocks"] >= 24 and report["load_failure"] is None
    # Of the prompt at most one block was computed; the rest is one token a step.
    assert report["computed_tokens"] - (OUTPUT - 1) <= BLOCK_SIZE


def test_blocks_of_generated_tokens_are_published_and_loaded_elsewhere(cluster: Cluster) -> None:
    cluster.publish("p2", "h2")
    decoded = cluster.decode.call("generate", "d2", cluster.ids, 60, handoff="h2")
    assert decoded["report"]["published_blocks"] == 2
    longer = cluster.ids + decoded["tokens"]
    again = cluster.prefill.call("generate", "p2b", longer[:870], 1)
    assert again["report"]["local_tokens"] + again["report"]["loaded_tokens"] == 27 * BLOCK_SIZE
    assert again["report"]["loaded_blocks"] == 2
    check_tokens(again["tokens"], Reference(decoded["tokens"], decoded["leads"]).after(59))


def test_a_prefix_that_decode_has_itself_is_not_loaded_and_not_leased(cluster: Cluster) -> None:
    cluster.publish("p3", "h3")
    cluster.decode.call("generate", "d3", cluster.ids, 1, handoff="h3")
    cluster.decode.call("add", "d3b", cluster.ids, OUTPUT)
    cluster.decode.call("step", 3)
    cluster.decode.call("synchronise")
    assert cluster.node.ledger().leases == ()
    again = cluster.decode.call("run", "d3b")
    check_tokens(again["tokens"], cluster.expected)
    assert again["report"]["loaded_blocks"] == 0
    assert again["report"]["local_tokens"] == BLOCKS * BLOCK_SIZE


def test_a_prefill_with_a_local_hit_hands_all_its_blocks_off(cluster: Cluster) -> None:
    cluster.publish("p4", "h4")
    cluster.prefill.call("synchronise")
    report = cluster.publish("p4b", "h4b")
    assert report["local_tokens"] == BLOCKS * BLOCK_SIZE and report["present_blocks"] == BLOCKS
    assert {lease.key: lease.blocks for lease in cluster.node.ledger().leases} == {
        "h4": BLOCKS,
        "h4b": BLOCKS,
    }
    for name in ("h4", "h4b"):
        assert cluster.node.agent.end_handoff(MODEL, name)


def test_a_corrupt_slot_is_recomputed_and_counted_and_leaves_the_slab(cluster: Cluster) -> None:
    cluster.publish("p5", "h5")
    cluster.node.corrupt(cluster.hashes[10])
    before = cluster.decode.call("stats")["load_failures"].get("corrupt", 0)
    retired = cluster.node.ledger().counters.retired_total
    decoded = cluster.decode.call("generate", "d5", cluster.ids, OUTPUT, handoff="h5")
    check_tokens(decoded["tokens"], cluster.expected)
    report = decoded["report"]
    assert (report["loaded_blocks"], report["failed_blocks"]) == (10, 15)
    assert report["load_failure"] == "corrupt"
    assert cluster.decode.call("stats")["load_failures"]["corrupt"] == before + 1
    cluster.decode.call("synchronise")
    ledger = cluster.node.ledger()
    # The bad slot went out of use, and what was recomputed has taken its place.
    assert (ledger.counters.retired_total - retired, ledger.published) == (1, BLOCKS)


@pytest.mark.parametrize("first_bad", [0, 3])
def test_an_abort_between_a_failed_load_and_its_recompute_leaves_the_own_cache_true(
    cluster: Cluster, first_bad: int
) -> None:
    name = f"d6-{first_bad}"
    cluster.publish(f"p6-{first_bad}", name)
    cluster.decode.call("fault", "fail_next", 1, first_bad)
    cluster.decode.call("add", name, cluster.ids, OUTPUT, handoff=name)
    cluster.decode.call("step_until_load_is_reported", name)
    cluster.decode.call("abort", name)
    cluster.decode.call("settle")
    # Without the slab, only its own cache could help, or harm.
    cluster.node.agent.clear(MODEL)
    again = cluster.decode.call("generate", f"{name}-again", cluster.ids, OUTPUT)
    check_tokens(again["tokens"], cluster.expected)
    assert again["report"]["local_tokens"] == 0


def test_a_failed_first_block_is_recomputed_without_asking_for_ever(cluster: Cluster) -> None:
    cluster.publish("p7", "h7")
    cluster.decode.call("fault", "fail_next", 1, 0)
    decoded = cluster.decode.call("generate", "d7", cluster.ids, OUTPUT, handoff="h7")
    check_tokens(decoded["tokens"], cluster.expected)
    assert decoded["report"]["failed_blocks"] == BLOCKS


def test_an_abort_while_a_load_is_held_is_reported_once_and_frees_everything(
    cluster: Cluster,
) -> None:
    cluster.publish("p8", "h8")
    cluster.decode.call("fault", "hold")
    cluster.decode.call("add", "d8", cluster.ids, OUTPUT, handoff="h8")
    cluster.decode.call("step_until_load", "d8")
    cluster.decode.call("abort", "d8")
    cluster.decode.call("step", 3)
    # The load thread may still write into them: vLLM must not have given them to anybody.
    assert cluster.decode.call("free_blocks") == cluster.free_blocks - BLOCKS
    cluster.decode.call("fault", "let_go")
    cluster.decode.call("settle")
    assert cluster.decode.call("stats")["load_reports"].count("d8") == 1
    assert cluster.decode.call("stats")["loads_in_progress"] == 0


def test_a_preempted_request_looks_up_again(cluster: Cluster) -> None:
    cluster.publish("p9", "h9")
    cluster.decode.call("add", "d9", cluster.ids, OUTPUT, handoff="h9")
    cluster.decode.call("step_until_tokens", "d9", 5)
    before = cluster.decode.call("stats")
    cluster.decode.call("preempt_all")
    decoded = cluster.decode.call("run", "d9")
    after = cluster.decode.call("stats")
    check_tokens(decoded["tokens"], cluster.expected)
    assert after["lookups_total"] == before["lookups_total"] + 1
    assert decoded["report"]["loaded_blocks"] == 2 * BLOCKS


def test_a_full_slab_is_counted_and_fails_nothing(cluster: Cluster) -> None:
    with _stranger(cluster) as hoard:
        total = cluster.node.ledger().slots_total
        names = [bytes([index]) * 32 for index in range(total - 5)]
        grants = hoard.allocate(names, 30.0).result(5.0)
        assert all(isinstance(grant, Grant) for grant in grants)
        report = cluster.publish("p10", "h10")
        assert (report["published_blocks"], report["no_room_blocks"]) == (5, 20)
        decoded = cluster.decode.call("generate", "d10", cluster.ids, OUTPUT, handoff="h10")
        check_tokens(decoded["tokens"], cluster.expected)
        assert decoded["report"]["loaded_blocks"] == 5
        assert decoded["report"]["no_room_blocks"] > 0
        hoard.abandon([grant for grant in grants if isinstance(grant, Grant)])
        hoard.lease_prefix("after", [], 1.0).result(5.0)


def test_a_dead_agent_is_a_miss_and_its_successor_is_used(cluster: Cluster) -> None:
    cluster.publish("p11", "h11")
    cluster.decode.call("fault", "hold")
    cluster.decode.call("add", "d11", cluster.ids, OUTPUT, handoff="h11")
    cluster.decode.call("step_until_load", "d11")
    cluster.node.agent.close()
    for engine in (cluster.prefill, cluster.decode):
        engine.call("wait_connected", connected=False)
    cluster.decode.call("fault", "let_go")
    caught = cluster.decode.call("run", "d11")
    check_tokens(caught["tokens"], cluster.expected)
    assert caught["report"]["load_failure"] == "unavailable"

    assert cluster.decode.call("reset_prefix_cache")
    alone = cluster.decode.call("generate", "d11b", cluster.ids, OUTPUT)
    check_tokens(alone["tokens"], cluster.expected)
    assert alone["report"]["loaded_blocks"] == 0 and alone["report"]["degraded"]
    assert cluster.decode.call("stats")["degraded"]

    cluster.node.restart()
    for engine in (cluster.prefill, cluster.decode):
        engine.call("wait_connected", connected=True)
        assert engine.call("reset_prefix_cache")
    assert cluster.publish("p11c", "h11c")["published_blocks"] == BLOCKS
    later = cluster.decode.call("generate", "d11c", cluster.ids, OUTPUT, handoff="h11c")
    check_tokens(later["tokens"], cluster.expected)
    assert later["report"]["loaded_blocks"] == BLOCKS


def test_an_aborted_prefill_leaves_no_handoff_lease(cluster: Cluster) -> None:
    cluster.prefill.call("add", "p12", cluster.ids, handoff="h12", publish=True)
    cluster.prefill.call("step", 1)
    assert [lease.key for lease in cluster.node.ledger().leases] == ["h12"]
    cluster.prefill.call("abort", "p12")


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("cache_config.prefix_caching_hash_algo", "sha256", "prefix_caching_hash_algo is 'sha256'"),
        ("kv_transfer_config.kv_load_failure_policy", "fail", "kv_load_failure_policy must be"),
    ],
)
def test_an_engine_that_cannot_share_blocks_is_refused_by_name(
    cluster: Cluster, setting: str, value: str, said: str
) -> None:
    assert cluster.decode.call("refusal", setting, value).startswith(
        f"ConnectorMisconfigured: {said}"
    )


def _stranger(cluster: Cluster) -> Any:
    """Another worker of the same model, without an engine."""
    import contextlib

    identity = cluster.decode.call("identity")
    namespace, layout = (
        kind(**{name: identity[name] for name in kind.__dataclass_fields__})
        for kind in (Namespace, Layout)
    )
    registration = Registration("stranger", "decode", os.getpid(), namespace, layout)
    store = BlockStore.connect(cluster.node.socket_path, registration, 5.0)
    assert store.slots.dtype == np.uint8
    return contextlib.closing(store)
