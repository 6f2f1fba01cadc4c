"""Lesson: prefill and decode apart against together, the same two engines on the same two cores.

Together: each engine prefills and decodes its half of the requests. Apart: long prompts are
prefilled on one and handed over, all else is done on the other. The engines are the product's, so
is the hand-over through the slab; router, Ray and HTTP are left out, which `load compare` measures.
Called by loadtests/lessons/book.py. `reading` and `plots` are pure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from kvcache.agent import AgentServer
from loadtests import plots as drawing
from loadtests.lessons.apart_host import ApartHost, Part, Task
from loadtests.lessons.effects import NOT_SEEN, Effect, effect, percentile
from loadtests.lessons.engine import Engine, EngineFailed
from loadtests.lessons.figures import ms, percent, times
from loadtests.lessons.lesson import Bench, Data
from loadtests.lessons.model_files import kv_bytes_per_token
from loadtests.lessons.virtual_client import prompt_of
from loadtests.load.metrics import itl_ms, tpot_ms, ttft_ms
from loadtests.load.records import Chunk, Outcome, Sample

NAME = "apart"
TITLE = "Prefill and decode apart against together"
QUESTION = "On the same two cores: who gains when long prompts get an engine of their own?"
EXPLANATION = """
Two engines can share the work in two ways. Together: each takes every other request and does all of
it, so that a long prompt shares its steps with whoever is decoded there. Apart: one engine only
prefills, the other only decodes, and the KV blocks of a prompt go from the one to the other through
shared memory. The decoding engine's steps stay short, and all streams share one batch; but each
engine can be idle while the other has a queue.

Four streams run while long prompts keep coming, slowly enough for either arrangement. Short prompts
stay with the decoding engine, as in Headwater's own routing. Both arrangements use the same two
processes, in turn. Together is measured with a large and with a small budget of chunked prefill,
and the better one counts.
"""
TERMS = ("prefill", "decode", "chunked prefill", "KV cache", "slab", "ITL", "TPOT", "TTFT")

APART = "apart"
HOST = "loadtests.lessons.apart_host:ApartHost"
BUDGETS = (512, 128)
ARRANGEMENTS = (*(f"together, budget {budget}" for budget in BUDGETS), APART)
STREAMS, STREAM_TOKENS = 4, 32
LONGS, LONGS_QUICK = 4, 2
LONG_TOKENS, LONG_TOKENS_QUICK = 1500, 800
LONG_OUTPUT_TOKENS = 8
ROUNDS, ROUNDS_QUICK = 3, 2
HEADROOM = 1.5
"""Time between long prompts, by the time that one takes alone: together must keep up too."""
FIRST_S = 0.5
"""When the first long prompt comes."""
CACHE_TOKENS = 10_240
"""In each engine and in the slab: more than all requests of a play together."""
CACHE_BYTES_MIN = 256 << 20
DISTURBED_MAX = 0.1
"""Share of the steps' time lost to other processes, above which the reading says so."""
START_DELAY_S = 0.2
"""Until a play begins: both engines must have heard of it."""


class Pair:
    """The two engines. engines[0] prefills where they are apart."""

    def __init__(self, engines: Sequence[Engine], pool: ThreadPoolExecutor) -> None:
        self._engines, self._pool = engines, pool
        self._budgets = [BUDGETS[0], BUDGETS[0]]

    def play(self, arrangement: str, streams: Sequence[Task], longs: Sequence[Task]) -> list[Part]:
        """Run both engines until all requests have ended. Raises EngineFailed."""
        given = split(arrangement, streams, longs)
        for index, budget in enumerate(budgets_of(arrangement)):
            if budget != self._budgets[index]:
                self._engines[index].apply(ApartHost.set_budget, budget)
                self._budgets[index] = budget
        zero_s = time.monotonic() + START_DELAY_S
        handed = len(longs) if arrangement == APART else 0
        running = [
            self._pool.submit(engine.apply, ApartHost.play, tasks, len(tasks) + extra, zero_s)
            for engine, tasks, extra in zip(self._engines, given, (0, handed), strict=True)
        ]
        return [each.result() for each in running]


