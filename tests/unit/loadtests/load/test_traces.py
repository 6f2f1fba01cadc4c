from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.load.hit_ratio import trace_hits
from loadtests.load.traces import TraceError, TraceRow, read, spread_ticks, whole_sessions

GOOD = {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def jsonl(folder: Path, *rows: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_mooncake_row_is_read_with_times_after_the_first(tmp_path: Path) -> None:
    later = {**GOOD, "timestamp": 4500, "input_length": 512, "hash_ids": [7]}
    assert read(jsonl(tmp_path, GOOD, later)) == [
        TraceRow(1, 0.0, 600, 5, (0, 1)),
        TraceRow(2, 1.5, 512, 5, (7,)),
    ]


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
def test_an_azure_row_is_read_in_both_ways_of_writing_a_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.2299600+00:00,110,27\n"
    )
    rows = read(file)
    assert [(row.line, row.input_tokens, row.output_tokens) for row in rows] == [
        (2, 4808, 10),
        (3, 110, 27),
    ]
    assert [row.at_s for row in rows] == [0.0, pytest.approx(1.25)]
    assert all(row.block_ids == () for row in rows)


def test_rows_are_ordered_by_time(tmp_path: Path) -> None:
    rows = read(jsonl(tmp_path, GOOD, {**GOOD, "timestamp": 0}))
    assert [(row.line, row.at_s) for row in rows] == [(2, 0.0), (1, 3.0)]


def test_the_format_can_be_told_where_the_file_does_not(tmp_path: Path) -> None:
    file = jsonl(tmp_path, GOOD).rename(tmp_path / "trace.txt")
    assert len(read(file, "mooncake")) == 1
    with pytest.raises(TraceError, match=r"trace\.txt: this is no known trace format: give moon"):
        read(file)
    with pytest.raises(TraceError, match="azur is no known trace format"):
        read(file, "azur")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": "soon"}, "field timestamp: 'soon' is not a number of milliseconds"),
        ({"timestamp": float("nan")}, "field timestamp: nan is not"),
        ({"timestamp": -1}, "field timestamp: -1 is not"),
        ({"input_length": 0}, "field input_length: 0 is not a whole number from 1 on"),
        ({"input_length": 1.5}, "field input_length: 1.5 is not"),
        ({"input_length": True}, "field input_length: True is not"),
        ({"output_length": None}, "field output_length: None is not"),
        ({"hash_ids": "0 1"}, "field hash_ids: '0 1' is not a list"),
        ({"hash_ids": [0, "a"]}, "field hash_ids"),
        ({"hash_ids": [0, -1]}, "field hash_ids"),
        ({"hash_ids": [0]}, "field hash_ids: 1 ids do not name 600 tokens in blocks of 512"),
    ],
)
def test_a_malformed_mooncake_field_is_named_with_file_and_line(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = jsonl(tmp_path, GOOD, {**GOOD, **change})
    with pytest.raises(TraceError) as refused:
        read(file)
    assert str(refused.value).startswith(f"{file}, line 2, ") and message in str(refused.value)


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    file = jsonl(tmp_path, {name: value for name, value in GOOD.items() if name != field})
    with pytest.raises(TraceError, match=f"line 1, field {field}: missing"):
        read(file)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("a.jsonl", "{", "line 1: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: not an object"),
        ("a.jsonl", "\n", "holds no request"),
        ("a.csv", "when,ContextTokens\n", "line 1: no column GeneratedTokens, TIMESTAMP"),
        ("a.csv", AZURE, "holds no request"),
        ("a.csv", AZURE + "yesterday,1,1\n", "line 2, field TIMESTAMP: 'yesterday' is not a date"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,0,1\n", "field ContextTokens: '0' is not"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,9,-1\n", "field GeneratedTokens: '-1' is not"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,9\n", "field GeneratedTokens: None is not"),
    ],
)
def test_a_malformed_file_is_told_in_one_line(
    tmp_path: Path, name: str, body: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(body)
    with pytest.raises(TraceError) as refused:
        read(file)
    assert message in str(refused.value) and str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "binary.jsonl")


