"""A request of a running cluster, held in one stage of its life by SIGSTOP, and a fault.

The cells are tests/leaks/matrix.py's. Real engines have no gates: the worker that has the request
is stopped when the agent's ledger and the ingress say that the stage has come, and they are looked
at again once it stands; if the stage is over by then, it goes on, and another prompt is tried. For
a load it is let go on by milliseconds until its lease is open. What the stages mean here where that
is not what matrix.py says: queued is in the worker's inbox; prefilling is before, published after a
first part of the prompt was published.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil

from tests.e2e.client import RawStream, body_of, raw_stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster
from tests.e2e.corpus import BATCHED_TOKENS, BLOCK, prompt
from tests.leaks.matrix import Fault, Stage
from tests.waiting import wait_until

LONG = 1700
LAST_STEPS = (LONG // BATCHED_TOKENS - 1) * BATCHED_TOKENS  # where the last two steps begin
TOKENS = 12
TRIES = 12
STAGE_S = 30.0
EXPIRED_S = 90.0  # leases of 30 s
DECODED = 4
BURST_S = 0.005  # a stopped worker goes on for so long, to be looked at again


def actor_pid(cluster: Cluster, kind: str) -> int | None:
    """The process of one of Ray's actors, among those that `serve` has started."""
    running = json.loads((cluster.state_dir / "running.json").read_text())
    for process in psutil.Process(running["pid"]).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::{kind}"):
                return process.pid
    return None


def token_ids(raw: RawStream) -> list[int]:
    """Of all whole events so far."""
    found: list[int] = []
    for line in raw.received.split(b"\n"):
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    found += choice.get("token_ids") or []
    return found


