"""The command as a user meets it: files in, one page or text out, and one clear refusal."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from loadtests.load import cli
from loadtests.load.commands import report
from loadtests.load.records import Outcome
from tests.unit.loadtests.report.made_runs import CONDITIONS, failed, run, sample


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run(label="a").save(tmp_path / "a.json")
    run(label="b").save(tmp_path / "b.json")
    run(label="c", conditions={**CONDITIONS, "rate": 4.0}).save(tmp_path / "c.json")
    return tmp_path


def call(*words: str) -> int:
    return cli.main(["report", *words])


def test_a_run_becomes_one_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("a.json") == 0
    assert capsys.readouterr().out.startswith("report.html: 1 run, ")
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(folder.glob("*.tmp"))


def test_text_has_the_same_tables_and_writes_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("a.json", "b.json", "--text") == 0
    text = capsys.readouterr().out
    for title in ("At a glance", "Conditions", "Outcomes", "Latency", "Throughput"):
        assert f"## {title}" in text
    assert "| TTFT |" in text
    assert "2 runs, n = 40 measured requests, of which 0 failed." in text
    assert "p99 from 100" in text
    assert not (folder / "report.html").exists()


def test_text_needs_nothing_of_what_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in {"matplotlib", "jinja2"} or name == "loadtests.report.page":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real(name, *rest)

    for module in ("page", "drawings", "timelines", "text"):
        monkeypatch.delitem(report.sys.modules, f"loadtests.report.{module}", raising=False)
        monkeypatch.delattr(f"loadtests.report.{module}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert call("a.json", "--text") == 0
    assert call("a.json") == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_runs_of_different_conditions_are_refused_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("a.json", "c.json") == 2
    told = capsys.readouterr().err
    assert "rate: 2 in a.json; 4 in c.json" in told
    assert "--compare-anyway" in told
    assert not (folder / "report.html").exists()
    assert call("a.json", "c.json", "--text") == 2


def test_told_to_it_compares_and_says_so_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("a.json", "c.json", "--compare-anyway", "--text") == 0
    head, _, _ = capsys.readouterr().out.partition("## At a glance")
    assert "different conditions" in head
    assert "rate: 2; 4" in head


def test_a_sweep_goes_across_its_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("a.json", "c.json", "--across", "rate", "--text") == 0
    text = capsys.readouterr().out
    assert "different conditions" not in text
    assert text.index("a, rate 2") < text.index("c, rate 4")


def test_some_of_many_runs_are_chosen_by_a_condition(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(".", "--where", "rate=2", "--where", "model=tiny", "--text") == 0
    assert "2 runs, n = 40" in capsys.readouterr().out
    assert call(".", "--where", "rate=3", "--text") == 2
    assert "in these runs rate is 2, 4" in capsys.readouterr().err
    assert call(".", "--where", "rate", "--text") == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_a_folder_stands_for_its_runs_and_what_is_none_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.json").unlink()
    (folder / "knee.json").write_text('{"knee": 3}')
    assert call(".", "--text") == 0
    out, err = capsys.readouterr()
    assert "2 runs" in out
    assert err.startswith("left out: knee.json")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.json", None, "missing.json"),
        ("text.json", "hello", "text.json is not a run of this tool"),
        ("other.json", '{"format": "other/1"}', "other.json has no format"),
        ("half.json", '{"format": "headwater-load/1"}', "half.json is a damaged run of this tool"),
    ],
)
def test_a_file_that_is_no_run_gets_one_line_that_names_it(
    folder: Path,
    name: str,
    content: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (folder / name).write_text(content)
    assert call("a.json", name) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_an_odd_sample_is_refused_by_its_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "a.json").read_text()
    (folder / "odd.json").write_text(text.replace('"sent_s": 0.0', '"sent_s": "soon"'))
    assert call("odd.json") == 2
    assert "odd.json is not a run of this tool" in capsys.readouterr().err


@pytest.mark.parametrize("time_s", ["NaN", "Infinity"])
def test_a_time_that_is_no_number_is_refused_by_its_file(
    folder: Path, time_s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "a.json").read_text()
    text = text.replace('"sent_s": 0.0', f'"sent_s": {time_s}')
    (folder / "odd.json").write_text(text)
    assert call("odd.json", "--text") == 2
    assert "no finite number" in capsys.readouterr().err


def test_an_empty_folder_and_a_place_that_cannot_be_written_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    assert call("empty") == 2
    assert "empty holds no .json file" in capsys.readouterr().err
    assert call("a.json", "-o", "nowhere/page.html") == 2
    assert "nowhere" in capsys.readouterr().err


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = failed(Outcome.REFUSED, 1, detail="\x1b[2J\x07a|b")
    run([sample(0), bad], label="\x1b]0;title\x07").save(folder / "hostile.json")
    assert call("hostile.json", "--text") == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "a\\|b" in text
