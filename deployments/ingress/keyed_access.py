"""Keys in an ingress: the file that is followed, the gate, what keys have used, their metrics.

Called by ingress.py. deployments/edge has the parts; here they are one thing with a task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from http import HTTPMethod
from typing import Any

from deployments.edge.asgi import AsgiApp
from deployments.edge.edge_counts import EdgeCounts
from deployments.edge.http_edge import GENERATE_PATHS
from deployments.edge.key_file import KeyFile, KeySettings
from deployments.edge.key_gate import KeyGate, as_json
from deployments.edge.key_limits import KeyLimiter
from deployments.edge.keys import KeyScope, local_operator
from deployments.edge.tenants import Tenants
from deployments.flow.flow_types import Intake
from deployments.flow.request_record import RecordStore, RequestRecord
from deployments.measures import ingress_list as named
from deployments.totals import gauge_of, totals_of

PUBLISH_S = 1.0


class KeyedAccess:
    """One ingress's."""

    def __init__(
        self, settings: KeySettings, secret: bytes, tenants: Tenants, model: str, counts: EdgeCounts
    ) -> None:
        """Raises RuntimeError that says what to do when the file of keys is not usable."""
        self._limiter = KeyLimiter()
        self._keys = KeyFile(
            settings,
            (local_operator(secret),),
            on_change=lambda table: self._limiter.keep(table.entries),
        )
        self._tenants = tenants
        self._counts = counts
        self._gate: KeyGate | None = None
        self._metrics = KeyMetrics(model)
        self._tasks: list[asyncio.Task[None]] = []

    def charge_for(self, records: RecordStore) -> None:
        """Have each request that ends pay for its tokens. Mutates the store."""
        before = records.on_end

        def ended(intake: Intake, record: RequestRecord, tokens: Sequence[int]) -> None:
            if before is not None:
                before(intake, record, tokens)
            if record.key and record.attempts:  # else nothing was computed
                used = record.prompt_tokens + record.output_tokens
                self._limiter.charge(record.key, used, time.monotonic())

        records.on_end = ended

    def gate_round(self, app: AsgiApp) -> KeyGate:
        """The application behind its gate; from now on the file is followed."""
        assert self._gate is None, "one gate an ingress"
        self._gate = KeyGate(
            app, self._keys, self._tenants, self._limiter, on_refused=self._count_refusal
        )
        self._tasks = [
            asyncio.create_task(self._keys.follow(), name="keys"),
            asyncio.create_task(self._publish(), name="key metrics"),
        ]
        return self._gate

    @property
    def is_closed(self) -> bool:
        """Whether keys are set."""
        return self._keys.table is not None

    def problems(self) -> list[str]:
        """What works less well than it should, in words."""
        return [self._keys.problem] if self._keys.problem else []

    def faults(self) -> list[str]:
        """What has ended and will not come back."""
        return [f"background task {t.get_name()} has ended" for t in self._tasks if t.done()]

    def as_json(self, now_s: float) -> dict[str, Any]:
        """For operators: names, limits and use; never keys."""
        assert self._gate is not None, "asked through the gate"
        return as_json(self._gate, self._keys, self._limiter, now_s)

    def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()

    def _count_refusal(self, method: str, path: str, status: int) -> None:
        """A request for tokens that went no further counts as one that was refused."""
        if method == HTTPMethod.POST and path.rstrip("/") in GENERATE_PATHS:
            self._counts.refused_by_key(status)

    async def _publish(self) -> None:
        assert self._gate is not None
        while True:
            self._metrics.publish(self._gate, self._keys)
            await asyncio.sleep(PUBLISH_S)


class KeyMetrics:
    """How many keys, refusals and failures of the file; no key's name."""

    def __init__(self, model: str) -> None:
        self._labels = {"model": model}
        self._refused = totals_of(named.REFUSED_BY_KEYS)
        self._keys = gauge_of(named.KEYS)
        self._failures = totals_of(named.KEYS_FAILURES)

    def publish(self, gate: KeyGate, keys: KeyFile) -> None:
        """Bring all of them up to date."""
        model = self._labels
        for reason, total in gate.refused.items():
            self._refused.set(model | {"reason": reason}, total)
        entries = () if keys.table is None else keys.table.entries
        for scope in KeyScope:
            count = sum(entry.scope is scope for entry in entries)
            self._keys.set(float(count), model | {"scope": scope.value})
        self._failures.set(model, keys.failures_total)
