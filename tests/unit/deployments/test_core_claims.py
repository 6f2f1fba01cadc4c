"""Cores are given once, to processes that live, across restarts of whoever gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.node.core_claims import CoreClaims, spread, started


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


@pytest.mark.usefixtures("two_cores")
def test_a_new_agent_knows_what_the_old_one_gave(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert CoreClaims(path).claim(other.pid, 1) == [0]
        assert CoreClaims(path).claim(os.getpid(), 1) == [1]
        assert CoreClaims(path).claim(os.getpid(), 1) == []
    finally:
        other.communicate(b"\n")
    assert CoreClaims(path).claim(os.getpid(), 1) == [0]


@pytest.mark.usefixtures("two_cores")
def test_a_process_id_that_is_used_again_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    began = started(os.getpid())
    assert began is not None
    path.write_text(json.dumps({0: [os.getpid(), began - 1], 1: [os.getpid(), began]}))
    assert CoreClaims(path).claim(os.getpid(), 1) == [0]


@pytest.mark.usefixtures("two_cores")
def test_a_damaged_file_is_no_claim_and_forgetting_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    path.write_text("not json")
    claims = CoreClaims(path)
    assert claims.claim(os.getpid(), 2) == [0, 1]
    claims.forget()
    assert not path.exists()
    assert claims.claim(2**22 + 1, 1) == []


def test_spread_gives_out_physical_cores_first(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert spread({0, 1, 2, 3}, tmp_path) == [0, 2, 1, 3]
    assert spread({3, 1}, tmp_path) == [1, 3]
    assert spread({1, 0}, tmp_path / "absent") == [0, 1]
