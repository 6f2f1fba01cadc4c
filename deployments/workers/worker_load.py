"""What a worker's engine did so far, and where its time went: kept for frames.Load.

Called by engine_loop, in the engine thread, once a turn. Time is counted by the state of the engine
while it passed, so that a reader who takes differences knows shares without seeing each turn
(`headwater diagnose`). Must not read a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.links import frames
from deployments.workers.step_totals import StepTotals

if TYPE_CHECKING:  # they import vLLM
    from deployments.engine.inprocess import EngineCounts, StepResult
    from kvcache.connector.stats import ConnectorStats


class WorkerLoad:
    """The totals of one engine. Times in seconds, of the caller's one clock."""

    def __init__(self, slots: int) -> None:
        """slots: requests that the engine runs at once."""
        self._slots = slots
        self.steps = StepTotals()
        self._last = (0.0, 0, 0.0, 0)  # ms, tokens, pairs, requests of the last step
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._busy_s = 0.0
        self._prefill_s = 0.0
        self._short_s = 0.0
        self._full_s = 0.0
        self._loading_s = 0.0
        self._wait_s = 0.0
        self._load_wait_s = 0.0
        self._since_s: float | None = None  # time up to here is counted; None: nothing to do

    def stepped(self, result: StepResult, began_s: float, ended_s: float) -> None:
        """A step is over. Mutates."""
        if self._since_s is None:
            self._since_s = began_s
        if not result.scheduled_tokens:
            return
        step_s = ended_s - began_s
        tokens, requests = result.scheduled_tokens, result.scheduled_requests
        self._last = (1e3 * step_s, tokens, result.scheduled_pairs, requests)
        self._busy_s += step_s
        self.steps.add(
            tokens,
            requests,
            result.scheduled_pairs,
            result.scheduled_contexts,
            took_s=step_s,
        )
        self._prefill_s += step_s * (tokens - requests) / tokens
        if result.short_of_blocks:
            self._short_s += step_s

    def prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt's first token was made. Mutates."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def _pass_time(self, counts: EngineCounts, loads: int, now_s: float) -> None:
        if self._since_s is not None:
            passed_s = now_s - self._since_s
            waiting = max(0, counts.waiting - loads)
            self._wait_s += waiting * passed_s
            self._load_wait_s += loads * passed_s
            if loads:
                self._loading_s += passed_s
            if waiting and counts.running >= self._slots:
                self._full_s += passed_s
        self._since_s = now_s if counts.running or counts.waiting or loads else None

    def now(
        self, counts: EngineCounts, kv: ConnectorStats | None, slab_peer: str, now_s: float
    ) -> frames.Load:
        """All of it, for whoever is linked. Mutates: time passes up to now."""
        self._pass_time(counts, kv.loads_in_progress if kv else 0, now_s)
        step_ms, step_tokens, step_pairs, batch = self._last
        return frames.Load(
            running=counts.running,
            waiting=counts.waiting,
            queued_tokens=counts.queued_tokens,
            free_blocks=counts.free_blocks,
            total_blocks=counts.total_blocks,
            steps=self.steps.steps,
            step_ms=step_ms,
            step_tokens=step_tokens,
            step_pairs=step_pairs,
            batch=batch,
            generated_tokens_total=counts.generated_tokens_total,
            computed_tokens_total=counts.computed_tokens_total,
            preemptions_total=counts.preemptions,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            blocks_published_total=kv.blocks_published_total if kv else 0,
            blocks_loaded_total=kv.blocks_loaded_total if kv else 0,
            blocks_pulled_total=kv.blocks_pulled_total if kv else 0,
            load_failures_total=kv.load_failures_total if kv else 0,
            degraded="node agent does not answer" if kv and kv.degraded else "",
            slab_peer=slab_peer,
            kv_copies=kv.copies if kv else "",
            slot_bytes=kv.slot_bytes if kv else 0,
            clock_s=now_s,
            busy_s_total=self._busy_s,
            prefill_s_total=self._prefill_s,
            short_s_total=self._short_s,
            full_s_total=self._full_s,
            loading_s_total=self._loading_s,
            wait_s_total=self._wait_s,
            load_wait_s_total=self._load_wait_s,
        )
