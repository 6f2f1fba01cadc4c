"""What an operator may know of all that is held for requests: by this ingress, and by its workers.

Each worker is asked over its link (frames.AskLedger) and answers once its engine's thread turns.
Called by engine_client (what comes in) and ingress (`/headwater/ledger`, which `status --ledger`
prints). Everything runs on the ingress's event loop. Must not change anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from deployments.flow.flow_request import FlowRequest
from deployments.ingress.worker_links import WorkerLinks
from deployments.links import frames

ANSWER_TIMEOUT_S = 5.0


class WorkerLedgers:
    """Those of one ingress's linked workers. Who asks meanwhile shares the question."""

    def __init__(self, links: WorkerLinks) -> None:
        self._links = links
        self._asked: dict[str, asyncio.Future[frames.WorkerLedger]] = {}

    def heard(self, worker: str, ledger: frames.WorkerLedger) -> None:
        """A worker's answer."""
        asked = self._asked.pop(worker, None)
        if asked is not None:
            asked.set_result(ledger)

    async def ask_all(self, timeout_s: float = ANSWER_TIMEOUT_S) -> list[dict[str, Any]]:
        """One entry a linked worker, sorted by name: what it holds, or why it does not say."""
        loop = asyncio.get_running_loop()
        workers = sorted(self._links.open)
        self._asked = {name: asked for name, asked in self._asked.items() if name in workers}
        for worker in workers:
            if worker not in self._asked:
                self._asked[worker] = loop.create_future()
                self._links.send(worker, frames.AskLedger())
        asked = {worker: self._asked[worker] for worker in workers}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        return [self._entry(worker, asked[worker], timeout_s) for worker in workers]

    def _entry(
        self, worker: str, asked: asyncio.Future[frames.WorkerLedger], timeout_s: float
    ) -> dict[str, Any]:
        if asked.done():
            found = msgspec.structs.asdict(asked.result())
            return {"worker": worker, **{name: msgspec.to_builtins(found[name]) for name in found}}
        if self._asked.get(worker) is asked:
            del self._asked[worker]  # the next one asks anew
        silent = f"its link ended, or its engine has not turned for {timeout_s:.0f} s"
        return {"worker": worker, "error": silent}


def requests_held(requests: Iterable[FlowRequest], now_s: float) -> list[dict[str, Any]]:
    """Of one ingress: where each request is, since when, and the hand-off that is open for it."""
    return [
        {
            "request": request.intake.request_id,
            "trace": request.intake.trace_id,
            "stage": request.stage.value,
            "age_s": now_s - request.intake.received_s,
            "worker": None if request.attempt is None else request.attempt.worker,
            "attempt_age_s": (
                None if request.attempt is None else now_s - request.attempt.submitted_s
            ),
            "handoff": None if request.handoff is None else request.handoff[1],
        }
        for request in requests
    ]
