"""From samples to figures: TTFT, TPOT, ITL, E2E, throughput, goodput, shares. Pure.

Called by the commands, reports, comparisons and lessons. Must not read a clock or a file.

Definitions, the same for all of loadtests:
- TTFT: request sent to first chunk with content, at the client. E2E: sent to last such chunk.
- TPOT: (E2E - TTFT) / (output tokens - 1), for each request of more than one token.
- ITL: every gap between successive tokens, pooled over requests. A chunk of k tokens counts as its
  gap and k - 1 gaps of 0, because its tokens came at once.
- Output tokens are the server's usage; where it gives none, the tokens counted in chunks.
- Throughput: what happened within the window, by its length. A request counts where it ended, its
  input where its first token came, its output where each chunk came; answers to warm-up requests
  that reach into the window are work of the window too. Failed requests count for nothing.
- Goodput: requests ended within the window that met every SLO, by its length. A request of one
  token has no TPOT, and meets that SLO.
- Latencies are of requests sent in the measured window that ended well; nothing else is averaged.
- Percentiles interpolate linearly between the two nearest ranks (numpy's default).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, quantiles

from loadtests.load.records import Outcome, Run, Sample

PERCENTILE_METHOD = "linear interpolation between the two nearest ranks"
ITL_METHOD = "a chunk of k tokens is its gap and k - 1 gaps of 0"
LAG_WARNING_MS = 20.0
"""A generator later than this at p99 did not send the load that was asked for."""
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in figures, in the unit of the values. n: how many values."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; the module says how each is defined.

    requests: measured ones, failed ones included. succeeded: of these, the samples of the
    latencies. *_per_s: over window_s seconds. goodput_per_s: None without SLOs. cached_share: of
    the input tokens of requests whose server told; None if it told of none. overhead_share: CPU
    outside the engines by cores and window; None if unknown. lag_ms: how late the generator sent.
    warnings: sentences that belong beside the figures.
    """

    label: str
    window_s: float
    requests: int
    succeeded: int
    outcomes: dict[Outcome, int]
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    lag_ms: Spread | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    success_share: float
    cached_share: float | None
    overhead_share: float | None
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class PerDevice:
    """Throughput by device where prefill and decode have their own.

    Input is the prefill devices' work and output the decode devices', each divided by its own
    count; only the total is divided by all.
    """

    prefill_devices: int
    decode_devices: int
    input_tokens_per_s_per_prefill_device: float
    output_tokens_per_s_per_decode_device: float
    total_tokens_per_s_per_device: float


def spread(values: Iterable[float]) -> Spread | None:
    """None of no values."""
    ranked = sorted(values)
    if not ranked:
        return None
    cuts = ranked * 99 if len(ranked) == 1 else quantiles(ranked, n=100, method="inclusive")
    return Spread(
        n=len(ranked),
        mean=fmean(ranked),
        p50=cuts[49],
        p90=cuts[89],
        p95=cuts[94],
        p99=cuts[98],
        least=ranked[0],
        most=ranked[-1],
    )


def ttft_ms(sample: Sample) -> float:
    """Of a sample that ended well."""
    return _MS * (sample.chunks[0].at_s - sample.sent_s)


def e2e_ms(sample: Sample) -> float:
    """Of a sample that ended well."""
    return _MS * (sample.chunks[-1].at_s - sample.sent_s)


def output_tokens(sample: Sample) -> int:
    """As usage says; else as counted."""
    return _streamed(sample) if sample.output_tokens is None else sample.output_tokens


def tpot_ms(sample: Sample) -> float | None:
    """None for an answer of one token."""
    tokens = output_tokens(sample)
    return (e2e_ms(sample) - ttft_ms(sample)) / (tokens - 1) if tokens > 1 else None


def itl_ms(sample: Sample) -> list[float]:
    """One gap fewer than tokens: chunk gaps, and zeros for tokens that came with another."""
    gaps = [0.0] * (sample.chunks[0].tokens - 1)
    for before, chunk in pairwise(sample.chunks):
        gaps.append(_MS * (chunk.at_s - before.at_s))
        gaps += [0.0] * (chunk.tokens - 1)
    return gaps


def meets(sample: Sample, slo: Mapping[str, float]) -> bool:
    """Whether a sample that ended well is within every limit. Raises ValueError for an odd name."""
    for name, limit_ms in slo.items():
        if name not in SLO_METRICS:
            raise ValueError(f"there is no SLO {name!r}: {', '.join(SLO_METRICS)}")
        value_ms = SLO_METRICS[name](sample)
        if value_ms is not None and value_ms > limit_ms:
            return False
    return True