class Held:
    """One request that stands in its stage, the holder stopped."""

    def __init__(self, cluster: Cluster, stage: Stage, seed: int) -> None:
        self.cluster, self.stage = cluster, stage
        self.ids = prompt(LONG, seed)
        self.name = f"{stage}-{uuid.uuid4().hex}"
        self.holder = cluster.worker(stage.role)
        self.raw: RawStream

    def stop(self) -> None:
        os.kill(self.holder["pid"], signal.SIGSTOP)

    def go_on(self) -> None:
        """Also where it was killed meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.holder["pid"], signal.SIGCONT)

    def books(self) -> dict[str, Any]:
        reply = self.cluster.http.get("/headwater/ledger?scan=false&owners=false").json()
        (node,) = reply["nodes"]
        return dict(node["books"])

    def lease(self, *, handoff: bool) -> dict[str, Any] | None:
        leases = (dict(one) for one in self.books()["leases"])
        return next((x for x in leases if self.name in x["key"] and x["handoff"] == handoff), None)

    def flow_stage(self) -> str:
        flying = self.cluster.status()["requests"]["in_flight"]
        return next((stage for stage, count in flying.items() if count), "ended")

    def reach(self) -> None:
        """Wait for the stage, and stop whoever has the request; it may be over by then."""
        match self.stage:
            case Stage.QUEUED:
                pass  # stopped before it came
            case Stage.PREFILLING:
                self.wait(lambda: self.lease(handoff=True))
            case Stage.PUBLISHED:
                self.wait(lambda: (self.lease(handoff=True) or {}).get("blocks"))
            case Stage.HANDING_OVER:
                self.wait(self.is_nearly_prefilled)
                self.stop()
                self.raw.read_events(1)
            case Stage.LOADING:
                self.wait(self.is_nearly_prefilled)
                self.stop()
                self.raw.read_events(1)
                while self.flow_stage() == "handover" and not self.lease(handoff=False):
                    self.go_on()
                    time.sleep(BURST_S)
                    self.stop()
            case Stage.DECODING:
                self.raw.read_events(DECODED)
            case Stage.FINISHING:
                self.raw.read_events(TOKENS - 1)
        self.stop()

    def is_nearly_prefilled(self) -> bool:
        """All steps of its prefill but the last two have published their blocks.

        A holder that stood all the prefill long would be given nothing: it is silent.
        """
        lease = self.lease(handoff=True)
        return lease is not None and lease["blocks"] >= LAST_STEPS // BLOCK

    def wait(self, condition: Any) -> None:
        wait_until(condition, timeout_s=STAGE_S, what=str(self.stage))

    def is_in_stage(self) -> bool:
        """The holder stands: what ledger and ingress say now stays so."""
        handoff, load = self.lease(handoff=True), self.lease(handoff=False)
        blocks = 0 if handoff is None else handoff["blocks"]
        is_open = {
            Stage.QUEUED: handoff is None and load is None,
            Stage.PREFILLING: handoff is not None and blocks == 0,
            Stage.PUBLISHED: blocks > 0,
            Stage.HANDING_OVER: handoff is not None,
            Stage.LOADING: load is not None and handoff is None,
            Stage.DECODING: handoff is None,
            Stage.FINISHING: handoff is None,
        }[self.stage]
        is_at_holder = self.where() == self.holder["id"]
        return is_open and is_at_holder and self.flow_stage() == self.stage.seen_by_ingress

    def where(self) -> str:
        """The worker that it was given to last, by the event log."""
        given = [
            what.split()[2]
            for _, subject, what in self.cluster.event_log()
            if self.name in subject and what.startswith("submitted")
        ]
        return given[-1] if given else "nowhere yet"


@contextlib.contextmanager
def held(cluster: Cluster, stage: Stage, seed: int) -> Iterator[Held]:
    """A request in that stage, proven; at the end its holder goes on, if it lives."""
    for number in range(TRIES):
        one = Held(cluster, stage, seed + number)
        if stage is Stage.QUEUED:
            one.stop()
        body = body_of(one.ids, max_tokens=TOKENS, ignore_eos=True)
        try:
            with raw_stream(cluster, body, one.name) as one.raw:
                if stage is Stage.QUEUED:
                    one.wait(lambda: one.where() != "nowhere yet")  # noqa: B023 - asked at once
                one.reach()
                if one.is_in_stage():
                    yield one
                    return
                one.go_on()
                one.raw.read_until(lambda got: b"data: [DONE]" in got)
        finally:
            one.go_on()
    raise AssertionError(f"{stage} was over each time, in {TRIES} tries")


def hit(one: Held, fault: Fault) -> None:
    """Carry the fault out; it has landed when this returns."""
    cluster = one.cluster
    match fault:
        case Fault.CLIENT_ABORT:
            one.raw.reset()
        case Fault.DEADLINE:
            pass_deadlines(one)
        case Fault.PREFILL_KILLED | Fault.DECODE_KILLED:
            role = "prefill" if fault is Fault.PREFILL_KILLED else "decode"
            os.kill(cluster.worker(role)["pid"], signal.SIGKILL)
        case Fault.AGENT_KILLED:
            kill_actor(cluster, "NodeAgent")
        case Fault.DIRECTORY_KILLED:
            kill_actor(cluster, "Directory")
        case Fault.INGRESS_KILLED:
            os.kill(int(cluster.status()["ingress"].split("-")[1]), signal.SIGKILL)


def pass_deadlines(one: Held) -> None:
    """A holder that stands loses its link after 10 s and its leases after 30 s."""
    before = one.books()
    due = len(before["leases"])

    def expired() -> bool:
        books = one.books()
        total = books["counters"]["leases_expired_total"]
        return bool(total >= before["counters"]["leases_expired_total"] + due)

    if due:
        wait_until(expired, timeout_s=EXPIRED_S, what="leases expired")


def kill_actor(cluster: Cluster, kind: str) -> None:
    """Ray starts it again."""
    pid = actor_pid(cluster, kind)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: actor_pid(cluster, kind) not in {None, pid},
        timeout_s=START_TIMEOUT_S,
        what=f"another {kind}",
    )
