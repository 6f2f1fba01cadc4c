from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from loadtests import sides
from loadtests.sides import Limits, SideFailed, VllmServer, running, wait_for, wait_for_line

CONFIG = {
    "model": {"dtype": "bfloat16", "max_model_len": 8192},
    "engine": {
        "block_size_tokens": 32,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 16,
        "kv_cache_mib": 256,
        "enforce_eager": True,
    },
}
LIMITS = Limits.of(CONFIG, "/models/x", "x")
FLAGS = (
    "--dtype bfloat16 --max-model-len 8192 --block-size 32 --max-num-batched-tokens 1024 "
    "--max-num-seqs 16 --kv-cache-memory-bytes 268435456 --enforce-eager --disable-log-stats"
)


def test_the_limits_of_the_product_become_flags_of_vllm() -> None:
    assert " ".join(LIMITS.flags()) == FLAGS


@pytest.fixture
def instead_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that tells how it was called; returns its folder."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $VLLM_CPU_OMP_THREADS_BIND $@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


def test_a_server_is_bound_to_its_core_and_its_end_is_told_with_its_last_words(
    instead_of_vllm: Path,
) -> None:
    server = VllmServer("one", LIMITS, core=1, flags=("--more",))
    with server.process(instead_of_vllm) as process:
        with pytest.raises(SideFailed, match=r"api_server .* ended with 0") as failed:
            server.wait(process)
        assert process.poll() == 0
    last = str(failed.value).splitlines()[-1]
    assert last.startswith("1 1 -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port ")
    assert last.endswith(f"--model /models/x --served-model-name x {FLAGS} --more")


def test_without_a_core_nothing_is_bound(instead_of_vllm: Path) -> None:
    server = VllmServer("one", LIMITS)
    with server.process(instead_of_vllm) as process:
        process.wait()
    assert (instead_of_vllm / "one.log").read_text().startswith("1 nobind -m vllm")


def test_a_server_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "START_TIMEOUT_S", 0.0)
    command = ["sleep", "60"]
    with running("x", command, {}, tmp_path / "x.log") as process:
        with pytest.raises(SideFailed, match="sleep 60: is not ready"):
            wait_for("http://127.0.0.1:1", process, tmp_path / "x.log")
        assert process.poll() is None
    assert process.poll() is not None


def test_what_a_server_leaves_behind_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides, "LEFT_BEHIND_S", 0.0)
    log = tmp_path / "x.log"
    # Its child has a process group of its own, as Ray's have, and does not hear of its end.
    script = (
        "import os, subprocess, time;"
        "child = subprocess.Popen(['sleep', '60'], process_group=0);"
        "print('child', child.pid, flush=True);"
        "time.sleep(60)"
    )
    with running("x", [sys.executable, "-c", script], {}, log) as process:
        wait_for_line("child", process, log)
        child = psutil.Process(int(log.read_text().split()[1]))
        assert child.is_running()
    assert not child.is_running()
    assert f"x left {child.pid} behind, which was killed" in capsys.readouterr().err
