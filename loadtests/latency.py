"""TTFT cold and warm, and tokens/s, of Headwater beside a plain vLLM.

Run: `python -m loadtests.latency`. Called by: people and loadtests/bench.py. Speaks HTTP only;
without URLs it starts both servers (loadtests/sides.py). Both are up all the time and one is asked
at a time, in turns, so that what the machine does meanwhile hits both. Before each turn nobody is
asked, until the other server rests.

TTFT: request sent to first content token at the client, streaming completions, token-id prompts.
Cold: a prompt that neither has seen; warm: the same prompt again, after a pause in which the first
answer has ended. Tokens/s: output tokens of all streams by the wall time from the first request to
the end of the last stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from statistics import median, quantiles
from typing import Any

import aiohttp

from loadtests.results import Section, Table, Target, arguments_of, report
from loadtests.sides import Side, both_sides

NAME = "latency"
COLD, WARM = "cold", "warm"
TARGETS = {COLD: Target.ceiling(1.05), WARM: Target.ceiling(1.2)}
THROUGHPUT_TARGET = Target.floor(0.95)
REQUEST_TIMEOUT_S = 300.0
# Long enough that the first answer's blocks are where the router can see them; a user who reads
# takes longer.
PAUSE_S = 0.25
# Before another server is asked. The worker of a plain vLLM 0.32 keeps a core busy for 1 s after
# its last step (SpinCondition in distributed/device_communicators/shm_broadcast.py): on two cores,
# Headwater's TTFT of 512 tokens would be 444 ms instead of 377.
REST_S = 1.25
TTFT_OUTPUT_TOKENS = 4
PARTS = ("tokenise", "queue", "prefill", "publish", "handover", "delivery", "total")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to ask; `side` where we started it."""

    label: str
    url: str
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream. parts_ms: Headwater's own account of its TTFT; empty of others."""

    ttft_ms: float
    tokens: int
    trace: str
    parts_ms: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Ttfts:
    """Samples by (prompt tokens, cold or warm) of one endpoint."""

    by_kind: dict[tuple[int, str], list[Answer]] = field(default_factory=dict)

    def add(self, tokens: int, kind: str, answer: Answer) -> None:
        """Mutates."""
        self.by_kind.setdefault((tokens, kind), []).append(answer)

    def ms(self, tokens: int, kind: str) -> list[float]:
        """TTFTs in ms."""
        return [answer.ttft_ms for answer in self.by_kind[tokens, kind]]


@dataclass(frozen=True, slots=True)
class Burst:
    """One run of concurrent streams. cpu_s: of the server's whole process tree, None if unknown."""

    tokens_per_s: float
    tokens: int
    cpu_s: float | None


