"""The ingress replica: vLLM's HTTP application, our edge in front, our engine client behind.

A Serve deployment; several may run, each with its own router and read replica. Called by Serve.
Adds `/ready`, `/headwater/status`, `/headwater/ledger`, `/headwater/requests/...` and the live
page, and answers `/health` in vLLM's place; all other routes are vLLM's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from ray.serve.handle import DeploymentHandle

from deployments.edge.answer_names import NamedAnswers
from deployments.edge.cors import ANY_ORIGIN, Cors
from deployments.edge.disconnect import DisconnectOnCancel
from deployments.edge.front_door import DoorAddress, FrontDoor
from deployments.edge.http_edge import FlowFailure, HttpEdge, HttpTrace, Refusal
from deployments.edge.key_file import KeySettings
from deployments.edge.live_page import mount_live_page
from deployments.edge.request_bounds import MODEL_CHARS_MAX
from deployments.edge.tenants import Tenants
from deployments.engine.settings import FrontEndSettings
from deployments.flow.flow_types import Failure, Outcome
from deployments.flow.request_record import RecordStore
from deployments.flow.request_story import as_json, story
from deployments.ingress.client_settings import ClientSettings
from deployments.ingress.keyed_access import KeyedAccess
from deployments.ingress.membership import MEMBERS, Member
from deployments.ingress.worker_views import WorkerState
from deployments.logs import log_here
from deployments.node.directory_actor import RAY_NAMESPACE
from deployments.node.node_agent import agent_name
from deployments.scaling.notes import notes_of
from deployments.secret import read_secret
from router.admission import Admission, Admitted
from router.route import Router
from router.settings import AdmissionSettings, RouterSettings

log = logging.getLogger("headwater.ingress")

AGENT_TIMEOUT_S = 5.0
_REFUSALS = {
    "queue_full": "All workers are busy and the queue is full.",
    "no_workers": "No worker is there to take requests yet.",
    "deadline": "The request would have to wait longer than it allows.",
}
_FAILURE_STATUS = {failure.code: failure.status for failure in Failure}


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What an ingress replica is made from; travels through Ray as plain values."""

    front_end: FrontEndSettings
    client: ClientSettings
    secret_file: str
    router: RouterSettings
    admission: AdmissionSettings
    body_bytes_max: int = 32 << 20
    tenant_header: str = ""
    tenant_keys_file: str = ""
    keys: KeySettings = field(default_factory=KeySettings)
    allowed_origins: tuple[str, ...] = ()  # pages that may use the API from a browser
    records_max: int = 1024
    door: DoorAddress | None = None  # None: clients come through Serve's proxy
    drain_s: float = 60.0  # in which answers may end once Serve takes this replica away
    is_scaled: bool = False  # whether the number of a role's workers may change
    # Value and reason of each setting that may be left to the start, by its dotted key.
    chosen: dict[str, dict[str, str | int]] = field(default_factory=dict)


