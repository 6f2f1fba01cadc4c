"""A whole comparison: what is still missing is measured, turn by turn. Called by the command.

Prints through `say`. Must not judge: reading.py and summary.py do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from loadtests.compare.addresses import Address
from loadtests.compare.budgets import Tried, best
from loadtests.compare.folder import Folder
from loadtests.compare.loads import LOADS, LONG, RUNNING, Load
from loadtests.compare.measuring import PAUSE_S, Conditions, Say, WarmUpFailed, take_turn
from loadtests.compare.nixl_pair import NixlPair
from loadtests.compare.plain import TwoPlain
from loadtests.compare.product import Headwater
from loadtests.compare.ray_llm import RayLlm
from loadtests.compare.schedule import Turn, missing, turns
from loadtests.compare.setups import Place, SetUp
from loadtests.load.errors import LoadError, UsageError
from loadtests.load.metrics import summarise
from loadtests.load.records import Outcome, Run
from loadtests.load.token_prompts import Vocabulary, token_ids, vocabulary_size
from loadtests.results import Setting
from loadtests.sides import Limits, SideFailed, product_config

PRODUCT, PLAIN, BUDGET, RAY, NIXL, URL = "a", "b", "c", "d", "e", "f"
OURS = (PRODUCT, PLAIN, BUDGET, RAY, NIXL)
ENGINES = 2
BUDGET_WINDOW_S = 30.0
# Ids that any model's vocabulary has, for servers of which nothing is known.
VOCABULARY_LEAST = 10_000
# A turn's start and stop, until one was measured; warm-up and stop, ever after.
START_GUESS_S = 45.0
AROUND_S = 20.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. turns_most: how many turns this call takes; None for all."""

    folder: Path
    labels: tuple[str, ...]
    rounds: int
    seed: int
    window_s: float
    loads: tuple[Load, ...]
    budgets: tuple[int, ...]
    packages: Path
    urls: tuple[str, ...] = ()
    url_model: str | None = None
    model: Path | None = None
    turns_most: int | None = None


