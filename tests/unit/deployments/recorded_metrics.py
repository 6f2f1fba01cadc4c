"""In place of Ray's exporter: what was told to it, by name and labels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from deployments import totals
from deployments.measures.all_metrics import METRICS
from deployments.measures.metric import Metric

BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass
class Recorded:
    """All families together. Each call is held against the list of metrics."""

    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    samples: dict[str, dict[tuple[tuple[str, str], ...], list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def value(self, metric: Metric, **labels: str) -> float | None:
        """Of the one series with these labels and any others; None without it."""
        found = [v for key, v in self.values[metric.name].items() if labels.items() <= set(key)]
        assert len(found) <= 1, (metric.name, labels)
        return found[0] if found else None

    def by(self, metric: Metric, label: str) -> dict[str, float]:
        """The values by one label; 0 is left out."""
        return {dict(key)[label]: v for key, v in self.values[metric.name].items() if v}

    def observed(self, metric: Metric, **labels: str) -> list[float]:
        """All samples of series with these labels."""
        series = self.samples[metric.name].items()
        return [one for key, many in series if labels.items() <= set(key) for one in many]

    def checked(self, name: str, tags: dict[str, str]) -> tuple[tuple[str, str], ...]:
        """The series' key. Raises AssertionError where labels or their values are not listed."""
        metric = BY_NAME[name]
        assert tags.keys() == metric.labels.keys(), (name, tags)
        for label, value in tags.items():
            allowed = metric.labels[label]
            assert isinstance(allowed, str) or value in allowed, (name, label, value)
        return tuple(sorted(tags.items()))


def install(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Until the test is over."""
    told = Recorded()

    class Family:
        def __init__(self, name: str, meaning: str, tag_keys: tuple[str, ...]) -> None:
            assert meaning == BY_NAME[name].meaning
            assert tag_keys == tuple(BY_NAME[name].labels)
            self.name = name

    class Counter(Family):
        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0
            self._record(value, tags)

        def _record(self, value: float, tags: dict[str, str]) -> None:
            series, key = told.values[self.name], told.checked(self.name, tags)
            series[key] = series.get(key, 0) + value

    class Gauge(Family):
        def set(self, value: float, tags: dict[str, str]) -> None:
            told.values[self.name][told.checked(self.name, tags)] = value

    class Histogram(Family):
        def __init__(
            self, name: str, meaning: str, boundaries: list[float], tag_keys: tuple[str, ...]
        ) -> None:
            super().__init__(name, meaning, tag_keys)
            assert boundaries == list(BY_NAME[name].bounds)

        def observe(self, value: float, tags: dict[str, str]) -> None:
            assert value >= 0, (self.name, value)
            told.samples[self.name][told.checked(self.name, tags)].append(value)

    monkeypatch.setattr(totals, "Counter", Counter)
    monkeypatch.setattr(totals, "Gauge", Gauge)
    monkeypatch.setattr(totals, "Histogram", Histogram)
    return told
