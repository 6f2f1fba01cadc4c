"""The file that says what runs here, and the lock that lets one serve command begin."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import cli, running
from cluster.commands import stop
from cluster.errors import NotRunningError, PrerequisiteError

ROOT = Path(__file__).resolve().parents[3]


def me() -> running.Running:
    ticks = running.started_ticks(os.getpid())
    assert ticks is not None
    return running.Running(os.getpid(), ticks, "http://127.0.0.1:1", None, "app", "m")


def test_two_serve_commands_that_begin_at_once_do_not_both_go_on(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from cluster import running\n"
        "with running.only_one(Path(sys.argv[1])):\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "in\n"
        with pytest.raises(PrerequisiteError, match="another serve command starts or ends"):
            running.only_one(tmp_path).__enter__()
        other.kill()
        other.wait()
    with running.only_one(tmp_path):  # however the other one ended
        pass


def test_what_another_wrote_meanwhile_is_not_forgotten(tmp_path: Path) -> None:
    mine = me()
    running.write(tmp_path, mine)
    running.forget(tmp_path, mine.pid + 1)
    assert running.read(tmp_path) == mine
    running.forget(tmp_path, mine.pid)
    assert running.last(tmp_path) is None
    running.forget(tmp_path, mine.pid)


def test_stop_with_an_address_leaves_alone_what_runs_here_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_pid: int, _signal: int) -> None:
        raise AssertionError("a serve command of another cluster was signalled")

    monkeypatch.setattr(os, "kill", kill)
    for address in (None, "127.0.0.1:6379"):
        running.write(tmp_path, replace(me(), ray_address=address))
        words = ["stop", "--state-dir", str(tmp_path), "--address", "127.0.0.1:1"]
        with pytest.raises((NotRunningError, PrerequisiteError), match="no Ray cluster answers"):
            stop.run(cli.parse(words))
        assert running.read(tmp_path).ray_address == address
