"""The file by which a probe sees that a worker takes work, and the probe's own script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deployments.node.agent_socket import socket_folder
from deployments.workers import ready_file

SCRIPT = Path(__file__).parents[3] / "helm/files/worker-ready.sh"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = socket_folder(str(tmp_path))
    made.mkdir(mode=0o700)
    return made


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def probe(tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **environ},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_a_pod_is_ready_from_a_workers_first_word_to_its_last(tmp_path: Path, folder: Path) -> None:
    assert probe(tmp_path).returncode == 1
    file = ready_file.announce(folder, "decode-abc12345")
    found = probe(tmp_path)
    assert (found.returncode, found.stdout) == (0, "1 workers are ready\n")
    ready_file.withdraw(file)
    assert probe(tmp_path).returncode == 1


def test_a_worker_that_was_killed_does_not_count_and_is_cleared_away(
    tmp_path: Path, folder: Path
) -> None:
    left = folder / f"{ready_file.PREFIX}prefill-xyz-{ended_process()}"
    left.touch()
    assert probe(tmp_path).returncode == 1
    mine = ready_file.announce(folder, "prefill-new")
    assert not left.exists()
    assert [*folder.iterdir()] == [mine]


def test_without_a_folder_there_is_no_worker(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert (found.returncode, found.stdout) == (1, "no worker of this pod is ready\n")
