from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtests import latency
from loadtests.latency import COLD, WARM, Answer, Burst, Client, Endpoint, Ttfts

LENGTHS = [128, 512]


def ttfts(cold_ms: Sequence[float], warm_ms: Sequence[float]) -> Ttfts:
    found = Ttfts()
    for length in LENGTHS:
        for kind, values in ((COLD, cold_ms), (WARM, warm_ms)):
            for value in values:
                found.add(length, kind, Answer(value, 4, ""))
    return found


def test_ratios_are_of_medians_and_an_outlier_misses_no_target() -> None:
    plain = ttfts([100, 100, 100], [10, 10, 10])
    ours = ttfts([104, 104, 900], [11, 11, 90])
    table, missed = latency.ttft_table(plain, ours, LENGTHS)
    assert missed == []
    assert [row[5] for row in table.rows] == ["1.040", "1.040", "1.100", "1.100"]


def test_a_target_that_was_missed_is_named_with_its_length() -> None:
    _, missed = latency.ttft_table(ttfts([100] * 3, [10] * 3), ttfts([106] * 3, [12] * 3), LENGTHS)
    assert len(missed) == 2
    assert all(line.startswith("TTFT cold") and "1.060" in line for line in missed)


def test_tokens_per_second_are_held_against_the_plain_servers() -> None:
    plain = [Burst(rate, 1024, 2.0) for rate in (300.0, 310.0, 320.0)]
    ours = [Burst(rate, 1024, None) for rate in (280.0, 291.4, 320.0)]
    table, missed = latency.burst_table(plain, ours)
    assert table.rows[1][4] == "0.940" and len(missed) == 1
    assert (table.rows[0][3], table.rows[1][3]) == ("2.0", "?")
    assert latency.burst_table(plain, plain)[1] == []


def test_engines_are_named_with_their_share_of_the_tokens() -> None:
    before = {"decode": 100}
    after = {"decode": 400, "prefill": 100}
    assert latency.shares_of(before, after) == "decode 75%, prefill 25%"
    assert latency.shares_of(after, after) == "unknown"


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    """Streams as many tokens as asked for, but for prompts that begin with 0 or 1."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = web.StreamResponse()
        await reply.prepare(request)
        first = body["prompt"][0]
        tokens = body["max_tokens"] - (first == 0)
        events = [{"choices": [{"token_ids": [], "text": ""}]}]
        events += [{"choices": [{"token_ids": [7], "text": "x"}]}] * tokens
        if first == 1:
            events = [{"error": {"message": "no"}}]
        for event in events:
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    server = TestServer(app)
    await server.start_server()
    yield server
    await server.close()


async def test_a_stream_is_read_to_its_end_and_timed_to_its_first_token(server: TestServer) -> None:
    async with latency.aiohttp.ClientSession() as session:
        client = Client(session, Endpoint("fake", str(server.make_url("")).rstrip("/")), "m")
        answer = await client.stream([5, 6], 4)
        burst = await client.burst([[5], [6], [7]], 8)
    assert answer.tokens == 4 and answer.ttft_ms > 0 and answer.parts_ms == {}
    assert (burst.tokens, burst.cpu_s) == (24, None)


@pytest.mark.parametrize(("first", "said"), [(0, "3 tokens, asked 4"), (1, "no")])
async def test_a_short_or_failed_stream_is_no_sample(
    server: TestServer, first: int, said: str
) -> None:
    async with latency.aiohttp.ClientSession() as session:
        client = Client(session, Endpoint("fake", str(server.make_url("")).rstrip("/")), "m")
        with pytest.raises(RuntimeError, match=said):
            await asyncio.wait_for(client.stream([first], 4), 10)


class TurnClient:
    """Notes who is asked, and for how long nobody is."""

    def __init__(self, name: str, log: list[str | float]) -> None:
        self._name = name
        self._log = log

    async def stream(self, _prompt: Sequence[int], output_tokens: int) -> Answer:
        self._log.append(self._name)
        return Answer(1.0, output_tokens, "")

    async def explained(self, answer: Answer) -> Answer:
        return answer

    async def burst(self, _prompts: Sequence[Sequence[int]], output_tokens: int) -> Burst:
        self._log.append(self._name)
        return Burst(1.0, output_tokens, None)


async def test_a_turn_begins_once_the_other_server_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str | float] = []

    async def sleep(seconds: float) -> None:
        log.append(seconds)

    monkeypatch.setattr(latency.asyncio, "sleep", sleep)
    clients: list[Any] = [TurnClient("plain", log), TurnClient("ours", log)]
    await latency.measure_ttft(clients, LENGTHS, 2, random.Random(0))
    await latency.measure_bursts(clients, 2, 4, 1, random.Random(0))
    last, rested_s = "", 0.0
    for entry in log:
        if isinstance(entry, float):
            rested_s += entry
            continue
        assert entry == last or rested_s >= latency.REST_S, log
        last, rested_s = entry, 0.0
