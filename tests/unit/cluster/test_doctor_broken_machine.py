"""`headwater doctor`, run as a process on a machine where one thing is really broken.

Each test breaks what a check is about, for the child process alone: its PATH, its search path, its
limits, its cores, a port, a folder, a file. Where a child cannot do that without being root
(/dev/shm, whom a folder belongs to, the interpreter's version), the lowest function that looks is
told otherwise, in this process; those tests say so.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import cli, machine_facts
from cluster.local_ray import PACKAGES, ROOT
from tests.unit.cluster.examined_machine import Checks, examine, failed

LINUX32 = 0x0008  # linux/personality.h: PER_LINUX32, uname says i686
MIB = 1 << 20


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    """What the doctor says of this machine as it is, which need not be perfect."""
    return examine(tmp_path_factory.mktemp("usual"))[1]


def test_another_machine_is_a_failure(tmp_path: Path, usual: Checks) -> None:
    libc = ctypes.CDLL(None)
    code, checks = examine(tmp_path, before=lambda: libc.personality(LINUX32))
    assert code == 1
    assert "must be CPython 3.11, 3.12 or 3.13 on Linux x86_64 or aarch64" in checks["Python"][1]
    assert list(failed(checks, usual)) == ["Python"]


def test_another_interpreter_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told otherwise in this process: another Python has none of the packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 10, 1, "final", 0))
    assert cli.main(["doctor", "--quick", "--port", "0", "--state-dir", str(tmp_path)]) == 1
    assert "CPython 3.10.1 on linux" in capsys.readouterr().out


def test_another_version_than_the_locks_is_a_failure(tmp_path: Path, usual: Checks) -> None:
    metadata = tmp_path / "old/ray-1.0.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.0.0\n")
    code, checks = examine(tmp_path, PYTHONPATH=f"{tmp_path / 'old'}:{ROOT}")
    assert code == 1
    assert "ray is 1.0.0, the lock has 2.60.0" in failed(checks, usual)["versions"]
    assert "remove .venv" in checks["versions"][1]


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "cluster"])
def test_somebody_elses_package_in_the_place_of_ours_is_a_failure(
    name: str, tmp_path: Path, usual: Checks
) -> None:
    stranger = tmp_path / "strange" / name
    stranger.mkdir(parents=True)
    (stranger / "__init__.py").write_text("")
    code, checks = examine(tmp_path, PYTHONPATH=f"{tmp_path / 'strange'}:{ROOT}")
    assert code == 1
    assert f"{name} is {stranger}" in failed(checks, usual)["packages"]
    assert "take the other one out of PYTHONPATH" in checks["packages"][1]


def test_a_package_in_the_place_of_ours_is_one_line_to_the_other_commands(tmp_path: Path) -> None:
    stranger = tmp_path / "strange/deployments"
    stranger.mkdir(parents=True)
    (stranger / "__init__.py").write_text("")
    (tmp_path / "running.json").write_text(
        '{"pid": 1, "started_ticks": 1, "endpoint": "", "dashboard": "", "app": "", "model": ""}'
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cluster.cli", "stop", "--state-dir", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'strange'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("headwater: No module named 'deployments.node'")
    assert done.stderr.count("\n") == 1
    assert "./headwater doctor" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12"),
        ("", "AttributeError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
    ],
)
def test_an_engine_package_that_does_not_load_is_a_failure(
    content: str, words: str, tmp_path: Path, usual: Checks
) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/ray.py").write_text(content)
    code, checks = examine(tmp_path, quick=False, PYTHONPATH=f"{tmp_path / 'strange'}:{ROOT}")
    assert code == 1
    level, message = checks["imports"]
    assert level == "failure"
    assert words in message
    assert "out of PYTHONPATH" in message
    assert not failed({name: checks[name] for name in usual}, usual)


def test_torch_that_does_not_load_leaves_the_speed_unknown(tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/torch.py").write_text("raise ImportError('libc10.so is cut off')")
    _, checks = examine(tmp_path, quick=False, PYTHONPATH=f"{tmp_path / 'strange'}:{ROOT}")
    assert checks["imports"][0] == "failure"
    assert checks["speed"][0] == "ok"
    assert "was not measured" in checks["speed"][1]


def test_a_missing_lscpu_is_a_failure(tmp_path: Path) -> None:
    code, checks = examine(tmp_path, PATH=str(tmp_path))
    assert code == 1
    assert checks["libraries"][0] == "failure"
    assert "lscpu" in checks["libraries"][1] and "util-linux" in checks["libraries"][1]


def test_a_libnuma_that_cannot_be_loaded_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "libnuma.so.1").write_bytes(b"no library" * 100)
    code, checks = examine(tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert code == 1
    assert checks["libraries"][0] == "failure"
    assert "libnuma.so.1" in checks["libraries"][1] and "libnuma1" in checks["libraries"][1]


def test_a_single_core_is_a_warning(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    _, checks = examine(tmp_path, before=lambda: os.sched_setaffinity(0, {core}))
    level, message = checks["cores"]
    assert level == "warning"
    assert "1 usable here" in message and "--decode-workers" in message


def test_a_limited_address_space_is_a_failure(tmp_path: Path, usual: Checks) -> None:
    code, checks = examine(
        tmp_path, before=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    )
    assert code == 1
    assert "ulimit -v unlimited" in failed(checks, usual)["memory"]
    assert "may map 2.1 GB" in checks["memory"][1]


def test_more_memory_than_the_machine_has_is_a_failure(tmp_path: Path) -> None:
    code, checks = examine(tmp_path, "--set", f"engine.kv_cache_mib={1 << 20}")
    assert code == 1
    assert checks["memory"][0] == "failure"
    assert "lower engine.kv_cache_mib" in checks["memory"][1]


def test_a_limit_on_files_is_a_failure_for_the_slab(tmp_path: Path, usual: Checks) -> None:
    code, checks = examine(
        tmp_path, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    )
    assert code == 1
    found = failed(checks, usual)
    assert list(found) == ["slab"]
    assert "File too large" in found["slab"] and "lower slab.mib" in found["slab"]


def test_a_missing_shared_memory_folder_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told otherwise in this process: only root can take /dev/shm away."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_facts, "SHM", tmp_path / "none")
    cli.main(["doctor", "--quick", "--json", "--port", "0", "--state-dir", str(tmp_path)])
    checks = {one["check"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["slab"]["level"] == "warning"
    assert "--shm-size" in checks["slab"]["message"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("check", "flag"), [("HTTP port", "--port"), ("dashboard port", "--dashboard-port")]
)
def test_a_port_that_is_taken_is_a_failure(
    check: str, flag: str, taken: int, tmp_path: Path, usual: Checks
) -> None:
    code, checks = examine(tmp_path, flag, str(taken))
    assert code == 1
    found = failed(checks, usual)
    assert list(found) == [check]
    assert f"cannot listen on 127.0.0.1:{taken} (Address already in use)" in found[check]
    assert f"{flag} 0" in found[check]


def test_a_clock_behind_our_own_files_is_a_warning(tmp_path: Path) -> None:
    root = tmp_path / "headwater"
    for name in (*PACKAGES, "requirements"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    later_s = (root / "cluster/cli.py").stat().st_mtime + 40 * 86_400
    os.utime(root / "cluster/cli.py", (later_s, later_s))
    _, checks = examine(tmp_path, root=root)
    level, message = checks["clock"]
    assert level == "warning"
    assert "days behind our own files: set it" in message


def test_every_check_is_broken_by_a_test() -> None:
    """A new check needs a test, here or in test_doctor_broken_folders, that breaks its thing."""
    from cluster.machine_checks import CHECKS

    files = Path(__file__).parent.glob("test_doctor_broken_*.py")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name, _ in CHECKS if f'"{name}"' not in text] == []
