"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _runs_are_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands keep their runs under the folder where they are called."""
    monkeypatch.chdir(tmp_path)
