"""`sweep`: one workload at rising loads, until an SLO breaks; where the knee is.

Open loop (--rates, --find-rate) or closed (--users, --find-users). Each load is a run of its own,
with its own warm-up, its own prompts (or a later step would find the earlier ones in the cache) and
its own JSON; the next one begins when the last answer of the one before has ended, and a pause is
over. loadtests/load/sweep.py defines the knee.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from loadtests.load import flags, sweep, workload_flags
from loadtests.load.arrivals import KINDS
from loadtests.load.commands.run import workload
from loadtests.load.errors import UsageError
from loadtests.load.execution import (
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    Job,
    Server,
    perform,
    server_of,
)
from loadtests.load.metrics import LAG_WARNING_MS, Spread, Summary, summarise
from loadtests.load.records import Outcome, Run
from loadtests.load.runner import Plan
from loadtests.load.sweep import Search, Step

SUMMARY = "raise the load until an SLO breaks, and tell where the knee is"
WINDOW_S = 30.0
WARMUP_S = 5.0
PAUSE_S = 2.0
_ATTEMPTS = 4
_MORE = 8
"""By how many times more requests a closed loop is given that ran out of them."""
_SEEDS = 10_000
"""More than a sweep has attempts, so that two sweeps with other seeds share no prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    flags.add_target(parser)
    workload_flags.add_arguments(parser)
    _add_loads(parser)
    flags.add_sending(parser)
    flags.add_outcome(parser, several=True)
    parser.set_defaults(warmup_s=WARMUP_S, duration_s=WINDOW_S)


