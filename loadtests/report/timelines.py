"""What happened when in one run: requests, TTFT, in flight, tokens and cached share over time.

Called by page.py. The whole run is drawn, with what lies outside the measured window shaded.
Failed requests are drawn as marks; their tokens and times are in no line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtests import plots
from loadtests.load import metrics
from loadtests.load.records import Outcome, Run, Sample
from loadtests.report.drawings import Drawing
from loadtests.report.numbers import count

BINS_MAX = 40
POINTS_MAX = 1500
CROSSES_MAX = 60
SEEN_SHARE = 0.005
_WIDTHS_S = tuple(step * 10.0**power for power in range(-2, 6) for step in (1, 2, 5))
_TIME = "time since the run began (s)"


def timeline(run: Run, name: str) -> Iterator[Drawing]:
    """name: unique in the page. Nothing of a run without samples."""
    if not run.samples:
        return
    time = _Time(run)
    good = [sample for sample in run.samples if sample.outcome is Outcome.OK]
    bad = [sample for sample in run.samples if sample.outcome is not Outcome.OK]
    yield _requests(time, good, bad, name)
    if good:
        yield _ttft(time, good, bad, name)
    yield _in_flight(time, name)
    if good:
        yield _tokens(time, good, name)
    told = [s for s in good if s.cached_tokens is not None and s.input_tokens]
    if told:
        yield _cached(time, told, name)


class _Time:
    """The axis of a run: its length, its bins, its window."""

    def __init__(self, run: Run) -> None:
        self.samples = run.samples
        self.window_s = run.window_s
        self.end_s = max(1e-3, run.window_s[1], *(sample.ended_s for sample in run.samples))
        fitting = (width for width in _WIDTHS_S if self.end_s / width <= BINS_MAX)
        self.width_s = next(fitting, self.end_s / BINS_MAX)
        bins = max(1, math.ceil(self.end_s / self.width_s - 1e-9))
        self.edges = np.minimum(np.arange(bins + 1) * self.width_s, self.end_s)
        if bins > 1 and self.edges[-1] - self.edges[-2] < self.width_s / 2:
            # The rate of a sliver says nothing: it belongs to the bin before.
            self.edges = np.delete(self.edges, -2)

    def middles(self) -> list[float]:
        return [float(middle) for middle in (self.edges[:-1] + self.edges[1:]) / 2]

    def sums(self, at_s: Iterable[float], weights: Iterable[float] | None = None) -> list[float]:
        given = None if weights is None else list(weights)
        sums, _ = np.histogram(list(at_s), bins=self.edges, weights=given)
        return [float(value) for value in sums]

    def per_s(self, at_s: Iterable[float], weights: Iterable[float] | None = None) -> list[float]:
        """The last bin may be shorter than the others."""
        widths = np.diff(self.edges)
        return [
            value / float(width)
            for value, width in zip(self.sums(at_s, weights), widths, strict=True)
        ]

    def frame(self, axes: Axes) -> None:
        """Shades what was not measured."""
        for low_s, high_s in self.outside():
            axes.axvspan(low_s, high_s, color=plots.PALETTE[-1], alpha=0.18, linewidth=0)
        axes.set_xlim(0.0, self.end_s)
        plots.from_zero(axes)

    def outside(self) -> list[tuple[float, float]]:
        """What lies outside the measured window, if it is wide enough to be seen."""
        begin_s, end_s = self.window_s
        both = ((0.0, begin_s), (end_s, self.end_s))
        return [(low, high) for low, high in both if high - low > SEEN_SHARE * self.end_s]

    def caption(self, text: str) -> str:
        return f"{text} Shaded: outside the measured window." if self.outside() else text


def _requests(time: _Time, good: Sequence[Sample], bad: Sequence[Sample], name: str) -> Drawing:
    figure, axes = plots.figure("Requests over time", _TIME, "requests/s")
    middles = time.middles()
    sent = time.per_s(sample.sent_s for sample in time.samples)
    plots.line(axes, middles, sent, f"sent (n = {count(len(time.samples))})", 0, markers=False)
    ended = time.per_s(sample.ended_s for sample in good)
    plots.line(axes, middles, ended, f"succeeded (n = {count(len(good))})", 2, markers=False)
    if bad:
        failed = time.per_s(sample.ended_s for sample in bad)
        plots.line(axes, middles, failed, f"failed (n = {count(len(bad))})", 1, markers=False)
    return _finish(time, figure, axes, f"{name}-requests", f"By {time.width_s:g} s.")


def _ttft(time: _Time, good: Sequence[Sample], bad: Sequence[Sample], name: str) -> Drawing:
    figure, axes = plots.figure("TTFT by when it was sent", _TIME, "TTFT (ms)")
    text = "A point is a request."
    for index, (label, measured) in enumerate((("measured", True), ("warm-up", False))):
        some = [sample for sample in good if sample.measured is measured]
        if not some:
            continue
        step = -(-len(some) // POINTS_MAX)
        drawn = some[::step]
        if step > 1:
            text += f" Of the {label} ones every {step}th is drawn."
        x, y = [s.sent_s for s in drawn], [metrics.ttft_ms(s) for s in drawn]
        plots.points(axes, x, y, f"{label} (n = {count(len(some))})", 0 if index == 0 else 6)
    if bad:
        axes.plot(
            [sample.sent_s for sample in bad],
            [0.03] * len(bad),
            transform=axes.get_xaxis_transform(),
            color=plots.look(1).color,
            marker="x" if len(bad) <= CROSSES_MAX else "|",
            linestyle="",
            label=f"failed, no TTFT (n = {count(len(bad))})",
        )
    return _finish(time, figure, axes, f"{name}-ttft", text)


def _in_flight(time: _Time, name: str) -> Drawing:
    """Exactly: each request adds one when it is sent and takes it away when it ends."""
    figure, axes = plots.figure("In flight", _TIME, "requests in flight")
    at_s = np.concatenate(
        [[s.sent_s for s in time.samples], [s.ended_s for s in time.samples]]
    ).astype(float)
    change = np.repeat([1, -1], len(time.samples))
    # One that ends as another begins was not in flight with it.
    order = np.lexsort((change, at_s))
    level = np.cumsum(change[order])
    x, y = at_s[order], level
    text = f"n = {count(len(time.samples))} requests, failed ones included."
    if len(x) > POINTS_MAX:
        # The most within each of as many spans as can be seen apart.
        spans = np.array_split(np.arange(len(x)), POINTS_MAX // 2)
        kept = np.array([span[np.argmax(y[span])] for span in spans])
        x, y = x[kept], y[kept]
        text += " Of what is too close to be seen apart, the most is drawn."
    axes.step(
        [0.0, *map(float, x)],
        [0.0, *map(float, y)],
        where="post",
        color=plots.look(0).color,
        linewidth=1.4,
    )
    return _finish(time, figure, axes, f"{name}-in-flight", text)


def _tokens(time: _Time, good: Sequence[Sample], name: str) -> Drawing:
    figure, axes = plots.figure("Output tokens over time", _TIME, "output tokens/s")
    chunks = [chunk for sample in good for chunk in sample.chunks]
    rates = time.per_s((chunk.at_s for chunk in chunks), (float(c.tokens) for c in chunks))
    plots.line(axes, time.middles(), rates, "output", 0, markers=False)
    tokens = sum(chunk.tokens for chunk in chunks)
    text = (
        f"By {time.width_s:g} s; n = {count(tokens)} tokens counted in the chunks of "
        f"{count(len(good))} requests that succeeded."
    )
    return _finish(time, figure, axes, f"{name}-tokens", text, legend=False)


def _cached(time: _Time, told: Sequence[Sample], name: str) -> Drawing:
    figure, axes = plots.figure("Cached input over time", _TIME, "cached share of input (%)")
    sent_s = [sample.sent_s for sample in told]
    total = time.sums(sent_s, (float(sample.input_tokens or 0) for sample in told))
    hits = time.sums(sent_s, (float(sample.cached_tokens or 0) for sample in told))
    known = [
        (at, 100.0 * hit / all_)
        for at, hit, all_ in zip(time.middles(), hits, total, strict=True)
        if all_
    ]
    plots.line(
        axes, [at for at, _ in known], [value for _, value in known], "cached", markers=False
    )
    text = f"By {time.width_s:g} s of sending; n = {count(len(told))} requests whose server told."
    return _finish(time, figure, axes, f"{name}-cached", text, legend=False)


def _finish(
    time: _Time,
    figure: Figure,
    axes: Axes,
    name: str,
    text: str,
    *,
    legend: bool = True,
) -> Drawing:
    time.frame(axes)
    if legend:
        plots.legend(axes)
    return Drawing(plots.svg(figure, name), time.caption(text))