class Ingress:
    """The replica. Serve asks it for its ASGI application once."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, settings: IngressSettings, prefill: DeploymentHandle, decode: DeploymentHandle
    ) -> None:
        log_here()
        self._settings = settings
        for handle in (prefill, decode):
            handle.options(stream=True)  # starts its MembershipRouter in this process
        self._door: FrontDoor | None = None
        self._records = RecordStore(settings.records_max)
        self._router = Router(settings.router)
        self._admission = Admission(settings.admission)
        # vLLM takes seconds to import: here, in the replica, never where the class is only named.
        from deployments.ingress.engine_client import EngineClient

        secret = read_secret(settings.secret_file)
        self._tenants = Tenants(
            secret, header=settings.tenant_header, keys_file=settings.tenant_keys_file
        )
        self._client = EngineClient(settings.client, self._router, self._records, secret)
        model = settings.client.model
        self._client.admission_now = lambda now_s: self._admission.view(model, now_s)
        self._access = KeyedAccess(
            settings.keys, secret, self._tenants, settings.client.model, self._client.edge_counts
        )
        self._access.charge_for(self._records)
        self._client.key_problems = self._access.problems

    async def __serve_build_asgi_app__(self) -> Cors:
        """Late-bound application (Ray Serve calls this on the replica's loop)."""
        from deployments.engine.front_end import build_front_end, explain

        app, llm = await build_front_end(self._settings.front_end, self._client)
        await self._client.start(llm)
        _replace_route(app, "/health", self._health)
        app.add_api_route("/v1/models/{model:path}", self._model)
        app.add_api_route("/ready", self._ready)
        app.add_api_route("/headwater/status", self._status)
        app.add_api_route("/headwater/ledger", self._ledger)
        app.add_api_route("/headwater/events", self._events)
        app.add_api_route("/headwater/requests", self._latest)
        app.add_api_route("/headwater/requests/{trace_id}", self._explain)
        mount_live_page(app, self._records)
        # Round the application, not in it: vLLM's has begun, and takes no more middleware.
        edge = HttpEdge(
            DisconnectOnCancel(app),
            self,
            body_bytes_max=self._settings.body_bytes_max,
            tenant_of=self._tenants.of,
            choices_max=self._settings.front_end.engine_requests_max,
            explain=explain,
        )
        cors = Cors(self._access.gate_round(edge), self._settings.allowed_origins)
        if self._settings.door is not None:  # Serve's proxy names answers itself
            self._door = FrontDoor(self._settings.door, NamedAnswers(cors))
        if ANY_ORIGIN in self._settings.allowed_origins and not self._access.is_closed:
            log.warning(
                'http.allowed_origins is "*" and no API keys are set: any web page that a '
                "browser on this network opens can use the model; name origins, or add a key "
                "(./headwater keys add NAME)"
            )
        return cors

    async def check_health(self) -> None:
        """Serve replaces this replica when a part of it has ended. Raises RuntimeError."""
        faults = self._faults()
        if faults:
            raise RuntimeError("; ".join(faults))

    def _faults(self) -> list[str]:
        """What of this replica has ended and will not come back."""
        door = self._door.fault() if self._door else None
        return [*self._client.faults(), *self._access.faults(), *([door] if door else [])]

    # ---- http_edge.EdgeEvents ---------------------------------------------------------------

    def admit(self, trace_id: str, body_bytes: int) -> Refusal | None:  # noqa: ARG002
        """Bound the requests in flight by the workers' slots and the queue."""
        model, now_s = self._settings.client.model, time.monotonic()
        self._admission.set_slots(model, self._router.slots(model))
        verdict = self._admission.offer(trace_id, model, now_s)
        if isinstance(verdict, Admitted):
            self._client.front_end.began(trace_id, now_s)
            self._client.finished[trace_id] = []
            return None
        status = 503 if verdict.reason == "no_workers" else 429
        return Refusal(verdict.retry_after_s, _REFUSALS[verdict.reason], status)

    def release(self, trace_id: str) -> None:
        """The HTTP exchange is over, however it ended."""
        finished, now_s = self._client.finished.pop(trace_id, []), time.monotonic()
        for record in finished:
            if record.delivered_s is None and record.first_token_s is not None:
                self._client.request_metrics.first_byte(record)  # an answer in one piece
        self._client.front_end.left(trace_id, now_s)
        self._admission.release(
            trace_id, self._settings.client.model, now_s, completed=bool(finished)
        )

    def ended(self, trace: HttpTrace) -> None:
        """Count a request of which no engine request was made; the flow counts the others."""
        counts = self._client.edge_counts
        if trace.beyond_key and trace.status is not None:
            counts.refused_by_key(trace.status)
        elif not trace.engine_requests:
            counts.ended(trace.status)

    def first_byte(self, trace_id: str) -> bool:
        """Note the delivery of the first token for each engine request of this trace."""
        records = self._records.get(trace_id)
        for record in records:
            if record.first_token_s is not None and record.delivered_s is None:
                record.delivered_s = time.monotonic()
                self._client.front_end.first_token(record)
                self._client.request_metrics.first_byte(record)
        # Choices of one stream (n > 1) have their first tokens one after the other.
        return bool(records) and all(
            one.delivered_s is not None or one.outcome is not None for one in records
        )

    def failure(self, trace_id: str) -> FlowFailure | None:
        """The failure that the flow ended this trace's request with, from its record."""
        for record in self._records.get(trace_id):
            if record.outcome in {Outcome.FAILED, Outcome.REFUSED}:
                code, _, message = record.detail.partition(": ")
                if code in _FAILURE_STATUS:  # else an engine gave it up, and vLLM says so
                    return FlowFailure(_FAILURE_STATUS[code], code, message)
        return None

    # ---- routes of ours ---------------------------------------------------------------------

    async def _health(self) -> Response:
        """200, without a body, while this ingress is alive, whatever its workers do; 503 else."""
        faults = self._faults()
        if not faults:
            return Response(status_code=200)
        return JSONResponse({"alive": False, "reasons": faults}, status_code=503)

    async def _ready(self) -> JSONResponse:
        """200 when a prefill and a decode worker can take a request; 503 with the reasons else."""
        found = self._client.readiness()
        body = {"ready": found.ready, "missing": found.missing, "reasons": found.reasons}
        if self._access.is_closed:
            del body["reasons"]  # names and addresses are for the operator: status has them
        return JSONResponse(body, status_code=200 if found.ready else 503)

    async def _model(self, model: str, request: Request) -> JSONResponse:
        """One model that is served, as OpenAI describes it; 404 for any other."""
        served = await request.app.state.openai_serving_models.show_available_models()
        for card in served.data:
            if card.id == model:
                return JSONResponse(card.model_dump())
        message = f"The model `{model[:MODEL_CHARS_MAX]}` does not exist."
        told = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
        return JSONResponse({"error": told}, status_code=404)

    async def _status(self) -> JSONResponse:
        """What `headwater status` shows."""
        client, flow = self._client, self._client.flow
        members = MEMBERS.present()
        workers = [
            self._worker_status(members[state.worker], state)
            for state in client.worker_states()
            if state.worker in members
        ]
        now_s, heard_s = time.monotonic(), client.directory_heard_s
        age_s = None if heard_s is None else now_s - heard_s
        body: dict[str, Any] = {
            "ingress": client.ingress_id,
            "model": self._settings.client.model,
            "chosen": self._settings.chosen,
            "workers": workers,
            "requests": {
                "in_flight": {stage.value: n for stage, n in flow.in_flight().items()},
                "outcomes": {
                    outcome.value: n + client.edge_counts.outcomes[outcome]
                    for outcome, n in flow.outcomes.items()
                },
                "refused_by_status": dict(client.edge_counts.refused_by_status),
                "handovers_total": flow.handovers_total,
                "resumes_total": flow.resumes_total,
                "late_outputs_total": flow.late_outputs_total,
                "role_fallbacks_total": flow.role_fallbacks_total,
            },
            "front_end": client.front_end.as_json(now_s),
            "cache": client.cached_share.as_json(now_s),
            "audits": client.audits.as_json(),
            "directory": {"heard_age_s": age_s, "sources": self._sources()} | self._audits(),
            "router": self._router_status(now_s),
            "scaling": await self._scaling(),
            "admission": asdict(self._admission.view(self._settings.client.model, now_s)),
            "keys": self._access.as_json(now_s),
            "degraded": [
                *(words for found in client.degraded().values() for words in found),
                *(
                    f"{one['id']} on node {one['node']}: {one['slow']}"
                    for one in workers
                    if one.get("slow")
                ),
            ],
        }
        return JSONResponse(body)

    async def _scaling(self) -> list[dict[str, Any]]:
        """What the autoscaler decided last, by role, with its reasons."""
        app = self._settings.client.directory.app
        return await asyncio.to_thread(notes_of, app) if self._settings.is_scaled else []

    def _router_status(self, now_s: float) -> dict[str, Any]:
        """Load by worker, what decisions had to do without, and how full the index is."""
        router, model = self._router, self._settings.client.model
        return {
            "load": [asdict(load) for load in router.load_snapshot(now_s)],
            "fallbacks_total": dict(router.fallbacks_total),
            "index_blocks": router.index.blocks(model),
            "index_blocks_max": router.settings.index_blocks_max,
            "index_evictions_total": router.index.evicted_total(model),
            "index_locations": router.index.locations,
            "index_locations_max": router.index.locations_max,
        }

    def _audits(self) -> dict[str, Any]:
        """How often digests were compared, and why streams were in doubt, since the start."""
        counters = self._router.index.counters
        return {
            "digests_equal_total": counters.digests_equal_total,
            "digests_differ_total": counters.digests_differ_total,
            "degraded_total": dict(counters.degraded_total),
        }

    def _sources(self) -> list[dict[str, Any]]:
        """What this ingress believes each slab and engine to hold, and how sure it is."""
        return [
            {
                "source": view.source,
                "model": view.model,
                "blocks": view.blocks,
                "sequence": view.sequence,
                "freshness": view.freshness.value,
                "reason": view.reason,
            }
            for view in self._router.index.streams()
        ]

    def _worker_status(self, member: Member, state: WorkerState) -> dict[str, Any]:
        status: dict[str, Any] = {
            "id": member.worker,
            "role": member.role,
            "model": member.model,
            "pid": member.pid,
            "node": member.node,
            "state": state.state,
            "why": state.why,
        }
        link = self._client.links.open.get(member.worker)
        if link is not None:
            load = link.load
            status |= {name: getattr(load, name) for name in load.__struct_fields__}
            status["slots"] = link.welcome.slots
            status["step_tokens_max"] = link.welcome.step_tokens_max
            status["slow"] = link.welcome.slow
        return status

    async def _ledger(self, *, scan: bool = True, owners: bool = True) -> JSONResponse:
        """Slots and leases of every node's slab, and what workers and we hold, with owners, ages.

        For who asks every second: scan False leaves out the independent scan of all slots, owners
        False what is not the slabs'.
        """
        nodes = sorted({member.node for member in MEMBERS.present().values()})
        app, model = self._settings.client.directory.app, self._settings.client.model
        ledgers: list[dict[str, Any]] = []
        for node in nodes:
            try:
                agent = ray.get_actor(agent_name(app, node), namespace=RAY_NAMESPACE)
                async with asyncio.timeout(AGENT_TIMEOUT_S):
                    ledgers.append(await agent.ledger.remote(model, scan=scan))
            except (ray.exceptions.RayError, ValueError, TimeoutError) as lost:
                error = str(lost) or f"the node's agent is silent for {AGENT_TIMEOUT_S:.0f} s"
                ledgers.append({"node": node, "error": error})
        held = await self._client.held() if owners else {}
        return JSONResponse({"nodes": ledgers, **held})

    async def _events(self) -> JSONResponse:
        """The ingress's event log, oldest first: (seconds on its clock, subject, what)."""
        return JSONResponse({"events": list(self._client.events)})

    async def _latest(self, count: int = 20) -> JSONResponse:
        """The newest request names."""
        return JSONResponse({"requests": list(self._records.latest(count))})

    async def _explain(self, trace_id: str) -> JSONResponse:
        """One request's record, as data and as a story."""
        records = self._records.get(trace_id)
        if not records:
            message = f"No record of request {trace_id!r}: unknown, or forgotten since."
            return JSONResponse({"error": {"message": message}}, status_code=404)
        body = {"records": [as_json(r) for r in records], "story": story(records)}
        return JSONResponse(body)

    async def __del__(self) -> None:
        """Serve ends this replica: running answers end first, then the links."""
        if not hasattr(self, "_client"):
            return
        self._client.leave()
        if self._door is not None:
            await self._door.close(self._settings.drain_s)
        self._access.close()
        self._client.close()


def _replace_route(app: FastAPI, path: str, endpoint: Callable[..., Any]) -> None:
    """Answer a path of vLLM's application ourselves; its interface stays as vLLM describes it."""
    (theirs,) = (route for route in app.router.routes if getattr(route, "path", "") == path)
    assert isinstance(theirs, APIRoute)
    app.router.routes.remove(theirs)
    app.add_api_route(
        path,
        endpoint,
        name=theirs.name,
        description=theirs.description,
        operation_id=theirs.unique_id,
        response_class=Response,
    )
