"""The whole tool against a server with known delays and failures, over real sockets.

The machine may be busy, so upper bounds are the server's own log of when it wrote what, on the same
clock, and medians; nominal delays are lower bounds.
"""

from __future__ import annotations

import time
from statistics import fmean, median

import pytest

from loadtests.load.client import Target
from loadtests.load.metrics import Summary, e2e_ms, itl_ms, summarise, tpot_ms, ttft_ms
from loadtests.load.records import Outcome, Request, Run
from loadtests.load.runner import Plan, drive
from loadtests.load.stub_server import MODEL, Fault, Script, StubServer, serving

TOKENS = 50
REQUESTS = 20
FIRST_MS, GAP_MS = 500.0, 20.0
KNOWN = Script(first_s=FIRST_MS / 1e3, gap_s=GAP_MS / 1e3)
FAILING = (
    *(Fault.ERROR_EVENT, Fault.NONE, Fault.CUT, Fault.NONE, Fault.ERROR_EVENT),
    *(Fault.ERROR_BODY, Fault.NONE, Fault.BUSY, Fault.NONE, Fault.ERROR_EVENT),
)


async def measured(script: Script, plan: Plan, **fields: object) -> tuple[Run, StubServer]:
    # Apart by less than a gap, so that a moment in which the machine stands hits few first tokens.
    requests = [Request(n, (5,) * 100, TOKENS, due_s=n * 0.03) for n in range(REQUESTS)]
    async with serving(script) as (server, url):
        target = Target(url, MODEL, **fields)  # type: ignore[arg-type]
        return await drive(target, requests, plan, slo={"ttft_ms": 60_000.0}), server


@pytest.mark.slow
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_known_delays_are_measured_as_the_server_kept_them(api: str) -> None:
    # LT-01. Every stream opens with an empty chunk, of chat with a role-only one too.
    begun_s = time.monotonic()
    requests = [Request(n, "a b", TOKENS, due_s=n * 0.03) for n in range(REQUESTS)]
    async with serving(KNOWN) as (server, url):
        run = await drive(Target(url, MODEL, api=api), requests, Plan())  # type: ignore[arg-type]
    assert [sample.outcome for sample in run.samples] == [Outcome.OK] * REQUESTS
    by_id = {f"stub-{served.number}": served for served in server.log}
    served = [by_id[sample.request_id] for sample in run.samples]
    for sample in run.samples:
        gaps = itl_ms(sample)
        assert len(gaps) == TOKENS - 1
        # The first token in no gap; the sum of all, and their mean, to the digit.
        assert ttft_ms(sample) + sum(gaps) == pytest.approx(e2e_ms(sample))
        assert tpot_ms(sample) == pytest.approx(fmean(gaps))
        assert ttft_ms(sample) >= FIRST_MS
        assert e2e_ms(sample) == pytest.approx(
            ttft_ms(sample) + (TOKENS - 1) * fmean(gaps), rel=0.05
        )
    # Against the server's own log.
    sent = [1e3 * (each.wrote_s[0] - begun_s) for each in served]
    assert all(wrote >= FIRST_MS for wrote in sent)
    firsts = [
        ttft_ms(sample) - 1e3 * (each.wrote_s[0] - each.arrived_s)
        for sample, each in zip(run.samples, served, strict=True)
    ]
    assert min(firsts) >= 0
    assert median(firsts) <= 15
    figures = summarise(run)
    wrote_gaps = [1e3 * (s.wrote_s[-1] - s.wrote_s[0]) / (TOKENS - 1) for s in served]
    assert figures.itl_ms is not None
    assert figures.itl_ms.n == REQUESTS * (TOKENS - 1)
    assert figures.itl_ms.mean == pytest.approx(fmean(wrote_gaps), abs=3)
    assert figures.tpot_ms is not None
    assert figures.tpot_ms.p50 == pytest.approx(median(wrote_gaps), abs=3)
    # A server that is late with its first token catches up: at least nearly the nominal gap.
    assert max(wrote_gaps) >= GAP_MS * 0.9


async def test_streams_that_fail_are_counted_by_class_and_in_no_figure() -> None:
    # LT-02.
    run, _ = await measured(Script(faults=FAILING), Plan())
    figures = summarise(run)
    assert figures.success_share == 0.4
    assert figures.outcomes == {
        Outcome.OK: 8,
        Outcome.ERROR_EVENT: 8,  # 6 in a stream and 2 as a body
        Outcome.CUT: 2,
        Outcome.REFUSED: 2,
    }
    _only_of_successes(run, figures, succeeded=8)


def _only_of_successes(run: Run, figures: Summary, succeeded: int) -> None:
    streamed_and_failed = [s for s in run.samples if s.chunks and s.outcome is not Outcome.OK]
    assert len(streamed_and_failed) == 8  # which a careless tool would have averaged in
    for found in (figures.ttft_ms, figures.tpot_ms, figures.e2e_ms):
        assert found is not None and found.n == succeeded
    assert figures.itl_ms is not None
    assert figures.itl_ms.n == succeeded * (TOKENS - 1)
    length_s = run.window_s[1] - run.window_s[0]
    assert figures.output_tokens_per_s * length_s == pytest.approx(succeeded * TOKENS)
    assert figures.input_tokens_per_s * length_s == pytest.approx(succeeded * 100)
    assert figures.requests_per_s * length_s == pytest.approx(succeeded)
    assert figures.goodput_per_s == pytest.approx(figures.requests_per_s)


async def test_a_closed_loop_never_has_more_in_flight_than_users() -> None:
    run, server = await measured(Script(gap_s=0.001), Plan(concurrency=4))
    assert server.in_flight_most == 4
    assert summarise(run).succeeded == REQUESTS


async def test_chunks_of_several_tokens_are_told_apart_where_the_server_tells_ids() -> None:
    run, _ = await measured(Script(chunk_tokens=4, cached_tokens=25), Plan())
    figures = summarise(run)
    assert figures.itl_ms is not None
    assert figures.itl_ms.n == REQUESTS * (TOKENS - 1)
    # 50 tokens in 13 chunks: 12 gaps between chunks, and 37 of 0.
    assert [gap == 0 for gap in itl_ms(run.samples[0])].count(True) >= 37
    assert figures.cached_share == 0.25
    assert not any("by chunk" in line for line in figures.warnings)


async def test_chunks_of_several_tokens_are_told_of_where_it_does_not() -> None:
    run, _ = await measured(Script(chunk_tokens=4, ids=False), Plan())
    figures = summarise(run)
    assert figures.itl_ms is not None
    assert figures.itl_ms.n == REQUESTS * 12
    assert any("1000 tokens in 260 chunks" in line for line in figures.warnings)


async def test_a_server_without_usage_is_counted_by_chunk_and_told_of() -> None:
    run, _ = await measured(Script(usage=False), Plan())
    figures = summarise(run)
    assert figures.succeeded == REQUESTS
    assert figures.input_tokens_per_s == 0
    assert any(f"told no usage in {REQUESTS} of" in line for line in figures.warnings)