class Comparison:
    """One comparison, in a folder."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options = options
        self.folder = Folder(options.folder)
        self._say = say
        self._left = options.turns_most
        self._cores = tuple(sorted(os.sched_getaffinity(0)))[:ENGINES]
        self._facts = _facts(Setting.here())
        self._config: dict[str, Any] = {}
        self._limits: Limits | None = None

    def measure(self) -> None:
        """Everything that is missing, or as much as was asked for. Raises LoadError."""
        options = self.options
        if any(label in OURS for label in options.labels):
            if len(self._cores) < ENGINES:
                raise LoadError(f"each engine needs a core of its own: {ENGINES}, here is 1")
            self._config = product_config()
            self._limits = self._limits_of(self._config)
        self.folder.begin(self._plan())
        if BUDGET in options.labels and not self._budgets_tried():
            return
        set_ups = self.set_ups()
        failed: set[str] = set()
        for turn in self.missing():
            if self._left == 0:
                return
            # What does not run does not run in the next round either; a start may take minutes.
            if turn.label not in failed and not self._took(set_ups[turn.label], turn):
                failed.add(turn.label)

    def missing(self) -> list[Turn]:
        """Turns that are still to be taken."""
        planned = turns(self.labels, self.options.rounds, self.options.seed)
        return missing(planned, self.folder.done(planned, self.options.loads))

    def left_s(self) -> float:
        """How long what is missing is going to take, by the starts that were seen."""
        options = self.options
        starts_s = {
            str(run.facts["set_up"]): float(run.facts["start_s"]) for run in self.folder.runs()
        }
        guess_s = median(starts_s.values()) if starts_s else START_GUESS_S
        loads_s = sum(load.warmup_s + options.window_s + PAUSE_S for load in options.loads)
        turns_s = sum(
            starts_s.get(turn.label, guess_s) + loads_s + AROUND_S for turn in self.missing()
        )
        untried = len(options.budgets) - len(self.tried()) if BUDGET in options.labels else 0
        load_s = LOADS["interference"].warmup_s + BUDGET_WINDOW_S
        return turns_s + untried * (guess_s + load_s + AROUND_S)

    def set_ups(self) -> Mapping[str, SetUp]:
        """By label."""
        made: dict[str, SetUp] = {
            label: Address(label, url, self.options.url_model)
            for label, url in zip(self._url_labels(), self.options.urls, strict=True)
        }
        if self._limits is None:
            return made
        place = self._place()
        model = None if self.options.model is None else str(self.options.model)
        made |= {
            PRODUCT: Headwater(PRODUCT, self._config, model),
            PLAIN: TwoPlain(PLAIN, place),
            RAY: RayLlm(RAY, place),
            NIXL: NixlPair(NIXL, place),
        }
        tried = self.tried()
        if tried:
            made[BUDGET] = TwoPlain(BUDGET, place, best(tried).budget)
        return made

    def tried(self) -> list[Tried]:
        """The budgets that were tried so far, of those asked for."""
        found = []
        for budget in self.options.budgets:
            file = self.folder.budget_run(budget)
            if file.exists():
                found.append(_tried(budget, Run.read(file)))
        return found

    def _took(self, set_up: SetUp, turn: Turn) -> bool:
        """Whether it gave figures."""
        self._left = None if self._left is None else self._left - 1
        began_s = time.monotonic()
        try:
            runs = take_turn(
                set_up,
                turn,
                self._conditions(self.options.loads, self.options.window_s),
                self.folder.logs(turn.name),
                self._facts,
                self._say,
            )
        except (SideFailed, WarmUpFailed) as failed:
            self.folder.fail(turn, set_up.title, str(failed))
            self._say(f"{turn.name}: {set_up.title} could not run: {failed}")
            return False
        self.folder.keep(turn, runs)
        self._say(f"{turn.name}: done in {time.monotonic() - began_s:.0f} s")
        return True

    def _budgets_tried(self) -> bool:
        """Whether all of them have been, now."""
        for budget in self.options.budgets:
            file = self.folder.budget_run(budget)
            if file.exists():
                continue
            if self._left == 0:
                return False
            self._left = None if self._left is None else self._left - 1
            turn = Turn(0, f"budget-{budget}")
            conditions = self._conditions((LOADS["interference"],), BUDGET_WINDOW_S)
            set_up = TwoPlain(BUDGET, self._place(), budget)
            try:
                ((_, run),) = take_turn(
                    set_up, turn, conditions, self.folder.logs(turn.name), self._facts, self._say
                )
            except (SideFailed, WarmUpFailed) as failed:
                raise LoadError(f"a budget of {budget} tokens a step: {failed}") from failed
            run.save(file)
        try:
            chosen = best(self.tried())
        except ValueError as none:
            raise LoadError(str(none)) from none
        self._say(f"the best budget for ({BUDGET}) is {chosen.budget} tokens a step")
        return True

    def _conditions(self, loads: tuple[Load, ...], window_s: float) -> Conditions:
        common: dict[str, Any] = {"cores": len(self._cores), "machine": self._facts["machine"]}
        if self._limits is not None:
            common |= {
                name: value
                for name, value in asdict(replace(self._limits, model="")).items()
                if name not in {"model", "max_num_batched_tokens"}
            }
        return Conditions(loads, self.options.seed, window_s, self._words(), common)

    def _words(self) -> Vocabulary:
        size = None if self._limits is None else vocabulary_size({"root": self._limits.model})
        return token_ids(size or VOCABULARY_LEAST)

    def _plan(self) -> dict[str, Any]:
        options = self.options
        return {
            "seed": options.seed,
            "window_s": options.window_s,
            "loads": [load.name for load in options.loads],
            "limits": None if self._limits is None else asdict(self._limits),
        }

    def _place(self) -> Place:
        assert self._limits is not None
        self.options.packages.mkdir(parents=True, exist_ok=True)
        return Place(self._cores, self._limits, self.options.packages)

    def _limits_of(self, config: dict[str, Any]) -> Limits:
        """Asks Headwater, once a folder, which model it serves and where that lies."""
        given = self.options.model
        if given is not None:
            if not (given / "config.json").is_file():
                raise UsageError(f"--model: {given} holds no config.json: name a model's folder")
            return Limits.of(config, str(given.resolve()), given.resolve().name)
        path, name = (self.folder.remembered(what) for what in ("model", "model_name"))
        if path is None or name is None:
            self._say("starting Headwater once, to ask which model it serves")
            logs = self.folder.logs("model")
            logs.mkdir(parents=True, exist_ok=True)
            try:
                with Headwater(PRODUCT, config).start(logs) as running:
                    path, name = running.facts["model_folder"], running.model
            except SideFailed as failed:
                raise LoadError(str(failed)) from failed
            self.folder.remember("model", path)
            self.folder.remember("model_name", name)
        return Limits.of(config, path, name)

    def _url_labels(self) -> list[str]:
        count = len(self.options.urls)
        return [URL if count == 1 else f"{URL}{number}" for number in range(1, count + 1)]

    @property
    def labels(self) -> Sequence[str]:
        """Of all set-ups, in the order of tables."""
        return [*self.options.labels, *self._url_labels()]


def _tried(budget: int, run: Run) -> Tried:
    def figure(group: str) -> Run:
        return replace(run, samples=tuple(s for s in run.samples if s.group == group))

    running, long = summarise(figure(RUNNING)), summarise(figure(LONG))
    failed = sum(s.outcome is not Outcome.OK for s in run.samples if s.measured)
    none = running.itl_ms is None or long.ttft_ms is None
    return Tried(
        budget=budget,
        itl_p99_ms=running.itl_ms.p99 if running.itl_ms is not None else float("inf"),
        long_ttft_p50_ms=long.ttft_ms.p50 if long.ttft_ms is not None else float("inf"),
        failed=max(failed, int(none)),
    )


def _facts(setting: Setting) -> dict[str, Any]:
    return {
        "date": setting.date,
        "machine": list(setting.machine),
        "versions": list(setting.versions),
        "revision": setting.revision,
        "load_before": setting.load,
    }
