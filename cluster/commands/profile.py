"""`headwater profile`: measures what plans are made from, on a running server, by HTTP.

Prefill time by new and cached tokens, decode step by batch and context, and, of Headwater, the
hand-over, the link and how the roles slow each other down; each with its fit error.
loadtests/planner/probe.py measures. The server should be idle otherwise; it takes one to three
minutes on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import sys
from dataclasses import replace
from pathlib import Path

from cluster import config_sources, running
from cluster.cli_options import PROFILE_FILE
from cluster.credentials import OPERATOR_PATH, api_key
from cluster.errors import AnswerError
from loadtests.load.client import Target
from loadtests.load.token_prompts import TokenIds, token_ids, vocabulary_size
from loadtests.planner.probe import QUICK, WHOLE, Grid, Probe, ProbeFailed
from loadtests.planner.profile import Profile
from loadtests.planner.server import card_of, connected
from loadtests.results import Setting

CONTEXT_TOKENS_MOST = 1 << 20
# Where a server does not tell its vocabulary: all that is called a language model has these.
USUAL_IDS = TokenIds(1000, 20_000)
TIMEOUT_S = 120.0


def run(arguments: argparse.Namespace) -> int:
    """Measure and save. Raises NotRunningError, and AnswerError where the server fails."""
    state_dir = config_sources.load(arguments).config.state.dir
    url = arguments.url or running.read(state_dir).endpoint
    out: Path = arguments.out or state_dir / PROFILE_FILE
    grid = QUICK if arguments.quick else WHOLE
    if arguments.rounds is not None:
        if arguments.rounds < 1:
            raise AnswerError("--rounds must be at least 1")
        grid = replace(grid, rounds=arguments.rounds)
    try:
        found = asyncio.run(measure(url, grid, arguments.seed))
        out.parent.mkdir(parents=True, exist_ok=True)
        found.save(out)
    except (ProbeFailed, ValueError) as failed:
        raise AnswerError(str(failed)) from failed
    except OSError as failed:
        raise AnswerError(f"{out} cannot be written: {failed.strerror}") from failed
    if arguments.json:
        sys.stdout.write(json.dumps(found.as_json(), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join([*lines_of(found), f"Saved: {out}"]) + "\n")
    return 0


async def measure(url: str, grid: Grid, seed: int) -> Profile:
    """Raises ProbeFailed, and ValueError for a URL that is none."""
    key = api_key(url, OPERATOR_PATH)  # the status and records are looked at too
    card = await card_of(url, key)
    vocabulary = USUAL_IDS
    size = vocabulary_size({"root": card.root})
    if size is not None:
        vocabulary = token_ids(size)
    target = Target(url, card.model, timeout_s=TIMEOUT_S, api_key=key)
    async with connected(target) as server:
        status = await server.status()
        context_tokens = card.context_tokens or CONTEXT_TOKENS_MOST
        probe = Probe(server, grid, vocabulary.draw, context_tokens, seed, _progress)
        return await probe.run(card.model, _now(), conditions_of(url, status))


def conditions_of(url: str, status: object) -> dict[str, object]:
    """Where it was measured: of a server elsewhere the machine is not known."""
    setting = Setting.here()
    found: dict[str, object] = {"url": url, "client": setting.machine, "load": setting.load}
    if isinstance(status, dict):
        roles = [str(worker["role"]) for worker in status["workers"]]
        found["workers"] = {role: roles.count(role) for role in sorted(set(roles))}
    return found


def lines_of(profile: Profile) -> list[str]:
    """For people."""
    link = profile.link
    lines = [
        f"{profile.model}, measured {profile.at}",
        *(f"  {name}: {value}" for name, value in profile.conditions.items()),
        *profile.fit_lines(),
        f"overhead of a first token besides its prefill: {profile.overhead_ms:.1f} ms"
        if profile.overhead_ms
        else "overhead of a first token: not told apart from its prefill by this server",
    ]
    lines += [
        f"roles slow each other down: prefill × {one.prefill:.2f} beside {one.streams} streams, "
        f"their step × {one.step:.2f} beside a prefill; n = {one.n}"
        for one in profile.contention
    ]
    if link.blocks:
        lines.append(
            f"link: {link.blocks} blocks of {link.block_bytes / 1e6:.3f} MB {link.what}, published "
            f"at {link.publish_bytes_per_s / 1e9:.2f} GB/s, loaded at "
            f"{link.load_bytes_per_s / 1e9:.2f} GB/s"
        )
    if profile.slots:
        lines.append(
            f"a worker's step has {profile.slots} slots and {profile.step_tokens:,} tokens, its KV "
            f"cache {profile.kv_tokens:,} tokens"
        )
    return lines


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
