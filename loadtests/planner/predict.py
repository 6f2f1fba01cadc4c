"""Predicts TTFT, TPOT and throughput of a load on a layout, from a profile. Pure.

Called by loadtests/planner/layouts.py, the plan command and the validation. Must not: choose a
layout, or hide an assumption: loadtests/planner/steps.py prints each step.

Prefill workers are one queue (loadtests/planner/queueing.py); the decode batch is a fixed point:
streams at once = rate × residence, residence = output tokens × step, step by batch and context.
Roles that share a machine slow each other down, so all of it is iterated until it stands still:

  sent        share of prompts that a prefill worker computes (loadtests/planner/path.py), while
              one is free and while none is: the router sends elsewhere what would wait
  service     of a prompt × contention with the streams
  others      streams beside one's own
  step        by batch and context × contention with prefills / (1 - share of time that the decode
              worker computes prompts and the tails of prompts, during which streams wait)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf

from loadtests.planner.path import Prices, Prompt
from loadtests.planner.profile import Profile
from loadtests.planner.queueing import Queue, others_in_batch, prompts_in_step

ROUNDS = 200
DAMPING = 0.5
CLOSE = 1e-5
STALLED_MOST = 0.98
"""Of a decode worker's time that prompts may take before its streams stand still."""


class Stage(StrEnum):
    """What can bind."""

    PREFILL = "prefill compute"
    DECODE = "decode step"
    KV = "KV capacity"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at random. cv: variation of the prefill service (0: all equal)."""

    rate_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    cv: float = 0.0

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that are computed."""
        return max(1, self.input_tokens - self.cached_tokens)

    def words(self) -> str:
        """For people."""
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        return (
            f"{self.rate_per_s:.4g} requests/s, {self.input_tokens} tokens in{cached}, "
            f"{self.output_tokens} out"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers by role. prefill 0: every worker does both."""

    prefill: int
    decode: int

    def words(self) -> str:
        """For people."""
        if not self.prefill:
            return f"{self.decode} worker{'s' * (self.decode > 1)} for both"
        return f"{self.prefill} prefill, {self.decode} decode"


@dataclass(frozen=True, slots=True)
class Wait:
    """One way to a first token: `base` ms at least; a share `waits`, `mean` ms each on average."""

    base: float
    waits: float
    mean: float

    @property
    def ms(self) -> float:
        """Mean over all."""
        return self.base + (self.waits * self.mean if self.waits else 0.0)

    def beyond(self, ms: float) -> float:
        """Share whose first token takes longer; the wait is taken as exponential."""
        if ms < self.base:
            return 1.0
        if not self.waits or not self.mean:
            return 0.0
        return self.waits * exp(-(ms - self.base) / self.mean)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a load would see. Times in ms, infinite where a queue grows without end.

    sent: share of prompts that prefill workers compute. busy: how often none of those that compute
    prompts is free; waits: share that waits there, wait_ms: each of them on average. shares: used,
    of what each stage could do; at 1 it is full. most_streams: that a decode worker can hold.
    """

    load: Load
    layout: Layout
    service_ms: float
    sent: float
    busy: float
    waits: float
    wait_ms: float
    ttft_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    others: float
    step_ms: float
    stalled: float
    gap_ms: float
    tpot_ms: float
    most_streams: float
    shares: dict[Stage, float]
    requests_per_s: float

    @property
    def bottleneck(self) -> Stage:
        """The stage that is nearest to its limit."""
        return max(self.shares, key=lambda stage: self.shares[stage])

    @property
    def is_stable(self) -> bool:
        """Whether no queue grows without end."""
        return max(self.shares.values()) < 1

    @property
    def output_tokens_per_s(self) -> float:
        """As many as arrive, or as the bottleneck lets through."""
        return self.requests_per_s * self.load.output_tokens


@dataclass(frozen=True, slots=True)
class _State:
    """What is iterated. sent_idle, sent_busy: while a prefill worker is free, and while none is."""

    sent_idle: float = 1.0
    sent_busy: float = 1.0
    busy: float = 0.0
    others: float = 0.0
    stalled: float = 0.0
    service: float = 0.0

    @property
    def sent(self) -> float:
        """Of all."""
        return (1 - self.busy) * self.sent_idle + self.busy * self.sent_busy

    def towards(self, other: _State) -> _State:
        """Half way."""
        return _State(
            *(
                getattr(self, name) + DAMPING * (getattr(other, name) - getattr(self, name))
                for name in self.__slots__
            )
        )

    def far_from(self, other: _State) -> float:
        """Largest difference of a share or of the streams."""
        names = ("sent_idle", "sent_busy", "busy", "others", "stalled")
        return float(max(abs(getattr(self, name) - getattr(other, name)) for name in names))


def predict(
    profile: Profile, load: Load, layout: Layout, *, sent: float | None = None
) -> Prediction:
    """sent: share of prompts that go to prefill workers, where it is known and not to be priced."""
    prompt = Prompt(load.input_tokens, load.cached_tokens, load.output_tokens)
    model = _Model(profile, load, layout, sent, Prices(profile, prompt))
    state = model.next_state(_State())
    for _ in range(ROUNDS):
        moved = state.towards(model.next_state(state))
        done = moved.far_from(state) < CLOSE
        state = moved
        if done:
            break
    return model.prediction(state)


@dataclass(frozen=True, slots=True)
class _Model:
    profile: Profile
    load: Load
    layout: Layout
    sent: float | None
    prices: Prices

    @property
    def rate(self) -> float:
        """Requests/ms."""
        return self.load.rate_per_s / 1e3

    @property
    def context(self) -> float:
        """Mean of a stream."""
        return self.load.input_tokens + self.load.output_tokens / 2

    @property
    def tail_ms(self) -> float:
        """Of a prompt that was handed over: what no whole block holds, computed once more."""
        block = self.profile.block_tokens
        return self.load.input_tokens % block * self.profile.token_ms if block else 0.0

    @property
    def kv_streams(self) -> float:
        """That a decode worker's KV holds to their ends."""
        tokens = self.load.input_tokens + self.load.output_tokens
        return self.profile.kv_tokens / tokens if self.profile.kv_tokens else inf

    @property
    def most_streams(self) -> float:
        """In one step: slots, KV, or where neither is known what was measured."""
        slots = self.profile.slots or max(point.batch for point in self.profile.steps)
        return max(1.0, min(float(slots), self.kv_streams))

    def service_at(self, others: float) -> float:
        """Of a prompt, beside so many streams at each decode worker."""
        alone = self.profile.service_ms(self.load.new_tokens, self.load.cached_tokens)
        return alone * self.profile.beside(others)[0] if self.layout.prefill else alone

    def step_at(self, others: float, state: _State) -> float:
        """Between two tokens, beside so many streams."""
        step = self.profile.step_ms(1 + others, self.context)
        step *= 1 + (self.profile.beside(1 + others)[1] - 1) * state.busy
        return step / (1 - min(STALLED_MOST, state.stalled))

    def sent_at(self, state: _State, waiting: int) -> float:
        """See Prediction; with so many prompts at a prefill worker."""
        if not self.layout.prefill:
            return 0.0
        if self.sent is not None:
            return self.sent
        return self.prices.sent_share(state.others, waiting, self.layout.decode)

    def prefill_queue(self, state: _State) -> Queue:
        """Of the prefill workers."""
        idle, busy = self.rate * state.sent_idle, self.rate * state.sent_busy
        return Queue(max(1, self.layout.prefill), idle, busy, state.service, self.load.cv**2)

    def decode_queue(self, state: _State) -> Queue:
        """Of the prompts that decode workers compute, each at the one with the fewest of them."""
        rate = self.rate * (1 - state.sent)
        return Queue(self.layout.decode, rate, rate, state.service, self.load.cv**2)

    def residence(self, others: float, state: _State) -> float:
        """Of a stream at its decode worker."""
        return (self.load.output_tokens - 1) * self.step_at(others, state)

    def next_state(self, old: _State) -> _State:
        """One round."""
        service = self.service_at(old.others)
        per_decode = self.rate / self.layout.decode
        return _State(
            sent_idle=self.sent_at(old, 0),
            sent_busy=self.sent_at(old, 1),
            busy=self.prefill_queue(old).busy if self.layout.prefill else 0.0,
            others=others_in_batch(
                per_decode, lambda n: self.residence(n, old), self.most_streams - 1
            ),
            stalled=per_decode * ((1 - old.sent) * service + old.sent * self.tail_ms),
            service=service,
        )

    def prediction(self, state: _State) -> Prediction:
        """Where it stands still."""
        load, layout, profile = self.load, self.layout, self.profile
        step, sent = self.step_at(state.others, state), state.sent
        queues = (self.prefill_queue(state), self.decode_queue(state))
        # Who is computed where others stream waits for the step under way, and shares the next.
        beside = step * (min(1.0, state.others) / 2 + 1)
        base = profile.overhead_ms + state.service
        waiting = state.busy * state.sent_busy / sent if sent else 0.0
        here = Wait(base + beside, queues[1].busy, queues[1].mean_when_busy)
        shared, beyond = self.shared_ms(state)
        # Prompts that end together had waited for the step; the next one's tokens delay anybody.
        mean = queues[0].mean_when_busy + (shared / waiting if waiting else 0.0)
        there = Wait(base + beyond, waiting, mean)
        ways = [(sent, there), (1 - sent, here)]
        shares = self.shares(state)
        gap = self.gap_ms(state, step)
        tokens = max(2, load.output_tokens)
        way = there if layout.prefill else here
        return Prediction(
            load=load,
            layout=layout,
            service_ms=state.service,
            sent=sent,
            busy=queues[0].busy if layout.prefill else queues[1].busy,
            waits=way.waits,
            wait_ms=way.mean,
            ttft_ms=sum(share * one.ms for share, one in ways if share > CLOSE),
            ttft_p50_ms=percentile(ways, 0.5),
            ttft_p95_ms=percentile(ways, 0.95),
            others=state.others,
            step_ms=step,
            stalled=state.stalled,
            gap_ms=gap,
            tpot_ms=(sent * gap + (1 - sent) * step + (tokens - 2) * step) / (tokens - 1),
            most_streams=self.most_streams,
            shares=shares,
            requests_per_s=load.rate_per_s / max(1.0, *shares.values()),
        )

    def prefill_used(self, state: _State) -> float:
        """Share of the prefill workers' time; there are some."""
        return self.rate * state.sent * state.service / self.layout.prefill

    def shared_ms(self, state: _State) -> tuple[float, float]:
        """What a prompt waits, on average, for others' tokens in its own steps at a prefill worker.

        First where a step holds whole prompts: all of a step end with it. Second where a prompt
        takes several: its last one is filled up with the next prompt's tokens.
        """
        whole, room = self.load.new_tokens, self.profile.step_tokens
        if not room or not self.layout.prefill:
            return 0.0, 0.0
        used = min(STALLED_MOST, self.prefill_used(state))
        if whole <= room:
            together = min(room / whole, prompts_in_step(used))
            return state.service * (together - 1) / 2, 0.0
        return 0.0, state.service * (-whole % room) / whole * (1 - exp(-used))

    def gap_ms(self, state: _State, step: float) -> float:
        """From the first to the second token of a request that is handed over."""
        block = self.profile.block_tokens or 1
        blocks = self.load.input_tokens // block
        waiting = step * min(1.0, state.others) / 2
        if state.sent:
            # Prompts that the router keeps from a busy prefill worker are at the decode worker when
            # what kept it busy is handed over; others are there at any time.
            kept = state.busy * (1 - state.sent_busy) / state.sent / self.layout.decode
            any_time = (1 - state.busy) * (1 - state.sent_idle) * self.rate * state.service
            waiting += min(1.0, kept + any_time / self.layout.decode) * state.service / 2
        return self.profile.handover_ms(blocks) + self.tail_ms + waiting + step

    def shares(self, state: _State) -> dict[Stage, float]:
        """Used, of what each stage could do."""
        slots = float(self.profile.slots or max(point.batch for point in self.profile.steps))
        per_decode = self.rate / self.layout.decode

        def of_batch(full: float) -> float:
            """Of the rate that goes through when so many streams are always there."""
            return per_decode * self.residence(max(0.0, full - 1), state) / full

        prefill = state.stalled
        if self.layout.prefill:
            prefill = self.prefill_used(state)
        if state.stalled > STALLED_MOST:  # a decode worker that prompts fill
            prefill = max(prefill, state.stalled)
        found = {
            Stage.PREFILL: prefill,
            Stage.DECODE: of_batch(slots),
            Stage.KV: 0.0 if self.kv_streams == inf else of_batch(self.kv_streams),
            Stage.LINK: 0.0,
        }
        link = self.profile.link
        if link.load_bytes_per_s and self.profile.block_tokens:
            moved = link.block_bytes * self.load.input_tokens / self.profile.block_tokens
            found[Stage.LINK] = 1e3 * per_decode * state.sent * moved / link.load_bytes_per_s
        return found


def percentile(ways: list[tuple[float, Wait]], quantile: float) -> float:
    """Of the mixture of ways, by bisection."""
    taken = [(share, way) for share, way in ways if share > CLOSE]
    if any(way.mean == inf for _, way in taken):
        return inf

    def beyond(ms: float) -> float:
        return sum(share * way.beyond(ms) for share, way in taken)

    low, high = 0.0, max(way.base for _, way in taken) + 1.0
    while beyond(high) > 1 - quantile:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > 1 - quantile else (low, middle)
    return high
