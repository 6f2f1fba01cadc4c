"""What must hold between two nodes, whatever the network between them is.

Counts are the engines' own: what their connectors report of each attempt, and vLLM's scheduler.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from cluster.diagnosis.rules import Cause
from tests.e2e.client import complete
from tests.e2e.conftest import START_TIMEOUT_S, Cluster
from tests.e2e.corpus import BLOCK, prompt
from tests.e2e.nodes.ray_nodes import Network
from tests.e2e.test_diagnose import check_names
from tests.waiting import wait_until

LENGTH = 1611
FULL_BLOCKS = LENGTH // BLOCK
HALF_LENGTH, HANDED_OVER = 801, 8  # 1.5 s each at 200 Mbit/s


def check_places(cluster: Cluster, network: Network) -> None:
    """Each role is on its node, which tells the address that it has in the network."""
    prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
    assert prefill["node"] != decode["node"]
    assert {node["node"] for node in cluster.ledger()} == {prefill["node"], decode["node"]}
    for worker, ip in ((prefill, network.head_ip), (decode, network.far_ip)):
        host, _, port = worker["slab_peer"].rpartition(":")
        assert host == ip
        assert int(port) > 0


def check_hand_over(cluster: Cluster, seed: int) -> None:
    """Prefill's blocks are pulled by the decode worker, which computes the prompt's tail alone."""
    ids = prompt(LENGTH, seed)
    body, trace = complete(cluster, ids, max_tokens=20, ignore_eos=True)
    record = cluster.record(trace)
    first, second = record["attempts"]
    assert [first["role"], second["role"]] == ["prefill", "decode"], record
    prefill = cluster.worker("prefill")
    assert (first["worker"], second["pull_from"]) == (prefill["id"], prefill["node"])
    assert first["kv"]["published_blocks"] == FULL_BLOCKS
    kv = second["kv"]
    # Whichever came when: all of it from the other node, since this one had nothing of the prompt.
    assert kv["prefetched_blocks"] + kv["pulled_blocks"] == kv["loaded_blocks"] >= FULL_BLOCKS - 1
    assert (kv["pull_s"] > 0) == (kv["pulled_blocks"] > 0)
    assert (kv["failed_blocks"], kv["pull_failure"]) == (0, None)
    assert kv["computed_tokens"] <= BLOCK + 20
    began = [(what, at_s) for at_s, name, what in cluster.event_log() if name == first["attempt"]]
    assert [what for what, _ in began] == [
        f"submitted to {first['worker']} as prefill",
        f"prefetched by {second['worker']}",
    ]
    told = cluster.cli("explain", trace).stdout
    assert f"{kv['pulled_blocks']} of them pulled from node {prefill['node']}" in told
    # The same prompt again, which caches of both nodes hold by now.
    again, trace = complete(cluster, ids, max_tokens=20, ignore_eos=True)
    assert again["choices"][0]["token_ids"] == body["choices"][0]["token_ids"]
    assert sum(_from_afar(attempt) for attempt in cluster.record(trace)["attempts"]) == 0


def check_agent_starts_anew(cluster: Cluster, seed: int) -> None:
    """Its slab is empty and its port another; blocks of what comes then are pulled from there."""
    prefill = cluster.worker("prefill")
    (agent,) = [node for node in cluster.ledger() if node["node"] == prefill["node"]]
    os.kill(agent["pid"], signal.SIGKILL)

    def moved() -> bool:
        now = cluster.worker("prefill")
        has_moved = now.get("slab_peer", "") not in {"", prefill["slab_peer"]}
        return has_moved and not now["degraded"]

    wait_until(moved, timeout_s=START_TIMEOUT_S, what="the new agent's address")
    assert cluster.worker("prefill")["id"] == prefill["id"], "the worker lived on"
    check_hand_over(cluster, seed)


def check_link_is_diagnosed(cluster: Cluster, seed: int) -> None:
    """What binds hand-overs of prompts that prefill's node has computed is the line between."""
    prompts = [prompt(HALF_LENGTH, seed + number) for number in range(HANDED_OVER)]
    for ids in prompts:
        complete(cluster, ids, max_tokens=1)

    def ask(some: list[list[int]]) -> None:
        for ids in some:
            complete(cluster, ids, max_tokens=2, ignore_eos=True)

    before = cluster.worker("decode")["loading_s_total"]
    threads = [threading.Thread(target=ask, args=(prompts[first::2],)) for first in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(
            lambda: cluster.worker("decode")["loading_s_total"] > before,
            timeout_s=30,
            what="blocks on their way",
        )
        check_names(cluster, Cause.LINK)
    finally:
        for thread in threads:
            thread.join()


def _from_afar(attempt: dict[str, Any]) -> int:
    kv = attempt["kv"] or {}
    return int(kv.get("pulled_blocks", 0) + kv.get("prefetched_blocks", 0))
