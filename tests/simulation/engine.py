"""A simulated engine: vLLM's scheduler as far as our connector sees it, over simulated KV.

Continuous batching with a token budget (chunked prefill), blocks with a prefix cache of the
engine's own, preemption, asynchronous loads. It calls SchedulerSide, the loader and the publisher
in the order of kvcache/connector/block_connector.py, and is driven by the production EngineLoop
through sim_worker.py. Source: vllm/v1/core/sched/scheduler.py (0.32): schedule, update_from_output,
_update_requests_with_invalid_blocks, _update_waiting_for_remote_kv, finish_requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.flow.flow_types import Finish
from kvcache.connector.loader import BlockLoader
from kvcache.connector.publisher import Publisher
from kvcache.connector.records import PARAMS_KEY, TransferParams
from kvcache.connector.scheduler_side import SchedulerSide
from kvcache.events import BlockEvent
from kvcache.store import BlockStore
from tests.simulation.engine_blocks import EngineBlocks
from tests.simulation.model import BLOCK, EOS, Text, block_bytes, next_token

WAITING, LOADING, RUNNING, PREEMPTED = "waiting", "waiting_for_remote_kvs", "running", "preempted"


@dataclass(slots=True)
class EngineInput:
    """In place of vLLM's EngineCoreRequest."""

    request_id: str
    prompt: tuple[int, ...]
    salt: str
    max_tokens: int
    min_tokens: int


@dataclass(slots=True)
class EngineOutput:
    """In place of vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Finish | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: None = None  # what caches had of a prompt decides nothing


@dataclass(slots=True)
class _Request:
    input: EngineInput
    text: Text
    status: str = WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_loaded: bool = False  # its load was reported; not scheduled since
    bad_from: int | None = None  # place of the first block that could not be loaded


@dataclass(frozen=True, slots=True)
class Counts:
    """As InprocessEngine's EngineCounts."""

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    steps: int
    generated_tokens_total: int
    computed_tokens_total: int
    preemptions: int


