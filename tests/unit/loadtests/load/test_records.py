"""A run's file: what is written is read back, and what is no run is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.load.records import FORMAT, CpuShare, Outcome, Run
from tests.unit.loadtests.load.samples import run_of, sample

RUN = run_of(
    sample(0, at_s=[0.1, 0.7], tokens=[1, 3], group="turn 1", cached_tokens=3, request_id="x"),
    sample(1, at_s=[], outcome=Outcome.REFUSED, status=429, detail="busy", measured=False),
    conditions={"seed": 1, "arrival": {"kind": "poisson"}},
    facts={"versions": ["a 1"]},
    cores=2,
    cpu=(CpuShare("engine", 1.5, engine=True),),
    slo={"ttft_ms": 300.0},
)


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.json")
    assert Run.read(tmp_path / "run.json") == RUN
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_replaces_an_older_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("older")
    RUN.save(tmp_path / "run.json")
    assert Run.read(tmp_path / "run.json") == RUN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "is not a run of this tool"),
        (b"{", "is not a run of this tool"),
        (b"[]", "has no format"),
        (b'{"format": "other/1"}', "has no format"),
        (json.dumps({"format": FORMAT}).encode(), "damaged run of this tool: KeyError"),
    ],
)
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        Run.read(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"window_s": [1]},
        {"window_s": None},
        {"samples": [3]},
        {"samples": [{"outcome": "odd", "chunks": []}]},
        {"cpu": [{"label": "x"}]},
        {"more": 1},
    ],
)
def test_a_damaged_run_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "run.json"
    RUN.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="damaged run of this tool") as refused:
        Run.read(path)
    assert str(path) in str(refused.value)
