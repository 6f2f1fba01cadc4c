from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.compare.folder import Failure, Folder, WrongFolder
from loadtests.compare.loads import LOADS
from loadtests.compare.schedule import Turn
from tests.unit.loadtests.compare.runs import run, sample

PLAN = {"seed": 1, "loads": ["mixed"]}
TURN = Turn(0, "a")
MIXED, SHARED = LOADS["mixed"], LOADS["shared_prefix"]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "c")
    found.begin(PLAN)
    return found


def test_going_on_needs_the_same_plan_and_says_what_differs(folder: Folder) -> None:
    folder.begin(PLAN)
    with pytest.raises(WrongFolder, match="was begun with seed 1, not 2: repeat"):
        folder.begin({**PLAN, "seed": 2})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(WrongFolder, match="holds something else"):
        Folder(tmp_path).begin(PLAN)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_what_was_found_out_before_the_begin_is_no_obstacle(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "c")
    folder.logs("model").mkdir(parents=True)
    folder.remember("model", "/models/x")
    folder.begin(PLAN)
    assert folder.remembered("model") == "/models/x"
    assert folder.remembered("other") is None


def test_a_turn_is_done_when_all_its_loads_are_there(folder: Folder) -> None:
    made = run("a", 0, (sample(0),))
    folder.keep(TURN, [(MIXED, made)])
    assert folder.done([TURN, Turn(1, "a")], [MIXED]) == {"00-a"}
    assert folder.done([TURN], [MIXED, SHARED]) == set()
    assert folder.runs() == [made]


def test_a_failure_is_kept_until_the_turn_succeeds(folder: Folder) -> None:
    folder.fail(TURN, "Ours", "python -m x: ended with 1")
    assert folder.failures() == [Failure("a", "Ours", 0, "python -m x: ended with 1")]
    folder.keep(TURN, [(MIXED, run("a", 0, (sample(0),)))])
    assert folder.failures() == []
