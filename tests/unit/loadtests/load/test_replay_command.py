"""`replay` as a user runs it, on a server that reuses prefixes; the trace is made up here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from loadtests.load.cli import main
from loadtests.load.records import Outcome, Run
from tests.unit.loadtests.load.caching_server import CachingServer

BLOCK = 512


def made_up_trace(folder: Path) -> Path:
    """40 sessions of three turns that share block 0, noted in ticks of 3 s as Mooncake's are."""
    rng = random.Random(7)
    rows: list[dict[str, object]] = []
    fresh = iter(range(1, 10_000))
    sessions = [[0] for _ in range(40)]
    for turn in range(3):
        for session in sessions:
            session += [next(fresh) for _ in range(rng.randrange(8, 16))]
            length = BLOCK * len(session) - rng.randrange(BLOCK)
            # A partial block is never part of a later prompt: there it has another id.
            partial = length % BLOCK != 0
            ids = [*session[:-1], next(fresh)] if partial else list(session)
            rows.append(
                {
                    "timestamp": 3000 * (10 * turn + len(rows) % 10),
                    "input_length": length,
                    "output_length": rng.randrange(1, 100),
                    "hash_ids": ids,
                }
            )
    rows.sort(key=lambda row: int(str(row["timestamp"])))
    file = folder / "made_up.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def replay(server: CachingServer, trace: Path, output: Path, *flags: str) -> tuple[int, Run]:
    code = main(
        [
            *("replay", "--url", server.url, "--trace", str(trace), "--output", str(output)),
            *("--vocabulary", "49152", "--length-scale", "1/16", "--quiet", *flags),
        ]
    )
    return code, Run.read(output)


def test_a_server_that_keeps_everything_measures_the_traces_own_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made_up_trace(tmp_path)
    with CachingServer().serving() as server:
        code, run = replay(server, trace, tmp_path / "run.json", "--concurrency", "1")
    found = run.facts["cached_share"]
    assert code == 0 and found["n"] == len(run.samples) == 120
    assert found["measured"] == found["possible"] > 0.3
    assert found["measured"] == pytest.approx(found["trace_own"], abs=0.02)
    printed = capsys.readouterr()
    assert "Measured is all that was possible." in printed.out
    assert f"trace's own          {found['trace_own']:7.2%}" in printed.out
    assert "120 requests of 120 rows" in printed.err and "in a closed loop" in printed.err
    assert run.conditions["trace"] == "made_up.jsonl"
    assert run.conditions["reusable_share"] == found["possible"]


def test_a_server_that_keeps_nothing_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made_up_trace(tmp_path)
    with CachingServer(forgets=True).serving() as server:
        _, run = replay(
            server, trace, tmp_path / "run.json", "--concurrency", "1", "--requests", "40"
        )
    found = run.facts["cached_share"]
    assert found["measured"] == 0 and found["possible"] > 0
    assert "was no longer held, or not where the request went" in capsys.readouterr().out


def test_the_second_replay_of_a_seed_finds_everything_and_another_seed_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made_up_trace(tmp_path)
    flags = ("--concurrency", "1", "--requests", "30")
    with CachingServer().serving() as server:
        replay(server, trace, tmp_path / "1.json", *flags)
        _, again = replay(server, trace, tmp_path / "2.json", *flags)
        assert "Restart it, or take another --seed" in capsys.readouterr().out
        _, other = replay(server, trace, tmp_path / "3.json", *flags, "--seed", "2")
    assert again.facts["cached_share"]["measured"] > 0.9
    assert other.facts["cached_share"]["measured"] == other.facts["cached_share"]["possible"]


def test_requests_go_out_at_the_scaled_times_and_lengths_of_the_trace(tmp_path: Path) -> None:
    trace = made_up_trace(tmp_path)
    with CachingServer().serving() as server:
        _, run = replay(server, trace, tmp_path / "run.json", "--requests", "20", "--rate", "200")
        # Scaled by 1/16: of blocks of 512, 9 to 16 in a first turn.
        assert all(8 * 32 < len(prompt) <= 16 * 32 for prompt in server.prompts)
    due_s = [sample.due_s for sample in run.samples]
    assert due_s == sorted(due_s) and len(set(due_s)) == 20
    assert due_s[-1] == pytest.approx(19 / 200)
    assert all(sample.outcome is Outcome.OK for sample in run.samples)
    assert all((sample.output_tokens or 0) <= 7 for sample in run.samples)


