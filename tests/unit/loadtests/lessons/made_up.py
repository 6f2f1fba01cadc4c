"""A lesson that measures nothing, for tests of the frame."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from matplotlib.figure import Figure

from loadtests import plots
from loadtests.lessons.lesson import Bench, Data, Lesson, Table


class FakeBench:
    """Stands in for Bench: no engine."""

    quick = True

    def __init__(self, disturbance: float | None = None) -> None:
        self.dropped = 0
        self._disturbance = disturbance

    def conditions(self) -> dict[str, Any]:
        return {"model": "made up", "mode": "quick"}

    def take_disturbance(self) -> float | None:
        return self._disturbance

    def drop_engines(self) -> None:
        self.dropped += 1


def bench(disturbance: float | None = None) -> Bench:
    return cast("Bench", FakeBench(disturbance))


def lesson(name: str = "made_up", **changes: Any) -> Lesson:
    """changes: other parts of the lesson."""

    def measure(_bench: Bench) -> Data:
        return {"n": {"steps": 3}, "conditions": {"tokens": 7}, "values": (1.0, 2.0)}

    def draw(data: Data) -> list[Figure]:
        figure, axes = plots.figure("values", "x", "y")
        plots.line(axes, [0, 1], data["values"], "v")
        return [figure]

    parts: dict[str, Any] = {
        "NAME": name,
        "TITLE": f"Title of {name}",
        "QUESTION": "Why?",
        "EXPLANATION": "First\nparagraph.\n\nSecond one.",
        "TERMS": ("token",),
        "measure": measure,
        "plots": draw,
        "reading": lambda data: (f"First of {data['values']}.", "Second."),
    }
    return cast("Lesson", SimpleNamespace(**{**parts, **changes}))


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


TABLE = Table("A table", ("a", "b"), (("1", "<2>"),))
