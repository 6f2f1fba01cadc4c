"""What the benchmark of starts and idle clusters says of given figures."""

from __future__ import annotations

import pytest

from loadtests.start import Started, section_of


def started(label: str, seconds: float, idle_percent: float) -> Started:
    return Started(label, [seconds, 3 * seconds, seconds], [1.0], idle_percent, 1000.0)


@pytest.mark.parametrize(
    ("seconds", "idle_percent", "missed"),
    [(15.0, 7.9, []), (36.0, 7.9, ["first answer"]), (36.0, 8.1, ["first answer", "idle"])],
)
def test_section_judges_medians_and_idle_cpu(
    seconds: float, idle_percent: float, missed: list[str]
) -> None:
    ours = started("Headwater", seconds, idle_percent)
    section = section_of(started("plain vLLM", 10.0, 0.5), ours, 300.0)
    assert len(section.missed) == len(missed)
    assert all(part in words for part, words in zip(missed, section.missed, strict=True))


def test_section_gives_ratios_to_plain_vllm() -> None:
    section = section_of(started("", 10.0, 2.0), started("", 15.0, 5.0), 300.0)
    (table,) = section.tables
    assert [row[3] for row in table.rows] == ["1.50", "1.00", "2.50", "1.00"]
