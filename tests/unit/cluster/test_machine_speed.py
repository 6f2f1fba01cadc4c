"""What one core computes, measured in a process of its own."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from cluster import machine_speed
from cluster.machine_speed import DTYPES


def test_speed_has_both_rates_of_each_dtype() -> None:
    found = machine_speed.measure()
    assert found is not None
    assert found.gflops.keys() == found.gbytes.keys() == set(DTYPES)
    assert min(*found.gflops.values(), *found.gbytes.values()) > 0


@pytest.mark.parametrize("answer", ["", "[]", "{}", '{"gflops": {}}'])
def test_speed_is_none_where_the_process_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    monkeypatch.setattr(subprocess, "run", ran)
    assert machine_speed.measure() is None
