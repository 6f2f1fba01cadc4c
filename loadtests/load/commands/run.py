"""`run`: one workload, sent in a closed or an open loop, measured.

Closed loop (--concurrency): that many users, each with one request at a time. Open loop (--rate):
requests arrive as --arrival says, however slow the server is.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import takewhile
from typing import Any

from loadtests.load import flags, workload_flags, workloads
from loadtests.load.arrivals import KINDS, arrivals
from loadtests.load.errors import UsageError
from loadtests.load.execution import Job, Server, check_output, conclude, perform, server_of
from loadtests.load.records import Request
from loadtests.load.runner import Plan

SUMMARY = "send a workload in a closed or an open loop and measure"
REQUESTS_DEFAULT = 20
# A closed loop with a duration has to have enough to send; engines of 2 requests/s a user are rare.
REQUESTS_PER_USER_S = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    flags.add_target(parser)
    workload_flags.add_arguments(parser)
    add_load(parser)
    flags.add_sending(parser)
    flags.add_outcome(parser)


def add_load(parser: argparse.ArgumentParser) -> None:
    """How much. Mutates the parser."""
    group = parser.add_argument_group("load")
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop of N users (default: of 1)"
    )
    loop.add_argument(
        "--rate", type=float, metavar="R", help="open loop: R requests (or sessions) a second"
    )
    group.add_argument(
        "--arrival", choices=KINDS, default="poisson", help="of an open loop (default: poisson)"
    )
    group.add_argument(
        "--cv",
        type=float,
        default=1.0,
        metavar="C",
        help="of gamma arrivals: variation of the gaps, above 1 in bursts (default: 1)",
    )
    group.add_argument(
        "--requests",
        type=workload_flags.whole(1),
        metavar="N",
        help=(
            f"to send, warm-up included (default: what --duration-s takes, else {REQUESTS_DEFAULT})"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises UsageError, NoServer."""
    users = 1 if arguments.concurrency is None else arguments.concurrency
    plan = flags.plan_of(arguments, users if arguments.rate is None else None)
    check_output(arguments)
    server = server_of(arguments, arguments.find_here)
    try:
        requests, conditions = workload(arguments, server, plan)
    except ValueError as odd:
        raise UsageError(str(odd)) from odd
    job = Job(
        server=server,
        requests=requests,
        plan=_ending_with(requests, plan) if arguments.requests else plan,
        conditions=conditions,
        label=arguments.label,
        slo=arguments.slo,
        cores=arguments.cores,
        quiet=arguments.quiet,
    )
    return conclude(perform(job), arguments)


def workload(
    arguments: argparse.Namespace, server: Server, plan: Plan
) -> tuple[list[Request], dict[str, Any]]:
    """The requests, due where the loop is open, and the conditions. Raises ValueError."""
    context = server.card.get("max_model_len")
    shape = workload_flags.shape_of(arguments, context if isinstance(context, int) else None)
    vocabulary = workload_flags.vocabulary_of(arguments, server.card)

    def built(count: int) -> workloads.Built:
        return workload_flags.built(arguments, shape, vocabulary, count, arguments.seed)

    times = _times(arguments, plan)
    found = built(arguments.requests or _count(plan, times))
    if times is not None and arguments.requests is None:
        # A session is one arrival and several requests.
        while _arrivals_of(found.requests) < len(times):
            found = built(2 * len(found.requests))
    requests = found.requests
    conditions = workload_flags.conditions(arguments, shape, vocabulary)
    conditions |= {"requests": arguments.requests, "arrival": None}
    if arguments.rate is not None:
        cv = {"cv": arguments.cv} if arguments.arrival == "gamma" else {}
        conditions["arrival"] = {"kind": arguments.arrival, "rate": arguments.rate, **cv}
        endless = arrivals(arguments.arrival, arguments.rate, arguments.seed, cv=arguments.cv)
        requests = workloads.due(requests, endless)
    if found.reuse is not None:
        conditions["reusable_share"] = found.reuse.token_share
    return requests, conditions


def _ending_with(requests: list[Request], plan: Plan) -> Plan:
    """Of an open loop: whatever is over first, the requests that were asked for or the duration."""
    last_s = plan.last_send_s
    last_due_s = max(request.due_s for request in requests)
    if plan.concurrency is None and last_s is not None and last_due_s < last_s:
        return replace(plan, duration_s=None)
    return plan


def _times(arguments: argparse.Namespace, plan: Plan) -> list[float] | None:
    """Of an open loop that lasts as long as its duration: its arrivals."""
    last_s = plan.last_send_s
    if arguments.rate is None or last_s is None:
        return None
    endless = arrivals(arguments.arrival, arguments.rate, arguments.seed, cv=arguments.cv)
    return list(takewhile(lambda at_s: at_s < last_s, endless))


def _count(plan: Plan, times: list[float] | None) -> int:
    if times is not None:
        return max(1, len(times))
    if plan.last_send_s is None or plan.concurrency is None:
        return REQUESTS_DEFAULT
    return max(REQUESTS_DEFAULT, round(REQUESTS_PER_USER_S * plan.concurrency * plan.last_send_s))


def _arrivals_of(requests: list[Request]) -> int:
    return sum(request.follows is None for request in requests)
