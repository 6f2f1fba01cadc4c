"""The plots of a report but for its timelines: distributions, runs side by side, sweeps.

Called by page.py. Each caption says what was counted; n is in the legend or the caption. A failed
request is in no distribution, and a percentile without enough samples is no point (numbers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from loadtests import plots
from loadtests.load.metrics import Spread
from loadtests.report.comparison import Comparison
from loadtests.report.entries import LATENCIES, Entry, Latency, by_series, sweep_lines, values
from loadtests.report.knees import UNITS
from loadtests.report.numbers import RULE, count, percentile

SERIES_MAX = 12
"""More lines than this cannot be told apart in one plot."""
_WIDE = 5.0
_ROW_IN = 0.32
_SHOWN = ("p50", "p95")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A plot as SVG, and what must be read with it."""

    svg: str
    caption: str


def distributions(shown: Sequence[Entry], comparison: Comparison) -> Iterator[Drawing]:
    """A CDF a latency, a line a run; repeats of one label are one line of all their samples."""
    series = _series(shown, comparison)
    drawn = dict(list(series.items())[:SERIES_MAX])
    for latency in LATENCIES:
        found = {
            label: values(latency, (sample for entry in some for sample in entry.good))
            for label, some in drawn.items()
        }
        if not any(found.values()):
            continue
        figure, axes = plots.figure(
            f"{latency.title}: share at or below",
            f"{latency.title} (ms)",
            f"share of {_of(latency)}",
        )
        for index, (label, some_values) in enumerate(found.items()):
            plots.cdf(axes, some_values, label, index)
        aside = _widen(axes, [value for each in found.values() for value in each])
        plots.legend(axes)
        caption = f"Of measured requests that succeeded; n counts {latency.what}.{aside}"
        if any(len(some) > 1 for some in drawn.values()):
            caption += " Runs of one label are drawn as one line of all their samples."
        if len(series) > len(drawn):
            caption += f" The first {len(drawn)} of {len(series)} are drawn."
        yield Drawing(plots.svg(figure, f"cdf-{latency.key}"), caption)


def side_by_side(shown: Sequence[Entry]) -> Iterator[Drawing]:
    """Several runs: each one's figures as points, a row a label."""
    labelled = by_series(shown)
    if len(shown) < 2:  # noqa: PLR2004  # nothing stands beside it
        return
    for latency in LATENCIES:
        rows = {
            label: {
                name: [v for e in some if (v := _percentile(e, latency.key, name)) is not None]
                for name in _SHOWN
            }
            for label, some in labelled.items()
        }
        yield from _dots(
            rows,
            f"{latency.title} by run",
            f"{latency.title} (ms)",
            f"dots-{latency.key}",
            f"{_counts(shown, latency)}. {RULE}",
        )
    for key, title, what in _FIGURES:
        rows = {
            label: {"": [v for e in some if (v := what(e)) is not None]}
            for label, some in labelled.items()
        }
        yield from _dots(rows, f"{key} by run", title, f"dots-{key}".lower(), _requests(shown))


def sweep(shown: Sequence[Entry], comparison: Comparison) -> Iterator[Drawing]:
    """Figures against the key that the runs vary; a line a label."""
    if comparison.across is None:
        return
    across = comparison.across.rpartition(".")[2]
    unit = f"{across} ({UNITS[across]})" if across in UNITS else across
    lines = sweep_lines(shown)
    for latency in LATENCIES:
        figure, axes = plots.figure(
            f"{latency.title} against {across}", unit, f"{latency.title} (ms)"
        )
        present = False
        for index, (label, some) in enumerate(lines.items()):
            for shift, name in enumerate(_SHOWN):
                prefix = f"{label}, " if len(lines) > 1 else ""
                present |= _against(
                    axes,
                    some,
                    lambda e, key=latency.key, at=name: _percentile(e, key, at),  # type: ignore[misc]
                    f"{prefix}{name}",
                    index * len(_SHOWN) + shift,
                )
        if not present:
            continue
        _limit(axes, shown, latency.key)
        plots.from_zero(axes)
        plots.legend(axes)
        caption = f"{_counts(shown, latency)}. {RULE}"
        yield Drawing(plots.svg(figure, f"sweep-{latency.key}"), caption)
    for key, title, what in _FIGURES:
        figure, axes = plots.figure(f"{key} against {across}", unit, title)
        drawn = [
            _against(axes, some, what, label, index)
            for index, (label, some) in enumerate(lines.items())
        ]
        if any(drawn):
            plots.from_zero(axes)
            if len(lines) > 1:
                plots.legend(axes)
            yield Drawing(plots.svg(figure, f"sweep-{key}".lower()), _requests(shown))


