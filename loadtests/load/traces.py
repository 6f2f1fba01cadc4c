"""Public request traces, read: Mooncake's JSON lines and Azure's CSV.

Called by the `replay` command and by whoever draws lengths from a trace. Makes rows only;
loadtests/load/trace_requests.py makes requests of them. Must not: guess at a row that is not of the
format: it is refused with file, line and field.

Mooncake (FAST'25 traces): timestamp in ms, input_length, output_length, and hash_ids: names of the
prompt's blocks of 512 tokens, the last one partial. Equal ids mean equal blocks after equal
prefixes. Azure (2023 and 2024): TIMESTAMP, ContextTokens, GeneratedTokens; which prompts share a
prefix is not told.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

MOONCAKE_BLOCK_TOKENS = 512
_COMMON_SHARE = 0.05
"""A prefix that more than this share of the rows begin with is everybody's, not a session's."""
_COMMON_ROWS = 50
"""Nor is one that fewer begin with: sessions have dozens of turns at most."""
_MS = 1e3
T = TypeVar("T")


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. line: in its file. at_s: after the first row of the file.

    block_ids: empty where the trace tells of no prefixes.
    """

    line: int
    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def read(file: Path, trace_format: str = "") -> list[TraceRow]:
    """All rows, by time. trace_format: one of FORMATS, or empty to go by the file's ending.

    Raises TraceError.
    """
    chosen = trace_format or {".jsonl": "mooncake", ".csv": "azure"}.get(file.suffix, "")
    if chosen not in FORMATS:
        known = ", ".join(FORMATS)
        raise TraceError(f"{file}: {chosen or 'this'} is no known trace format: give {known}")
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(FORMATS[chosen](file, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file} cannot be read: {error}") from error
    if not rows:
        raise TraceError(f"{file} holds no request")
    rows.sort(key=lambda row: row.at_s)
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


def spread_ticks(rows: Sequence[TraceRow], seed: int) -> list[TraceRow]:
    """Rows that were noted by a coarse clock, at times drawn within its ticks; order is kept.

    A clock is coarse if at least half of the rows share their time with another one; any other
    trace is left as it is. A tick ends where the next one begins, or after the usual time.
    """
    together = Counter(row.at_s for row in rows)
    ticks = sorted(together)
    if len(ticks) <= 1 or 2 * sum(n for n in together.values() if n > 1) < len(rows):
        return list(rows)
    usual_s = median(after - before for before, after in pairwise(ticks))
    ends = {before: min(after - before, usual_s) for before, after in pairwise(ticks)}
    rng = random.Random(f"ticks/{seed}")
    times: list[float] = []
    for tick in ticks:
        width_s = ends.get(tick, usual_s)
        times += sorted(tick + rng.random() * width_s for _ in range(together[tick]))
    by_tick = sorted(rows, key=lambda row: row.at_s)  # stable: the file's order within a tick
    return [replace(row, at_s=at_s) for row, at_s in zip(by_tick, times, strict=True)]


def whole_sessions(rows: Sequence[TraceRow], count: int, seed: int) -> list[TraceRow]:
    """Rows of sessions drawn by seed until there are `count`, in the order of the trace.

    A few consecutive rows of a long trace hold few pairs of one session, so they repeat far less
    than the whole. Here all rows of a chosen session are taken (of the last one, the first rows). A
    session is the rows with the same shortest beginning that is not common to many.
    """
    common = _common_prefixes(rows)
    sessions: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        depth = 1
        while row.block_ids[:depth] in common and depth < len(row.block_ids):
            depth += 1
        # Rows without ids are all sessions of their own: negative, as no id is.
        key = row.block_ids[:depth] or (-1 - number,)
        sessions.setdefault(key, []).append(number)
    names = list(sessions)
    random.Random(f"sessions/{seed}").shuffle(names)
    chosen: list[int] = []
    for name in names:
        chosen += sessions[name][: count - len(chosen)]
        if len(chosen) == count:
            break
    return [rows[number] for number in sorted(chosen)]


def _common_prefixes(rows: Sequence[TraceRow]) -> set[tuple[int, ...]]:
    common: set[tuple[int, ...]] = set()
    most = max(_COMMON_ROWS, _COMMON_SHARE * len(rows))
    depth = 1
    while True:
        counts = Counter(
            row.block_ids[:depth]
            for row in rows
            if len(row.block_ids) >= depth and (depth == 1 or row.block_ids[: depth - 1] in common)
        )
        found = {prefix for prefix, n in counts.items() if n > most}
        if not found:
            return common
        common |= found
        depth += 1


def _mooncake(file: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{file}, line {number}: not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise TraceError(f"{file}, line {number}: not an object")
        where = _Place(file, number, row)
        ids = where.value("hash_ids", _ids, "a list of whole numbers from 0 on")
        input_tokens = where.value("input_length", _count, "a whole number from 1 on")
        if len(ids) != -(-input_tokens // MOONCAKE_BLOCK_TOKENS):
            raise where.error(
                "hash_ids",
                f"{len(ids)} ids do not name {input_tokens} tokens in blocks of "
                f"{MOONCAKE_BLOCK_TOKENS}",
            )
        yield TraceRow(
            line=number,
            at_s=where.value("timestamp", _number, "a number of milliseconds from 0 on") / _MS,
            input_tokens=input_tokens,
            output_tokens=where.value("output_length", _whole, "a whole number from 0 on"),
            block_ids=ids,
        )


def _azure(file: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
    if missing:
        raise TraceError(f"{file}, line 1: no column {', '.join(sorted(missing))}")
    for row in reader:
        where = _Place(file, reader.line_num, row)
        yield TraceRow(
            line=reader.line_num,
            at_s=where.value("TIMESTAMP", _seconds, "a date and time"),
            input_tokens=where.value("ContextTokens", _text_count, "a whole number from 1 on"),
            output_tokens=where.value("GeneratedTokens", _text_whole, "a whole number from 0 on"),
        )


FORMATS: dict[str, Callable[[Path, Iterator[str]], Iterator[TraceRow]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a trace a value stands."""

    file: Path
    line: int
    row: dict[str, Any]

    def value(self, field: str, read_as: Callable[[Any], T], meant: str) -> T:
        if field not in self.row:
            raise self.error(field, "missing")
        try:
            return read_as(self.row[field])
        except (TypeError, ValueError) as error:
            raise self.error(field, f"{self.row[field]!r} is not {meant}") from error

    def error(self, field: str, why: str) -> TraceError:
        return TraceError(f"{self.file}, line {self.line}, field {field}: {why}")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:  # noqa: PLR2004 - also NaN
        raise ValueError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value


def _count(value: object) -> int:
    return _whole(value) if value != 0 else _whole(-1)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(_whole, value))


def _text_whole(value: str) -> int:
    return _whole(int(value))


def _text_count(value: str) -> int:
    return _count(int(value))


def _seconds(value: str) -> float:
    when = dt.datetime.fromisoformat(value)
    return (when if when.tzinfo else when.replace(tzinfo=dt.UTC)).timestamp()
