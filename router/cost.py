"""The cost model: what a worker would take for a request, in ms, and its fit to samples.

Called by: router/route.py. Must not: read a clock; choose anything.

Minimised is the predicted TTFT of this request plus what it costs others (DESIGN.md, D7):

  prompt at P, decode at D   queue(P) + load(P) + compute(P) + handoff(D) + decode(D) + caused(P, D)
  prompt at D itself         queue(D) + load(D) + compute(D)              + decode(D) + caused(D)

No term depends on P and D together, except that handoff(D) loads blocks from the slab of D's node
or pulls them from P's; so the cheapest pair is that of one node, its cheapest P with its cheapest
D, or the cheapest P anywhere with the D that is cheapest when it has to pull. load() pulls what
only another node's slab has, where that takes less time than to compute it.

caused = weight * (at P: compute for each request in flight, as that many are taken to come behind
it; at D: what is computed there for each stream that it stalls, and the growth of the step for each
stream and token to come). The weight rises from `caused_weight_idle` to `caused_weight_full` with
the share of decode slots taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.decision import CostTerms
from router.fit import TwoTermFit
from router.settings import RouterSettings

_PAIRS = 1e6  # the attention term counts millions of token pairs


@dataclass(slots=True)
class WorkerCost:
    """Fitted constants of the workers of one model on one kind of machine."""

    prefill: TwoTermFit  # x: new tokens, y: million pairs
    step: TwoTermFit  # x: 1, y: streams in the batch
    load: TwoTermFit  # x: 1, y: blocks
    handoff: TwoTermFit  # x: 1, y: blocks
    pull: TwoTermFit  # x: 1, y: blocks

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        """Time to compute `tokens` new tokens that follow `context_tokens` cached ones."""
        pairs = tokens * (context_tokens + tokens / 2) / _PAIRS
        return self.prefill.first * tokens + self.prefill.second * pairs

    def queue_ms(self, tokens: int) -> float:
        """Time to compute `tokens` queued tokens of others (their contexts are not known)."""
        return self.prefill.first * tokens

    def step_ms(self, streams: int) -> float:
        """One decode step with that many streams."""
        return self.step.first + self.step.second * streams

    def load_ms(self, blocks: int) -> float:
        """Time to load blocks from the slab; nothing for none."""
        return self.load.first + self.load.second * blocks if blocks > 0 else 0.0

    def pull_ms(self, blocks: int) -> float:
        """Time to pull blocks from another node's slab; nothing for none."""
        return self.pull.first + self.pull.second * blocks if blocks > 0 else 0.0

    def validate(self) -> None:
        """Check the bounds of the constants. Raises AssertionError."""
        for fit in (self.prefill, self.step, self.load, self.handoff, self.pull):
            fit.validate()


class CostModel:
    """Constants by model and kind of machine: workers of one kind share theirs.

    Not by worker: roles see other samples (prefill long prompts, decode their tails), so that
    equal machines came to unequal constants, and the router fled the one that it knew better.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._costs: dict[tuple[str, str], WorkerCost] = {}
        self._workers: dict[str, WorkerCost] = {}

    def add_worker(self, worker: str, model: str, machine: str = "") -> WorkerCost:
        """Constants of a worker: those of its kind, which it goes on teaching."""
        key = (model, machine)
        if key not in self._costs:
            self._costs[key] = self._start()
        self._workers[worker] = self._costs[key]
        return self._workers[worker]

    def remove_worker(self, worker: str) -> None:
        """Forget a worker; its kind keeps what it taught."""
        self._workers.pop(worker, None)

    def observe_prefill(self, worker: str, tokens: int, ms: float, *, pairs: float) -> None:
        """Sample: a step computed `tokens` new tokens in `ms`.

        `pairs`: pairs of one of them and a token before it, which is what attention works on.
        """
        cost = self._workers.get(worker)
        if cost is not None:
            cost.prefill.observe(tokens, pairs / _PAIRS, ms)

    def observe_step(self, worker: str, batch: int, ms: float) -> None:
        """Sample: one pure decode step with `batch` streams took `ms`."""
        cost = self._workers.get(worker)
        if cost is not None:
            cost.step.observe(1.0, batch, ms)

    def observe_load(self, worker: str, blocks: int, ms: float) -> None:
        """Sample: `blocks` blocks were loaded from the slab in `ms`."""
        cost = self._workers.get(worker)
        if cost is not None:
            cost.load.observe(1.0, blocks, ms)

    def observe_pull(self, worker: str, blocks: int, ms: float) -> None:
        """Sample: `blocks` blocks came from another node's slab in `ms`."""
        cost = self._workers.get(worker)
        if cost is not None:
            cost.pull.observe(1.0, blocks, ms)

    def observe_handoff(self, worker: str, ms: float) -> None:
        """Sample: between prefill's and decode's first tokens went `ms`, loads and step apart."""
        cost = self._workers.get(worker)
        if cost is not None:
            cost.handoff.observe(1.0, 0.0, ms)

    def validate(self) -> None:
        """Check all constants. Raises AssertionError."""
        for cost in self._costs.values():
            cost.validate()
        kinds = [id(cost) for cost in self._costs.values()]
        assert all(id(cost) in kinds for cost in self._workers.values())

    def _start(self) -> WorkerCost:
        s = self._settings

        def fit(start: tuple[float, float], typical_x: float, typical_y: float) -> TwoTermFit:
            half_life, prior = s.fit_half_life_samples, s.fit_prior_weight
            return TwoTermFit(start, typical_x, typical_y, half_life, prior)

        return WorkerCost(
            fit((s.prefill_start_ms_per_token, s.prefill_start_ms_per_megapair), 256.0, 0.0328),
            fit((s.step_start_ms, s.step_start_ms_per_stream), 1.0, 4.0),
            fit((s.load_start_ms, s.load_start_ms_per_block), 1.0, 16.0),
            fit((s.handoff_start_ms, s.load_start_ms_per_block), 1.0, 16.0),
            fit((s.pull_start_ms, s.pull_start_ms_per_block), 1.0, 16.0),
        )


