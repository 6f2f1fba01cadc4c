"""Runs `headwater doctor` as a process on a machine that is broken for this process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.local_ray import ROOT

Checks = dict[str, tuple[str, str]]  # level and message of each check


def nothing() -> None:
    """Before the doctor starts."""


def examine(
    tmp_path: Path,
    *flags: str,
    before: Callable[[], object] = nothing,
    root: Path = ROOT,
    quick: bool = True,
    **environment: str,
) -> tuple[int, Checks]:
    """The doctor's exit code, and level and message of each check."""
    (tmp_path / "here").mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HEADWATER_", "PYTHONPATH"))}
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "cluster.cli", "doctor", "--json"),
            *(["--quick"] if quick else []),
            *("--port", "0", "--dashboard-port", "0", "--state-dir", str(tmp_path / "state")),
            *flags,
        ],
        cwd=tmp_path / "here",
        env={**clean, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=before,
    )
    assert done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0)
    checks = {one["check"]: (one["level"], one["message"]) for one in found["checks"]}
    return done.returncode, checks


def failed(checks: Checks, usual: Checks) -> dict[str, str]:
    """Failures that the machine as it is does not have, with their words."""
    return {
        name: message
        for name, (level, message) in checks.items()
        if level == "failure" and usual[name][0] != "failure"
    }
