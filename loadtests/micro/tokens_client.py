"""The clients' process: opens streams, counts tokens, gives credit for them, checks every word.

Called by tokens_servers as ``python -m loadtests.micro.tokens_client``: one JSON command a line on
standard input (Run), one JSON answer a line on standard output (Seen). Must not: cost much beside a
server; so bytes are only counted while a run lasts, and read once it is over.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import aiohttp
import psutil
import uvloop

from loadtests.micro.counting import credit

RUN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``prompt`` tells the engine how to run; ``text`` is what each answer must read.

    pids: the server's processes, for the time that they take.
    """

    url: str
    fifo: str
    model: str
    prompt: tuple[int, ...]
    streams: int
    tokens: int
    pace_ms: int
    text: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients saw, from the first token to the last; the last two only with a pace.

    server_us: CPU time of the server's processes, by token; cpu_share: of the clients' own.
    added_itl_ms: gaps between tokens, less the pace; k tokens at once are k-1 gaps of 0.
    delivery_ms: from the step's time to the token's arrival.
    """

    tokens_per_s: float
    tokens_per_event: float
    server_us: float
    cpu_share: float
    added_itl_ms: list[float]
    delivery_ms: list[float]


class _Meter:
    """CPU seconds used since the first token: of the server, and of this process."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """A token has come; the first one counts."""
        if self._began is None:
            self._began = self._now()

    def used_s(self) -> tuple[float, float]:
        """(server, this process). At the end of the run."""
        assert self._began is not None
        now = self._now()
        return now[0] - self._began[0], now[1] - self._began[1]

    def _now(self) -> tuple[float, float]:
        server = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self._pids)
        return server, time.process_time()


class _Stream:
    """One answer as it comes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.arrivals: list[tuple[float, int]] = []

    def take(self, data: bytes) -> int:
        """Note bytes that came; returns the tokens in them: each word has one space before it."""
        tokens = data.count(b" ") - data.count(b"data:")
        self.parts.append(data)
        if tokens > 0:
            self.arrivals.append((time.monotonic(), tokens))
        return tokens

    def events(self) -> list[str]:
        """The text of each event. Raises ValueError for a stream that broke off."""
        lines = b"".join(self.parts).split(b"\n\n")
        if lines[-2:] != [b"data: [DONE]", b""]:
            raise ValueError(f"a stream ended with {lines[-2:]!r}")
        parsed = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]
        texts = [str(event["choices"][0]["text"]) for event in parsed]
        return [text for text in texts if text]


async def _read(
    session: aiohttp.ClientSession, run: Run, stream: _Stream, credit_fd: int, meter: _Meter
) -> None:
    body = {
        "model": run.model,
        "prompt": run.prompt,
        "max_tokens": run.tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with session.post(f"{run.url}/v1/completions", json=body) as answer:
        if answer.status != 200:  # noqa: PLR2004
            raise ValueError(f"{answer.status}: {await answer.text()}")
        async for data in answer.content.iter_any():
            tokens = stream.take(data)
            meter.begin()
            if tokens > 0 and not run.pace_ms:
                credit(credit_fd, tokens)


async def carry_out(run: Run) -> Seen:
    """One run. Raises ValueError when any answer is not what it must be."""
    credit_fd = os.open(run.fifo, os.O_RDWR)
    streams = [_Stream() for _ in range(run.streams)]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=RUN_TIMEOUT_S)
    meter = _Meter(run.pids)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            reading = (_read(session, run, stream, credit_fd, meter) for stream in streams)
            await asyncio.gather(*reading)
            server_s, client_s = meter.used_s()
    finally:
        os.close(credit_fd)
    events = 0
    for stream in streams:
        texts = stream.events()
        if "".join(texts) != run.text:
            raise ValueError(f"an answer is wrong: {''.join(texts)[:200]!r}")
        events += len(texts)
    first_s = min(stream.arrivals[0][0] for stream in streams)
    last_s = max(stream.arrivals[-1][0] for stream in streams)
    made = run.streams * (run.tokens - 1)
    return Seen(
        tokens_per_s=made / (last_s - first_s),
        tokens_per_event=run.streams * run.tokens / events,
        server_us=1e6 * server_s / made,
        cpu_share=client_s / (last_s - first_s),
        added_itl_ms=_added(streams, run.pace_ms) if run.pace_ms else [],
        delivery_ms=_delivery(streams, run.pace_ms) if run.pace_ms else [],
    )


def _added(streams: list[_Stream], pace_ms: int) -> list[float]:
    added: list[float] = []
    for stream in streams:
        for (before_s, _), (now_s, tokens) in zip(
            stream.arrivals, stream.arrivals[1:], strict=False
        ):
            added.append(1e3 * (now_s - before_s) - pace_ms)
            added += [-float(pace_ms)] * (tokens - 1)
    return sorted(added)


def _delivery(streams: list[_Stream], pace_ms: int) -> list[float]:
    return sorted(1e3 * now_s % pace_ms for stream in streams for now_s, _ in stream.arrivals[1:])


def main() -> None:
    """Serve commands until standard input ends."""
    for line in sys.stdin:
        given = json.loads(line)
        gc.collect()
        gc.disable()
        seen = uvloop.run(carry_out(Run(**given)))
        gc.enable()
        sys.stdout.write(json.dumps(asdict(seen)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
