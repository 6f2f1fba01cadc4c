"""`headwater logs`: which files it shows, how it follows, and what it says where there are none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cli, running
from cluster.log_files import Tail
from cluster.serve_output import FILE
from tests.unit.cluster import fake_endpoint
from tests.unit.cluster.status_examples import status, worker
from tests.waiting import wait_until

INGRESS = "ingress-4711-0a1b2c3d"
PIDS = {"decode-1": 101, "prefill-1": 102, INGRESS: 4711}


class Site:
    """A cluster that runs: an endpoint, Ray's log folder, and a process in the place of serve."""

    def __init__(self, server: fake_endpoint.Endpoint, folder: Path) -> None:
        self.server, self.state_dir = server, folder / "state"
        self.logs = folder / "session" / "logs"
        self.logs.mkdir(parents=True)
        self.serve = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.has(**PIDS)
        self.runs()
        (self.state_dir / FILE).write_text("Starting Ray.\n")

    def runs(self, logs: str | None = "", ray_address: str | None = None) -> None:
        ticks = running.started_ticks(self.serve.pid)
        assert ticks is not None
        folder = str(self.logs) if logs == "" else logs
        found = running.Running(
            self.serve.pid, ticks, self.server.url, None, "app", "m", folder, [], ray_address
        )
        running.write(self.state_dir, found)

    def has(self, **pids: int) -> None:
        """Who runs; the ingress always does."""
        workers = [
            worker(name, name.partition("-")[0], pid=pid)
            for name, pid in pids.items()
            if name != INGRESS
        ]
        self.server.objects["/headwater/status"] = status(ingress=INGRESS, workers=workers)

    def log(self, pid: int, text: str, suffix: str = "err") -> None:
        with (self.logs / f"worker-0f-01-{pid}.{suffix}").open("a") as file:
            file.write(text)

    def end(self) -> None:
        self.serve.kill()
        self.serve.wait()

    def run(self, *words: str) -> int:
        return cli.main(["logs", *words, "--state-dir", str(self.state_dir)])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.chdir(tmp_path)
    with fake_endpoint.endpoint() as server:
        found = Site(server, tmp_path)
        yield found
        found.end()
        assert found.serve.stdin is not None
        found.serve.stdin.close()


class Followed:
    """`logs -f` in a thread, and what it has written so far."""

    def __init__(self, site: Site, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written = bytearray()
        monkeypatch.setattr("cluster.commands.logs._write", self.written.extend)
        monkeypatch.setattr("cluster.commands.logs.POLL_S", 0.005)
        monkeypatch.setattr("cluster.commands.logs.LOOK_S", 0.01)
        self.code: list[int] = []
        self._thread = threading.Thread(target=lambda: self.code.append(site.run(*words, "-f")))
        self._thread.start()

    def until(self, text: str) -> None:
        wait_until(lambda: text.encode() in self.written, timeout_s=30, what=lambda: repr(self))

    def ended(self) -> int:
        self._thread.join(30)
        return self.code[0]

    def __repr__(self) -> str:
        return self.written.decode()


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_without_a_name_serves_own_log_is_shown(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.run() == 0
    assert shown(capsys) == "Starting Ray.\n"


@pytest.mark.parametrize("name", PIDS)
def test_worker_or_ingress_is_shown_by_its_name(
    name: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    for each, pid in PIDS.items():
        site.log(pid, f"an error of {each}\n")
        site.log(pid, f"output of {each}\n", "out")
    assert site.run(name) == 0
    lines = shown(capsys).splitlines()
    assert [line for line in lines if not line.startswith("==> ")] == [
        f"an error of {name}",
        f"output of {name}",
    ]
    assert f"==> {site.logs}/worker-0f-01-{PIDS[name]}.err <==" in lines


def test_serves_lines_of_a_replica_are_shown_with_it(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    (site.logs / "serve").mkdir()
    (site.logs / "serve" / "replica_app_DecodeWorker_1.log").write_text("initialised\n")
    assert site.run("decode-1") == 0
    assert "initialised" in shown(capsys)


def test_role_shows_all_of_its_workers(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.has(**{"decode-1": 101, "decode-2": 103, "prefill-1": 102})
    for pid in (101, 102, 103):
        site.log(pid, f"of {pid}\n")
    assert site.run("decode") == 0
    told = shown(capsys)
    assert "of 101" in told and "of 103" in told and "of 102" not in told


@pytest.mark.parametrize(
    ("name", "near"), [("decode-2", "decode-1"), ("prefil", "prefill"), ("xyz", "")]
)
def test_unknown_name_is_an_error_with_the_nearest(
    name: str, near: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.run(name) == 1
    told = capsys.readouterr().err
    assert (f"did you mean {near}?" in told) == bool(near)
    assert all(known in told for known in PIDS)


def test_follow_shows_what_is_added_until_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(site, monkeypatch=monkeypatch)
    followed.until("Starting Ray.\n")
    with (site.state_dir / FILE).open("a") as file:
        file.write("Ready.\n")
    followed.until("Starting Ray.\nReady.\n")
    site.end()
    assert followed.ended() == 0


def test_follow_goes_on_with_the_replacement(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.log(101, "first\n")
    site.has(**{"decode-1": 101, "decode-9": 109})
    followed = Followed(site, "decode-1", monkeypatch=monkeypatch)
    followed.until("first\n")
    site.log(109, "of another that ran all the time\n")
    site.server.objects.pop("/headwater/status")  # the ingress does not answer for a while
    site.log(101, "its last words\n")
    followed.until("its last words\n")
    site.log(103, "of the replacement\n")
    site.has(**{"decode-9": 109, "decode-3": 103})
    followed.until("of the replacement\n")
    site.end()
    assert followed.ended() == 0
    assert b"all the time" not in followed.written


def test_follow_of_a_role_takes_in_new_workers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.log(101, "first\n")
    followed = Followed(site, "decode", monkeypatch=monkeypatch)
    followed.until("first\n")
    site.log(103, "of a second\n")
    site.has(**{"decode-1": 101, "decode-2": 103})
    followed.until("of a second\n")
    site.log(101, "and of the first\n")
    followed.until("and of the first\n")
    site.end()
    assert followed.ended() == 0


def test_nothing_running_is_an_error_that_names_the_last_log(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.end()
    assert site.run("decode-1") == 1
    told = capsys.readouterr().err
    assert "nothing runs here" in told and str(site.state_dir / FILE) in told
    (site.state_dir / FILE).unlink()
    assert site.run() == 1
    assert "./headwater serve" in capsys.readouterr().err


def test_workers_of_another_ray_cluster_are_an_error(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.runs(logs=None, ray_address="10.0.0.1:6379")
    assert site.run("decode-1") == 1
    assert "10.0.0.1:6379" in capsys.readouterr().err


def test_worker_of_another_node_is_an_error(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("decode-1") == 1
    assert "runs on another node" in capsys.readouterr().err


def test_tail_of_a_file_that_shrank_begins_anew(tmp_path: Path) -> None:
    written = bytearray()
    tail, log = Tail(written.extend, with_names=False), tmp_path / "log"
    for text in ("long enough\n", "new\n"):
        log.write_text(text)
        tail.show([log, tmp_path / "absent"])
    assert written == b"long enough\nnew\n"
