"""The ways of our own figures into Ray's exporter: totals, values of now, samples.

Called by the metrics of ingresses, workers and node agents. Each family is one of
deployments/measures. Nothing here may be called once a token: Ray's observe() takes microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.measures.metric import Metric

OBSERVED_MAX = 1_000  # of values that come with tokens and steps, at one look


@dataclass(slots=True)
class Totals:
    """Turns totals that only grow into increments of a Ray counter."""

    counter: Counter
    seen: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def set(self, tags: dict[str, str], total: float) -> None:
        """A first total of 0 is told too: without it, the first increase would not be seen."""
        key = tuple(sorted(tags.items()))
        grown = total - self.seen.get(key, 0)
        if grown > 0:
            self.counter.inc(grown, tags)
            self.seen[key] = total
        elif key not in self.seen:
            self.counter._record(0.0, tags)  # noqa: SLF001 - inc() refuses 0
            self.seen[key] = 0


def observe(histogram: Histogram, values: Iterable[float], tags: Mapping[str, str]) -> None:
    """Give each value to the exporter."""
    labels = dict(tags)
    for value in values:
        histogram.observe(value, labels)


def observe_some(histogram: Histogram, values: Sequence[float], tags: Mapping[str, str]) -> None:
    """The same for values that come with tokens and steps: of many, a random choice."""
    is_few = len(values) <= OBSERVED_MAX
    observe(histogram, values if is_few else random.sample(values, OBSERVED_MAX), tags)


def totals_of(metric: Metric) -> Totals:
    """The family's counter."""
    assert metric.kind == "counter", metric.name
    return Totals(Counter(metric.name, metric.meaning, tag_keys=tuple(metric.labels)))


def gauge_of(metric: Metric) -> Gauge:
    """The family's gauge."""
    assert metric.kind == "gauge", metric.name
    return Gauge(metric.name, metric.meaning, tag_keys=tuple(metric.labels))


def histogram_of(metric: Metric) -> Histogram:
    """The family's histogram."""
    assert metric.kind == "histogram", metric.name
    return Histogram(
        metric.name,
        metric.meaning,
        boundaries=list(metric.bounds),
        tag_keys=tuple(metric.labels),
    )
