"""Whether runs may stand side by side: only if all that their figures depend on is equal.

Called by the report command and by whatever shows several runs together. Pure. Conditions are
compared leaf by leaf, their nested keys joined by dots; SLOs count, because goodput depends on
them. Must not: guess that a difference does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.load.records import Run

ABSENT = "(not told)"
NONE = "–"
# A sweep gives each step prompts of its own, or it would find those of the last one in a cache:
# these are not equal, though the seed of the sweep is.
OF_A_STEP = ("step_seed", "reusable_share")
_SHOWN_CHARACTERS = 80
_DIFFERENCES_SHOWN = 20
_EXAMPLE_CHARACTERS = 30


class Incomparable(ValueError):
    """The runs differ in a condition; the message names each key and its values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that is not the same in all runs. values: as text, one a run, in their order."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is known of runs that are shown together.

    across: the key that a sweep varies, None for none; at: its value for each run. differences:
    other conditions that differ, which is only so where the user wanted it.
    """

    across: str | None = None
    at: tuple[float, ...] = ()
    differences: tuple[Difference, ...] = ()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key. A list is a leaf, and so is an empty mapping."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def as_text(value: Any) -> str:  # noqa: ANN401  # whatever JSON holds
    """A leaf for people to read; whether two are equal is not to be told from it."""
    if value is None or value in ("", [], {}):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        return ", ".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def conditions(run: Run) -> dict[str, Any]:
    """All that must be equal, by its key."""
    leaves = flat(run.conditions)
    if run.cores:
        leaves.setdefault("cores", run.cores)
    return {**leaves, **{f"slo.{key}": value for key, value in run.slo.items()}}


def differences(runs: Sequence[Run]) -> tuple[Difference, ...]:
    """The conditions that are not the same in all, in the order in which they are first told."""
    told = [{key: _exact(leaf) for key, leaf in conditions(run).items()} for run in runs]
    keys = dict.fromkeys(key for each in told for key in each)
    columns = ((key, tuple(each.get(key, ABSENT) for each in told)) for key in keys)
    return tuple(Difference(key, values) for key, values in columns if len(set(values)) > 1)


def compare(
    names: Sequence[str], runs: Sequence[Run], *, across: str | None = None, anyway: bool = False
) -> Comparison:
    """Raises Incomparable, and ValueError for an `across` that these runs cannot be shown by.

    names: what the message calls each run, such as its file.
    """
    found = differences(runs)
    key, at = _swept(names, runs, across) if across else (None, ())
    varied = (key, *OF_A_STEP) if key else ()
    rest = tuple(each for each in found if each.key not in varied)
    if rest and not anyway:
        raise Incomparable(_refusal(names, rest, key))
    return Comparison(key, at, rest)


def _exact(value: Any) -> str:  # noqa: ANN401
    """Equal for what is equal: 1 and 1.0 are, and 1 and "1" are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # A word that reads as a number must not equal the number.
    words_as_they_are = isinstance(value, str) and not _reads_as_json(value)
    return value if words_as_they_are else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _reads_as_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _swept(names: Sequence[str], runs: Sequence[Run], wanted: str) -> tuple[str, tuple[float, ...]]:
    """The full key, and its value in each run."""
    leaves = [flat(run.conditions) for run in runs]
    keys = list(dict.fromkeys(key for each in leaves for key in each))
    exact = [key for key in keys if key == wanted]
    chosen = exact or [key for key in keys if key.rpartition(".")[2] == wanted]
    if len(chosen) != 1:
        which = f"the keys {', '.join(chosen)}" if chosen else f"only {', '.join(keys) or 'none'}"
        raise ValueError(f"--across {wanted}: the runs' conditions have {which}; name one of them")
    (key,) = chosen
    at: list[float] = []
    for name, each in zip(names, leaves, strict=True):
        value = each.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            told = ABSENT if key not in each else _exact(value)
            message = f"--across {key} needs a number in each run: in {name} it is {told}"
            raise ValueError(message)  # noqa: TRY004  # of the file's content
        at.append(float(value))
    return key, tuple(at)


def _refusal(names: Sequence[str], found: Sequence[Difference], across: str | None) -> str:
    lines = ["these runs were made under different conditions, so they are not compared:"]
    for difference in found[:_DIFFERENCES_SHOWN]:
        by_value: dict[str, list[str]] = {}
        for name, value in zip(names, difference.values, strict=True):
            by_value.setdefault(value, []).append(name)
        told = "; ".join(
            f"{_cut(value)} in {', '.join(holders[:3])}{_more(len(holders) - 3)}"
            for value, holders in by_value.items()
        )
        lines.append(f"  {difference.key}: {told}")
    if len(found) > _DIFFERENCES_SHOWN:
        lines.append(f"  and {len(found) - _DIFFERENCES_SHOWN} conditions more")
    key, value = found[0].key, found[0].values[0]
    some = (
        f"{key}={value}" if value != ABSENT and len(value) <= _EXAMPLE_CHARACTERS else "KEY=VALUE"
    )
    hint = (
        f"Give runs that differ in none of these, or choose some, such as --where '{some}', or "
        "--compare-anyway (the report then says so)"
    )
    varied = [each.key for each in found if each.key not in OF_A_STEP]
    if across is None and len(varied) == 1:
        hint += f", or, if this is a sweep, --across {varied[0]}"
    return "\n".join([*lines, hint])


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
