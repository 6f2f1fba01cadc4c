"""What a person reads when a command cannot do its work: one line or few, and the next step."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import cli, local_ray, running
from cluster.commands import serve as serve_command
from cluster.config import Config
from cluster.errors import PrerequisiteError, StartError
from tests.fakes.nodes import resolved
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.status_examples import serve as serve_status
from tests.unit.cluster.status_examples import status

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and message of a command that fails; the message is one line, and all there is."""
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = int(str(ended.code))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headwater: ")
    assert shown.err.count("\n") == 1
    return code, shown.err.strip()


# ---- words that are none ------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "start the cluster and answer until Ctrl-C" in shown
    assert "usage: ./headwater" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("stauts",), "there is no command stauts (did you mean status?); see ./headwater --help"),
        (("fly",), "there is no command fly; see ./headwater --help"),
        (("--prot",), "there is no option --prot; see ./headwater --help"),
        (
            ("serve", "--prot", "9"),
            "serve takes no --prot (did you mean --port?); see ./headwater serve --help",
        ),
        (
            ("serve", "--prot=9"),
            "serve takes no --prot=9 (did you mean --port?); see ./headwater serve --help",
        ),
        (("stop", "now"), "stop takes no now; see ./headwater stop --help"),
        (
            ("serve", "--port"),
            "argument --port: expected one argument; see ./headwater serve --help",
        ),
    ],
)
def test_wrong_words_are_one_line_with_the_help_to_look_at(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *words) == (2, f"headwater: {told}")


@pytest.mark.parametrize("words", [("config", "--yaml"), ("config",), ("doctor", "--quick")])
def test_whoever_closes_our_pipe_has_seen_enough(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "cluster.cli", *words, "--state-dir", str(tmp_path)]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (cli.EXIT_BROKEN_PIPE, "")


# ---- serve, before anything is started ----------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a serve that would start; a test that gets past the checks fails here."""

    def too_far(*_: object) -> None:
        raise AssertionError("the model was about to be prepared")

    monkeypatch.setattr("cluster.model_store.prepare_model", too_far)
    return ["serve", "--port", "0", "--dashboard-port", "0", "--state-dir", str(tmp_path / "state")]