@dataclass(slots=True)
class Work:
    """A request as one worker would find it, and the state of that worker.

    Not frozen, only because one is built per worker and request, and that takes four times as long.
    """

    total_tokens: int
    """Prompt and resumed tokens."""
    block_size: int
    output_tokens: int
    """Tokens it is taken to generate."""
    weight: float
    """Worth of a ms of delay to others."""
    engine_blocks: int = 0
    """Blocks in the engine's own cache, from block 0."""
    slab_blocks: int = 0
    """Blocks in its node's slab, from block 0."""
    in_flight: int = 0
    queued_tokens: int = 0
    free_blocks: int | None = None
    slots: int = 1
    peer_blocks: int = 0
    """Blocks in the slab of another node that can be read, from block 0."""
    pulled_blocks: int = 0
    """Result of prefill_terms and decode_terms: those of them that are worth pulling."""


Terms = tuple[float, float, float, float, float, float]
"""(queue, compute, load, handoff, decode, caused), in ms, in the order of CostTerms."""


def prefill_terms(cost: WorkerCost, work: Work) -> Terms:
    """Terms of computing the prompt at a prefill worker, without the decode worker's.

    Mutates work.pulled_blocks.
    """
    load, compute = _load_and_compute_ms(cost, work, work.engine_blocks)
    return (
        cost.queue_ms(work.queued_tokens),
        compute,
        load,
        0.0,
        0.0,
        work.weight * compute * work.in_flight,
    )


def _load_and_compute_ms(cost: WorkerCost, work: Work, engine_blocks: int) -> tuple[float, float]:
    """(load, compute) of a prompt with what the worker's own caches, its slab and a peer hold."""
    total, block_size, slab = work.total_tokens, work.block_size, work.slab_blocks
    cached = max(slab, engine_blocks)
    compute = cost.prefill_ms(total - cached * block_size, cached * block_size)
    load = cost.load_ms(slab - engine_blocks)
    work.pulled_blocks = 0
    if work.peer_blocks > cached:
        pull = cost.pull_ms(work.peer_blocks - cached)
        with_peer = work.peer_blocks * block_size
        rest = cost.prefill_ms(total - with_peer, with_peer)
        if pull + rest < compute:
            work.pulled_blocks = work.peer_blocks - cached
            return load + pull, rest
    return load, compute


def away_terms(cost: WorkerCost, work: Work, remote: Terms) -> Terms:
    """`remote` of decode_terms, with the prompt computed on another node: blocks are pulled."""
    whole = work.total_tokens // work.block_size
    engine, slab = work.engine_blocks, work.slab_blocks
    here = cost.load_ms(whole - engine)
    away = cost.load_ms(slab - engine) + cost.pull_ms(whole - max(slab, engine))
    queue, compute, load, handoff, decode, caused = remote
    return queue, compute, load, handoff - here + away, decode, caused


def decode_terms(cost: WorkerCost, work: Work, stalled_min: float) -> tuple[Terms, Terms]:
    """Terms of a decode worker: with the prompt from a prefill worker, and with it its own.

    Mutates work.pulled_blocks, for the latter.
    """
    block_size, total, weight = work.block_size, work.total_tokens, work.weight
    engine, in_flight = work.engine_blocks, work.in_flight
    per_token, per_stream = cost.prefill.first, cost.step.second
    decode = cost.step.first + per_stream * (in_flight + 1) + _wait_ms(cost, work)
    stalled = max(stalled_min, in_flight)
    growth = per_stream * in_flight * work.output_tokens
    queue = per_token * work.queued_tokens
    whole = total // block_size
    tail = per_token * (total - whole * block_size)
    handoff = cost.handoff.first + cost.load_ms(whole - engine) + queue + tail
    remote = (0.0, 0.0, 0.0, handoff, decode, weight * (tail * stalled + growth))
    most = (total - 1) // block_size  # at least the last token is computed
    load, compute = _load_and_compute_ms(cost, work, min(most, engine))
    caused = weight * (compute * stalled + growth)
    return remote, (queue, compute, load, 0.0, decode, caused)


def cost_terms(prefill: Terms | None, decode: Terms) -> CostTerms:
    """Terms of a pair, or of a decode worker on its own."""
    if prefill is None:
        return CostTerms(*decode)
    return CostTerms(*map(float.__add__, prefill, decode))


def _wait_ms(cost: WorkerCost, work: Work) -> float:
    """Wait for a slot, and for blocks, of a decode worker: one stream's end frees either."""
    if work.in_flight == 0:
        return 0.0
    stream_ms = work.output_tokens * cost.step_ms(min(work.in_flight, work.slots))
    wait = 0.0
    if work.in_flight >= work.slots:
        wait = stream_ms * (work.in_flight - work.slots + 1) / work.slots
    if work.free_blocks is not None:
        needed = -(-(work.total_tokens + work.output_tokens) // work.block_size)
        needed -= work.engine_blocks
        missing = needed - work.free_blocks
        if missing > 0:
            wait = max(wait, stream_ms * missing / needed)
    return wait
