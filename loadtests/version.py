"""Headwater's version, from pyproject.toml. Called by the command line, and for results.

Imports the standard library alone: `./headwater --version` installs nothing.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def version() -> str:
    """Such as 0.1.0. Images and the chart's layer carry the file, too."""
    with PYPROJECT.open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])