def test_the_servers_context_bounds_requests_unless_a_flag_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made_up_trace(tmp_path)
    with CachingServer(context_tokens=600).serving() as server:
        _, clipped = replay(server, trace, tmp_path / "1.json", "--concurrency", "4")
        assert max(map(len, server.prompts)) <= 599
        _, dropped = replay(
            server,
            trace,
            tmp_path / "2.json",
            *("--concurrency", "4", "--over", "drop", "--max-context", "300", "--seed", "3"),
        )
    assert clipped.conditions["clipped"] > 0 and clipped.conditions["dropped"] == 0
    assert dropped.conditions["dropped"] > clipped.conditions["clipped"]
    assert len(dropped.samples) == 120 - dropped.conditions["dropped"]
    assert f"{clipped.conditions['clipped']} clipped and 0 dropped" in capsys.readouterr().err


def test_whole_sessions_can_be_picked(tmp_path: Path) -> None:
    trace = made_up_trace(tmp_path)
    flags = ("--concurrency", "1", "--requests", "30")
    with CachingServer().serving() as server:
        _, first_rows = replay(server, trace, tmp_path / "1.json", *flags)
        _, sessions = replay(
            server, trace, tmp_path / "2.json", *flags, "--pick", "sessions", "--seed", "2"
        )
    own = [run.facts["cached_share"]["trace_own"] for run in (first_rows, sessions)]
    assert own[1] > own[0] + 0.05


def test_failures_are_no_part_of_the_comparison_and_end_in_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made_up_trace(tmp_path)
    with CachingServer(refuse=lambda number: number % 4 == 1).serving() as server:
        code, run = replay(
            server, trace, tmp_path / "run.json", "--concurrency", "1", "--requests", "40"
        )
    assert code == 1 and run.facts["cached_share"]["n"] == 30
    assert "more than --failures-max" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--length-scale", "1/17"), "try 1/16"),
        (("--skip-rows", "500"), "--skip-rows 500 leaves no row"),
        (("--format", "azure"), "no column ContextTokens"),
        (("--time-scale", "0"), "a time scale is above 0"),
        (("--rate", "-1"), "a rate is above 0"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    trace = made_up_trace(tmp_path)
    with CachingServer().serving() as server:
        words = ["replay", "--url", server.url, "--trace", str(trace), "--vocabulary", "49152"]
        assert main([*words, "--length-scale", "1/16", "--quiet", *flags]) == 2
        assert not server.prompts
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_trace_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CachingServer().serving() as server:
        words = ["replay", "--url", server.url, "--vocabulary", "49152"]
        assert main([*words, "--trace", str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl cannot be read" in capsys.readouterr().err


def test_a_dry_run_needs_no_server_and_tells_what_is_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = made_up_trace(tmp_path)
    flags = ["--length-scale", "1/16", "--cache-blocks", "10", "1000", "--concurrency", "1"]
    assert main(["replay", "--trace", str(trace), "--dry-run", *flags]) == 0
    printed = capsys.readouterr().out
    with CachingServer().serving() as server:
        _, run = replay(server, trace, tmp_path / "run.json", *flags[2:])
    found = run.facts["cached_share"]
    for name in ("possible", "possible_lru_10", "possible_lru_1000", "trace_own"):
        assert f"{found[name]:7.2%}" in printed
    assert found["possible_lru_10"] < found["possible_lru_1000"] < found["possible"]


def test_a_trace_without_ids_is_sent_and_shares_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "made_up.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{n:02}.5000000,{900 + n},{n}\n" for n in range(10, 30))
    )
    with CachingServer().serving() as server:
        code, run = replay(server, trace, tmp_path / "run.json", "--time-scale", "0.01")
    assert code == 0 and len(run.samples) == 20
    assert [len(prompt) for prompt in sorted(server.prompts, key=len)] == [57] * 3 + [58] * 16 + [
        59
    ] * 1
    assert run.samples[-1].due_s == pytest.approx(0.19)
    assert run.facts["cached_share"]["possible"] == 0
    assert run.facts["cached_share"]["trace_own"] is None