class SimEngine:
    """What EngineLoop needs of InprocessEngine; a step has a begin and an end."""

    def __init__(
        self, blocks: EngineBlocks, seqs_max: int, step_tokens_max: int, store: Any, stats: Any
    ) -> None:
        """store() and stats() as ConnectorSession's."""
        self.blocks = blocks
        self.side: SchedulerSide
        self.loader: BlockLoader
        self.publisher: Publisher
        self.requests: dict[str, _Request] = {}
        self._seqs_max = seqs_max
        self._step_tokens_max = step_tokens_max
        self._store = store
        self.kv_stats = stats
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._scheduled: list[tuple[_Request, int]] = []
        self._saves: list[Any] = []
        self._leaving: dict[str, list[int]] = {}  # aborted while their load was on its way
        self._steps = self._generated = self._computed = self._preemptions = 0

    # ---- requests, as EngineLoop calls them ---------------------------------------------------

    @staticmethod
    def decode_request(request: EngineInput) -> EngineInput:
        """They travel as they are."""
        return request

    def add(
        self, request: EngineInput, resume_tokens: Sequence[int], kv_params: Mapping[str, Any]
    ) -> None:
        """Queue a request."""
        assert request.request_id not in self.requests
        text = Text([*request.prompt, *resume_tokens], request.salt)
        queued = _Request(request, text)
        self.requests[request.request_id] = queued
        self._waiting.append(queued)
        params = TransferParams.of({PARAMS_KEY: dict(kv_params)})
        self.side.begin(request.request_id, text.names, len(text.tokens), params, may_load=True)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without output."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request, aborted=True)

    def status_of(self, request_id: str) -> str:
        """vLLM's status."""
        request = self.requests.get(request_id)
        return "unknown" if request is None else request.status

    def first_scheduled_s(self, request_id: str) -> float | None:
        """Not measured."""
        return None

    def publish_wait_s(self) -> float:
        """Not measured."""
        return 0.0

    def end_handoffs(self, handoffs: Iterable[str]) -> None:
        """As InprocessEngine's."""
        store: BlockStore | None = self._store()
        if store is not None:
            for handoff in handoffs:
                store.end_handoff(handoff)

    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.requests or self._leaving)

    def counts(self) -> Counts:
        """The load."""
        queued = sum(max(0, len(r.text.tokens) - r.computed - 1) for r in self.requests.values())
        return Counts(
            len(self._running),
            len(self._waiting),
            queued,
            self.blocks.free_total,
            self.blocks.total,
            self._steps,
            self._generated,
            self._computed,
            self._preemptions,
        )

    def take_cache_events(self) -> list[BlockEvent]:
        """What the prefix cache gained and lost."""
        return self.blocks.take_events()

    def cache_snapshot(self) -> tuple[bytes, ...]:
        """What the prefix cache holds."""
        return tuple(self.blocks.cached)

    # ---- a step begins: vLLM's schedule() and build_connector_meta() ---------------------------

    def begin_step(self) -> int:
        """Schedule; loads begin. Returns the number of tokens that the step computes."""
        self._scheduled = []
        budget = self._schedule_running(self._step_tokens_max)
        if not any(r.status == PREEMPTED and r.computed < 0 for r in self._waiting):
            self._schedule_waiting(budget)
        for request in self._waiting:
            request.computed = max(0, request.computed)
        self._saves = []
        for request, new in self._scheduled:
            save = self.side.scheduled(
                request.input.request_id,
                request.text.names,
                request.computed,
                new,
                lambda _, request=request: request.blocks,
            )
            if save is not None:
                self._saves.append(save)
        for job in self.side.take_loads():
            self.loader.submit(job)
        return sum(new for _, new in self._scheduled)

    def _schedule_running(self, budget: int) -> int:
        for request in list(self._running):
            if request not in self._running or budget == 0:
                continue
            new = min(len(request.text.tokens) - request.computed, budget)
            while not self._grow(request, request.computed + new):
                victim = self._running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self._scheduled.append((request, new))
                budget -= new
        return budget

    def _preempt(self, victim: _Request) -> None:
        self._preemptions += 1
        self._scheduled = [(r, n) for r, n in self._scheduled if r is not victim]
        self.blocks.release(victim.blocks)
        victim.blocks = []
        victim.computed = -1  # until the step is planned: nobody else is let in meanwhile
        victim.status = PREEMPTED
        self._waiting.insert(0, victim)

    def _schedule_waiting(self, budget: int) -> None:
        # Those that hold blocks come first, and none is let in that does not fit as a whole: else
        # they could wait for each other's blocks for ever.
        for request in sorted(self._waiting, key=lambda request: not request.blocks):
            if budget == 0 or len(self._running) >= self._seqs_max:
                return
            if request.status == LOADING:
                if not request.is_loaded:
                    continue
                self._load_ended(request)
            name, tokens = request.input.request_id, request.text.tokens
            hit, external = [], 0
            if request.computed == 0:
                hit = self.blocks.longest_hit(request.text.names, (len(tokens) - 1) // BLOCK)
                matched = self.side.matched_tokens(
                    name, request.text.names, len(tokens), BLOCK * len(hit)
                )
                if matched is None:
                    continue
                external = matched
            ready = request.computed + BLOCK * len(hit) + external
            new = 0 if external else min(len(tokens) - ready, budget)
            self.blocks.take_hit(hit)
            request.blocks += hit
            whole = -(-len(tokens) // BLOCK) - len(request.blocks)
            reserved = self._reserved(request) if external else 0
            fits = whole <= self.blocks.free_total - reserved
            if not fits or not self._grow(request, ready + new):
                self.blocks.release(hit)
                request.blocks = request.blocks[: len(request.blocks) - len(hit)]
                return
            self.side.allocated(name, request.blocks, external)
            request.computed = ready
            if external:
                request.status = LOADING
                self._expect(request, len(hit), ready // BLOCK)
                continue
            self._waiting.remove(request)
            self._running.append(request)
            request.status = RUNNING
            self._scheduled.append((request, new))
            budget -= new

    def _reserved(self, newcomer: _Request) -> int:
        """Blocks that those who are in already still need for the tokens that they have."""
        waiting = (r for r in self._waiting if r.blocks and r is not newcomer)
        inside = [*self._running, *waiting]
        return sum(max(0, -(-len(r.text.tokens) // BLOCK) - len(r.blocks)) for r in inside)

    def _expect(self, request: _Request, first: int, last: int) -> None:
        """Whatever is loaded into these blocks must be what the request's names say (I1, I8)."""
        for place in range(first, last):
            self.blocks.expect(
                request.blocks[place], request.text.names[place], request.text.contents[place]
            )

    def _grow(self, request: _Request, tokens: int) -> bool:
        return self.blocks.grow(request.blocks, -(-tokens // BLOCK))

    def _load_ended(self, request: _Request) -> None:
        """vLLM's _update_waiting_for_remote_kv."""
        request.is_loaded = False
        request.status = WAITING
        if request.bad_from is not None:
            request.computed = BLOCK * request.bad_from
            request.bad_from = None
            if request.computed == 0:
                self.blocks.release(request.blocks)
                request.blocks = []
        self._register(request, request.computed)

    # ---- a step ends: the forward pass, and vLLM's update_from_output() ------------------------

    def end_step(self) -> list[EngineOutput]:
        """Compute, publish, sample. Returns the outputs."""
        self._steps += 1
        for request, new in self._scheduled:
            self._compute(request, new)
        self.publisher.publish(self._saves)
        results = self.loader.take_finished()
        for result in results:
            loading = self.requests.get(result.request_id)
            if loading is not None and result.failed_block_ids:
                loading.bad_from = loading.blocks.index(result.failed_block_ids[0])
        outputs = [
            self._sample(request)
            for request, _ in self._scheduled
            if request.computed == len(request.text.tokens)
        ]
        for result in results:
            self.side.loaded(result)
            loading = self.requests.get(result.request_id)
            if loading is not None:
                loading.is_loaded = True
            self.blocks.release(self._leaving.pop(result.request_id, []))
        return outputs

    def _compute(self, request: _Request, new: int) -> None:
        first, request.computed = request.computed // BLOCK, request.computed + new
        self._computed += new
        text = request.text
        for place in range(first, request.computed // BLOCK):
            before = self.blocks.contents[request.blocks[place - 1]] if place else None
            part = text.tokens[BLOCK * place : BLOCK * (place + 1)]
            content = block_bytes(before, part, text.salt)
            self.blocks.computed(request.blocks[place], content)
        self._register(request, request.computed)

    def _register(self, request: _Request, tokens: int) -> None:
        for place in range(tokens // BLOCK):
            parent = request.text.names[place - 1] if place else None
            self.blocks.register(request.blocks[place], request.text.names[place], parent)

    def _sample(self, request: _Request) -> EngineOutput:
        text, asked = request.text, request.input
        full = len(text.tokens) // BLOCK
        held = [self.blocks.contents[block] or b"" for block in request.blocks[:full]]
        place = len(text.tokens) - len(asked.prompt)
        token = next_token(held, text.tokens[full * BLOCK :], place, asked.min_tokens)
        text.extend([token])
        self._generated += 1
        output = EngineOutput(asked.request_id, [token])
        if token == EOS:
            output.finish_reason = Finish.STOP
        elif place + 1 >= asked.max_tokens:
            output.finish_reason = Finish.LENGTH
        if output.finish_reason is not None:
            output.kv_transfer_params = self._end(request, aborted=False)
        return output

    def _end(self, request: _Request, *, aborted: bool) -> dict[str, Any]:
        """vLLM's finish_requests: blocks of a load on its way stay until it is reported."""
        name = request.input.request_id
        del self.requests[name]
        (self._running if request.status == RUNNING else self._waiting).remove(request)
        report = self.side.finish(name, aborted=aborted)
        if request.status == LOADING and not request.is_loaded:
            self._leaving[name] = request.blocks
        else:
            self.blocks.release(request.blocks)
        return report.as_params()