def _goodput(entry: Entry) -> float | None:
    return entry.summary.goodput_per_s


def _output(entry: Entry) -> float | None:
    return entry.summary.output_tokens_per_s if entry.summary.succeeded else None


def _cached(entry: Entry) -> float | None:
    share = entry.summary.cached_share
    return None if share is None else 100.0 * share


def _success(entry: Entry) -> float | None:
    return 100.0 * entry.summary.success_share if entry.summary.requests else None


_FIGURES: tuple[tuple[str, str, Callable[[Entry], float | None]], ...] = (
    ("Goodput", "requests/s within every SLO", _goodput),
    ("Throughput", "output tokens/s", _output),
    ("Cached input", "cached share of input tokens (%)", _cached),
    ("Success", "requests that succeeded (%)", _success),
)


def _series(shown: Sequence[Entry], comparison: Comparison) -> dict[str, list[Entry]]:
    if comparison.across is None:
        return by_series(shown)
    return {entry.name: [entry] for entry in shown}


def _against(
    axes: Axes,
    some: Sequence[Entry],
    what: Callable[[Entry], float | None],
    label: str,
    index: int,
) -> bool:
    """Whether there was anything to draw. Repeats at one value are points of their own."""
    found = [(e.at, value) for e in some if e.at is not None and (value := what(e)) is not None]
    if found:
        plots.line(axes, [at for at, _ in found], [value for _, value in found], label, index)
    return bool(found)


def _limit(axes: Axes, shown: Sequence[Entry], key: str) -> None:
    limits = {entry.run.slo[key] for entry in shown if key in entry.run.slo}
    for limit_ms in sorted(limits):
        axes.axhline(
            limit_ms,
            color=plots.PALETTE[-1],
            linestyle=":",
            linewidth=1.2,
            label=f"SLO: {limit_ms:g} ms",
        )


def _dots(
    rows: Mapping[str, Mapping[str, Sequence[float]]], title: str, x: str, name: str, caption: str
) -> Iterator[Drawing]:
    every = [value for series in rows.values() for some in series.values() for value in some]
    if not every:
        return
    height = max(plots.SIZE_IN[1] * 0.7, 1.1 + _ROW_IN * len(rows))
    figure, axes = plots.figure(title, x, "", size=(plots.SIZE_IN[0], height))
    plots.dots(axes, rows)
    plots.from_zero(axes, "x")
    if any(label for series in rows.values() for label in series):
        plots.legend(axes)
    yield Drawing(plots.svg(figure, name.replace(" ", "-")), f"A point is a run. {caption}")


def _widen(axes: Axes, found: Sequence[float]) -> str:
    """Logarithmic where a few large values would press the rest to the left; what to say of it."""
    above = sorted(value for value in found if value > 0)
    if not above or above[-1] < _WIDE * above[len(above) // 2]:
        plots.from_zero(axes, "x")
        return ""
    plots.logarithmic(axes)
    zeros = len(found) - len(above)
    return f" The axis is logarithmic: {count(zeros)} values of 0 lie left of it." if zeros else ""


def _of(latency: Latency) -> str:
    return "gaps" if latency.key == "itl_ms" else "requests"


def _percentile(entry: Entry, key: str, name: str) -> float | None:
    spread: Spread | None = getattr(entry.summary, key)
    return None if spread is None else percentile(spread, name)


def _counts(shown: Sequence[Entry], latency: Latency) -> str:
    spreads: list[Spread | None] = [getattr(entry.summary, latency.key) for entry in shown]
    return f"n = {_span([spread.n if spread else 0 for spread in spreads])} {latency.what} a run"


def _requests(shown: Sequence[Entry]) -> str:
    return f"n = {_span([entry.summary.requests for entry in shown])} measured requests a run."


def _span(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return count(least) if least == most else f"{count(least)} to {count(most)}"
