"""The Dockerfiles, linted and held to the chart; no container engine was at hand to build them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
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


@each
def test_what_is_copied_is_there_and_is_what_the_layer_has(path: Path) -> None:
    build = path.suffix.removeprefix(".")
    copied = [
        word
        for line in path.read_text().splitlines()
        if line.startswith("COPY ")
        for word in line.split()[2:-1]
    ]
    assert all((ROOT / word).exists() for word in copied)
    locks = {f"requirements/{lock}" for lock in layer.LOCKS[build]}
    assert {*copied} == {"headwater", "LICENSE", *locks, *layer.PACKAGES}


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