def at(*times_s: float) -> list[TraceRow]:
    return [TraceRow(line, at_s, 10, 1) for line, at_s in enumerate(times_s, 1)]


def test_rows_of_a_tick_are_spread_over_it_in_their_order() -> None:
    rows = at(*[0.0] * 50, *[3.0] * 30, *[6.0] * 20, 12.0, 12.0)
    spread = spread_ticks(rows, seed=1)
    assert [row.line for row in spread] == list(range(1, 103))
    times = [row.at_s for row in spread]
    assert times == sorted(times) and len(set(times)) == 102
    assert Counter(int(at_s // 3) for at_s in times) == {0: 50, 1: 30, 2: 20, 4: 2}
    assert sum(times[:50]) / 50 == pytest.approx(1.5, abs=0.3)
    assert spread == spread_ticks(rows, seed=1) != spread_ticks(rows, seed=2)


def test_a_fine_clock_is_left_alone() -> None:
    rows = at(0.0, 0.04, 0.04, 0.3, 0.9, 2.0)
    assert spread_ticks(rows, seed=1) == rows
    assert spread_ticks(at(5.0, 5.0), seed=1) == at(5.0, 5.0)


def sessions_trace() -> list[TraceRow]:
    """100 sessions of three turns that all begin with block 0, the turns far apart."""
    return [
        TraceRow(
            turn * 100 + n, turn * 100.0 + n, 600, 1, (0, *range(10 * n + 1, 10 * n + turn + 2))
        )
        for turn in range(3)
        for n in range(100)
    ]


def test_whole_sessions_repeat_as_the_whole_trace_does_and_first_rows_do_not() -> None:
    rows = sessions_trace()
    hits, total = trace_hits([row.block_ids for row in rows])
    own = hits / total
    chosen = whole_sessions(rows, 30, seed=1)
    hits, total = trace_hits([row.block_ids for row in chosen])
    assert len(chosen) == 30 and hits / total == pytest.approx(own, abs=0.05)
    assert set(Counter(row.block_ids[1] for row in chosen).values()) == {3}
    hits, total = trace_hits([row.block_ids for row in rows[:30]])
    assert hits / total < own - 0.1


def test_chosen_sessions_come_in_the_order_of_the_trace_and_by_seed() -> None:
    rows = sessions_trace()
    chosen = whole_sessions(rows, 31, seed=1)
    assert [row.at_s for row in chosen] == sorted(row.at_s for row in chosen)
    assert len(chosen) == 31  # the last session is cut
    assert chosen == whole_sessions(rows, 31, seed=1) != whole_sessions(rows, 31, seed=2)
    assert whole_sessions(rows, 1000, seed=1) == rows


def test_rows_without_ids_are_sessions_of_their_own() -> None:
    rows = at(*range(50))
    assert len(whole_sessions(rows, 7, seed=1)) == 7


@pytest.mark.skipif(
    "HEADWATER_TEST_TRACES" not in os.environ,
    reason="HEADWATER_TEST_TRACES names no folder with the public traces",
)
@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("mooncake_conversation_trace.jsonl", {None: 36.6, 1000: 4.5, 10_000: 21.2, 100_000: 36.4}),
        ("mooncake_synthetic_trace.jsonl", {None: 64.0, 1000: 8.4, 10_000: 42.4, 100_000: 64.0}),
    ],
)
def test_the_public_traces_have_their_known_hit_ratios(
    name: str, percent: dict[int | None, float]
) -> None:
    rows = read(Path(os.environ["HEADWATER_TEST_TRACES"]) / name)
    found = {}
    for blocks in percent:
        hits, total = trace_hits([row.block_ids for row in rows], blocks)
        found[blocks] = round(100 * hits / total, 1)
    assert found == percent