def split(arrangement: str, streams: Sequence[Task], longs: Sequence[Task]) -> list[list[Task]]:
    """Which engine gets what."""
    if arrangement == APART:
        handed = [
            Task(long.name, long.prompt, long.output_tokens, long.due_s, hands_over=True)
            for long in longs
        ]
        return [handed, list(streams)]
    return [[*streams[half::2], *longs[half::2]] for half in (0, 1)]


def budgets_of(arrangement: str) -> tuple[int, int]:
    """Of either engine."""
    budget = BUDGETS[0] if arrangement == APART else int(arrangement.rpartition(" ")[2])
    return budget, budget


@contextmanager
def pair(bench: Bench) -> Iterator[Pair]:
    """Both engines, each on a core of its own, at one node agent. Raises EngineFailed."""
    first, *_, last = bench.cores * 2
    if first == last:
        raise EngineFailed("two engines side by side need two cores, and this process has one")
    bench.drop_engines()  # their memory
    with ExitStack() as stack:
        token_bytes = kv_bytes_per_token(bench.model, bench.dtype)
        cache_bytes = max(CACHE_BYTES_MIN, CACHE_TOKENS * token_bytes)
        agent = AgentServer(str(bench.scratch / "agent.sock"), cache_bytes)
        stack.callback(agent.close)
        settings = [
            {
                "model_path": str(bench.model),
                "served_model": "lesson",
                "role": role,
                "dtype": bench.dtype,
                "max_model_len": bench.context_max,
                "kv_cache_bytes": cache_bytes,
                "max_num_batched_tokens": BUDGETS[0],
                "agent_socket": agent.socket_path,
                "owner": f"{role}-engine",
                "core": core,
            }
            for role, core in (("prefill", first), ("decode", last))
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        bench.say("starting two engines")
        starting = [pool.submit(Engine, each, HOST) for each in settings]
        for each in starting:
            stack.callback(_close, each)
        engines = [each.result() for each in starting]
        path = str(bench.scratch / "hand-over.sock")
        engines[1].apply(ApartHost.listen, path)
        engines[0].apply(ApartHost.connect, path)
        engines[1].apply(ApartHost.accept)
        yield Pair(engines, pool)


def _close(starting: Future[Engine]) -> None:
    if starting.exception() is None:
        starting.result().close()


def measure(bench: Bench) -> Data:
    """All arrangements in turn, round by round."""
    rounds = ROUNDS_QUICK if bench.quick else ROUNDS
    longs_n = LONGS_QUICK if bench.quick else LONGS
    long_tokens = LONG_TOKENS_QUICK if bench.quick else LONG_TOKENS
    long_tokens = min(long_tokens, bench.context_max - LONG_OUTPUT_TOKENS)
    generator = random.Random(6)
    found = []
    with pair(bench) as engines:
        streams, longs = workload(generator, 32, [FIRST_S], long_tokens)
        alone = samples_of(streams, longs, engines.play(APART, streams, longs))
        interval_s = HEADROOM * ttft_ms(alone[-1]) / 1e3
        step_s = (tpot_ms(alone[0]) or 0.0) / 1e3
        lasting = round((FIRST_S + longs_n * interval_s) / step_s)
        lasting = min(lasting, bench.context_max - STREAM_TOKENS)
        due_s = [FIRST_S + number * interval_s for number in range(longs_n)]
        for number in range(rounds):
            for arrangement in ARRANGEMENTS:
                bench.say(f"{arrangement}, round {number + 1} of {rounds}")
                streams, longs = workload(generator, lasting, due_s, long_tokens)
                parts = engines.play(arrangement, streams, longs)
                found.append(round_of(arrangement, streams, longs, parts))
    step_s, cpu_s = (sum(each[name] for each in found) for name in ("step_s", "cpu_s"))
    disturbed = max(0.0, 1.0 - cpu_s / step_s)
    return {
        "n": {
            "rounds of each arrangement": rounds,
            "gaps of the streams in a round": STREAMS * (lasting - 1),
        },
        "conditions": {
            "streams": f"{STREAMS}, {STREAM_TOKENS} tokens in, {lasting} out",
            "long prompts": (
                f"{longs_n} of {long_tokens} tokens in, {LONG_OUTPUT_TOKENS} out, one every "
                f"{interval_s:.1f} s, {HEADROOM:g} times what one takes"
            ),
            "engines": "2 processes, one core each; the product's engine and hand-over through "
            "the slab, without router, Ray and HTTP",
            "apart": f"prefill in steps of at most {BUDGETS[0]} tokens",
            "times": "elapsed, from when a request was due; no network",
            "taken by other processes": f"{percent(disturbed)} of the steps' time",
        },
        "disturbed": disturbed,
        "streams": STREAMS,
        "long_tokens": long_tokens,
        "rounds": found,
    }


def workload(
    generator: random.Random, output_tokens: int, due_s: Sequence[float], long_tokens: int
) -> tuple[list[Task], list[Task]]:
    """Streams that begin at once, and a long prompt at each of these times."""
    streams = [
        Task(f"stream-{index}", prompt_of(generator, STREAM_TOKENS), output_tokens, 0.0)
        for index in range(STREAMS)
    ]
    longs = [
        Task(f"long-{index}", prompt_of(generator, long_tokens), LONG_OUTPUT_TOKENS, at_s)
        for index, at_s in enumerate(due_s)
    ]
    return streams, longs


def samples_of(
    streams: Sequence[Task], longs: Sequence[Task], parts: Sequence[Part]
) -> list[Sample]:
    """Each request's tokens, wherever they were made; streams first."""
    samples = []
    for index, task in enumerate((*streams, *longs)):
        marks = sorted(mark for part in parts for mark in part.marks.get(task.name, []))
        tokens = sum(count for _, count in marks)
        assert tokens == task.output_tokens, f"{task.name} got {tokens} tokens"
        samples.append(
            Sample(
                index=index,
                group=task.name.partition("-")[0],
                due_s=task.due_s,
                sent_s=task.due_s,
                ended_s=marks[-1][0],
                outcome=Outcome.OK,
                chunks=tuple(Chunk(at_s, count) for at_s, count in marks),
                input_tokens=len(task.prompt),
                output_tokens=tokens,
            )
        )
    return samples


def round_of(
    arrangement: str, streams: Sequence[Task], longs: Sequence[Task], parts: Sequence[Part]
) -> dict[str, Any]:
    """What one play gave."""
    samples = samples_of(streams, longs, parts)
    running, long = samples[: len(streams)], samples[len(streams) :]
    gaps = [gap for sample in running for gap in itl_ms(sample)]
    ended_s = max(sample.ended_s for sample in samples)
    return {
        "arrangement": arrangement,
        "longest_gap_ms": max(gaps),
        "itl_p99_ms": percentile(gaps, 0.99),
        "tpot_ms": median(each for sample in running if (each := tpot_ms(sample)) is not None),
        "long_ttft_ms": median(ttft_ms(sample) for sample in long),
        "tokens_per_s": sum(sample.output_tokens or 0 for sample in samples) / ended_s,
        "busy": [part.step_s / ended_s for part in parts],
        "step_s": sum(part.step_s for part in parts),
        "cpu_s": sum(part.cpu_s for part in parts),
        "handed_over_blocks": sum(part.loaded_blocks for part in parts),
        "failed_blocks": sum(part.failed_blocks for part in parts),
        "gaps_ms": sorted(round(gap, 2) for gap in gaps),
    }


def plots(data: Data) -> list[Figure]:
    """The streams' gaps, and what each arrangement costs whom."""
    arrangements = _arrangements(data)
    n = len(_values(data, APART, "tpot_ms"))
    spread, axes = drawing.figure(f"Gaps of the streams, {n} rounds", "ms", "share of gaps")
    for index, arrangement in enumerate(arrangements):
        gaps = [
            gap
            for each in data["rounds"]
            if each["arrangement"] == arrangement
            for gap in each["gaps_ms"]
        ]
        drawing.cdf(axes, gaps, arrangement, index)
    drawing.logarithmic(axes, "x")
    axes.set_ylim(0.8, 1.005)
    drawing.legend(axes)
    costs, axes = drawing.figure(f"Who waits, median of {n} rounds", "", "ms")
    values = {
        "longest gap": "longest_gap_ms",
        "TPOT of streams": "tpot_ms",
        "TTFT, long prompts": "long_ttft_ms",
    }
    drawing.bars(
        axes,
        tuple(values),
        {
            arrangement: [median(_values(data, arrangement, value)) for value in values.values()]
            for arrangement in arrangements
        },
    )
    drawing.logarithmic(axes, "y")
    drawing.legend(axes)
    return [spread, costs]


def reading(data: Data) -> tuple[str, str]:
    """Two sentences: the streams, and the price."""
    best = _best_together(data)
    gap, tpot, first, tokens = (
        _change(data, best, value)
        for value in ("longest_gap_ms", "tpot_ms", "long_ttft_ms", "tokens_per_s")
    )
    scene = (
        f"While prompts of {data['long_tokens']} tokens came in, the longest gap of "
        f"{data['streams']} streams was {ms(gap.then)} with prefill and decode apart and "
        f"{ms(gap.first)} {best} (n = {gap.n} rounds)"
    )
    if gap.falls:
        said = f"{scene}, {times(1 / gap.ratio)} as long together"
    elif gap.rises:
        said = f"{scene}, so apart was worse, contrary to the textbook"
    else:
        said = f"{scene}: {NOT_SEEN}"
    return (f"{said}; {_compared('TPOT', tpot)}.", _price(data, first, tokens))


def _compared(what: str, change: Effect) -> str:
    figures = f"{ms(change.then)} against {ms(change.first)}"
    if not change.seen:
        return f"their {what} shows no difference ({figures})"
    return f"their {what} was {'higher' if change.rises else 'lower'} apart, {figures}"


def _price(data: Data, first: Effect, tokens: Effect) -> str:
    busy = [
        median(each["busy"][index] for each in data["rounds"] if each["arrangement"] == APART)
        for index in (0, 1)
    ]
    ttft = f"{ms(first.then)} apart and {ms(first.first)} together"
    if first.rises:
        said = f"The long prompts paid for it: their TTFT was {ttft}"
    elif first.falls:
        said = f"The long prompts gained too: their TTFT was {ttft}"
    else:
        said = f"For the long prompts' TTFT {NOT_SEEN}: {ttft}"
    noise = (
        f"; other processes had the cores for {percent(data['disturbed'])} of the steps' time, "
        "which these elapsed times include"
        if data["disturbed"] > DISTURBED_MAX
        else ""
    )
    made = f"{tokens.then:.0f} tokens/s against {tokens.first:.0f}"
    output = f"output was {made}" if tokens.seen else f"output shows no difference ({made})"
    return (
        f"{said}; {output}, with the prefill engine busy {percent(busy[0])} of the time and the "
        f"decode engine {percent(busy[1])}{noise}."
    )


def _best_together(data: Data) -> str:
    together = [each for each in _arrangements(data) if each != APART]
    return min(together, key=lambda each: median(_values(data, each, "longest_gap_ms")))


def _arrangements(data: Data) -> list[str]:
    return list(dict.fromkeys(each["arrangement"] for each in data["rounds"]))


def _change(data: Data, together: str, value: str) -> Effect:
    """From together to apart."""
    return effect(_values(data, together, value), _values(data, APART, value))


def _values(data: Data, arrangement: str, value: str) -> list[float]:
    return [each[value] for each in data["rounds"] if each["arrangement"] == arrangement]
