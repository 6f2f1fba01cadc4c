"""Parameters that only `./headwater test --all` runs, beside those that every run takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def full(values: Iterable[Any]) -> list[Any]:
    """Each value as a parameter marked `full`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]
