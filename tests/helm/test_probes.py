"""A slow start under the rendered probes: a stub of the kubelet asks in virtual time.

What a probe finds at a moment is real where it is a script (it is run), and told where it is Ray's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deployments.workers import ready_file
from tests.helm.chart import ROOT, Helm, Json, sets

LOAD_S = 300  # of the model
RAY_S = 40  # until Ray's process on the pod answers
SCRIPTS = "/etc/headwater/scripts/"


@dataclass
class Kubelet:
    """Asks one container's probes as Kubernetes documents it: startup first, then both others."""

    container: Json
    finds: Callable[[str, int], bool]  # the probe's target and the time: whether it succeeds
    killed_s: int | None = None
    ready: list[tuple[int, bool]] = field(default_factory=list)

    def watch(self, until_s: int) -> None:
        """Ask until then, or until a probe ends the container."""
        has_started, failed = False, {"startup": 0, "liveness": 0, "readiness": 0}
        for now_s in range(until_s):
            for kind in ["liveness", "readiness"] if has_started else ["startup"]:
                probe = self.container[f"{kind}Probe"]
                if now_s % probe["periodSeconds"]:
                    continue
                succeeds = self.finds(target_of(probe), now_s)
                failed[kind] = 0 if succeeds else failed[kind] + 1
                is_over = failed[kind] >= probe["failureThreshold"]
                if kind == "readiness" and (succeeds or is_over):
                    self.ready.append((now_s, succeeds))
                elif kind != "readiness" and is_over:
                    self.killed_s = now_s
                    return
                has_started = has_started or (kind == "startup" and succeeds)

    def first_ready_s(self) -> int:
        return next(at_s for at_s, is_ready in self.ready if is_ready)


def target_of(probe: Json) -> str:
    """What is asked: a path, or the last word of a command."""
    return str(probe["httpGet"]["path"] if "httpGet" in probe else probe["exec"]["command"][-1])


@pytest.fixture
def worker_ready(tmp_path: Path) -> Callable[[bool], bool]:
    """Whether the script finds a worker, where one stands or none does; a run for each."""
    folder = tmp_path / f"headwater-{os.getuid()}"
    folder.mkdir()

    def run(*, stands: bool) -> bool:
        file = ready_file.announce(folder, "decode-a") if stands else None
        try:
            command = ["/bin/bash", str(ROOT / "helm/files/worker-ready.sh")]
            environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
            return subprocess.run(command, env=environment, check=False).returncode == 0
        finally:
            if file is not None:
                ready_file.withdraw(file)

    found = {stands: run(stands=stands) for stands in (False, True)}
    return found.__getitem__


@pytest.mark.parametrize("group", ["prefill", "decode"])
def test_a_worker_that_loads_for_minutes_is_not_killed_and_gets_traffic_only_then(
    helm: Helm, worker_ready: Callable[[bool], bool], group: str
) -> None:
    def finds(target: str, now_s: int) -> bool:
        if target == "/api/healthz":
            return now_s >= RAY_S
        assert target == SCRIPTS + "worker-ready.sh"
        return worker_ready(now_s >= LOAD_S)

    kubelet = Kubelet(helm.render().container(group), finds)
    kubelet.watch(LOAD_S + 600)
    assert kubelet.killed_s is None
    assert LOAD_S <= kubelet.first_ready_s() <= LOAD_S + 10
    assert all(is_ready == (at_s >= LOAD_S) for at_s, is_ready in kubelet.ready)


def test_a_frontend_whose_workers_load_or_go_away_lives_and_is_not_ready(helm: Helm) -> None:
    away = range(900, 2400)  # of a peer, longer than any probe's patience

    def finds(target: str, now_s: int) -> bool:
        if target == "/api/healthz":
            return now_s >= RAY_S
        assert target == "/ready"
        return now_s >= LOAD_S and now_s not in away

    kubelet = Kubelet(helm.render().container("frontend"), finds)
    kubelet.watch(3000)
    assert kubelet.killed_s is None
    assert LOAD_S <= kubelet.first_ready_s() <= LOAD_S + 10
    assert not any(is_ready for at_s, is_ready in kubelet.ready if at_s in away)
    assert kubelet.ready[-1] == (2990, True)


def test_the_stub_kills_where_the_leave_is_too_short(helm: Helm) -> None:
    short = helm.render(*sets("probes.startupSeconds=600")).container("decode")
    for first_s, killed in ((590, False), (620, True)):
        kubelet = Kubelet(short, lambda target, now_s, s=first_s: now_s >= s or "/" not in target)
        kubelet.watch(700)
        assert (kubelet.killed_s is not None) == killed
