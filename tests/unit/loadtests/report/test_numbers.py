from __future__ import annotations

import pytest

from loadtests.report.numbers import number, share


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0.00"),
        (1234.5, "1,234"),
        (99.97, "100"),
        (9.999, "10.0"),
        (56.72, "56.7"),
        (8.9, "8.90"),
        (0.9999, "1.00"),
        (0.5, "0.500"),
        (0.0123, "0.0123"),
        (-12.34, "-12.3"),
    ],
)
def test_a_figure_has_three_digits_that_count(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_a_share_is_percent_or_a_dash() -> None:
    assert (share(0.1234), share(1.0), share(None)) == ("12.3 %", "100.0 %", "–")
