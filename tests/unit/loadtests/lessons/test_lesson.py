from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from loadtests.lessons.engine import EngineFailed
from loadtests.lessons.lesson import Result, read, save, teach
from tests.unit.loadtests.lessons.made_up import TABLE, FakeBench, bench, lesson, raises


def test_a_lesson_is_measured_read_and_drawn() -> None:
    result = teach(lesson(tables=lambda _data: [TABLE]), bench())
    assert result.error == ""
    assert result.reading == ("First of [1.0, 2.0].", "Second.")
    assert len(result.plots) == 1
    assert result.tables == (TABLE,)


def test_its_data_tell_the_conditions_of_the_bench_and_its_own() -> None:
    data = teach(lesson(), bench(disturbance=0.031)).data
    assert data is not None
    assert data["conditions"] == {
        "model": "made up",
        "mode": "quick",
        "tokens": 7,
        "taken by other processes": "3.1 % of the steps' time",
    }
    assert data["lesson"] == "made_up"
    assert data["seconds"] >= 0
    assert data["date"].endswith(" UTC")


def test_what_was_not_measured_on_an_engine_says_nothing_of_disturbance() -> None:
    data = teach(lesson(), bench(disturbance=None)).data
    assert data is not None
    assert "taken by other processes" not in data["conditions"]


def test_a_lesson_whose_engine_fails_says_so_and_leaves_no_engine_behind() -> None:
    here = bench()
    result = teach(lesson(measure=raises(EngineFailed("the engine has ended."))), here)
    assert result.error == "the engine has ended."
    assert (result.data, result.reading, result.plots) == (None, None, ())
    assert cast("FakeBench", here).dropped == 1


def test_an_error_of_a_lesson_is_told_with_its_place() -> None:
    result = teach(lesson(measure=raises(RuntimeError("broken"))), bench())
    assert result.error.startswith("RuntimeError: broken (made_up.py, line ")


@pytest.mark.parametrize("part", ["reading", "plots", "tables"])
def test_where_only_the_reading_fails_the_data_are_kept(part: str) -> None:
    broken = lesson()
    setattr(broken, part, raises(KeyError("missing")))
    result = teach(broken, bench())
    assert "KeyError" in result.error
    assert result.data is not None
    assert result.data["values"] == [1.0, 2.0]
    assert result.reading is None


def test_data_of_another_lesson_or_without_n_are_refused() -> None:
    data = teach(lesson("other"), bench()).data
    assert data is not None
    assert "are not data of lesson made_up" in read(lesson(), data).error
    assert "with their n" in read(lesson("other"), {**data, "n": {}}).error
    assert "are not data" in read(lesson("other"), {**data, "format": "older"}).error
    assert read(lesson("other"), data).error == ""


def test_data_are_saved_as_json_and_read_back_equal(tmp_path: Path) -> None:
    result = teach(lesson(), bench())
    path = save(result, tmp_path)
    assert path == tmp_path / "made_up.json"
    assert json.loads(path.read_text()) == result.data
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_failure_without_data_saves_nothing(tmp_path: Path) -> None:
    assert save(Result(lesson(), error="no"), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
