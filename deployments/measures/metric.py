"""What a metric is: name, kind, meaning, labels with all their values.

Called by the three lists beside it and by whoever reads them (exporter, dashboards, docs). Must
not import ray: dashboards are made where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

PREFIX = "ray_"  # Ray's exporter puts it before each name
FEW = 8  # values that a label may take where they are not listed, for the bound on series
MODEL = "the served model: one an application"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One family. Equal to itself alone.

    Attributes:
        name: without Ray's prefix; a unit last, _total after it for counters.
        meaning: HELP; formulas are stated here.
        labels: by name: all values, or in words why they are few.
        bounds: upper bounds of a histogram's buckets, in the name's unit.

    """

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, tuple[str, ...] | str]
    bounds: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        """What is true of every metric. Raises AssertionError."""
        assert self.name.startswith("headwater_"), self.name
        assert self.name.endswith("_total") == (self.kind == "counter"), self.name
        assert bool(self.bounds) == (self.kind == "histogram"), self.name
        assert list(self.bounds) == sorted(set(self.bounds)), self.name

    @property
    def exported(self) -> str:
        """The name that Prometheus sees."""
        return PREFIX + self.name

    @property
    def series_names(self) -> tuple[str, ...]:
        """All names that an expression may use."""
        if self.kind != "histogram":
            return (self.exported,)
        return tuple(self.exported + end for end in ("_bucket", "_sum", "_count"))

    @property
    def series_max(self) -> int:
        """Series that one process can make of it."""
        listed = [v for v in self.labels.values() if v is not MODEL]
        values = [FEW if isinstance(v, str) else len(v) for v in listed]
        return prod(values) * (len(self.bounds) + 3 if self.bounds else 1)


# From a millisecond to two minutes: a CPU and a GPU both lie within.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
# Between two tokens: finer where people read along.
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
