"""The suite's runner: which failures may be run once more, and what its closing line adds up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from tests import suite
from tests.suite import Failure, Phase, Result

FAILED = Failure("tests/e2e/test_handoff.py::test_x", "failed", "AssertionError: waited 30 s")
IN_EQUALITY = Failure("tests/e2e/test_equality.py::test_x", "failed", "assert 1 == 2")
IN_UNIT = Failure("tests/unit/router/test_cost.py::test_x", "failed", "assert 1 == 2")
IN_LEDGER = Failure("tests/e2e/test_handoff.py::test_x", "error", "LedgerNotClean: 1 lease")
WRONG_TOKENS = Failure("tests/contract/test_y.py::test_x", "failed", "TokensDiffer: 3 != 4")


def result_of(*failures: Failure) -> Result:
    counts = Counter(failure.outcome for failure in failures)
    return Result(counts + Counter(passed=5), list(failures))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each pytest run; each passes."""
    asked: list[list[str]] = []

    def run(arguments: Sequence[str]) -> Result:
        asked.append(list(arguments))
        return Result(Counter(passed=1))

    monkeypatch.setattr(suite, "run_pytest", run)
    return asked


def test_rerun_of_a_chance_failure_names_it_as_flaky(runs: list[list[str]]) -> None:
    result = result_of(FAILED)
    assert suite.rerun(result, 3) == [FAILED.test]
    assert [words[0] for words in runs] == [FAILED.test]
    assert (result.failures, +result.counts) == ([], Counter(passed=6))


@pytest.mark.parametrize("failure", [IN_EQUALITY, IN_UNIT, IN_LEDGER, WRONG_TOKENS])
def test_rerun_of_a_wrong_answer_does_not_happen(failure: Failure, runs: list[list[str]]) -> None:
    result = result_of(FAILED, failure)
    assert suite.rerun(result, 3) == []
    assert runs == []
    assert result.failures == [FAILED, failure]


@pytest.mark.parametrize("at_most", [0, 1])
def test_rerun_of_too_many_failures_does_not_happen(at_most: int, runs: list[list[str]]) -> None:
    result = result_of(FAILED, FAILED)
    assert suite.rerun(result, at_most) == []
    assert runs == []


def test_rerun_that_fails_again_stays_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_pytest", lambda _: result_of(FAILED))
    result = result_of(FAILED)
    assert suite.rerun(result, 3) == []
    assert result.failures == [FAILED]


def test_closing_line_adds_phases_up() -> None:
    result = result_of(FAILED)
    result.add(Result(Counter(passed=2, skipped=1), broken=["pytest ended with 4: tests/e2e"]))
    told = suite.closing_lines(result, [], 61.5).splitlines()
    assert told[-1].strip("= ") == "1 failed, 7 passed, 1 skipped, 1 error in 61.50s (0:01:01)"
    assert told[1:-1] == ["BROKEN pytest ended with 4: tests/e2e", f"FAILED {FAILED.test}"]


def test_run_pytest_without_a_report_is_broken() -> None:
    result = suite.run_pytest(["--no-such-option"])
    assert [one.split(":")[0] for one in result.broken] == ["pytest ended with 4"]


def test_run_pytest_counts_what_passed() -> None:
    result = suite.run_pytest(["tests/unit/test_suite.py", "-q", "-k", "closing_line"])
    assert (+result.counts, result.failures, result.broken) == (Counter(passed=1), [], [])


@pytest.mark.parametrize("everything", [False, True])
def test_phase_arguments_leave_out_full_tests_unless_all(*, everything: bool) -> None:
    words = suite.phase_arguments(Phase("x", ("unit",), is_parallel=True), everything=everything)
    assert ("--quick" in words) is not everything
    assert words[0] == "tests/unit"
    assert "-n" in words
    serial = suite.phase_arguments(Phase("x", ("e2e",), is_parallel=False), everything=True)
    assert "-n" not in serial
    assert serial[1:] == list(suite.FIXED_ORDER)
