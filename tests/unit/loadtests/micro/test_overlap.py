"""The overlap benchmark's arithmetic, and its line: no engine runs here."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from kvcache.connector.records import RequestReport
from loadtests.micro.overlap import GBIT_S, Handed, PlayedRuns, Runs, blocks_at, section_of
from loadtests.micro.overlap_played import Played
from loadtests.micro.paced_line import BURST_S, PacedLine


def handed(gap_s: float, *, overlap: bool) -> Handed:
    """Two parts of 8 blocks, published at 0.5 and 1 s."""
    arrived = [(0.6, 8), (1.1, 16)] if overlap else [(1.2, 16)]
    counts = {"prefetched_blocks": 8 * overlap, "pulled_blocks": 16 - 8 * overlap}
    return Handed(1.0, 1.0 + gap_s, [(0.5, 8), (1.0, 16)], arrived, counts)


def runs(with_overlap_s: float) -> Runs:
    return {
        (gbit_s, overlap): [handed(gap_s, overlap=overlap)] * 3
        for gbit_s in GBIT_S
        for overlap, gap_s in ((False, 0.4), (True, with_overlap_s))
    }


def played(with_overlap_s: float) -> PlayedRuns:
    return {
        (gbit_s, overlap): [
            Played(after_s, RequestReport(prefetched_blocks=56 * overlap, pulled_blocks=6))
        ]
        for gbit_s in GBIT_S
        for overlap, after_s in ((False, 0.4), (True, with_overlap_s))
    }


def test_the_section_sets_the_second_token_beside_that_without_overlap() -> None:
    section = section_of(runs(0.1), played(0.04))
    table, without_engines, timeline, _ = section.tables
    assert without_engines.rows[1][1:6] == ("40", "40 to 40", "56", "6", "0.10")
    assert table.rows[0][1:7] == ("1000", "400", "400 to 400", "0", "16", "1")
    assert table.rows[1][1:7] == ("1000", "100", "100 to 100", "8", "8", "0.25")
    assert section.missed == ()
    after_ms = {row[0]: row[1:] for row in timeline.rows}
    assert after_ms["-500"] == ("8", "0", "8", "0")
    assert after_ms["0"] == ("16", "0", "16", "8")
    assert after_ms["200"] == ("16", "16", "16", "16")
    assert timeline.rows[-1] == ("second token at, ms", "", "400", "", "100")


def test_overlap_that_saves_little_is_a_missed_target() -> None:
    assert section_of(runs(0.36), played(0.1)).missed == (
        "1 Gbit/s: 0.90 of the time without overlap",
    )
    section = section_of({}, played(0.36))
    assert section.missed == (
        "played, 1 Gbit/s: 0.90 of the time without overlap",
        "played, 10 Gbit/s: 0.90 of the time without overlap",
    )
    assert len(section.tables) == 1


def test_blocks_at_a_time_are_those_of_the_last_count_before_it() -> None:
    counts = [(0.5, 8), (1.0, 16)]
    assert [blocks_at(counts, at_s) for at_s in (0.4, 0.5, 0.9, 2.0)] == [0, 8, 8, 16]


@pytest.mark.slow
def test_a_paced_line_carries_everything_and_not_sooner_than_its_rate_allows() -> None:
    sent = bytes(range(256)) * 4096  # 1 MiB
    rate = 10e6
    with socket.create_server(("127.0.0.1", 0)) as node, PacedLine(node.getsockname()) as line:
        line.bytes_per_s = rate

        def serve() -> None:
            sock, _ = node.accept()
            with sock:
                assert sock.recv(1) == b"?"
                sock.sendall(sent)

        server = threading.Thread(target=serve)
        server.start()
        host, _, port = line.address.rpartition(":")
        with socket.create_connection((host, int(port))) as reader:
            began_s = time.monotonic()
            reader.sendall(b"?")
            received = bytearray()
            while data := reader.recv(1 << 16):
                received += data
            took_s = time.monotonic() - began_s
        server.join()
    assert bytes(received) == sent
    assert took_s >= len(sent) / rate - BURST_S
