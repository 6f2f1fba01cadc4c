"""The router: candidates, their cost, the decision.

Called by: request_flow (route, submitted, first_token, ended), the links (reports, engine block
events), membership (add_worker, remove_worker), the directory's shell (apply_feed). All on one
thread. Must not: do I/O, read a clock, be random (equal workers are taken in turn, from a seeded
order).

Call `submitted` straight after `route`, without awaiting in between: what is decided but not booked
does not weigh on the next decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from kvcache.directory_types import Effect, Feed
from kvcache.events import (
    ENGINE_PREFIX,
    EventBatch,
    Snapshot,
    StreamDigest,
    engine_source,
    slab_source,
)
from router.choice import Choice, Worker, choose, ttft_ms
from router.cost import CostModel
from router.decision import Decision, Reason, RouteRequest
from router.errors import BlockSizeMismatch, NoWorker, UnknownWorker
from router.load import LoadBook, WorkerLoad
from router.prefix_index import PrefixIndex
from router.pricing import ModelGroup, NodeGroup, Prices, Pricing
from router.settings import RouterSettings
from router.workers import State, WorkerReport, WorkerView


class Router:
    """Decides where requests run, for all models."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self.index = PrefixIndex(self.settings.index_blocks_max)
        self.costs = CostModel(self.settings)
        self._loads = LoadBook(self.settings.report_ttl_s, self.settings.report_margin_s)
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, ModelGroup] = {}
        self._no_handoff: set[str] = set()
        self._pricing = Pricing(self.settings, self._loads, self._no_handoff)
        self._tick = 0
        self.fallbacks_total = {"no_hashes": 0, "engine_in_doubt": 0, "slab_in_doubt": 0}
        """Decisions made without regard to blocks that may have been cached, by reason."""

    # Membership

    def add_worker(self, view: WorkerView) -> None:
        """Add a worker, or take a new view of one (its state, say). Mutates.

        Raises BlockSizeMismatch if the model's other workers have another block size.
        """
        for other in self._workers.values():
            same = other.view.model == view.model and other.view.worker != view.worker
            if same and other.view.block_size != view.block_size:
                here = other.view.block_size
                raise BlockSizeMismatch(view.worker, view.model, here, view.block_size)
        known = self._workers.get(view.worker)
        if known is not None and known.view.model != view.model:
            self.remove_worker(view.worker)
            known = None
        if known is None:
            self._loads.add_worker(view.worker)
            self._workers[view.worker] = Worker(
                view.worker,
                view,
                self.costs.add_worker(view.worker, view.model, view.machine),
                engine_source(view.worker),
                slab_source(view.node),
                crc32(view.worker.encode(), self.settings.seed & 0xFFFFFFFF),
            )
            self._regroup(view.model)
        else:
            known.view, known.slab_source = view, slab_source(view.node)
            self._regroup(view.model)

    def remove_worker(self, worker: str) -> int:
        """Forget a worker with its load, cache and constants; returns its attempts. Mutates."""
        known = self._workers.pop(worker, None)
        if known is None:
            return 0
        self.index.drop_source(known.engine_source)
        self.costs.remove_worker(worker)
        self._regroup(known.view.model)
        return self._loads.remove_worker(worker)

    def set_handoff(self, node: str, *, usable: bool) -> None:
        """Say whether prefill and decode workers of a node can hand over (is its agent alive?)."""
        if usable:
            self._no_handoff.discard(node)
        else:
            self._no_handoff.add(node)

    def workers(self, model: str) -> tuple[WorkerView, ...]:
        """Views of the model's workers, in any state, sorted by name."""
        views = [w.view for w in self._workers.values() if w.view.model == model]
        return tuple(sorted(views, key=lambda view: view.worker))

    def view(self, worker: str) -> WorkerView | None:
        """View of one worker; None when it is not known."""
        known = self._workers.get(worker)
        return None if known is None else known.view

    def is_ready(self, worker: str) -> bool:
        """Whether a worker is known and takes work; one that drains does where none is ready."""
        known = self._workers.get(worker)
        return known is not None and worker in self._models[known.view.model].names

    def is_leaving(self, model: str) -> bool:
        """Whether none of the model's workers is ready: whoever takes work drains."""
        known = self._models.get(model)
        return known is not None and known.is_leaving

    def slots(self, model: str) -> int:
        """Decode slots of the model's ready workers (for admission)."""
        known = self._models.get(model)
        return 0 if known is None else known.slots

    # Blocks

    def apply_batch(self, batch: EventBatch) -> tuple[Effect, ...]:
        """Take a batch from its writer; NeedResync among the effects is for the caller to do.

        Late words of an engine whose worker is gone are left out, or they would stay for ever.
        """
        return self.index.apply(batch) if self._is_heard(batch.source) else ()

    def apply_snapshot(self, snapshot: Snapshot) -> tuple[Effect, ...]:
        """Take a snapshot from its writer."""
        return self.index.apply_snapshot(snapshot) if self._is_heard(snapshot.source) else ()

    def apply_digest(self, told: StreamDigest) -> tuple[Effect, ...]:
        """Compare with a writer's figures; NeedResync as with batches."""
        return self.index.apply_digest(told) if self._is_heard(told.source) else ()

    def apply_feed(self, feed: Feed) -> tuple[Effect, ...]:
        """Take the directory's answer to `events_since(router.index.cursor)`."""
        return self.index.apply_feed(feed)

    # Load and samples

    def worker_report(self, worker: str, report: WorkerReport, now_s: float) -> bool:
        """Take a worker's report; False if it is not known (gone meanwhile)."""
        if report.step_ms is not None and report.running > 0:
            self.costs.observe_step(worker, report.running, report.step_ms)
        return self._loads.report(worker, report, now_s)

    def submitted(self, attempt: str, worker: str, tokens: int, now_s: float) -> bool:
        """Book an attempt with `tokens` to compute; False if the worker is gone."""
        return self._loads.submitted(attempt, worker, tokens, now_s)

    def planned(self, attempt: str, worker: str, now_s: float) -> bool:
        """Book the decode worker that a prefill attempt will hand over to, under the same attempt.

        Until the hand-over that worker does not know of it, so that no report counts it; without
        this, all requests in prefill would be sent to the decode worker that looks idle meanwhile.
        It ends with the prefill attempt. False if the worker is gone.
        """
        return self._loads.submitted(attempt, worker, 0, now_s, planned=True)

    def first_token(self, attempt: str, worker: str | None = None) -> None:
        """The attempt's prompt is computed; its tokens are queued no longer."""
        self._loads.first_token(attempt, worker)

    def ended(self, attempt: str, worker: str | None = None) -> bool:
        """The attempt ended, however; safe to repeat."""
        return self._loads.ended(attempt, worker)

    def load(self, worker: str, now_s: float) -> WorkerLoad:
        """Load of one worker. Raises UnknownWorker."""
        if worker not in self._workers:
            raise UnknownWorker(worker)
        return self._loads.view(worker, now_s)

    def load_snapshot(self, now_s: float) -> tuple[WorkerLoad, ...]:
        """Load of all workers, sorted by name."""
        return tuple(self._loads.view(worker, now_s) for worker in self._loads.workers())

    def observe_prefill(self, worker: str, tokens: int, ms: float, *, pairs: float) -> None:
        """Sample for the fit: see CostModel.observe_prefill."""
        self.costs.observe_prefill(worker, tokens, ms, pairs=pairs)

    def observe_step(self, worker: str, batch: int, ms: float) -> None:
        """Sample for the fit: see CostModel.observe_step."""
        self.costs.observe_step(worker, batch, ms)

    def observe_load(self, worker: str, blocks: int, ms: float) -> None:
        """Sample for the fit: see CostModel.observe_load."""
        self.costs.observe_load(worker, blocks, ms)

    def observe_pull(self, worker: str, blocks: int, ms: float) -> None:
        """Sample for the fit: see CostModel.observe_pull."""
        self.costs.observe_pull(worker, blocks, ms)

    def observe_handoff(self, worker: str, ms: float) -> None:
        """Sample for the fit: see CostModel.observe_handoff."""
        self.costs.observe_handoff(worker, ms)

    # The decision

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """Decide where the request runs. Raises NoWorker. Mutates only the turn of equal workers.

        One dict look-up per block, and some microseconds per worker.
        """
        model = self._models.get(request.model)
        if model is None:
            raise NoWorker(request.model, "decode")
        total_tokens = request.prompt_tokens + request.resume_tokens
        whole = total_tokens // model.block_size
        hashes = request.block_hashes
        matched = self.index.match(
            request.model, hashes if len(hashes) <= whole else hashes[:whole]
        )
        self._tick += 1
        prices = self._pricing.prices(model, request, matched, now_s, self._tick)
        choice = choose(prices.nodes, self.settings, model.block_size, self._tick)
        if choice is None and not prices.complete:  # all of these are excluded; others are not
            prices = self._pricing.prices(
                model, request, matched, now_s, self._tick, everything=True
            )
            choice = choose(prices.nodes, self.settings, model.block_size, self._tick)
        if choice is None:
            decodes = (w for node in model.nodes.values() for w in node.decodes)
            usable = any(worker.name not in request.excluded for worker in decodes)
            raise NoWorker(request.model, "prefill" if usable else "decode")
        return self._decision(request, model, matched, choice, prices)

    def validate(self) -> None:
        """Check all parts. Raises AssertionError."""
        self.index.validate()
        self.costs.validate()
        self._loads.validate()
        assert set(self._loads.workers()) == set(self._workers)
        for name, model in self._models.items():
            grouped = [w for n in model.nodes.values() for w in (*n.prefills, *n.decodes)]
            assert {w.name for w in grouped} == model.names, name
            mine = [w for w in self._workers.values() if w.view.model == name]
            state = _state_that_takes_work(mine)
            assert {w.name for w in grouped} == {w.name for w in mine if w.view.state == state}
            assert model.is_leaving == (state != "ready"), name

    def _decision(
        self,
        request: RouteRequest,
        model: ModelGroup,
        matched: dict[str, int],
        choice: Choice,
        prices: Prices,
    ) -> Decision:
        cost_ms, prefill, decode = choice.pair
        computing = prefill or decode
        cached = computing.cached_blocks * model.block_size
        degraded = tuple(s for s in self.index.degraded(request.model) if s in model.node_of)
        if degraded:
            for kind in {source.partition(":")[0] for source in degraded}:
                self.fallbacks_total[f"{kind}_in_doubt"] += 1
        if not request.block_hashes and request.prompt_tokens >= model.block_size:
            self.fallbacks_total["no_hashes"] += 1
        slab = computing.worker.slab_source
        elsewhere = max(
            (n for s, n in matched.items() if s[:5] == "slab:" and s != slab), default=0
        )
        pull_from = ""
        if computing.pulled_blocks:
            peers = self._pricing.peers(model, matched)
            pull_from = next(model.node_of[s].name for _, s in peers if s != slab)
        return Decision(
            request_id=request.request_id,
            model=request.model,
            prefill=None if prefill is None else prefill.worker.view.worker,
            decode=decode.worker.view.worker,
            reason=self._final_reason(request, choice, prices),
            prefix_information="degraded" if degraded else "exact",
            predicted_ttft_ms=ttft_ms(prefill, decode),
            cost_ms=cost_ms,
            cached_tokens=cached,
            compute_tokens=request.prompt_tokens + request.resume_tokens - cached,
            caused_weight=prices.weight,
            tied=choice.tied,
            candidates=choice.candidates,
            candidates_total=choice.total,
            elsewhere_tokens=elsewhere * model.block_size,
            pull_from=pull_from,
            degraded_sources=degraded,
        )

    def _final_reason(self, request: RouteRequest, choice: Choice, prices: Prices) -> Reason:
        """Say first what left no choice."""
        if request.any_role:
            return "any_role"
        if request.needs_prefill_worker is False:
            return "prefill_not_wanted"
        if not any(node.prefills for node in prices.nodes):
            return "no_prefill_worker"
        return choice.reason

    def _is_heard(self, source: str) -> bool:
        is_engine = source.startswith(ENGINE_PREFIX)
        return not is_engine or source.removeprefix(ENGINE_PREFIX) in self._workers

    def _regroup(self, name: str) -> None:
        """Rebuild by node, in a fixed order, the workers of a model that take work."""
        mine = sorted(
            (w for w in self._workers.values() if w.view.model == name),
            key=lambda worker: (worker.view.node, worker.view.worker),
        )
        if not mine:
            self._models.pop(name, None)
            return
        state = _state_that_takes_work(mine)
        model = ModelGroup(mine[0].view.block_size, is_leaving=state != "ready")
        for worker in mine:
            view = worker.view
            if view.state != state:
                continue
            model.names.add(worker.name)
            node = model.nodes.get(view.node)
            if node is None:
                node = NodeGroup(view.node, worker.slab_source, len(model.nodes))
                model.nodes[view.node] = node
            model.node_of[worker.engine_source] = model.node_of[worker.slab_source] = node
            node.is_readable = node.is_readable or bool(view.slab_peer)
            if view.role == "prefill":
                node.prefills.append(worker)
            else:
                node.decodes.append(worker)
                model.slots += 0 if model.is_leaving else view.slots
        self._models[name] = model


def _state_that_takes_work(workers: Sequence[Worker]) -> State:
    """Ready; where none is, those that drain: what has begun must end somewhere."""
    return "ready" if any(w.view.state == "ready" for w in workers) else "draining"
