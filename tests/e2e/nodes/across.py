"""What must hold between two nodes, whatever the network between them is.

Counts are the engines' own: what their connectors report of each attempt, and vLLM's scheduler.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from cluster.commands.diagnose import watch
from cluster.diagnosis.judge import judge
from cluster.diagnosis.looks import window_of
from cluster.diagnosis.rules import Cause
from tests.e2e.client import LEADS, complete, reference_of
from tests.e2e.conftest import START_TIMEOUT_S, Cluster
from tests.e2e.corpus import BLOCK, prompt
from tests.e2e.nodes.ray_nodes import Network
from tests.e2e.test_directory import slabs_are_known
from tests.equality import check_tokens
from tests.waiting import wait_until

# 37 MB, which take 1.5 s at 200 Mbit/s: a pull is given up after 5 s, however busy the machine is.
LENGTH = 811
FULL_BLOCKS = LENGTH // BLOCK
# Their blocks fit into prefill's own cache and slab, so that nothing of them is computed again. Two
# at a time, whose blocks are on the line for 7.5 s in all, whatever the engines do meanwhile.
HANDED_OVER = 5
WATCHED_S = 4.0


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
    body, trace = complete(cluster, ids, max_tokens=20, ignore_eos=True, **LEADS)
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
    # The same prompt again, once the router knows that caches of both nodes hold it.
    wait_until(lambda: slabs_are_known(cluster), timeout_s=START_TIMEOUT_S, what="the slabs")
    again, trace = complete(cluster, ids, max_tokens=20, ignore_eos=True)
    check_tokens(again["choices"][0]["token_ids"], reference_of(body["choices"][0]))
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
    """What binds hand-overs of prompts that prefill's node has computed is the line between.

    Watched from here: the command starts in the time that a machine takes for that, and the blocks
    would have come by then.
    """
    prompts = [prompt(LENGTH, seed + number) for number in range(HANDED_OVER)]
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
        window = window_of(watch(cluster.endpoint, WATCHED_S))
    finally:
        for thread in threads:
            thread.join()
    told = judge(window)
    assert told.verdict == Cause.LINK, told


def _from_afar(attempt: dict[str, Any]) -> int:
    kv = attempt["kv"] or {}
    return int(kv.get("pulled_blocks", 0) + kv.get("prefetched_blocks", 0))
