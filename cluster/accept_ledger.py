"""Whether a cluster's books are at their baseline: `faults_of`.

Called by accept_checks.py. Pure: from the JSON of /headwater/status and /headwater/ledger. Whatever
a request holds at any stage shows in one of these: the ingress's flow and admission, the router's
accounts, the engines' queues and block pools (vLLM's own counts), the slabs' slots and leases, and
the scan of the slot table, which must say what its books say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCANNED = ("free", "filling", "quarantined", "published", "leased_slots")


def faults_of(status: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that is not at its baseline, in words; empty when clean."""
    faults = [
        f"{count} requests in stage {stage}"
        for stage, count in status["requests"]["in_flight"].items()
        if count
    ]
    if status["admission"]["in_flight"]:
        faults.append(f"admission holds {status['admission']['in_flight']} requests")
    faults += [
        f"the router counts work for {load['worker']}"
        for load in status["router"]["load"]
        if load["in_flight"] or load["queued_tokens"]
    ]
    for worker in status["workers"]:
        name = worker["id"]
        if worker["state"] != "ready":
            faults.append(f"{name} is {worker['state']}")
        elif worker["running"] or worker["waiting"]:
            faults.append(f"the engine of {name} runs {worker['running']} requests")
        elif worker["free_blocks"] != worker["total_blocks"]:
            held = worker["total_blocks"] - worker["free_blocks"]
            faults.append(f"the engine of {name} holds {held} blocks")
    if not nodes:
        faults.append("no node tells of its slab")
    for node in nodes:
        faults += _slab_faults(node)
    return faults


def _slab_faults(node: Mapping[str, Any]) -> list[str]:
    name = str(node["node"])[:8]
    if "error" in node:
        return [f"the slab of node {name} is not known: {node['error']}"]
    books, scan = node["books"], node["scan"]
    faults = [
        f"node {name}: the books have {books[what]} {what} slots, the slots say {scan[what]}"
        for what in SCANNED
        if books[what] != scan[what]
    ]
    faults += [
        f"node {name}: {books[what]} slots {what}"
        for what in ("leased_slots", "filling", "quarantined")
        if books[what]
    ]
    if books["leases"]:
        faults.append(f"node {name}: {len(books['leases'])} leases open")
    return faults