def _add_loads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loads")
    loads = group.add_mutually_exclusive_group(required=True)
    many, between = workload_flags.flag(_many), workload_flags.flag(_between)
    loads.add_argument(
        "--rates", type=many, metavar="R,R,...", help="open loop, requests (or sessions) a second"
    )
    loads.add_argument("--users", type=many, metavar="N,N,...", help="closed loop")
    loads.add_argument(
        "--find-rate",
        type=between,
        metavar="LEAST:MOST",
        help="double from the least until an SLO breaks, then halve what is between",
    )
    loads.add_argument("--find-users", type=between, metavar="LEAST:MOST", help="likewise")
    add = group.add_argument
    add(
        "--precision",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="--find-* end when the broken load is within this of the held one (default: 0.1)",
    )
    add("--past-break", action="store_true", help="try all of --rates or --users")
    add(
        "--within",
        type=flags.share,
        default=sweep.WITHIN_SHARE,
        metavar="SHARE",
        help=f"of the requests that meet all SLOs where a load holds "
        f"(default: {sweep.WITHIN_SHARE:g})",
    )
    add(
        "--pause-s",
        type=float,
        default=PAUSE_S,
        metavar="S",
        help=f"between two loads (default: {PAUSE_S:g})",
    )
    add("--arrival", choices=KINDS, default="poisson", help="of an open loop (default: poisson)")
    add("--cv", type=float, default=1.0, metavar="C", help="of gamma arrivals (default: 1)")


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was run."""

    run: Run
    summary: Summary
    step: Step


def run(arguments: argparse.Namespace) -> int:
    """Raises UsageError, NoServer."""
    if not arguments.slo:
        raise UsageError("--slo: a sweep needs limits to break, such as ttft_ms=300,tpot_ms=30")
    try:
        search = _search(arguments)
    except ValueError as odd:
        raise UsageError(str(odd)) from odd
    server = server_of(arguments, arguments.find_here)
    return sweep_with(arguments, search, lambda load, n: _step(arguments, server, load, n))


def sweep_with(
    arguments: argparse.Namespace, search: Search, step: Callable[[float, int], Done]
) -> int:
    """Runs what the search asks for, prints a row of each and the knee at the end; the exit code.

    step: runs the load test of a load, which is the n-th.
    """
    done: list[Done] = []
    open_loop = _is_open(arguments)
    unit = "requests/s" if open_loop else "users"
    _say(_TITLES.format(unit))
    load = next(search)
    interrupted = False
    try:
        while True:
            found = step(load, len(done))
            _save(found.run, arguments.output, len(done), load, open_loop=open_loop)
            if found.run.facts.get("interrupted"):
                raise KeyboardInterrupt  # noqa: TRY301 - as between two steps
            done.append(found)
            _say(_row(found))
            for line in _remarks(found):
                _say(f"    {line}")
            load = search.send(found.step.held)
            time.sleep(arguments.pause_s)
    except StopIteration:
        pass
    except KeyboardInterrupt:
        interrupted = True
        _say(f"interrupted before {load:g} {unit} were measured: that load does not count")
    _say("")
    limits = ", ".join(f"{name} ≤ {limit:g}" for name, limit in arguments.slo.items())
    _say(f"A load holds if {arguments.within:.0%} of its measured requests met {limits}.")
    _say(sweep.knee(each.step for each in done).sentence(unit))
    late = [f"{each.step.load:g}" for each in done if _is_late(each.summary)]
    if late:
        _say(
            f"Not to be relied on at {', '.join(late)} {unit}: there the generator was late. "
            "Repeat on a machine with less to do."
        )
    if interrupted:
        return EXIT_INTERRUPTED
    return 0 if any(each.summary.succeeded for each in done) else EXIT_FAILURES


def _search(arguments: argparse.Namespace) -> Search:
    if arguments.rates or arguments.users:
        loads = arguments.rates or arguments.users
        if arguments.users and any(load != int(load) for load in loads):
            raise ValueError("--users are whole numbers")
        return sweep.ladder(loads, past_break=arguments.past_break)
    least, most = arguments.find_rate or arguments.find_users
    whole = arguments.find_users is not None
    return sweep.bisection(least, most, precision=arguments.precision, whole=whole)


def _is_open(arguments: argparse.Namespace) -> bool:
    return bool(arguments.rates or arguments.find_rate)


def _step(arguments: argparse.Namespace, server: Server, load: float, number: int) -> Done:
    """One load, again with more requests where a closed loop ran out. Raises UsageError."""
    count: int | None = None
    for attempt in range(_ATTEMPTS):
        of_step = argparse.Namespace(**vars(arguments))
        of_step.seed = _SEEDS * arguments.seed + _ATTEMPTS * number + attempt
        of_step.requests = count
        of_step.rate = load if _is_open(arguments) else None
        of_step.concurrency = None if _is_open(arguments) else int(load)
        plan = flags.plan_of(of_step, of_step.concurrency)
        job = _job(of_step, server, plan, f"{arguments.label or server.target.model} at {load:g}")
        # How many a closed loop sends is the server's doing; the step's own seed is told besides.
        told = {"requests": None, "seed": arguments.seed, "step_seed": of_step.seed}
        result = perform(replace(job, conditions={**job.conditions, **told}))
        if not result.facts.get("ran_out"):
            break
        sys.stderr.write(f"{len(job.requests)} requests were too few for {load:g} users\n")
        count = _MORE * len(job.requests)
    return judged(result, load, arguments.within)


def _job(arguments: argparse.Namespace, server: Server, plan: Plan, label: str) -> Job:
    """Raises UsageError."""
    try:
        requests, conditions = workload(arguments, server, plan)
    except ValueError as odd:
        raise UsageError(str(odd)) from odd
    return Job(
        server=server,
        requests=requests,
        plan=plan,
        conditions=conditions,
        label=label,
        slo=arguments.slo,
        cores=arguments.cores,
        quiet=arguments.quiet,
    )


def judged(result: Run, load: float, within: float) -> Done:
    """A step that was cut short broke: what it left unanswered is no sample, and was no success."""
    step = sweep.step_of(result, load, within)
    if result.facts.get("cut_short"):
        step = replace(step, within=0)
    return Done(result, summarise(result), step)


def _save(result: Run, folder: Path | None, number: int, load: float, *, open_loop: bool) -> None:
    if folder is None:
        return
    kind = "rate" if open_loop else "users"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        result.save(folder / f"{number:02}-{kind}-{load:g}.json")
    except OSError as failed:
        raise UsageError(f"--output: {failed}") from failed


_COLUMNS = ("n", "failed", "TTFT p50", "p99", "TPOT p50", "p99", "req/s", "tok/s out", "within SLO")
_TITLES = "{:>12}" + "".join(f"{name:>11}" for name in _COLUMNS) + "  (ms)"


def _row(done: Done) -> str:
    step, summary = done.step, done.summary
    within = step.within / step.n if step.n else 0.0
    cells = (
        *(f"{step.n}", f"{summary.requests - summary.succeeded}"),
        *(_ms(summary.ttft_ms, "p50"), _ms(summary.ttft_ms, "p99")),
        *(_ms(summary.tpot_ms, "p50"), _ms(summary.tpot_ms, "p99")),
        *(f"{summary.requests_per_s:.3f}", f"{summary.output_tokens_per_s:.1f}"),
        f"{within:.1%}",
    )
    verdict = "holds" if step.held else "breaks"
    return f"{step.load:>12g}" + "".join(f"{cell:>11}" for cell in cells) + f"  {verdict}"


def _is_late(summary: Summary) -> bool:
    return summary.lag_ms is not None and summary.lag_ms.p99 > LAG_WARNING_MS


def _ms(found: Spread | None, name: str) -> str:
    return "-" if found is None else f"{getattr(found, name):.1f}"


def _remarks(done: Done) -> list[str]:
    """What a reader must know beside the row."""
    remarks = list(done.summary.warnings)
    failed = [s for s in done.run.samples if s.measured and s.outcome is not Outcome.OK]
    if failed:
        remarks.append(f"{failed[0].outcome}, request {failed[0].index}: {failed[0].detail}")
    step = done.step
    if not step.n or 0 < step.n * (1 - step.share) < 1:
        remarks.append(
            f"{step.n} measured requests are too few to tell {step.share:.0%} from all of them: "
            "take a longer --duration-s"
        )
    return remarks


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _many(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of loads such as 0.5,1,2") from error
    if not all(0 < load < float("inf") for load in loads):
        raise ValueError(f"{text!r}: loads are above 0")
    return loads


def _between(text: str) -> tuple[float, float]:
    least, found, most = text.partition(":")
    try:
        between = float(least), float(most)
    except ValueError as error:
        raise ValueError(f"{text!r} is not such as 0.5:8") from error
    if not found or not 0 < between[0] < between[1] < float("inf"):
        raise ValueError(f"{text!r} goes from a load above 0 to a higher one")
    return between
