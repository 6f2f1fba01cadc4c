from __future__ import annotations

import pytest

from loadtests.planner.sizes import binary, both, decimal, parse_size


def test_gb_and_gib_are_7_percent_apart() -> None:
    assert parse_size("80GB") == 80_000_000_000
    assert parse_size(" 80 gib ") == 85_899_345_920
    assert parse_size("1.5MiB") == 1_572_864


@pytest.mark.parametrize("text", ["80", "80G", "GB", "-1GB", "", "1e3GB"])
def test_a_size_without_a_known_unit_is_refused_with_the_two_that_it_could_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"GB .*GiB|80GB or 80GiB"):
        parse_size(text)


def test_a_size_is_told_in_both_kinds_of_unit() -> None:
    assert both(512 * 2**20) == "512 MiB (536.9 MB)"
    assert both(100) == "100 B"
    assert binary(80e9) == "74.51 GiB"
    assert decimal(80 * 2**30) == "85.9 GB"
