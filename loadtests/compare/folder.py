"""The folder of a comparison: what was planned, what is done, what failed. Called by the command.

    plan.json                  what must stay the same when the comparison goes on
    runs/ROUND-LABEL-LOAD.json a run each; a turn is done when all its loads are there
    budgets/BUDGET.json        the short runs that choose set-up (c)'s budget
    failed/ROUND-LABEL.json    a set-up that could not run: what was done, and what it said
    found.json                 what was found out once, such as where the model lies
    logs/                      of every server

So a comparison can be done in parts, and an interrupted one goes on where it was. Must not
overwrite a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests.compare.loads import Load
from loadtests.compare.schedule import Turn
from loadtests.load.records import Run


class WrongFolder(Exception):
    """The folder holds something else than what was asked for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A turn that gave no figures. error: the command that failed, and what it said."""

    label: str
    title: str
    round: int
    error: str


class Folder:
    """One comparison on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, plan: dict[str, Any]) -> None:
        """Make it, or go on with it. Raises WrongFolder where it was begun in another way."""
        found = self._plan()
        if found is None:
            for name in ("runs", "budgets", "failed", "logs"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            _write(self.path / "plan.json", plan)
            return
        differing = [
            f"{name} {found.get(name)!r}, not {plan.get(name)!r}"
            for name in sorted({*plan, *found})
            if found.get(name) != plan.get(name)
        ]
        if differing:
            raise WrongFolder(
                f"{self.path} was begun with {'; '.join(differing)}: repeat those flags to go on "
                "with it, or name another folder"
            )

    def remembered(self, name: str) -> str | None:
        """A value that was found out once, such as where the model lies."""
        file = self.path / "found.json"
        if not file.exists():
            return None
        value = json.loads(file.read_text(encoding="utf-8")).get(name)
        return None if value is None else str(value)

    def remember(self, name: str, value: str) -> None:
        """For the next time."""
        file = self.path / "found.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        _write(file, {**found, name: value})

    def done(self, turns: Iterable[Turn], loads: Sequence[Load]) -> set[str]:
        """Names of the turns that are done."""
        return {
            turn.name
            for turn in turns
            if all(self._run(turn, load.name).exists() for load in loads)
        }

    def keep(self, turn: Turn, runs: Sequence[tuple[Load, Run]]) -> None:
        """A turn's runs; it has not failed, whatever it did before."""
        for load, run in runs:
            run.save(self._run(turn, load.name))
        self._failure(turn).unlink(missing_ok=True)

    def fail(self, turn: Turn, title: str, error: str) -> None:
        """A turn gave nothing. A later try replaces it."""
        failure = Failure(turn.label, title, turn.round, error)
        _write(self._failure(turn), asdict(failure))

    def runs(self) -> list[Run]:
        """All, in the order of rounds. Raises ValueError for a file that is no run."""
        return [Run.read(file) for file in sorted((self.path / "runs").glob("*.json"))]

    def failures(self) -> list[Failure]:
        """Turns that gave nothing so far."""
        files = sorted((self.path / "failed").glob("*.json"))
        return [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in files]

    def logs(self, turn: str) -> Path:
        """Of a turn's servers."""
        return self.path / "logs" / turn

    def budget_run(self, budget: int) -> Path:
        """Where the short run of a budget is, or will be."""
        return self.path / "budgets" / f"{budget:05d}.json"

    def _plan(self) -> dict[str, Any] | None:
        file = self.path / "plan.json"
        if file.exists():
            return dict(json.loads(file.read_text(encoding="utf-8")))
        ours = {"found.json", "logs"}
        if self.path.exists() and any(each.name not in ours for each in self.path.iterdir()):
            raise WrongFolder(f"{self.path} holds something else: name an empty or a new folder")
        return None

    def _run(self, turn: Turn, load: str) -> Path:
        return self.path / "runs" / f"{turn.name}-{load}.json"

    def _failure(self, turn: Turn) -> Path:
        return self.path / "failed" / f"{turn.name}.json"


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)
