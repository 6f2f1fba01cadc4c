"""The file of what serve says, and a process that goes on in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import running, serve_output
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
# Goes on in the background, then does as the first argument says, and waits for its end.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from cluster import serve_output
folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
print("before", flush=True)
ready = serve_output.detach(folder)
(folder / "pid").write_text(f"{os.getpid()} {os.getsid(0)}")
print("starting", flush=True)
{then}
signal.pause()
"""


def program(folder: Path, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{then}", then), str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def background_pid(folder: Path) -> int:
    pid, session = map(int, (folder / "pid").read_text().split())
    assert pid == session, "a session of its own"
    return pid


def test_detached_process_goes_on_after_it_is_ready(tmp_path: Path) -> None:
    caller = program(tmp_path, "ready()")
    shown, errors = caller.communicate(timeout=30)
    pid = background_pid(tmp_path)
    try:
        assert (caller.returncode, errors) == (0, "")
        assert shown.startswith("before\nstarting\n")
        assert f"pid {pid}" in shown and str(tmp_path / serve_output.FILE) in shown
        assert running.started_ticks(pid) is not None
    finally:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: running.started_ticks(pid) is None, timeout_s=30, what="its end")
    assert (tmp_path / serve_output.FILE).read_text() == "starting\nended\n"


@pytest.mark.parametrize(
    ("then", "code", "last"),
    [
        ("sys.exit('no such model')", 1, "no such model\n"),
        ("sys.exit(2)", 2, "starting\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "starting\n"),
    ],
)
def test_detached_process_that_fails_gives_its_code(
    then: str, code: int, last: str, tmp_path: Path
) -> None:
    caller = program(tmp_path, then)
    shown, errors = caller.communicate(timeout=30)
    assert caller.returncode == code
    assert shown.endswith(last)
    assert errors.startswith("headwater: ") and str(tmp_path / serve_output.FILE) in errors


def test_interrupt_before_it_is_ready_ends_both(tmp_path: Path) -> None:
    caller = program(tmp_path, "")
    assert caller.stdout is not None
    for line in caller.stdout:
        if line == "starting\n":
            break
    caller.send_signal(signal.SIGINT)
    assert caller.communicate(timeout=30)[0] == "ended\n"
    assert caller.returncode == serve_output.EXIT_INTERRUPTED
    assert running.started_ticks(background_pid(tmp_path)) is None


def test_detached_serve_that_fails_says_why_and_where(tmp_path: Path) -> None:
    words = ["serve", "./no-such-model", "--detach", "--port=0", "--dashboard-port=0"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cluster.cli", *words, f"--state-dir={tmp_path}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    log = tmp_path / serve_output.FILE
    assert done.returncode == 1
    assert "no-such-model" in done.stdout and done.stdout == log.read_text()
    assert str(log) in done.stderr


def test_output_in_the_foreground_is_kept_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / serve_output.FILE).write_text("of the last start")
    with serve_output.kept(tmp_path):
        sys.stdout.write("Starting Ray.\n")
        assert (tmp_path / serve_output.FILE).read_text() == "Starting Ray.\n"
    sys.stdout.write("elsewhere\n")
    assert (tmp_path / serve_output.FILE).read_text() == "Starting Ray.\n"
    assert capsys.readouterr().out == "Starting Ray.\nelsewhere\n"
