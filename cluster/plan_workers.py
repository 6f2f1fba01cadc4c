"""The half of `headwater plan` that is about load: cards and workers for an SLA, and validation.

Called by cluster/commands/plan.py. The arithmetic is loadtests/planner's; here flags become its
questions, and a validation is run against a server.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import running
from cluster.cli_options import PROFILE_FILE
from cluster.config_sources import Loaded
from cluster.credentials import OPERATOR_PATH, api_key
from cluster.errors import AnswerError, ConfigError
from loadtests.load.client import Target
from loadtests.load.runner import drive
from loadtests.load.token_prompts import TokenIds, token_ids, vocabulary_size
from loadtests.planner import validate
from loadtests.planner.layouts import Infeasible, plan_workers
from loadtests.planner.playing import play_at_random
from loadtests.planner.predict import Layout, Load, predict
from loadtests.planner.probe import ProbeFailed
from loadtests.planner.profile import Profile
from loadtests.planner.server import HttpServer, card_of, connected
from loadtests.planner.sla import Sla, cards_by_throughput, tpot_ms_of
from loadtests.planner.steps import as_json, heard_lines, plan_lines, prediction_lines
from loadtests.planner.validate import HeldOut

Answer = tuple[list[str], dict[str, Any]]
"""Lines for people, figures for machines."""
USUAL_IDS = TokenIds(1000, 20_000)
VALIDATIONS = ((1500, 20, 0.4), (100, 200, 0.3), (512, 64, 0.6))
"""Tokens in and out, and the share of the rate that a layout could take: well below, and nearer."""


def load_profile(arguments: argparse.Namespace, state_dir: Path) -> tuple[Path, Profile | None]:
    """The named one, else that of the state folder, if there is one. Raises ConfigError."""
    path: Path = arguments.profile or state_dir / PROFILE_FILE
    if arguments.profile is None and not path.exists():
        return path, None
    try:
        return path, Profile.read(path)
    except ValueError as odd:
        raise ConfigError(str(odd)) from odd


def plan_load(arguments: argparse.Namespace, loaded: Loaded) -> Answer:
    """Cards by throughput, workers from a profile, or a prediction for a layout."""
    path, profile = load_profile(arguments, loaded.config.state.dir)
    lines: list[str] = []
    data: dict[str, Any] = {}
    wanted = _sla(arguments)
    if arguments.card_tokens_per_s is not None:
        if wanted is None:
            raise ConfigError("--card-tokens-per-s needs --ttft-ms and --tpot-ms (or --e2e-ms)")
        cards = cards_by_throughput(wanted, arguments.card_tokens_per_s)
        lines += cards.lines
        data["cards"] = cards.count
    if profile is None:
        if not lines or arguments.profile is not None:
            raise ConfigError(
                f"there is no profile ({path}): ./headwater profile measures one, --profile FILE "
                "names one; without it, --card-tokens-per-s X gives cards by throughput"
            )
        lines.append("Prefill and decode apart need a profile: ./headwater profile measures one")
        return lines, data
    if wanted is None:
        found = _predicted(arguments, loaded, profile)
    else:
        found = _planned(arguments, profile, wanted)
    return [*lines, *found[0]], data | found[1]


def _planned(arguments: argparse.Namespace, profile: Profile, wanted: Sla) -> Answer:
    try:
        plan = plan_workers(
            profile,
            wanted,
            headroom=arguments.headroom,
            cached_tokens=_cached(arguments),
        )
    except Infeasible as cannot:
        raise ConfigError("\n".join([f"no plan: {cannot}", *profile.trust_lines()])) from cannot
    lines = plan_lines(profile, plan)
    data = {
        "plan": as_json(plan.with_headroom),
        "most_rate_per_s": plan.most_rate_per_s,
        "headroom": plan.headroom,
        "trust": profile.trust_lines(),
    }
    return lines, data


def _predicted(arguments: argparse.Namespace, loaded: Loaded, profile: Profile) -> Answer:
    if arguments.rate is None:
        raise ConfigError(
            "name an SLA (--ttft-ms and --tpot-ms, with --rate or --concurrent), or a load to "
            "predict (--rate, --input-tokens, --output-tokens)"
        )
    load = _load(arguments)
    workers = loaded.config.workers
    layout = Layout(workers.prefill.replicas, workers.decode.replicas)
    if profile.colocated:
        layout = Layout(0, workers.decode.replicas)
    found = predict(profile, load, layout)
    heard = play_at_random(profile, load, layout) if found.is_stable else None
    lines = [
        *(f"{line}" for line in profile.fit_lines()),
        *prediction_lines(profile, found),
        *heard_lines(heard),
        *profile.trust_lines(),
    ]
    return lines, {"prediction": as_json(found), "trust": profile.trust_lines()}


# ---- validation ---------------------------------------------------------------------------------


def validate_profile(arguments: argparse.Namespace, loaded: Loaded) -> Answer:
    """Runs loads, compares, and stores the errors in the profile. Raises AnswerError."""
    state_dir = loaded.config.state.dir
    path, profile = load_profile(arguments, state_dir)
    if profile is None:
        raise ConfigError(f"there is no profile ({path}): ./headwater profile measures one first")
    url = arguments.url or running.read(state_dir).endpoint
    lines: list[str] = []
    try:
        profile, lines = asyncio.run(_validate(arguments, profile, url))
        profile.save(path)
    except (ProbeFailed, ValueError) as failed:
        raise AnswerError(str(failed)) from failed
    except OSError as failed:
        raise AnswerError(f"{path} cannot be written: {failed.strerror}") from failed
    data = {"validations": [asdict(one) for one in profile.validations]}
    return [*lines, *profile.trust_lines(), f"Saved: {path}"], data


async def _validate(
    arguments: argparse.Namespace, profile: Profile, url: str
) -> tuple[Profile, list[str]]:
    key = api_key(url, OPERATOR_PATH)  # records are looked at too
    card = await card_of(url, key)
    if card.model != profile.model:
        raise ProbeFailed(f"the profile is of {profile.model}, {url} serves {card.model}")
    size = vocabulary_size({"root": card.root})
    vocabulary = USUAL_IDS if size is None else token_ids(size)
    target = Target(url, card.model, api_key=key)
    lines: list[str] = []
    async with connected(target) as server:
        layout = layout_of(await server.status(), profile)
        measured = profile
        for load in _loads(arguments, profile, layout, card.context_tokens):
            held = HeldOut(load, arguments.warmup_s, arguments.duration_s, arguments.seed)
            _progress(f"{load.words()}: {held.end_s:g} s")
            requests = held.requests(vocabulary.draw)
            run = await drive(target, requests, held.plan, label="validation")
            records = await _records(server, [sample.request_id for sample in run.samples])
            found = validate.compare(profile, held, layout, run, records, _now())
            measured = measured.validated(found)
            lines += validate.lines_of(found)
    return measured, lines


async def _records(server: HttpServer, ids: Sequence[str]) -> list[dict[str, Any]]:
    found = [await server.record(one) for one in ids]
    return [dict(one) for one in found if one is not None]


def layout_of(status: Any, profile: Profile) -> Layout:  # noqa: ANN401 - JSON, whatever comes
    """The workers that are ready; a plain server is one worker for both."""
    if status is None or profile.colocated:
        return Layout(0, 1)
    roles = [worker["role"] for worker in status["workers"] if worker["state"] == "ready"]
    return Layout(roles.count("prefill"), max(1, roles.count("decode")))


def _loads(
    arguments: argparse.Namespace, profile: Profile, layout: Layout, context_tokens: int
) -> list[Load]:
    """The asked one, or three that differ, at shares of what the layout can take."""
    if arguments.rate is not None:
        return [_load(arguments)]
    found = []
    for tokens_in, tokens_out, share in VALIDATIONS:
        fitting = min(tokens_in, context_tokens - tokens_out) if context_tokens else tokens_in
        idle = predict(profile, Load(1e-3, fitting, tokens_out), layout)
        rate = share * 1e-3 / max(idle.shares.values())
        found.append(Load(float(f"{rate:.2g}"), fitting, tokens_out))
    return found


# ---- flags --------------------------------------------------------------------------------------


def is_about_load(arguments: argparse.Namespace) -> bool:
    """Whether flags of this half were given."""
    names = ("ttft_ms", "tpot_ms", "e2e_ms", "rate", "card_tokens_per_s")
    return any(getattr(arguments, name) is not None for name in names)


def _sla(arguments: argparse.Namespace) -> Sla | None:
    """None where no bound is named. Raises ConfigError for half of one."""
    ttft, tpot, e2e = arguments.ttft_ms, arguments.tpot_ms, arguments.e2e_ms
    if ttft is None and tpot is None and e2e is None:
        return None
    if ttft is None or (tpot is None) == (e2e is None):
        raise ConfigError("an SLA is --ttft-ms, and one of --tpot-ms and --e2e-ms")
    if (arguments.rate is None) == (arguments.concurrent is None):
        raise ConfigError("an SLA is for a load: name one of --rate and --concurrent")
    output = arguments.output_tokens
    if tpot is None:
        try:
            tpot = tpot_ms_of(ttft_ms=ttft, e2e_ms=e2e, output_tokens=output)
        except ValueError as odd:
            raise ConfigError(str(odd)) from odd
    tokens = arguments.input_tokens
    return Sla(ttft, tpot, tokens, output, arguments.concurrent, arguments.rate)


def _load(arguments: argparse.Namespace) -> Load:
    return Load(
        arguments.rate,
        arguments.input_tokens,
        arguments.output_tokens,
        _cached(arguments),
    )


def _cached(arguments: argparse.Namespace) -> int:
    cached, tokens = arguments.cached_tokens, arguments.input_tokens
    if cached >= tokens:
        raise ConfigError(f"--cached-tokens ({cached}) must be below --input-tokens ({tokens})")
    return int(cached)


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
