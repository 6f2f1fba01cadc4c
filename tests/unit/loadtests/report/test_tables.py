"""The tables: each figure as computed by hand, with its n, and no failure in any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.load.records import CpuShare, Outcome, Run
from loadtests.report.comparison import Comparison, compare
from loadtests.report.entries import Entry, entries
from loadtests.report.sheet import Sheet
from loadtests.report.tables import sheets, warnings
from tests.unit.loadtests.report.made_runs import CONDITIONS, failed, run, sample


def shown(*runs: Run, across: str | None = None, anyway: bool = False) -> list[Entry]:
    files = [Path(f"{n}.json") for n in range(len(runs))]
    comparison = compare([str(file) for file in files], runs, across=across, anyway=anyway)
    return entries(list(zip(files, runs, strict=True)), comparison)


def made(*runs: Run, **options: Any) -> dict[str, Sheet]:
    sheets_of = sheets(shown(*runs, **options), Comparison(across=options.get("across")))
    return {sheet.key: sheet for sheet in sheets_of}


def rows(sheet: Sheet) -> list[dict[str, str]]:
    return [dict(zip(sheet.table.columns, row, strict=True)) for row in sheet.table.rows]


def test_every_table_of_a_report_is_there() -> None:
    found = made(run(slo={"ttft_ms": 300.0}))
    assert set(found) == {
        "overview",
        "conditions",
        "environment",
        "outcomes",
        "latency",
        "throughput",
        "goodput",
        "cached",
        "cpu",
        "lag",
    }


def test_latencies_stand_with_their_n() -> None:
    samples = [sample(n, sent_s=n, ttft_s=0.1 * (n + 1), gap_s=0.02) for n in range(3)]
    ttft, tpot, itl, e2e = rows(made(run(samples))["latency"])
    assert (ttft["ms"], ttft["n"], ttft["p50"], ttft["least"], ttft["most"]) == (
        *("TTFT", "3", "200"),
        *("100", "300"),
    )
    assert (tpot["n"], tpot["p50"]) == ("3", "20.0")
    assert (itl["n"], itl["mean"]) == ("12", "20.0")
    assert (e2e["n"], e2e["p50"]) == ("3", "280")


@pytest.mark.parametrize(
    ("n", "told"),
    [
        (1, {"p50": "n < 2", "p90": "n < 10", "p95": "n < 20", "p99": "n < 100"}),
        (10, {"p50": "100", "p90": "100", "p95": "n < 20", "p99": "n < 100"}),
        (99, {"p50": "100", "p90": "100", "p95": "100", "p99": "n < 100"}),
        (100, {"p50": "100", "p90": "100", "p95": "100", "p99": "100"}),
    ],
)
def test_a_percentile_of_too_few_samples_is_no_number(n: int, told: dict[str, str]) -> None:
    sheet = made(run([sample(each, sent_s=each) for each in range(n)]))["latency"]
    ttft = rows(sheet)[0]
    assert {name: ttft[name] for name in told} == told
    assert any("p99 from 100" in note for note in sheet.notes)


def test_every_class_of_failure_is_counted_and_none_reaches_another_table() -> None:
    bad = [outcome for outcome in Outcome if outcome is not Outcome.OK]
    samples = [sample(0, sent_s=0.0), *(failed(o, n + 1) for n, o in enumerate(bad))]
    found = made(run(samples, window_s=(0.0, 10.0), slo={"ttft_ms": 300.0}))
    (told,) = rows(found["outcomes"])
    assert told == {
        "run": "one",
        "measured, n": "8",
        **{outcome.value.replace("_", " "): "1" for outcome in Outcome},
        "succeeded": "12.5 %",
    }
    for key in ("overview", "latency", "throughput", "goodput", "cached"):
        text = " ".join(cell for row in found[key].table.rows for cell in row)
        assert "7,77" not in text
    assert rows(found["latency"])[0]["n"] == "1"
    assert rows(found["throughput"])[0]["requests/s"] == "0.100"
    assert rows(found["goodput"])[0]["met all, n"] == "1"


def test_what_failures_said_is_counted_by_kind() -> None:
    samples = [failed(Outcome.REFUSED, n, detail="too\nbusy") for n in range(3)]
    (told,) = rows(made(run([*samples, sample(9)]))["failures"])
    assert (told["outcome"], told["HTTP status"], told["n"], told["what it said"]) == (
        *("refused", "500"),
        *("3", "too busy"),
    )


def test_without_failures_there_is_no_table_of_them() -> None:
    assert "failures" not in made(run())


def test_what_was_not_measured_is_said_and_is_in_no_latency() -> None:
    warm = [replace(sample(n, ttft_s=9.0), measured=False) for n in range(4)]
    found = made(run([*warm, sample(5)]))
    assert rows(found["latency"])[0]["most"] == "100"
    assert any("4 requests were sent outside" in note for note in found["outcomes"].notes)


def test_parts_of_a_workload_have_rows_of_their_own() -> None:
    parts = [sample(0, group="long", ttft_s=1.0), sample(1, group="short", ttft_s=0.1)]
    told = {row["ms"]: row["most"] for row in rows(made(run(parts))["groups"])}
    assert (told["TTFT, long"], told["TTFT, short"]) == ("1,000", "100")
    assert "groups" not in made(run([sample(0, group="all")]))


def test_goodput_counts_a_failure_as_none_and_names_its_slos() -> None:
    samples = [sample(0, ttft_s=0.1), sample(1, ttft_s=0.9), failed(Outcome.CUT, 2)]
    (told,) = rows(made(run(samples, slo={"ttft_ms": 300.0}, window_s=(0.0, 2.0)))["goodput"])
    assert told["SLOs"] == "TTFT ≤ 300 ms"
    assert (told["met all, n"], told["of measured, n"], told["share"]) == ("1", "3", "33.3 %")
    assert told["goodput, requests/s"] == "0.500"


def test_without_slos_there_is_no_goodput() -> None:
    found = made(run())
    assert "goodput" not in found
    assert rows(found["overview"])[0]["goodput, requests/s"] == "–"


def test_the_cached_share_is_of_those_requests_whose_server_told() -> None:
    samples = [sample(0, cached=320), sample(1, cached=0), sample(2)]
    (told,) = rows(made(run(samples))["cached"])
    assert (told["told by, n requests"], told["input tokens"]) == ("2", "1,280")
    assert (told["of these cached"], told["cached share"]) == ("320", "25.0 %")
    (unknown,) = rows(made(run())["cached"])
    assert unknown["cached share"] == "–"


def test_a_replay_stands_beside_its_traces_own_hit_ratio() -> None:
    found = made(run([sample(0, cached=320)], facts={"cached_share": {"trace_own": 0.4597}}))
    assert "one: the trace's own hit ratio is 46.0 %, of its blocks." in found["cached"].notes
    assert len(made(run(facts={"cached_share": None}))["cached"].notes) == 1


def test_cpu_is_told_by_process_and_outside_the_engines() -> None:
    parts = (CpuShare("engine", 10.0, engine=True), CpuShare("ingress", 2.0, engine=False))
    found = made(run(cpu=parts, window_s=(0.0, 10.0)))
    told = {row["process"]: row for row in rows(found["cpu"])}
    assert told["engine"]["share of all cores"] == "50.0 %"
    assert told["all outside the engines"]["share of all cores"] == "10.0 %"
    assert told["ingress"]["cores"] == "0.200"
    (note,) = found["cpu"].notes
    assert "no claim" not in note


def test_too_much_work_outside_the_engines_is_said_before_all_else() -> None:
    parts = (CpuShare("engine", 10.0, engine=True), CpuShare("ingress", 4.0, engine=False))
    (told,) = warnings(shown(run(cpu=parts, window_s=(0.0, 10.0))))
    assert "20.0 % of 2 cores" in told
    assert "no claim" in told


def test_unseen_processes_and_engines_are_said() -> None:
    assert any("could not be seen" in note for note in made(run())["cpu"].notes)
    parts = (CpuShare("server", 10.0, engine=False),)
    found = made(run(cpu=parts))["cpu"]
    assert any("no engine" in note for note in found.notes)
    assert "all outside the engines" not in [row[0] for row in found.table.rows]


def test_a_warning_of_the_run_is_said_before_all_else() -> None:
    (told,) = warnings(shown(run(facts={"cut_short": "stopped after 3 s"})))
    assert told == "one: cut short: stopped after 3 s."


def test_what_differs_between_runs_has_a_table_by_run() -> None:
    other = {**CONDITIONS, "rate": 4.0}
    found = made(run(label="a"), run(label="b", conditions=other), anyway=True)
    assert [row["rate"] for row in rows(found["conditions-apart"])] == ["2", "4"]
    assert "rate" not in [row[0] for row in found["conditions"].table.rows]
    assert "seed" in [row[0] for row in found["conditions"].table.rows]


def test_runs_of_one_label_keep_names_of_their_own_and_are_summed_up_by_their_median() -> None:
    three = [
        run([sample(n, sent_s=n, ttft_s=ttft_s) for n in range(20)], window_s=(0.0, 50.0))
        for ttft_s in (0.3, 0.1, 0.2)
    ]
    found = made(*three)
    assert [row["run"] for row in rows(found["overview"])] == ["one #1", "one #2", "one #3"]
    (told,) = rows(found["repeats"])
    assert (told["n runs"], told["TTFT p50, ms"]) == ("3", "200 (100 to 300)")
    assert told["output tokens/s"] == "2.00 (2.00 to 2.00)"


def test_runs_of_one_label_and_different_conditions_are_no_repeats() -> None:
    found = made(run(), run(conditions={**CONDITIONS, "rate": 4.0}), anyway=True)
    assert "repeats" not in found
    assert [row["run"] for row in rows(found["overview"])] == ["one #1", "one #2"]


def test_throughput_stands_with_the_requests_that_it_counts() -> None:
    early = replace(sample(0, sent_s=1.0, ttft_s=4.5), measured=False)
    late = sample(2, sent_s=9.5, ttft_s=3.0)
    found = made(run([early, sample(1, sent_s=6.0), late], window_s=(5.0, 10.0)))
    (told,) = rows(found["throughput"])
    assert (told["succeeded in it, n"], told["requests/s"]) == ("2", "0.400")
    assert rows(found["latency"])[0]["n"] == "2"


def test_a_sweep_is_in_the_order_of_its_key() -> None:
    steps = [run(conditions={**CONDITIONS, "rate": rate}) for rate in (10, 9, 0.5)]
    found = made(*steps, across="rate")
    names = [row["run"] for row in rows(found["overview"])]
    assert names == ["one, rate 0.5", "one, rate 9", "one, rate 10"]
    assert "repeats" not in found


def test_a_run_without_a_success_has_no_figure_and_no_traceback() -> None:
    found = made(run([failed(Outcome.UNREACHABLE, n) for n in range(3)], slo={"ttft_ms": 1.0}))
    assert [row["n"] for row in rows(found["latency"])] == ["0"] * 4
    assert {row["p50"] for row in rows(found["latency"])} == {"–"}
    assert made(run([]))["outcomes"].table.rows[0][-1] == "–"
