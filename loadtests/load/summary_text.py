"""A run's figures as lines for a terminal: what `run` and `replay` print at their end.

Pure. Every figure comes with its n and its unit; loadtests/load/metrics.py says what it means.
"""

from __future__ import annotations

from collections.abc import Iterator

from loadtests.load.metrics import PerDevice, Spread, Summary
from loadtests.load.records import Outcome, Run

_PERCENT = 100


def lines(run: Run, summary: Summary, devices: PerDevice | None = None) -> Iterator[str]:
    """In order."""
    yield f"{run.label}: {conditions(run)}"
    ended = ", ".join(
        f"{summary.outcomes[outcome]} {outcome}"
        for outcome in Outcome
        if outcome in summary.outcomes
    )
    yield (
        f"{summary.requests} requests measured over {summary.window_s:.1f} s: {ended or 'none'} "
        f"(success {summary.success_share:.1%})"
    )
    yield from _details(run)
    yield ""
    columns = ("n", "mean", "p50", "p90", "p95", "p99", "most")
    yield f"{'ms':<12}" + "".join(f"{name:>10}" for name in columns)
    for name, found in (
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("E2E", summary.e2e_ms),
    ):
        yield f"{name:<12}{_row(found)}"
    yield ""
    yield (
        f"{summary.requests_per_s:.3f} requests/s; tokens/s: {summary.input_tokens_per_s:.1f} "
        f"input, {summary.output_tokens_per_s:.1f} output, {summary.total_tokens_per_s:.1f} total"
    )
    if devices is not None:
        yield from _by_device(devices)
    if summary.goodput_per_s is not None:
        limits = ", ".join(f"{name} ≤ {limit:g}" for name, limit in run.slo.items())
        yield f"goodput {summary.goodput_per_s:.3f} requests/s met {limits}"
    if summary.cached_share is not None:
        yield f"cached: {summary.cached_share:.1%} of the input tokens"
    if run.cpu:
        yield from _cpu(run, summary)
    for warning in summary.warnings:
        yield f"WARNING: {warning}"


def conditions(run: Run) -> str:
    """Under which the figures were measured, in one line; what was not set is left out."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_words(value)}"
        for name, value in run.conditions.items()
        if value is not None and value not in ({}, "")
    )


def _words(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_words(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(found: Spread | None) -> str:
    if found is None:
        return f"{0:>10}"
    values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.most)
    return f"{found.n:>10}" + "".join(f"{value:>10.1f}" for value in values)


def _details(run: Run) -> Iterator[str]:
    """One failure of each kind in the server's words: enough to know where to look."""
    told: set[Outcome] = set()
    for sample in run.samples:
        if sample.measured and sample.outcome is not Outcome.OK and sample.outcome not in told:
            told.add(sample.outcome)
            yield f"  {sample.outcome}, request {sample.index}: {sample.detail}"


def _by_device(devices: PerDevice) -> Iterator[str]:
    yield (
        f"by device: {devices.input_tokens_per_s_per_prefill_device:.1f} input tokens/s per "
        f"prefill device ({devices.prefill_devices}), "
        f"{devices.output_tokens_per_s_per_decode_device:.1f} output tokens/s per decode device "
        f"({devices.decode_devices})"
    )
    count = devices.prefill_devices + devices.decode_devices
    yield (
        f"by device, all {count}: {devices.total_tokens_per_s_per_device:.1f} input and output "
        "tokens/s per device"
    )


def _cpu(run: Run, summary: Summary) -> Iterator[str]:
    parts = ", ".join(
        f"{share.label} {share.cpu_s:.1f}{' (engine)' if share.engine else ''}" for share in run.cpu
    )
    yield f"CPU seconds in the window: {parts}"
    if summary.overhead_share is None:
        yield "no process could be told to be an engine: the share outside engines is unknown"
    else:
        yield (
            f"outside the engines: {_PERCENT * summary.overhead_share:.1f} % of {run.cores} cores"
        )
