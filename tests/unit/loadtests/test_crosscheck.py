"""The cross-check against aiperf: what is sent and read, and what it says. aiperf is played."""

from __future__ import annotations

import argparse
import json
import stat
import sys
from pathlib import Path

import pytest

from loadtests import crosscheck
from loadtests.crosscheck import FIGURES, CrosscheckFailed, Round, Served
from loadtests.load.client import Target
from loadtests.load.stub_server import MODEL, Fault, Script
from loadtests.results import EXIT_MISSED
from tests.unit.loadtests.load.stub_thread import stub

OPTIONS = argparse.Namespace(
    rounds=2, requests=3, concurrency=2, input_words=10, output_tokens=4, venv=None, uv="uv"
)
SERVED = Served("http://host", "stub", "the stub")
EXPORT = {
    "time_to_first_token": {"p50": 300.0},
    "inter_token_latency": {"p50": 20.0},
    "request_throughput": {"avg": 4.0},
    "output_token_throughput": {"avg": 160.0},
    "request_count": {"avg": 3.0},
}
# Writes down what it was asked, and exports figures, as aiperf does.
FAKE = f"""#!{sys.executable}
import json, pathlib, sys
words = sys.argv[1:]
if words == ["--version"]:
    print("9.9")
    sys.exit()
out = pathlib.Path(words[words.index("--output-artifact-dir") + 1])
out.mkdir()
sent = pathlib.Path(words[words.index("--input-file") + 1]).read_text()
(pathlib.Path(__file__).parent / "sent").write_text(sent)
(out / "profile_export_aiperf.json").write_text({json.dumps(EXPORT)!r})
"""


def program(folder: Path, text: str = FAKE) -> Path:
    path = folder / "aiperf"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def figures(*values: float) -> dict[str, float]:
    return dict(zip(FIGURES, values, strict=True))


def test_both_send_the_same_bodies_but_for_the_first_word(tmp_path: Path) -> None:
    with stub(Script()) as (server, url):
        target = Target(url, MODEL, api="chat")
        rounds = crosscheck.measure(program(tmp_path), target, OPTIONS, tmp_path)
    assert len(rounds) == 2
    theirs = [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    ours = [served.body for served in server.log[-3:]]
    assert len(theirs) == len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        first, rest = mine.pop("messages")[0]["content"].split(" ", 1)
        other_first, other_rest = other.pop("messages")[0]["content"].split(" ", 1)
        assert (first != other_first, rest) == (True, other_rest)
        assert mine == other
    # No prompt begins as another one of any round does.
    firsts = [
        served.body["messages"][0]["content"].split()[0]
        for served in server.log
        if "messages" in served.body
    ]
    assert len(set(firsts)) == len(firsts)


def test_who_is_first_changes_with_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(crosscheck, "by_this_tool", lambda *_: order.append("ours"))
    monkeypatch.setattr(crosscheck, "by_aiperf", lambda *_: order.append("theirs"))
    crosscheck.measure(Path("aiperf"), Target("http://host", MODEL), OPTIONS, Path("folder"))
    assert order == ["ours", "ours", "theirs", "theirs", "ours"]  # the first is not measured


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (figures(300, 20, 4, 160), []),
        (figures(314, 19.1, 4.1, 153), []),
        (figures(330, 20, 4, 160), ["TTFT p50, ms: 1.100 of aiperf's"]),
        (figures(300, 18, 4, 140), ["TPOT p50, ms: 0.900", "output tokens/s: 0.875"]),
    ],
)
def test_figures_that_part_by_more_than_five_in_a_hundred_are_missed(
    ours: dict[str, float], missed: list[str]
) -> None:
    rounds = [Round(ours, figures(300, 20, 4, 160))]
    section = crosscheck.section_of(rounds, OPTIONS, SERVED, "aiperf 9.9")
    assert len(section.missed) == len(missed)
    assert all(found.startswith(said) for found, said in zip(section.missed, missed, strict=True))
    assert section.name == "crosscheck-stub"
    assert any("n = 2 rounds of 3 requests" in line for line in section.conditions)


def test_the_median_of_the_rounds_is_compared() -> None:
    rounds = [Round(figures(v, 20, 4, 160), figures(300, 20, 4, 160)) for v in (300, 900, 301)]
    assert not crosscheck.section_of(rounds, OPTIONS, SERVED, "aiperf 9.9").missed


def test_figures_of_fewer_requests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps(EXPORT))
    assert crosscheck.exported(path, 3) == figures(300, 20, 4, 160)
    with pytest.raises(CrosscheckFailed, match="3 good requests of 4"):
        crosscheck.exported(path, 4)


def test_an_export_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(json.dumps({**EXPORT, "inter_token_latency": {}}))
    for path in (tmp_path / "export.json", tmp_path / "none.json"):
        with pytest.raises(CrosscheckFailed, match="not as expected"):
            crosscheck.exported(path, 3)


def test_a_failed_request_of_ours_ends_it() -> None:
    with stub(Script(faults=(Fault.NONE, Fault.CUT))) as (_, url):
        target = Target(url, MODEL, api="chat")
        with pytest.raises(CrosscheckFailed, match="cut of request 1"):
            crosscheck.by_this_tool(target, crosscheck.bodies(OPTIONS, "a"), 1)


def test_what_could_not_be_run_is_told_with_its_command_and_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = program(tmp_path, "#!/bin/sh\necho no such index >&2\nexit 3\n")
    assert crosscheck.main(["--aiperf", str(broken)]) == 1
    said = capsys.readouterr().err
    assert said == f"{broken} --version\nended with 3\nno such index\n"
    assert crosscheck.main(["--venv", str(tmp_path / "new"), "--uv", str(tmp_path / "uv")]) == 1
    assert f"{tmp_path / 'uv'} venv --python" in capsys.readouterr().err


def test_an_environment_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    there = program(tmp_path / "bin")
    assert crosscheck.installed(tmp_path, "no-such-uv") == there


def test_it_runs_whole_against_the_stub_and_says_what_was_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--aiperf", str(program(tmp_path)), "--rounds", "1", "--requests", "3"]
    words += ["--first-ms", "1", "--gap-ms", "1", "--output-tokens", "4"]
    # The fake's figures are not the stub's.
    assert crosscheck.main([*words, "--results", str(tmp_path / "RESULTS.md")]) == EXIT_MISSED
    printed = capsys.readouterr().out
    assert "aiperf 9.9; n = 1 rounds of 3 requests" in printed
    assert "<!-- begin crosscheck-stub -->" in (tmp_path / "RESULTS.md").read_text()
