"""Answers of /headwater/status and /headwater/ledger, as an ingress gives them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster import running
from tests.unit.cluster.fake_endpoint import Endpoint

NODE = "0123456789abcdef" * 3
LEASE = {
    "key": "load-7",
    "owner": "decode-1",
    "handoff": False,
    "blocks": 3,
    "awaited": 0,
    "age_s": 1.25,
    "expires_in_s": 28.75,
}

FILL = {
    "owner": "prefill-1",
    "state": "filling",
    "slots": 1,
    "age_s": 0.5,
    "expires_in_s": 59.5,
}
WAIT = {"key": "load-9", "owner": "decode-2", "blocks": 5, "age_s": 0.1, "expires_in_s": 0.9}
HELD: dict[str, Any] = {
    "workers": [
        {
            "worker": "decode-1",
            "attempts": [
                {"attempt": "cmpl-7~2", "owner": "ingress-1", "status": "running", "age_s": 3.0}
            ],
            "loads": [
                {
                    "request": "cmpl-8~1",
                    "lease": "load-8",
                    "blocks": 9,
                    "aborted": True,
                    "age_s": 0.25,
                }
            ],
            "staging": [{"owner": "10.0.0.2:7", "state": "quarantined", "slots": 2, "age_s": 40.0}],
            "staging_slots": 16,
        },
        {"worker": "prefill-1", "error": "its link ended"},
    ],
    "requests": [
        {
            "request": "cmpl-7",
            "trace": "cmpl-7",
            "stage": "decode",
            "age_s": 4.0,
            "worker": "decode-1",
            "attempt_age_s": 3.1,
            "handoff": None,
        },
        {
            "request": "cmpl-9",
            "trace": "cmpl-9",
            "stage": "parked",
            "age_s": 1.0,
            "worker": None,
            "attempt_age_s": None,
            "handoff": "cmpl-9~1",
        },
    ],
}


def worker(name: str, role: str, **changes: Any) -> dict[str, Any]:
    """A linked worker."""
    linked = {
        "id": name,
        "role": role,
        "model": "m",
        "pid": 4711,
        "node": NODE,
        "state": "ready",
        "why": "",
        "running": 2,
        "waiting": 5,
        "queued_tokens": 777,
        "free_blocks": 120,
        "total_blocks": 135,
        "blocks_published_total": 31,
        "blocks_loaded_total": 17,
        "prompt_tokens_total": 200,
        "cached_tokens_total": 50,
        "stalled_s": 0.0,
        "degraded": "",
    }
    return {**linked, **changes}


def unlinked(name: str, role: str, state: str) -> dict[str, Any]:
    """A worker of which nothing is heard."""
    known = worker(name, role, state=state)
    return {key: known[key] for key in ("id", "role", "model", "pid", "node", "state", "why")}


def status(**changes: Any) -> dict[str, Any]:
    """Two workers, some requests."""
    cached = {"prompt_tokens": 400, "cached_tokens": 100, "cached_share": 0.25}
    nothing = {"prompt_tokens": 0, "cached_tokens": 0, "cached_share": None}
    known = {
        "ingress": "ingress-1",
        "model": "m",
        "workers": [worker("decode-1", "decode"), worker("prefill-1", "prefill")],
        "requests": {
            "in_flight": {"parked": 0, "prefill": 1, "handover": 0, "decode": 3},
            "outcomes": {"finished": 12, "cancelled": 1, "refused": 0, "failed": 0},
            "handovers_total": 9,
            "resumes_total": 2,
            "late_outputs_total": 0,
            "role_fallbacks_total": 0,
        },
        "cache": {"total": cached, "last_minute": nothing},
        "audits": {"share": 0.0, "outcomes": {"agreed": 0, "disagreed": 0}},
        "directory": {
            "heard_age_s": 0.31,
            "sources": [
                {"source": f"slab:{NODE}", "blocks": 44, "freshness": "exact", "reason": ""},
                {"source": "engine:decode-1", "blocks": 8, "freshness": "exact", "reason": ""},
            ],
            "digests_equal_total": 31,
            "digests_differ_total": 1,
            "degraded_total": {"gap": 2, "digest": 1},
        },
        "admission": {"in_flight": 4, "limit": 40, "slots": 32, "refused_total": 6},
        "degraded": [],
    }
    return {**known, **changes}


def node(**changes: Any) -> dict[str, Any]:
    """A node with one lease."""
    books = {
        "slots_total": 182,
        "free": 170,
        "filling": 1,
        "quarantined": 0,
        "published": 11,
        "retired": 0,
        "leased_slots": 3,
        "leases": [LEASE],
        "fills": [FILL],
        "waits": [WAIT],
    }
    return {"node": NODE, "pid": 4712, "books": books, **changes}


def serve(server: Endpoint, state_dir: Path, **changes: Any) -> None:
    """Let the fake endpoint answer as a cluster that this process has started."""
    pid = os.getpid()
    mine = running.Running(pid, running.started_ticks(pid) or 0, server.url, None, "app", "m")
    running.write(state_dir, mine)
    server.objects |= {
        "/headwater/status": status(**changes),
        "/headwater/ledger?scan=false&owners=false": {"nodes": [node()]},
        "/headwater/ledger?scan=false&owners=true": {"nodes": [node()], **HELD},
        "/headwater/ledger?scan=true&owners=true": {"nodes": [node(scan={"free": 170})], **HELD},
    }
