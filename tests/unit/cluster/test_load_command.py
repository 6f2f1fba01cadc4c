"""`headwater load`: hands over to the load tool, and tells it what runs here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import cli, running
from deployments.edge.keys import local_operator_key
from loadtests.load import cli as load
from loadtests.load.flags import Here
from loadtests.load.stub_server import MODEL, Script
from tests.unit.loadtests.load.stub_thread import stub

SECRET = b"the cluster's own secret"
OPERATOR = local_operator_key(SECRET)
ONE = ("--token-ids", "1000:2000", "--input-tokens", "8", "--output-tokens", "2", "--requests", "1")


@pytest.fixture(autouse=True)
def _runs_are_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def running_at(url: str, state_dir: Path) -> None:
    pid = os.getpid()
    ticks = running.started_ticks(pid)
    assert ticks is not None
    found = running.Running(pid, ticks, url, dashboard=None, app="app", model=MODEL)
    running.write(state_dir, found)


def test_the_cluster_that_runs_here_is_asked_where_no_url_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub(Script()) as (server, url):
        running_at(url, tmp_path)
        assert cli.main(["load", "run", *ONE, "--state-dir", str(tmp_path)]) == 0
    assert len(server.log) == 1
    assert "1 requests measured" in capsys.readouterr().out


def test_a_url_needs_nothing_that_runs_here(tmp_path: Path) -> None:
    with stub(Script()) as (server, url):
        words = ["load", f"--state-dir={tmp_path / 'none'}", "run", *ONE, "--url", url]
        assert cli.main(words) == 0
    assert len(server.log) == 1


@pytest.mark.parametrize(
    ("environment", "expected"), [("hw-mine", "Bearer hw-mine"), ("", f"Bearer {OPERATOR}")]
)
def test_it_has_a_key_for_the_cluster_that_runs_here(
    environment: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_API_KEY", environment)
    (tmp_path / "secret").write_bytes(SECRET)
    with stub(Script()) as (server, url):
        running_at(url, tmp_path)
        assert cli.main(["load", "run", *ONE, "--state-dir", str(tmp_path)]) == 0
    assert server.log[0].headers["authorization"] == expected


@pytest.mark.parametrize("flag", [(), ("--api-key-env", "OTHER")])
def test_a_server_that_a_url_names_gets_the_key_that_is_meant_for_it(
    flag: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_API_KEY", "hw-mine")
    monkeypatch.setenv("OTHER", "hw-other")
    with stub(Script()) as (server, url):
        assert cli.main(["load", "run", *ONE, f"--url={url}", *flag]) == 0
    assert server.log[0].headers["authorization"] == f"Bearer hw-{'other' if flag else 'mine'}"


def test_nothing_that_runs_here_is_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["load", "run", *ONE, "--state-dir", str(tmp_path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("headwater: nothing runs here")
    assert "./headwater serve" in said


def test_what_the_tool_says_names_the_command_as_it_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["load", "rum"])
    assert ended.value.code == cli.EXIT_USAGE
    assert capsys.readouterr().err == (
        "./headwater load: there is no command rum (did you mean run?); "
        "see ./headwater load --help\n"
    )


def test_every_dash_goes_to_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str]] = []

    def main(words: list[str], find_here: object, prog: str) -> int:
        heard.append(words)
        return 7

    monkeypatch.setattr(load, "main", main)
    assert cli.main(["load", "run", "--unknown", "-x", "--", "y", "--config"]) == 7
    assert heard == [["run", "--unknown", "-x", "--", "y", "--config"]]


def test_the_exit_code_of_failed_requests_is_the_commands(tmp_path: Path) -> None:
    with stub(Script()) as (_, url):
        running_at(url, tmp_path)
        words = ["load", "run", *ONE, "--state-dir", str(tmp_path), "--model", "other"]
        assert cli.main(words) == cli.EXIT_USAGE


def test_the_server_is_the_whole_tree_of_the_command_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Here] = []
    running_at("http://127.0.0.1:1", tmp_path)
    monkeypatch.setattr(load, "main", lambda _, find_here, prog: found.append(find_here()) or 0)
    assert cli.main(["load", "run", "--state-dir", str(tmp_path)]) == 0
    assert found == [Here("http://127.0.0.1:1", os.getpid())]
