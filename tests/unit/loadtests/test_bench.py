from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from loadtests import bench
from loadtests.results import EXIT_MISSED

PATH = Path("RESULTS.md")


def test_all_run_in_turn_though_one_fails() -> None:
    ran: list[str] = []

    def run(module: str, results: Path) -> int:
        assert results == PATH
        ran.append(module)
        return 1 if len(ran) == 1 else 0

    codes = bench.run_all(list(bench.BENCHMARKS), PATH, run)
    assert ran == list(bench.BENCHMARKS.values())
    assert list(codes.values()) == [1] + [0] * (len(ran) - 1)


@pytest.mark.parametrize(
    ("codes", "strict", "expected"),
    [
        ({"a": 0}, False, 0),
        ({"a": 0}, True, 0),
        ({"a": 0, "b": EXIT_MISSED}, False, 0),
        ({"a": 0, "b": EXIT_MISSED}, True, 1),
        ({"a": 1, "b": 0}, False, 1),
        ({"a": -9}, False, 1),
    ],
)
def test_a_failure_counts_always_and_a_missed_target_if_asked(
    codes: dict[str, int], *, strict: bool, expected: int
) -> None:
    assert bench.exit_code(codes, strict=strict) == expected


def test_only_what_was_asked_for_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[str] = []

    def run(names: list[str], _results: Path) -> dict[str, int]:
        ran.extend(names)
        return dict.fromkeys(names, EXIT_MISSED)

    monkeypatch.setattr(bench, "run_all", run)
    arguments = ["--only", "routing", "--only", "slab", "--results", str(tmp_path / "r.md")]
    assert bench.main(arguments) == 0
    assert ran == ["slab", "routing"]
    assert "<!-- begin header -->" in (tmp_path / "r.md").read_text()
    assert "slab: ran, with targets MISSED" in capsys.readouterr().out
    assert bench.main([*arguments, "--strict"]) == 1


def test_a_benchmark_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    code = bench.run_in_process("loadtests.no_such_benchmark", tmp_path / "r.md")
    assert bench.exit_code({"none": code}, strict=False) == 1


@pytest.mark.parametrize("name", ["latency", "slab", "routing"])
def test_a_benchmark_is_where_its_name_says(name: str) -> None:
    assert importlib.util.find_spec(bench.BENCHMARKS[name].split()[0]) is not None