def summarise(run: Run) -> Summary:
    """All figures of a run."""
    begin_s, end_s = run.window_s
    length_s = end_s - begin_s
    measured = [sample for sample in run.samples if sample.measured]
    good = [sample for sample in measured if sample.outcome is Outcome.OK]
    within = _Within.of(run)

    def rate(count: float) -> float:
        return count / length_s if length_s > 0 else 0.0

    lag = spread(_MS * (sample.sent_s - sample.due_s) for sample in measured)
    return Summary(
        label=run.label,
        window_s=length_s,
        requests=len(measured),
        succeeded=len(good),
        outcomes=dict(Counter(sample.outcome for sample in measured)),
        ttft_ms=spread(map(ttft_ms, good)),
        tpot_ms=spread(value for value in map(tpot_ms, good) if value is not None),
        itl_ms=spread(gap for sample in good for gap in itl_ms(sample)),
        e2e_ms=spread(map(e2e_ms, good)),
        lag_ms=lag,
        requests_per_s=rate(within.requests),
        input_tokens_per_s=rate(within.input_tokens),
        output_tokens_per_s=rate(within.output_tokens),
        total_tokens_per_s=rate(within.input_tokens + within.output_tokens),
        goodput_per_s=rate(within.good_requests) if run.slo else None,
        success_share=len(good) / len(measured) if measured else 0.0,
        cached_share=_cached_share(good),
        overhead_share=_overhead_share(run, length_s),
        warnings=tuple(_warnings(run, good, lag)),
    )


def per_device(summary: Summary, *, prefill_devices: int, decode_devices: int) -> PerDevice:
    """Raises ValueError where a role has no device."""
    if prefill_devices < 1 or decode_devices < 1:
        raise ValueError("throughput by device needs at least one prefill and one decode device")
    return PerDevice(
        prefill_devices=prefill_devices,
        decode_devices=decode_devices,
        input_tokens_per_s_per_prefill_device=summary.input_tokens_per_s / prefill_devices,
        output_tokens_per_s_per_decode_device=summary.output_tokens_per_s / decode_devices,
        total_tokens_per_s_per_device=(
            summary.total_tokens_per_s / (prefill_devices + decode_devices)
        ),
    )


SLO_METRICS: Mapping[str, Callable[[Sample], float | None]] = {
    "ttft_ms": ttft_ms,
    "tpot_ms": tpot_ms,
    "e2e_ms": e2e_ms,
}


@dataclass(slots=True)
class _Within:
    """What happened in the window, of requests that ended well."""

    requests: int = 0
    good_requests: int = 0
    input_tokens: float = 0.0
    output_tokens: float = 0.0

    @classmethod
    def of(cls, run: Run) -> _Within:
        """Each end of the window belongs to it."""
        begin_s, end_s = run.window_s
        found = cls()
        for sample in run.samples:
            if sample.outcome is not Outcome.OK:
                continue
            if begin_s <= sample.ended_s <= end_s:
                found.requests += 1
                found.good_requests += meets(sample, run.slo)
            if begin_s <= sample.chunks[0].at_s <= end_s:
                found.input_tokens += sample.input_tokens or 0
            streamed = sum(c.tokens for c in sample.chunks if begin_s <= c.at_s <= end_s)
            # Where chunks do not tell their tokens, each has an equal part of the usage.
            found.output_tokens += streamed * output_tokens(sample) / _streamed(sample)
        return found


def _streamed(sample: Sample) -> int:
    return sum(chunk.tokens for chunk in sample.chunks)


def _cached_share(good: Sequence[Sample]) -> float | None:
    told = [s for s in good if s.cached_tokens is not None and s.input_tokens]
    tokens = sum(sample.input_tokens or 0 for sample in told)
    return sum(sample.cached_tokens or 0 for sample in told) / tokens if tokens else None


def _overhead_share(run: Run, length_s: float) -> float | None:
    # Where no engine can be told apart, what is outside of them cannot either.
    if not any(share.engine for share in run.cpu) or run.cores < 1 or length_s <= 0:
        return None
    return sum(share.cpu_s for share in run.cpu if not share.engine) / (run.cores * length_s)


def _warnings(run: Run, good: Sequence[Sample], lag: Spread | None) -> Iterable[str]:
    if run.facts.get("cut_short"):
        yield f"cut short: {run.facts['cut_short']}"
    if run.facts.get("unsent_due"):
        yield (
            f"{run.facts['unsent_due']} requests whose time came were never sent: as many were in "
            "flight as may be, so the load was not the one that was asked for"
        )
    if not good:
        yield "no measured request succeeded: there is no latency to tell"
    if lag is not None and lag.p99 > LAG_WARNING_MS:
        yield (
            f"the generator could not keep up: it sent {lag.p99:.0f} ms late at p99 "
            f"(n={lag.n}), so the load was not the one that was asked for"
        )
    by_chunk = [s for s in good if _streamed(s) != output_tokens(s)]
    if by_chunk:
        tokens = sum(map(output_tokens, by_chunk))
        chunks = sum(len(sample.chunks) for sample in by_chunk)
        yield (
            f"token times by chunk in {len(by_chunk)} of {len(good)} requests: the server does not "
            f"tell the tokens of a chunk, and sent {tokens} tokens in {chunks} chunks; their ITL "
            "are gaps between chunks"
        )
    unknown = sum(sample.input_tokens is None for sample in good)
    if unknown:
        yield (
            f"the server told no usage in {unknown} of {len(good)} requests: their input tokens "
            "are counted as 0, their output tokens by chunk"
        )
    untold = sum(sample.cached_tokens is None for sample in good)
    if 0 < untold < len(good):
        yield (
            f"the server told cached tokens of {len(good) - untold} of {len(good)} requests: the "
            "cached share is of these alone, and too high if the others had none"
        )
