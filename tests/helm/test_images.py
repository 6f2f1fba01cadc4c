"""The Dockerfiles, linted and held to the chart; no container engine was at hand to build them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from helm import layer
from tests.conftest import MISSING
from tests.helm.chart import CHART, ROOT, Helm

IMAGES = sorted((CHART / "images").glob("Dockerfile.*"))
each = pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)


@each
def test_hadolint_finds_nothing(path: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip(f"{MISSING}hadolint (requirements/helm.lock)")
    done = subprocess.run(
        [program, "--no-color", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def copied(path: Path) -> list[str]:
    """What a Dockerfile takes from the repository."""
    return [
        word
        for line in path.read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[2:-1]
    ]


@each
def test_what_is_copied_is_there_and_is_what_the_layer_has(path: Path) -> None:
    build = path.suffix.removeprefix(".")
    assert all((ROOT / word).exists() for word in copied(path))
    locks = {f"requirements/{lock}" for lock in layer.LOCKS[build]}
    assert {*copied(path)} == {"headwater", "LICENSE", "pyproject.toml", *locks, *layer.PACKAGES}


def copied_files(path: Path) -> Iterator[str]:
    """Those below what it copies, by their paths."""
    for word in copied(path):
        folder = ROOT / word
        found = folder.rglob("*.*") if folder.is_dir() else [folder]
        yield from (str(one.relative_to(ROOT)) for one in found)


def is_ignored(path: str) -> bool:
    """By .dockerignore, whose patterns are of whole paths, ** being any folders."""
    patterns = [
        line.removeprefix("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    parts = path.split("/")
    folders = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    return any(
        fnmatch(folder.rpartition("/")[2], pattern.removeprefix("**/"))
        if pattern.startswith("**/")
        else fnmatch(folder, pattern) and folder.count("/") == pattern.count("/")
        for folder in folders
        for pattern in patterns
    )


@each
def test_what_an_image_needs_is_in_the_builds_context_and_caches_are_not(path: Path) -> None:
    needed = [one for one in copied_files(path) if "_cache" not in one and ".pyc" not in one]
    assert needed and not [one for one in needed if is_ignored(one)]
    left = (".git/HEAD", ".venv/bin/python", ".mypy_cache/x", "cluster/__pycache__/a.pyc")
    assert all(map(is_ignored, (*left, "results/run.json", "build/headwater-layer.tar.xz")))


@each
def test_pips_cache_stays_in_no_image(path: Path, helm: Helm) -> None:
    assert re.search(r"^ +PIP_NO_CACHE_DIR=1 ", path.read_text(), re.MULTILINE)
    install, *_ = helm.render().pod("decode")["spec"]["initContainers"]
    assert {"name": "PIP_NO_CACHE_DIR", "value": "1"} in install["env"]


@each
def test_the_image_is_what_the_chart_expects(path: Path, helm: Helm) -> None:
    text = path.read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base is not None
    assert base[1] == f"{values['image']['repository']}:{values['image']['tag']}"
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    security = values["podSecurity"]
    assert users[-1] == f"{security['runAsUser']}:{security['runAsGroup']}"
    container = helm.render().container("decode")
    environ = {one["name"]: one.get("value") for one in container["env"]}
    assert f"HEADWATER_VENV={environ['HEADWATER_VENV']}" in text
    assert f"PYTHONPATH={environ['PYTHONPATH']}" in text
    assert f"{environ['PYTHONPATH']}/headwater config" in text


def test_the_image_for_gpus_has_the_compiler_that_triton_needs() -> None:
    installed = re.search(
        r"apt-get install --yes --no-install-recommends (.+?) \\",
        (CHART / "images/Dockerfile.gpu").read_text(),
    )
    assert installed is not None
    assert {"gcc", "libc6-dev"} <= {*installed[1].split()}


def test_rays_version_is_the_same_in_image_chart_and_lock(helm: Helm) -> None:
    (version,) = re.findall(
        r"^ray==([\d.]+)", (ROOT / "requirements/serve.lock").read_text(), re.MULTILINE
    )
    assert helm.render().cluster["rayVersion"] == version
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["image"]["tag"] == f"{version}-py311"
