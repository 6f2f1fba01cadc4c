"""The shell round shadow_audit: carries its effects to links, and engines' outputs to it.

Called by engine_client. No decision is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from deployments.engine.audits import as_audit, audit_step, is_comparable
from deployments.engine.codec import encode_request
from deployments.engine.messages import EngineCoreOutput
from deployments.flow.flow_types import Role
from deployments.flow.shadow_audit import AuditEffect, AuditSettings, ShadowAudits, StartAudit
from deployments.ingress.worker_views import WorkerState
from deployments.links import frames


class LinkedWorker(Protocol):
    """The part of a link that is looked at."""

    @property
    def load(self) -> frames.Load:
        """The worker's last word on itself."""


class AuditRuns:
    """The audits of one ingress."""

    def __init__(
        self,
        settings: AuditSettings,
        block_size: int,
        send: Callable[[str, frames.Message], None],
        note: Callable[[str, str], None],
    ) -> None:
        """send(worker, message); note(attempt, what) keeps the event log."""
        self.core = ShadowAudits(settings, block_size, is_comparable)
        self._send = send
        self._note = note

    def before_submit(self, worker: str) -> None:
        """A user's request is about to be sent there."""
        self._carry_out(self.core.user_goes_to(worker))

    def users_of(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """A step's outputs without those of audits, which are compared."""
        if not self.core.started_total:
            return outputs
        users = []
        for output in outputs:
            if self.core.is_audit(output.request_id):
                self._carry_out(self.core.outputs(output.request_id, audit_step(output)))
            else:
                users.append(output)
        return users

    def tick(
        self,
        states: Iterable[WorkerState],
        links: Mapping[str, LinkedWorker],
        in_flight: Iterable[int],
        now_s: float,
    ) -> None:
        """Call about twice a second. in_flight: users' requests of this ingress, by stage."""
        ready = (state.worker for state in states if state.state == "ready")
        loads = {worker: links[worker].load for worker in ready if worker in links}
        busy = {worker: load.running + load.waiting for worker, load in loads.items()}
        self._carry_out(self.core.tick(busy, now_s, users=sum(in_flight)))

    def _carry_out(self, effects: Sequence[AuditEffect]) -> None:
        for effect in effects:
            if not isinstance(effect, StartAudit):
                self._send(effect.worker, frames.Abort([effect.attempt]))
                continue
            request = encode_request(as_audit(effect.payload, effect.attempt, effect.output_tokens))
            self._note(effect.attempt, f"audit submitted to {effect.worker}")
            role = Role.DECODE.value
            message = frames.Submit(effect.attempt, role, request, [], None, is_audit=True)
            self._send(effect.worker, message)
