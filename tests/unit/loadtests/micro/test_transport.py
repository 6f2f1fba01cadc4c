"""The transport benchmark: its ways on a few small blocks, and what it makes of figures."""

from __future__ import annotations

import pytest

from loadtests.micro.transport import Round, measure, ratio, section_of

WAYS = (
    *("memcpy", "shm", "raw, 1 socket", "raw, 2 sockets", "raw, 4 sockets"),
    *("tcp, 1 stream", "tcp, 2 streams", "tcp, 4 streams"),
)


def rounds_of(**rates: float) -> dict[str, list[Round]]:
    """Two rounds; the second on a machine of half the speed."""
    found = dict.fromkeys(WAYS, 10.0) | {name.replace("_", " "): r for name, r in rates.items()}
    return {name: [Round(rate, 0.1), Round(rate / 2, 0.1)] for name, rate in found.items()}


@pytest.mark.slow
def test_every_way_is_measured_in_every_round() -> None:
    results = measure(blocks=12, block_bytes=7_680, rounds=2, window_slots=4)
    assert set(results) == set(WAYS)
    assert all(
        len(found) == 2 and all(r.rate_gb_s > 0 for r in found) for found in results.values()
    )


def test_ratios_are_of_the_same_round() -> None:
    results = rounds_of() | {"tcp, 2 streams": [Round(8.0, 0.1), Round(4.0, 0.1)]}
    assert ratio(results, "tcp, 2 streams", "raw, 1 socket") == pytest.approx(0.8)


def test_figures_that_keep_the_targets_miss_none() -> None:
    section = section_of(rounds_of(), 300, 737_280, 8)
    assert section.missed == ()
    (table,) = section.tables
    assert [row[0] for row in table.rows] == [
        *("memcpy", "shm", "raw, 1 socket", "tcp, 1 stream"),
        *("raw, 2 sockets", "tcp, 2 streams", "raw, 4 sockets", "tcp, 4 streams"),
    ]


def test_a_default_that_is_slower_than_its_share_of_a_raw_socket_is_missed() -> None:
    slow = rounds_of() | {"tcp, 1 stream": [Round(7.0, 0.1), Round(3.5, 0.1)]}
    (missed,) = section_of(slow, 300, 737_280, 8).missed
    assert "tcp, 1 stream: 0.70 of raw, 1 socket" in missed


def test_only_the_default_number_of_streams_has_a_target() -> None:
    slow = rounds_of() | {"tcp, 2 streams": [Round(1.0, 0.1)] * 2}
    assert section_of(slow, 300, 737_280, 8).missed == ()


def test_shared_memory_that_is_slower_than_half_of_memcpy_is_missed() -> None:
    (missed,) = section_of(rounds_of(shm=4.0), 300, 737_280, 8).missed
    assert missed.startswith("shm: 0.40 of memcpy")
