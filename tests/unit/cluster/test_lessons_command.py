"""`headwater lessons` without an engine: made-up lessons, made-up benches."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from cluster import cli, model_store
from loadtests.lessons import book
from loadtests.lessons import lesson as frame
from loadtests.lessons.engine import EngineFailed
from tests.unit.loadtests.lessons.made_up import FakeBench, lesson, raises


class Context(FakeBench):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = SimpleNamespace(path=tmp_path, figures=model_store.BUNDLED_FIGURES)
    monkeypatch.setattr(model_store, "prepare_model", lambda *_: model)
    monkeypatch.setattr(frame, "Bench", lambda *_, **__: Context())


def teach_these(monkeypatch: pytest.MonkeyPatch, *lessons: Any) -> None:
    monkeypatch.setattr(book, "find", lambda _names: list(lessons))


def test_each_lesson_is_told_and_the_page_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    teach_these(monkeypatch, lesson("a"), lesson("b"))
    assert cli.main(["lessons", "--quick", "--output", "out"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("First of [1.0, 2.0].") == 2
    assert "2/2  Title of b" in shown
    assert f"Page: {tmp_path / 'out' / 'lessons.html'}" in shown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "lessons.html",
        "a.json",
        "b.json",
    }


def test_a_failed_lesson_is_shown_the_others_go_on_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = lesson("bad", measure=raises(EngineFailed("no engine could be built")))
    teach_these(monkeypatch, bad, lesson("good"))
    assert cli.main(["lessons", "--output", "out"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: no engine could be built" in shown
    assert "First of [1.0, 2.0]." in shown
    assert "1 of 2 lessons failed: bad" in shown
    page = (tmp_path / "out" / "lessons.html").read_text()
    assert "no engine could be built" in page and "Title of good" in page


def test_what_was_taught_before_ctrl_c_is_on_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_bench: Any) -> Any:
        raise KeyboardInterrupt

    teach_these(monkeypatch, lesson("a"), lesson("b", measure=interrupted))
    assert cli.main(["lessons", "--output", "out"]) == cli.EXIT_INTERRUPTED
    assert "Title of a" in (tmp_path / "out" / "lessons.html").read_text()


def test_the_page_can_be_made_again_from_the_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    teach_these(monkeypatch, lesson("a"))
    assert cli.main(["lessons", "--output", "out"]) == 0
    page = tmp_path / "out" / "lessons.html"
    first = page.read_text()
    page.unlink()
    teach_these(monkeypatch, lesson("a", measure=raises(AssertionError())), lesson("not_there"))
    assert cli.main(["lessons", "--from-data", "--output", "out"]) == 0
    assert page.read_text() == first
    assert "First of [1.0, 2.0]." in capsys.readouterr().out


def test_the_list_shows_names_and_titles_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["lessons", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(book.LESSONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["anatomie"], "there is no lesson anatomie (did you mean anatomy?); --list shows them"),
        (["--from-data", "--output", "empty"], "empty has no data of these lessons; measure"),
        (["--output", "file/inside"], "the page cannot be written to file/inside: Not a directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["lessons", *words]) == 1
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_data_that_are_not_json_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "anatomy.json").write_text("{")
    assert cli.main(["lessons", "anatomy", "--from-data", "--output", str(tmp_path)]) == 1
    assert "anatomy.json is not JSON" in capsys.readouterr().err


def test_data_of_something_else_fail_that_lesson(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "anatomy.json").write_text(json.dumps({"n": {"a": 1}, "lesson": "other"}))
    assert cli.main(["lessons", "anatomy", "--from-data", "--output", str(tmp_path)]) == 1
    assert "FAILED: these are not data of lesson anatomy" in capsys.readouterr().out


def test_without_the_drawing_library_the_way_to_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find_spec(name, *more),
    )
    assert cli.main(["lessons", "--list"]) == 1
    shown = capsys.readouterr().err
    assert "lessons draw their page with matplotlib" in shown
    assert shown.count("\n") == 1
