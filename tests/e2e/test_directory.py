"""What the router believes to be cached, through restarts of the directory and of workers.

Against the slot table's own count and the engines' own hits.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from tests.e2e.client import complete, reference
from tests.e2e.conftest import START_TIMEOUT_S, Cluster
from tests.e2e.corpus import BLOCK, prompt
from tests.equality import check_tokens
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]
LEARNED_TIMEOUT_S = 60.0
EVICTED_MAX = 4
LONG = 12 * BLOCK


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def sources(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    """What the ingress knows of slabs or engines, by source."""
    known = cluster.status()["directory"]["sources"]
    return [source for source in known if source["source"].startswith(kind)]


def directory_pid(cluster: Cluster) -> int:
    """Of the actor; it has the same raylet for a parent as a worker."""
    worker = psutil.Process(cluster.worker("decode")["pid"])
    raylet = worker.parent()
    assert raylet is not None
    (found,) = [c for c in raylet.children() if "::Directory" in " ".join(c.cmdline())]
    return found.pid


def slabs_are_known(cluster: Cluster) -> bool:
    """The ingress is sure of each node's slab, and has as many blocks of it as the slot table."""
    nodes = cluster.ledger()
    if not all("scan" in node for node in nodes):
        return False
    known = sorted((s["freshness"], s["blocks"]) for s in sources(cluster, "slab:"))
    return known == sorted(("exact", node["scan"]["published"]) for node in nodes)


def loaded_blocks(cluster: Cluster, trace: str) -> int:
    return sum(a["kv"]["loaded_blocks"] for a in cluster.record(trace)["attempts"] if a["kv"])


def test_a_restarted_directory_learns_all_blocks_again_while_requests_go_on(
    cluster: Cluster,
) -> None:
    prefixes = [prompt(3 * BLOCK, 9100 + n) for n in range(4)]
    for ids in prefixes:
        complete(cluster, ids, max_tokens=4)
    wait_until(lambda: slabs_are_known(cluster), timeout_s=LEARNED_TIMEOUT_S, what="the slab")
    before = cluster.status()["directory"]
    old = directory_pid(cluster)
    kill(old)
    for n, ids in enumerate(prefixes):
        body, _ = complete(cluster, ids + prompt(BLOCK, 9200 + n), max_tokens=4)
        assert body["choices"][0]["token_ids"]

    def is_back() -> bool:
        known = cluster.status()["directory"]
        lost = known["degraded_total"].get("directory lost", 0)
        was_lost = lost > before["degraded_total"].get("directory lost", 0)
        return was_lost and known["heard_age_s"] is not None and slabs_are_known(cluster)

    wait_until(is_back, timeout_s=LEARNED_TIMEOUT_S, what="all blocks known again")
    assert directory_pid(cluster) != old
    assert all(source["freshness"] == "exact" for source in sources(cluster, ""))
    compared = cluster.status()["directory"]

    def is_compared() -> bool:
        now = cluster.status()["directory"]["digests_equal_total"]
        return bool(now >= compared["digests_equal_total"] + 6)

    wait_until(is_compared, timeout_s=LEARNED_TIMEOUT_S, what="digests of slab and engines")
    assert cluster.status()["directory"]["digests_differ_total"] == 0
    told = cluster.cli("status", "--once").stdout
    assert " 0 different; in doubt: " in " ".join(told.split())


def test_a_restarted_worker_finds_the_same_blocks_by_name_and_its_old_cache_is_forgotten(
    cluster: Cluster,
) -> None:
    # DIR-01 and DIR-03: workers' hash seeds are random and differ; a cache ends with its engine.
    ids = prompt(LONG, 9300)
    first = reference(cluster, ids, max_tokens=8, ignore_eos=True)
    wait_until(lambda: slabs_are_known(cluster), timeout_s=LEARNED_TIMEOUT_S, what="the slab")
    victims = [cluster.worker(role) for role in ("decode", "prefill")]
    for victim in victims:
        kill(victim["pid"])
    old = {f"engine:{victim['id']}" for victim in victims}

    def are_forgotten() -> bool:
        return not old & {source["source"] for source in sources(cluster, "engine:")}

    wait_until(
        are_forgotten, timeout_s=LEARNED_TIMEOUT_S, what="the dead engines' blocks to vanish"
    )
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="replacements")
    assert {cluster.worker(role)["pid"] for role in ("decode", "prefill")}.isdisjoint(
        victim["pid"] for victim in victims
    )
    again, trace = complete(cluster, ids, max_tokens=8, ignore_eos=True)
    check_tokens(again["choices"][0]["token_ids"], first)
    assert loaded_blocks(cluster, trace) >= LONG // BLOCK - 1, "named as the dead ones named them"


def test_a_stopped_agents_slab_is_left_out_of_account_and_counts_again_when_it_goes_on(
    cluster: Cluster,
) -> None:
    complete(cluster, prompt(LONG, 9400), max_tokens=4)
    wait_until(lambda: slabs_are_known(cluster), timeout_s=LEARNED_TIMEOUT_S, what="the slab")
    (node,) = cluster.ledger()
    held = node["scan"]["published"]
    doubts = cluster.status()["router"]["fallbacks_total"]["slab_in_doubt"]
    os.kill(node["pid"], signal.SIGSTOP)
    try:

        def is_in_doubt() -> bool:
            slabs = [(s["freshness"], s["reason"]) for s in sources(cluster, "slab:")]
            return slabs == [("degraded", "silent")]

        wait_until(is_in_doubt, timeout_s=LEARNED_TIMEOUT_S, what="the silence to be noticed")
        body, _ = complete(cluster, prompt(BLOCK, 9401), max_tokens=4)
        assert body["choices"][0]["token_ids"]
        assert cluster.status()["router"]["fallbacks_total"]["slab_in_doubt"] > doubts
    finally:
        os.kill(node["pid"], signal.SIGCONT)
    wait_until(lambda: slabs_are_known(cluster), timeout_s=LEARNED_TIMEOUT_S, what="the old slab")
    (after,) = cluster.ledger()
    assert after["pid"] == node["pid"]
    # A full slab may have given a block up for the request in between.
    assert after["scan"]["published"] >= held - EVICTED_MAX
    assert cluster.status()["directory"]["digests_differ_total"] == 0