def test_a_taken_port_is_told_with_the_flag_that_mends_it(
    taken: int, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = refused(capsys, *quick, "--port", str(taken))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{taken} (Address already in use)" in told
    assert told.endswith("choose another with --port, or --port 0 for any free one")


def test_a_taken_dashboard_port_is_told_with_the_flag_that_mends_it(
    taken: int, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = refused(capsys, *quick, "--dashboard-port", str(taken))
    assert code == 1
    assert f"the dashboard cannot listen on 127.0.0.1:{taken} (Address already in use)" in told
    assert told.endswith(
        "choose another with --dashboard-port, or --dashboard-port 0 for any free one"
    )


def test_a_serve_that_fails_leaves_the_signals_as_they_were(
    quick: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_model(*_: object) -> None:
        raise PrerequisiteError("no model")

    monkeypatch.setattr("cluster.model_store.prepare_model", no_model)
    both = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in both]
    assert refused(capsys, *quick)[0] == 1
    assert [signal.getsignal(number) for number in both] == before


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_here_is_told_with_the_flag_that_mends_it(
    host: str, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = refused(capsys, *quick, "--host", host)
    assert code == 1
    assert told.endswith("give an address of this machine with --host")


def test_a_state_folder_that_is_a_file_is_told_with_the_flag_that_mends_it(
    tmp_path: Path, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, told = refused(capsys, *quick, "--state-dir", str(tmp_path / "file"))
    assert code == 1
    assert told.endswith("(File exists): give a folder with --state-dir")


def test_a_socket_folder_that_is_open_to_others_is_told(
    tmp_path: Path,
    quick: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"headwater-{os.getuid()}").mkdir(mode=0o755)
    code, told = refused(capsys, *quick)
    assert code == 1
    assert "is open to others (mode 755), but it must be this user's alone" in told
    assert told.endswith("remove it, or set TMPDIR to a folder of yours")


def test_a_good_machine_passes_all_of_these(quick: list[str]) -> None:
    with pytest.raises(AssertionError, match="about to be prepared"):
        cli.main(quick)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("10.0.0.7", "10.0.0.7")],
)
def test_the_endpoint_is_shown_as_a_url_of_this_machine(host: str, shown: str) -> None:
    assert serve_command._reachable(host) == shown


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "that is not HOST:PORT"),
        ("10.0.0.1:", "that is not HOST:PORT"),
        ("host:port", "that is not HOST:PORT"),
        ("127.0.0.1:1", "Connection refused"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_told_with_what_to_give(address: str, why: str) -> None:
    with pytest.raises(PrerequisiteError) as missing:
        local_ray._someone_listens(address)
    told = str(missing.value)
    assert why in told
    assert f"answers at {address} (" in told
    assert "leave --address out" in told


def test_ray_that_does_not_start_is_told_with_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def fails(**_: object) -> None:
        raise ValueError("no\nroom" + " at all" * 500)

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # Ray's token is made there
    config = resolved(Config.model_validate({"state": {"dir": tmp_path / "state"}}))
    before = dict(os.environ)
    with pytest.raises(StartError) as failed, local_ray.ray_cluster(config):
        pass
    assert dict(os.environ) == before, "a cluster of several nodes may be started next"
    told = str(failed.value)
    assert told.startswith("Ray did not start (ValueError: no room at all")
    assert len(told) < 800
    assert "session_latest/logs, and ./headwater doctor" in told


@pytest.mark.parametrize(
    ("content", "flags", "told"),
    [
        ("{", (), "keys.json cannot be used (Input data was truncated): mend it"),
        (None, ("--set", "keys.file=gone.json"), "gone.json cannot be used (No such file"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_told_before_anything_starts(
    content: str | None,
    flags: tuple[str, ...],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "keys.json").write_text(content)
    code, message = refused(capsys, "serve", "--state-dir", str(tmp_path), *flags)
    assert code == 1
    assert told in message
    assert "./headwater keys list" in message


# ---- a cluster that is gone, or another's --------------------------------------------------------


def test_a_cluster_that_was_killed_is_not_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = subprocess.Popen(["sleep", "100"])
    ticks = running.started_ticks(child.pid) or 0
    child.kill()
    child.wait()
    dead = running.Running(child.pid, ticks, "http://127.0.0.1:1", None, "headwater", "m")
    running.write(tmp_path, dead)
    for command in ("status", "stop", "chat", "explain", "demo"):
        code, told = refused(capsys, command, "--state-dir", str(tmp_path))
        assert code == 1
        assert told.endswith("start it: ./headwater serve")


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that counts as the running cluster."""
    child = subprocess.Popen(["sleep", "100"])
    ticks = running.started_ticks(child.pid) or 0
    running.write(tmp_path, running.Running(child.pid, ticks, "http://x", None, "headwater", "m"))
    yield child
    child.kill()
    child.wait()


def test_stop_says_whose_a_process_is_that_it_may_not_end(
    ours: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("cluster.commands.stop.os", SimpleNamespace(kill=forbidden))
    assert cli.main(["stop", "--state-dir", str(tmp_path)]) == 1
    assert f"pid {ours.pid} is another user's" in capsys.readouterr().err


def test_stop_is_done_when_the_process_ends_by_itself(
    ours: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ended(_pid: int, _signal: int) -> None:
        ours.kill()
        ours.wait()
        raise ProcessLookupError

    monkeypatch.setattr("cluster.commands.stop.os", SimpleNamespace(kill=ended))
    assert cli.main(["stop", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("Stopped.\n")
    assert not (tmp_path / "running.json").exists()


def test_chat_with_an_endpoint_that_is_not_up_names_the_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, told = refused(capsys, "chat", "--endpoint", "http://127.0.0.1:1")
    assert code == 1
    assert "Connection refused" in told and "./headwater serve" in told


def test_explain_of_an_unknown_request_names_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_endpoint.endpoint() as server:
        serve_status(server, tmp_path)
        server.objects["/headwater/requests?count=1"] = {"requests": ["newest-1"]}
        code, told = refused(capsys, "explain", "unknown-1", "--state-dir", str(tmp_path))
    assert code == 1
    assert "404 nothing here" in told
    assert told.endswith("The newest request is newest-1")


def test_explain_finds_a_request_of_whichever_ingress_it_came_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_endpoint.endpoint() as first, fake_endpoint.endpoint() as second:
        serve_status(first, tmp_path)
        here = replace(running.read(tmp_path), more_endpoints=[second.url])
        running.write(tmp_path, here)
        first.objects["/headwater/requests?count=1"] = {"requests": []}
        second.objects["/headwater/requests/r-2"] = {"records": [], "story": "It went well."}
        code = cli.main(["explain", "r-2", "--state-dir", str(tmp_path)])
    assert code == 0
    assert capsys.readouterr().out == "It went well.\n"


def test_status_of_another_version_says_to_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_endpoint.endpoint() as server:
        serve_status(server, tmp_path)
        server.objects["/headwater/status"] = {
            key: value for key, value in status().items() if key != "cache"
        }
        code, told = refused(capsys, "status", "--state-dir", str(tmp_path))
    assert code == 1
    assert "runs another version of Headwater" in told and "./headwater stop" in told
