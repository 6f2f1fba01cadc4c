"""The lines of `status --ledger`: everything that is held for a request, its owner and its age.

A cluster without requests holds nothing: what stays here has leaked. Called by status_view. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]
NODE_CHARACTERS = 8


def held_lines(nodes: Iterable[Found], held: Mapping[str, Sequence[Found]]) -> list[str]:
    """Slabs by node, then workers, then the ingress's own requests."""
    lines = [line for node in nodes for line in _of_node(node)]
    lines += [line for worker in held.get("workers", ()) for line in _of_worker(worker)]
    if "requests" in held:
        lines += _of_ingress(held["requests"])
    return lines


def _of_node(node: Found) -> list[str]:
    name = node["node"][:NODE_CHARACTERS]
    if "error" in node:
        return [f"Slab of node {name}: {node['error']}"]
    leases, fills, waits = (node["books"][what] for what in ("leases", "fills", "waits"))
    return [
        (
            f"Slab of node {name}: {_count(leases, 'lease')}, {len(waits)} put off, "
            f"{_count(fills, 'owner')} filling slots."
        ),
        *(_lease(lease) for lease in leases),
        *(
            f"  lease {wait['key']} of {wait['owner']}: waits for some of {wait['blocks']} blocks, "
            f"{_old(wait)}, ends in {wait['expires_in_s']:.1f} s"
            for wait in waits
        ),
        *(_fill(fill) for fill in fills),
    ]


def _lease(lease: Found) -> str:
    kind = "hand-off" if lease["handoff"] else "lease"
    awaited = f" and {lease['awaited']} to come" if lease["awaited"] else ""
    return (
        f"  {kind} {lease['key']} of {lease['owner']}: {lease['blocks']} blocks{awaited}, "
        f"{lease['age_s']:.1f} s old, ends in {lease['expires_in_s']:.1f} s"
    )


def _fill(fill: Found) -> str:
    end = (
        f"ends in {fill['expires_in_s']:.1f} s"
        if fill["state"] == "filling"
        else "until their writer has stopped"
    )
    return f"  {fill['slots']} slots {fill['state']} by {fill['owner']}, {_old(fill)}, {end}"


def _of_worker(worker: Found) -> list[str]:
    name = worker["worker"]
    if "error" in worker:
        return [f"Worker {name}: {worker['error']}"]
    attempts, loads, staging = (worker[what] for what in ("attempts", "loads", "staging"))
    used = sum(use["slots"] for use in staging)
    return [
        (
            f"Worker {name}: {_count(attempts, 'attempt')}, {_count(loads, 'load')}, "
            f"{used} of {worker['staging_slots']} staging slots."
        ),
        *(f"  attempt {a['attempt']} of {a['owner']}: {a['status']}, {_old(a)}" for a in attempts),
        *(_load(load) for load in loads),
        *(f"  {s['slots']} staging slots {s['state']} by {s['owner']}, {_old(s)}" for s in staging),
    ]


def _load(load: Found) -> str:
    state = ", aborted" if load["aborted"] else ""
    return (
        f"  load for {load['request']} under {load['lease']}: {load['blocks']} blocks{state}, "
        f"{_old(load)}"
    )


def _of_ingress(requests: Sequence[Found]) -> list[str]:
    return [
        f"Ingress: {_count(requests, 'request')}.",
        *(
            f"  request {request['request']}: {request['stage']}"
            + (f" at {request['worker']}" if request["worker"] else "")
            + f", {_old(request)}"
            + (f", hand-off {request['handoff']} open" if request["handoff"] else "")
            for request in requests
        ),
    ]


def _old(one: Found) -> str:
    return f"{one['age_s']:.1f} s old"


def _count(things: Sequence[object], name: str) -> str:
    if not things:
        return f"no {name}s"
    return f"1 {name}" if len(things) == 1 else f"{len(things)} {name}s"
