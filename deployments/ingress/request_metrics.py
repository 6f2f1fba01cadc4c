"""Histograms and token counts of requests, from their records; ingress/metrics has the rest.

Told of a request at its first byte and at its end (engine_client, ingress); of its tokens only the
time between them, kept by the flow. All of it goes to Ray's exporter once a second (the tick).

A choice that ends is counted once: in e2e_seconds, prompt_tokens and output_tokens by its outcome,
in cached_tokens by source, with fault and reason where it has one. Must not read a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deployments.flow.flow_types import Failure, Outcome
from deployments.flow.request_record import AttemptRecord, RequestRecord, ttft_parts
from deployments.measures import ingress_list as named
from deployments.totals import histogram_of, observe, observe_some, totals_of

_CODES = {failure.code for failure in Failure}
GAVE_UP = "engine_gave_up"


class RequestMetrics:
    """Of one ingress; its event loop owns it. Every choice that ended is counted."""

    def __init__(self, model: str, block_size: int) -> None:
        """block_size: tokens in a KV block."""
        self._labels = {"model": model}
        self._block_size = block_size
        self._first: list[RequestRecord] = []
        self._first_tokens = 0
        self._part_s = dict.fromkeys(named.PARTS, 0.0)
        self._ended: list[RequestRecord] = []
        self._prompt_tokens: Counter[str] = Counter(dict.fromkeys(named.OUTCOMES, 0))
        self._output_tokens: Counter[str] = Counter(dict.fromkeys(named.OUTCOMES, 0))
        self._cached: Counter[str] = Counter(dict.fromkeys(named.SOURCES, 0))
        self._faults: Counter[str] = Counter(dict.fromkeys(named.FAULTS, 0))
        self._ttft = histogram_of(named.TTFT)
        self._parts = histogram_of(named.TTFT_PARTS)
        self._first_tokens_total = totals_of(named.FIRST_TOKENS)
        self._part_totals = totals_of(named.FIRST_TOKEN_SECONDS)
        self._tpot = histogram_of(named.TPOT)
        self._itl = histogram_of(named.ITL)
        self._e2e = histogram_of(named.E2E)
        self._predicted = histogram_of(named.TTFT_PREDICTED)
        self._ratio = histogram_of(named.TTFT_RATIO)
        self._totals = (
            (totals_of(named.PROMPT_TOKENS), "outcome", self._prompt_tokens),
            (totals_of(named.OUTPUT_TOKENS), "outcome", self._output_tokens),
            (totals_of(named.CACHED_TOKENS), "source", self._cached),
            (totals_of(named.FAULTED), "reason", self._faults),
        )

    def first_byte(self, record: RequestRecord) -> None:
        """Its first token is on its way to the client, or (in one piece) was. Mutates."""
        self._first.append(record)

    def ended(self, record: RequestRecord) -> None:
        """Mutates: counts a choice that has ended."""
        assert record.outcome is not None
        outcome = record.outcome.value
        self._prompt_tokens[outcome] += record.prompt_tokens
        self._output_tokens[outcome] += record.output_tokens
        self._cached.update(cached_by_source(record, self._block_size))
        if record.outcome in {Outcome.REFUSED, Outcome.FAILED}:
            code = record.detail.partition(": ")[0]
            self._faults[code if code in _CODES else GAVE_UP] += 1
        self._ended.append(record)

    def publish(self, gaps: Sequence[float]) -> None:
        """Bring the exporter up to date. gaps: between outputs, in seconds, since the last time."""
        labels = self._labels
        first, self._first = self._first, []
        ended, self._ended = self._ended, []
        for record in first:
            self._observe_first(record)
        self._first_tokens_total.set(labels, self._first_tokens)
        for part, total_s in self._part_s.items():
            self._part_totals.set(labels | {"part": part}, total_s)
        for outcome in Outcome:
            took = [duration_s(r) for r in ended if r.outcome is outcome]
            observe(self._e2e, took, labels | {"outcome": outcome.value})
        tpots = [s for s in (tpot_s(record) for record in ended) if s is not None]
        observe(self._tpot, tpots, labels)
        observe_some(self._itl, gaps, labels)
        for totals, label, values in self._totals:
            for value, total in values.items():
                totals.set(labels | {label: value}, total)

    def _observe_first(self, record: RequestRecord) -> None:
        parts = ttft_parts(record)
        if parts is None:
            return
        self._first_tokens += 1
        self._ttft.observe(parts.total_ms / 1e3, self._labels)
        for part in named.PARTS:
            # A clock read on two threads may give a part of -1 us.
            seconds = max(0.0, getattr(parts, f"{part}_ms") / 1e3)
            self._part_s[part] += seconds
            self._parts.observe(seconds, self._labels | {"part": part})
        told = prediction(record)
        if told is not None:
            predicted_s, measured_s = told
            self._predicted.observe(predicted_s, self._labels)
            self._ratio.observe(measured_s / predicted_s, self._labels)


def duration_s(record: RequestRecord) -> float:
    """From HTTP's receiving it to its end."""
    assert record.ended_s is not None
    return record.ended_s - record.received_s


def tpot_s(record: RequestRecord) -> float | None:
    """Of a finished choice of more than one token."""
    if record.outcome is not Outcome.FINISHED or record.output_tokens <= 1:
        return None
    if record.first_token_s is None or record.ended_s is None:
        return None
    return (record.ended_s - record.first_token_s) / (record.output_tokens - 1)


def prediction(record: RequestRecord) -> tuple[float, float] | None:
    """Predicted and measured seconds; None where the first attempt did not give the first token."""
    if not record.decisions or not record.attempts or record.first_token_s is None:
        return None
    predicted_s = record.decisions[0].predicted_ttft_ms / 1e3
    if record.attempts[0].first_output_s != record.first_token_s or predicted_s <= 0:
        return None
    return predicted_s, record.first_token_s - record.tokenised_s


def cached_by_source(record: RequestRecord, block_size: int) -> dict[str, int]:
    """The prompt's cached tokens by source; they add up to what the client reads in usage."""
    local, loaded = record.local_cached_tokens, record.cached_tokens - record.local_cached_tokens
    pulled = unreported = 0
    first = _first_with_token(record)
    if loaded and first is not None and first.pull_from:
        if first.kv is None:
            unreported = loaded
        else:
            pulled = min(loaded, block_size * first.kv.pulled_blocks)
    slab = loaded - pulled - unreported
    return {"engine": local, "slab": slab, "other_node": pulled, "unreported": unreported}


def _first_with_token(record: RequestRecord) -> AttemptRecord | None:
    return next((a for a in record.attempts if a.first_output_s is not None), None)