class Client:
    """Asks one endpoint for completions."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, model: str) -> None:
        self.endpoint = endpoint
        self._session = session
        self._model = model

    async def stream(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """One greedy stream, read to its end. Raises RuntimeError on any error of the server."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        tokens, ttft_ms = 0, 0.0
        sent_s = time.perf_counter()
        async with self._session.post(f"{self.endpoint.url}/v1/completions", json=body) as reply:
            if reply.status != HTTPStatus.OK:
                raise RuntimeError(f"{self.endpoint.label}: {reply.status} {await reply.text()}")
            async for event in _events(reply):
                if "error" in event:
                    raise RuntimeError(f"{self.endpoint.label}: {event['error']}")
                for choice in event["choices"]:
                    count = len(choice.get("token_ids") or ())
                    if count and not tokens:
                        ttft_ms = 1e3 * (time.perf_counter() - sent_s)
                    tokens += count
            trace = reply.headers.get("x-headwater-request", "")
        if tokens != output_tokens:
            raise RuntimeError(f"{self.endpoint.label}: {tokens} tokens, asked {output_tokens}")
        return Answer(ttft_ms, tokens, trace)

    async def explained(self, answer: Answer) -> Answer:
        """With the parts of its TTFT; asked for apart, so that no measurement holds the asking."""
        return replace(answer, parts_ms=await self._parts(answer.trace))

    async def burst(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Burst:
        """All prompts at once."""
        side = self.endpoint.side
        before_s = side.cpu_s() if side else 0.0
        began_s = time.perf_counter()
        answers = await asyncio.gather(*(self.stream(p, output_tokens) for p in prompts))
        wall_s = time.perf_counter() - began_s
        tokens = sum(answer.tokens for answer in answers)
        return Burst(tokens / wall_s, tokens, side.cpu_s() - before_s if side else None)

    async def generated(self) -> dict[str, int]:
        """Output tokens of each role of Headwater's so far; empty of a plain server."""
        async with self._session.get(f"{self.endpoint.url}/headwater/status") as reply:
            if reply.status != HTTPStatus.OK:
                return {}
            workers = (await reply.json())["workers"]
        made: dict[str, int] = {}
        for worker in workers:
            made[worker["role"]] = made.get(worker["role"], 0) + worker["generated_tokens_total"]
        return made

    async def _parts(self, trace: str) -> dict[str, float]:
        if not trace:
            return {}
        url = f"{self.endpoint.url}/headwater/requests/{trace}"
        async with self._session.get(url) as reply:
            (record,) = (await reply.json())["records"]
        return {name: record["ttft"][f"{name}_ms"] for name in PARTS} if record["ttft"] else {}


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def prompt_of(tokens: int, generator: random.Random) -> list[int]:
    """Token ids clear of the special ones; as good as never seen before."""
    return [generator.randrange(400, 20_000) for _ in range(tokens)]


async def measure_ttft(
    clients: Sequence[Client], lengths: Sequence[int], rounds: int, generator: random.Random
) -> list[Ttfts]:
    """Each length cold and warm, at each client in turn; who is first changes with the round."""
    samples = [Ttfts() for _ in clients]
    for number in range(rounds):
        for length in lengths:
            prompt = prompt_of(length, generator)
            order = list(zip(clients, samples, strict=True))
            for client, found in order if number % 2 == 0 else reversed(order):
                await asyncio.sleep(REST_S)
                for kind in (COLD, WARM):
                    answer = await client.stream(prompt, TTFT_OUTPUT_TOKENS)
                    found.add(length, kind, await client.explained(answer))
                    await asyncio.sleep(PAUSE_S)
        _note(f"TTFT: round {number + 1} of {rounds}")
    return samples


async def measure_bursts(
    clients: Sequence[Client], streams: int, output_tokens: int, rounds: int, seed: random.Random
) -> list[list[Burst]]:
    """Concurrent streams at each client in turn, after one unmeasured round."""
    bursts: list[list[Burst]] = [[] for _ in clients]
    for number in range(rounds + 1):
        prompts = [prompt_of(seed.randrange(32, 65), seed) for _ in range(streams)]
        order = list(zip(clients, bursts, strict=True))
        for client, found in order if number % 2 == 0 else reversed(order):
            await asyncio.sleep(REST_S)
            burst = await client.burst(prompts, output_tokens)
            if number:
                found.append(burst)
        _note(f"tokens/s: round {number} of {rounds}")
    return bursts


def ttft_table(theirs: Ttfts, ours: Ttfts, lengths: Sequence[int]) -> tuple[Table, list[str]]:
    """The table, and the targets that were missed."""
    rows: list[tuple[str, ...]] = []
    missed = []
    for kind in (COLD, WARM):
        for length in lengths:
            plain, here = theirs.ms(length, kind), ours.ms(length, kind)
            ratio = median(here) / median(plain)
            verdict = TARGETS[kind].verdict(ratio)
            if not TARGETS[kind].is_met(ratio):
                missed.append(f"TTFT {kind}, {length} tokens: ratio {ratio:.3f}, {verdict}")
            rows.append(
                (
                    f"{kind}, {length} tokens",
                    *(f"{median(plain):.1f}", f"{_p90(plain):.1f}"),
                    *(f"{median(here):.1f}", f"{_p90(here):.1f}"),
                    *(f"{ratio:.3f}", verdict),
                )
            )
    columns = ("TTFT in ms", "plain p50", "p90", "Headwater p50", "p90", "ratio of p50", "target")
    return Table(columns, tuple(rows)), missed


def parts_table(ours: Ttfts, lengths: Sequence[int]) -> Table:
    """Where Headwater's TTFT went, by its own records; the client's own share is the rest."""
    rows = []
    for kind in (COLD, WARM):
        for length in lengths:
            answers = [a for a in ours.by_kind[length, kind] if a.parts_ms]
            if not answers:
                continue
            parts = [median(answer.parts_ms[name] for answer in answers) for name in PARTS]
            outside = median(a.ttft_ms - a.parts_ms["total"] for a in answers)
            row = (f"{kind}, {length} tokens", *(f"{part:.1f}" for part in parts[:-1]))
            rows.append((*row, f"{outside:.1f}"))
    return Table(("p50 in ms of", *PARTS[:-1], "HTTP and client"), tuple(rows))


def burst_table(theirs: Sequence[Burst], ours: Sequence[Burst]) -> tuple[Table, list[str]]:
    """The table, and the targets that were missed."""
    plain = median(b.tokens_per_s for b in theirs)
    here = median(b.tokens_per_s for b in ours)
    verdict = THROUGHPUT_TARGET.verdict(here / plain)
    rows = [
        ("plain vLLM", f"{plain:.1f}", _range(theirs), _cpu(theirs), "1", ""),
        ("Headwater", f"{here:.1f}", _range(ours), _cpu(ours), f"{here / plain:.3f}", verdict),
    ]
    columns = ("tokens/s", "p50", "least to most", "CPU ms a token", "ratio of p50", "target")
    met = THROUGHPUT_TARGET.is_met(here / plain)
    missed = [] if met else [f"tokens/s: ratio {here / plain:.3f}, {verdict}"]
    return Table(columns, tuple(rows)), missed


def shares_of(before: dict[str, int], after: dict[str, int]) -> str:
    """Which role's engine made the tokens in between; two at work make it an unequal race."""
    made = {role: tokens - before.get(role, 0) for role, tokens in after.items()}
    total = sum(made.values())
    if total <= 0:
        return "unknown"
    return ", ".join(f"{role} {tokens / total:.0%}" for role, tokens in sorted(made.items()))


async def compare(plain: Endpoint, ours: Endpoint, options: argparse.Namespace) -> Section:
    """Measure both and say what came out."""
    generator = random.Random(options.seed)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{ours.url}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        clients = [Client(session, endpoint, model) for endpoint in (plain, ours)]
        # Connections, first-time paths, the cost model's first samples.
        await measure_ttft(clients, options.lengths, 1, generator)
        theirs, mine = await measure_ttft(clients, options.lengths, options.rounds, generator)
        before = await clients[-1].generated()
        bursts = await measure_bursts(
            clients, options.streams, options.output_tokens, options.burst_rounds, generator
        )
        shares = shares_of(before, await clients[-1].generated())
    ttft, missed = ttft_table(theirs, mine, options.lengths)
    burst, missed_bursts = burst_table(*bursts)
    flags = [f"{e.label}: {e.side.flags}." for e in (plain, ours) if e.side]
    return Section(
        name=NAME,
        title="TTFT and tokens/s beside plain vLLM",
        conditions=(
            (
                f"TTFT: n = {options.rounds} prompts of each length, each cold and then warm "
                f"{PAUSE_S:g} s later, streaming /v1/completions with token ids, greedy; one "
                "request at a time."
            ),
            (
                f"tokens/s: n = {options.burst_rounds} bursts of {options.streams} streams × "
                f"{options.output_tokens} tokens at once, distinct prompts of 32 to 64 tokens."
            ),
            (
                "Both servers are up all the time, on loopback, and are asked in turn, each "
                f"{REST_S:g} s after the other's last answer; the client shares the machine with "
                "them."
            ),
            *flags,
            (
                "Both: one compute thread an engine, no compilation; plain vLLM with its own "
                "defaults for scheduling and prefix caching. It has one engine; Headwater has two, "
                "of which a prompt uses one at a time, and is asked as `serve` serves."
            ),
            f"Headwater's tokens of the bursts, by engine: {shares}.",
            (
                "CPU ms a token: of all processes of a side, idle ones included, while it was "
                "measured, by output tokens."
            ),
        ),
        tables=(ttft, parts_table(mine, options.lengths), burst),
        missed=(*missed, *missed_bursts),
    )


def main(arguments: list[str] | None = None) -> int:
    """Compare; see loadtests.results for the exit code."""
    parser = arguments_of("TTFT and tokens/s of Headwater beside a plain vLLM server")
    parser.add_argument("--plain", metavar="URL", help="a running plain vLLM; else one is started")
    parser.add_argument("--headwater", metavar="URL", help="a running Headwater, likewise")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1500])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--burst-rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if (options.plain is None) != (options.headwater is None):
        parser.error("give both --plain and --headwater, or neither")
    with contextlib.ExitStack() as stack:
        if options.plain is None:
            _note("starting both servers")
            theirs, mine = stack.enter_context(both_sides())
            plain = Endpoint("plain vLLM", theirs.url, theirs)
            ours = Endpoint("Headwater", mine.url, mine)
        else:
            plain = Endpoint("plain vLLM", options.plain.rstrip("/"))
            ours = Endpoint("Headwater", options.headwater.rstrip("/"))
        section = asyncio.run(compare(plain, ours, options))
    return report(section, options.results)


def _p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def _range(bursts: Sequence[Burst]) -> str:
    found = [burst.tokens_per_s for burst in bursts]
    return f"{min(found):.1f} to {max(found):.1f}"


def _cpu(bursts: Sequence[Burst]) -> str:
    if any(burst.cpu_s is None for burst in bursts):
        return "?"
    return f"{1e3 * median((burst.cpu_s or 0.0) / burst.tokens for burst in bursts):.1f}"


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
