"""Windows and looks of clusters that never were: quiet ones, changed where a test needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.diagnosis.looks import Look
from cluster.diagnosis.window import FlowWindow, FrontEndWindow, NodeWindow, Window, WorkerWindow
from tests.unit.cluster import status_examples

SECONDS = 5.0
QUIET_FRONT_END = FrontEndWindow(SECONDS, loop_cpu_share=0.05, process_cpu_share=0.07, ticks=10)
QUIET_FLOW = FlowWindow(looks=21, limit=24)
QUIET_NODE = NodeWindow("0123", slots_total=180, free=150, leased=0)


def prefill(name: str = "prefill-1", **changes: Any) -> WorkerWindow:
    return replace(_worker(name), role="prefill", **changes)


def decode(name: str = "decode-1", **changes: Any) -> WorkerWindow:
    return replace(_worker(name), **changes)


def _worker(name: str) -> WorkerWindow:
    return WorkerWindow(name, "decode", SECONDS, slots=16, free_blocks=135, total_blocks=135)


def window(*workers: WorkerWindow, **changes: Any) -> Window:
    """A quiet cluster; in place of its workers, those of a role that are given."""
    given = {worker.role for worker in workers}
    quiet = [worker for worker in (prefill(), decode()) if worker.role not in given]
    whole = Window(SECONDS, (*quiet, *workers), QUIET_FLOW, QUIET_FRONT_END, (QUIET_NODE,), (), ())
    return replace(whole, **changes)


def flow(**changes: Any) -> FlowWindow:
    return replace(QUIET_FLOW, **changes)


def front_end(**changes: Any) -> FrontEndWindow:
    return replace(QUIET_FRONT_END, **changes)


# ---- looks --------------------------------------------------------------------------------------

PARTS = ("tokenise", "queue", "prefill", "publish", "handover", "delivery")
TOTALS = ("busy", "prefill", "short", "full", "loading", "wait", "load_wait")


def worker_status(name: str, role: str, **changes: Any) -> dict[str, Any]:
    """Of a linked worker that has done nothing yet, 100 s after its clock began."""
    zeros = {f"{total}_s_total": 0.0 for total in TOTALS}
    idle = {
        **dict.fromkeys(("running", "waiting", "queued_tokens", "batch", "step_tokens"), 0),
        **dict.fromkeys(("steps", "preemptions_total", "blocks_loaded_total"), 0),
        **dict.fromkeys(("generated_tokens_total", "computed_tokens_total"), 0),
        **dict.fromkeys(("prompt_tokens_total", "cached_tokens_total"), 0),
        "step_ms": 0.0,
        "blocks_pulled_total": 0,
        "slot_bytes": 1_000_000,
        "clock_s": 100.0,
        "slots": 16,
    }
    return status_examples.worker(name, role, **{**zeros, **idle, **changes})


def status(*workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Of an ingress that has done nothing yet."""
    quiet = {
        "in_flight": dict.fromkeys(("parked", "prefill", "handover", "decode"), 0),
        "outcomes": {"finished": 0, "cancelled": 0, "refused": 0, "failed": 0},
        "role_fallbacks_total": 0,
    }
    known = {
        "requests": quiet,
        "admission": {
            **dict.fromkeys(("in_flight", "refused_total", "admitted_total"), 0),
            "limit": 24,
            "slots": 16,
        },
        "front_end": ingress(),
        **changes,
    }
    return status_examples.status(workers=list(workers), **known)


def ingress(**changes: Any) -> dict[str, Any]:
    """The front end's part of a status."""
    first = {"requests_total": 0, **{f"{part}_s_total": 0.0 for part in PARTS}}
    zeros = dict.fromkeys(
        ("busy_s_total", "wait_s_total", "loop_cpu_s_total", "process_cpu_s_total"), 0.0
    )
    known = {"clock_s": 50.0, "untokenised": 0, "ticks_total": 0, "late_s_total": 0.0}
    return {**known, **zeros, "first_tokens": first, **changes}


def looks(*statuses: dict[str, Any], apart_s: float = 1.0) -> list[Look]:
    """One after the other, on a clock of our own; the ingress's clock goes on as long."""
    found: list[Look] = []
    for number, one in enumerate(statuses):
        later_s = number * apart_s
        now = one
        if "front_end" in one:
            front = {**one["front_end"], "clock_s": one["front_end"]["clock_s"] + later_s}
            now = {**one, "front_end": front}
        found.append(Look(7.0 + later_s, now))
    return found
