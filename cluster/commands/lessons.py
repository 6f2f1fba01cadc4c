"""`headwater lessons`: the textbook of inference, measured on the real engine of this machine.

Starts engines of its own and needs no running cluster; one that runs here would disturb the times,
which is said. Writes one HTML page, and each lesson's data beside it. Ends with 1 if a lesson
failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import config_sources, running
from cluster.auto_values import resolve
from cluster.cli_options import LESSONS_PAGE
from cluster.errors import ClusterError, NotRunningError, PrerequisiteError
from cluster.node_facts import here

if TYPE_CHECKING:
    from cluster.config import Config
    from loadtests.lessons.lesson import Lesson, Result

# Not of the serving lock: the launcher adds requirements/plots.lock for this command.
NEEDED = ("matplotlib", "jinja2")


def run(arguments: argparse.Namespace) -> int:
    """Teach. Raises ClusterError before anything is measured; then failures are on the page."""
    config = config_sources.load(arguments).config
    for module in NEEDED:
        if importlib.util.find_spec(module) is None:
            message = (
                f"lessons draw their page with {module}, which this environment lacks; the "
                "launcher installs it: ./headwater lessons"
            )
            raise PrerequisiteError(message)
    lessons = _chosen(arguments.names)
    if arguments.list:
        width = max((len(lesson.NAME) for lesson in lessons), default=0)
        for lesson in lessons:
            sys.stdout.write(f"{lesson.NAME:<{width}}  {lesson.TITLE}\n")
        return 0
    folder: Path = arguments.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"the page cannot be written to {folder}: {error.strerror}") from error
    results = (
        _again(lessons, folder)
        if arguments.from_data
        else _measured(lessons, folder, config, quick=arguments.quick)
    )
    failed = [result for result in results if result.error]
    sys.stdout.write(f"Page: {(folder / LESSONS_PAGE).resolve()}\n")
    if failed:
        names = ", ".join(result.lesson.NAME for result in failed)
        sys.stdout.write(f"{len(failed)} of {len(results)} lessons failed: {names}\n")
    return int(bool(failed))


def _chosen(names: list[str]) -> list[Lesson]:
    from loadtests.lessons.book import NoSuchLesson, find

    try:
        return find(names)
    except NoSuchLesson as error:
        raise ClusterError(str(error)) from error


def _measured(lessons: list[Lesson], folder: Path, config: Config, *, quick: bool) -> list[Result]:
    from cluster.model_store import prepare_model
    from loadtests.lessons.lesson import Bench, save, teach

    _warn_of_cluster(config.state.dir)
    model = prepare_model(
        config.model.path_or_name, config.model.revision, config.state.cache_dir, _progress
    )
    dtype = resolve(config, [here()], model.figures).config.model.resolved_dtype
    results: list[Result] = []
    with Bench(model.path, quick=quick, say=_progress, dtype=dtype) as bench:
        for number, lesson in enumerate(lessons, 1):
            sys.stdout.write(f"\n{number}/{len(lessons)}  {lesson.TITLE}\n")
            sys.stdout.flush()
            began_s = time.monotonic()
            result = teach(lesson, bench)
            results.append(result)
            save(result, folder)
            _write(results, folder)  # after each: Ctrl-C leaves what there is
            _tell(result, time.monotonic() - began_s)
    return results


def _again(lessons: list[Lesson], folder: Path) -> list[Result]:
    from loadtests.lessons.lesson import read

    results = []
    for lesson in lessons:
        path = folder / f"{lesson.NAME}.json"
        if not path.exists():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ClusterError(f"{path} is not JSON: {error}") from error
        result = read(lesson, data)
        sys.stdout.write(f"\n{lesson.TITLE}\n")
        _tell(result, None)
        results.append(result)
    if not results:
        raise ClusterError(f"{folder} has no data of these lessons; measure them first")
    _write(results, folder)
    return results


def _write(results: list[Result], folder: Path) -> None:
    from loadtests.lessons.lesson import write
    from loadtests.lessons.page import render

    write(folder / LESSONS_PAGE, render(results))


def _tell(result: Result, seconds: float | None) -> None:
    if result.reading is None:
        sys.stdout.write(f"    FAILED: {result.error}\n")
    else:
        for sentence in result.reading:
            sys.stdout.write(f"    {sentence}\n")
    if seconds is not None:
        sys.stdout.write(f"    ({seconds:.0f} s)\n")
    sys.stdout.flush()


def _warn_of_cluster(state_dir: Path) -> None:
    try:
        found = running.read(state_dir)
    except NotRunningError:
        return
    sys.stderr.write(
        f"A Headwater runs here (pid {found.pid}): its work disturbs these times. "
        "./headwater stop ends it.\n"
    )


def _progress(line: str) -> None:
    sys.stderr.write(f"    {line}\n")
