"""The options of each command: one function a command, which adds them to its parser.

Called by cluster/cli_commands.py, whose table names them. Imports the standard library alone, and
modules of ours that do the same: the help must appear on a machine where nothing is installed yet.
The commands themselves are in cluster/commands. Each function mutates its parser.
"""

# ruff: noqa: D103 - the module's docstring says what every function does

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import config_flags
from cluster.credentials import KEY_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
STATUS_INTERVAL_MIN_S = 0.1
DIAGNOSE_S, DIAGNOSE_MIN_S, DIAGNOSE_MAX_S = 5.0, 2.0, 600.0  # workers report every second
ACCEPT_SEEDS, ACCEPT_SEEDS_MAX = 4, 1000
ACCEPT_FLOOR_GB_S = 0.1
KEY_LIMITS = {
    "requests_per_min": "requests a minute",
    "tokens_per_min": "tokens a minute, of prompts and answers",
    "concurrent": "requests running at once",
}
PROFILE_FILE = "profile.json"
PLAN_MEMORY_SHARE = 0.92  # as vLLM 0.32 takes it
PLAN_RESERVE_BYTES = 2 << 30
PLAN_INPUT_TOKENS, PLAN_OUTPUT_TOKENS = 1000, 200
PLAN_WARMUP_S, PLAN_DURATION_S = 10.0, 60.0
PLAN_SEED = 11
PLAN_HEADROOM_MAX = 100  # a hundred times the load is a typing error
LESSONS_FOLDER = Path("results/lessons")
LESSONS_PAGE = "lessons.html"
GRAFANA_TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105 - its name
DASHBOARDS_FOLDER = ROOT / "helm" / "dashboards"

# ---- run ----------------------------------------------------------------------------------------


def serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detach",
        action="store_true",
        help="return once the cluster is ready or has failed; it goes on in the background",
    )
    config_flags.add_arguments(parser, *config_flags.FLAGS, model_positional=True)


def stop(parser: argparse.ArgumentParser) -> None:
    config_flags.add_arguments(parser, "address", "state-dir")


def chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", metavar="URL", help="instead of the one that runs here")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.2, help="0 is greedy (default: 0.2)")
    config_flags.add_arguments(parser, "state-dir")


def demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-kill", action="store_true", help="leave out the scene that kills a decode worker"
    )
    config_flags.add_arguments(parser, "state-dir")


# ---- inspect ------------------------------------------------------------------------------------


def status(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="once, for machines")
    form.add_argument("--once", action="store_true", help="once, also on a terminal")
    form.add_argument(
        "--interval",
        type=_seconds_from(STATUS_INTERVAL_MIN_S),
        default=1.0,
        metavar="S",
        help="seconds between two looks on a terminal (default: 1)",
    )
    parser.add_argument(
        "--ledger", action="store_true", help="all that is held, with owners and ages"
    )
    config_flags.add_arguments(parser, "state-dir")


def logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="WORKER",
        help="a worker or ingress as status names it, or all of a role: prefill, decode, ingress; "
        "without one, what serve says",
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until Ctrl-C or the cluster's end"
    )
    config_flags.add_arguments(parser, "state-dir")


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", nargs="?", help="its id; without one, the newest request")
    parser.add_argument("--json", action="store_true", help="the whole record")
    config_flags.add_arguments(parser, "state-dir")


def diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=_seconds_from(DIAGNOSE_MIN_S, DIAGNOSE_MAX_S),
        default=DIAGNOSE_S,
        metavar="N",
        help=f"how long to watch, {DIAGNOSE_MIN_S:g} to {DIAGNOSE_MAX_S:g} "
        f"(default: {DIAGNOSE_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="for machines, with all figures")
    config_flags.add_arguments(parser, "state-dir")


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="without importing ray, torch and vllm and measuring a core, which takes some seconds",
    )
    read = [name for name in config_flags.FLAGS if name != "served-name"]
    config_flags.add_arguments(parser, *read)


def config(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, with descriptions")
    form.add_argument("--yaml", action="store_true", help="as a complete configuration file")
    config_flags.add_arguments(parser, *config_flags.FLAGS)


# ---- measure ------------------------------------------------------------------------------------


def load(parser: argparse.ArgumentParser) -> None:
    """For the help only: cluster/cli.py passes everything on as `load_arguments`."""
    parser.add_argument(
        "load_arguments",
        nargs="*",
        metavar="run|replay|sweep|report|compare",
        help="run: one load; replay: a recorded trace; sweep: several rates; report: a page of "
        "results; compare: beside other servers; each has its own --help",
    )
    parser.add_argument("--state-dir", metavar="FOLDER", help="of the cluster that runs here")
    parser.add_argument("--config", metavar="FILE", help="likewise, which names the folder")


def profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        help="another OpenAI-compatible server (default: the cluster that runs here); API key, "
        f"where one is needed, in {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: {PROFILE_FILE} in the state folder"
    )
    parser.add_argument("--quick", action="store_true", help="few points, each once")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="of each prompt length (default: 3)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts")
    parser.add_argument("--json", action="store_true", help="for machines")
    config_flags.add_arguments(parser, "state-dir")


def plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--examples", action="store_true", help="the sums that texts print, done again"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    _plan_memory(parser)
    _plan_load(parser)
    _plan_validation(parser)
    config_flags.add_arguments(
        parser, "model", "dtype", "prefill-workers", "decode-workers", "state-dir", "cache-dir"
    )


def _plan_memory(parser: argparse.ArgumentParser) -> None:
    from loadtests.planner.shape import DTYPE_BYTES  # here: the other commands can do without it

    memory = parser.add_argument_group("memory", "sizes name their unit: 80GB is 10^9, 80GiB 2^30")
    memory.add_argument(
        "--context", type=_count, nargs="+", metavar="N", help="tokens of a sequence"
    )
    memory.add_argument("--device-memory", type=_size, metavar="SIZE", help="of one device")
    memory.add_argument("--kv-memory", type=_size, metavar="SIZE", help="a device's, for KV alone")
    memory.add_argument(
        "--kv-dtype", choices=["auto", *DTYPE_BYTES], default="auto", help="default: the model's"
    )
    memory.add_argument("--tp", type=_count, metavar="N", help="tensor-parallel ranks")
    memory.add_argument("--block-tokens", type=_count, metavar="N", help="tokens of a KV block")
    memory.add_argument("--weights", type=_size, metavar="SIZE", help="of the whole model")
    memory.add_argument(
        "--reserve",
        type=_size,
        default=PLAN_RESERVE_BYTES,
        metavar="SIZE",
        help="of a device, for activations and the like (default: 2GiB, assumed)",
    )
    memory.add_argument(
        "--memory-share",
        type=_share,
        default=PLAN_MEMORY_SHARE,
        metavar="X",
        help=f"of a device that the engine may use (default: {PLAN_MEMORY_SHARE:g})",
    )
    memory.add_argument("--concurrent", type=_count, metavar="N", help="requests at once")


def _plan_load(parser: argparse.ArgumentParser) -> None:
    from loadtests.planner.sla import HEADROOM

    group = parser.add_argument_group("load", "an SLA, or a load to predict")
    for flag, kind, default, what in (
        ("--ttft-ms", float, None, "SLA: 95th percentile of the time to the first token"),
        ("--tpot-ms", float, None, "SLA: mean time between tokens"),
        ("--e2e-ms", float, None, "SLA: for the whole answer, in place of --tpot-ms"),
        ("--rate", float, None, "requests/s, arriving at random"),
        ("--input-tokens", int, PLAN_INPUT_TOKENS, "of a prompt (default: %(default)s)"),
        ("--output-tokens", int, PLAN_OUTPUT_TOKENS, "of an answer (default: %(default)s)"),
        ("--cached-tokens", int, 0, "of a prompt, found in a cache (default: 0)"),
        (
            "--card-tokens-per-s",
            float,
            None,
            "output tokens/s of one card, for cards by throughput",
        ),
    ):
        group.add_argument(flag, type=_above_zero(kind), default=default, metavar="X", help=what)
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help=f"default: {PROFILE_FILE} in --state-dir"
    )
    group.add_argument(
        "--headroom",
        type=_headroom,
        default=HEADROOM,
        metavar="X",
        help=f"share of the load to be ready for beyond it (default: {HEADROOM:g})",
    )


def _plan_validation(parser: argparse.ArgumentParser) -> None:
    held = parser.add_argument_group("validation")
    held.add_argument(
        "--validate",
        action="store_true",
        help="predict loads, run them, and store the error in the profile (three, or --rate's)",
    )
    held.add_argument("--url", metavar="URL", help="server (default: the cluster that runs here)")
    held.add_argument(
        "--warmup-s",
        type=_above_zero(float),
        default=PLAN_WARMUP_S,
        metavar="S",
        help=f"requests sent before are not measured (default: {PLAN_WARMUP_S:g})",
    )
    held.add_argument(
        "--duration-s",
        type=_above_zero(float),
        default=PLAN_DURATION_S,
        metavar="S",
        help=f"length of each run (default: {PLAN_DURATION_S:g})",
    )
    held.add_argument(
        "--seed", type=int, default=PLAN_SEED, metavar="N", help="of arrivals and prompts"
    )


def lessons(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="lessons (default: all)")
    parser.add_argument("--list", action="store_true", help="show the lessons and end")
    parser.add_argument(
        "--quick", action="store_true", help="shorter inputs, fewer repeats: under 20 s a lesson"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=LESSONS_FOLDER,
        metavar="FOLDER",
        help=f"for {LESSONS_PAGE} and the data (default: ./{LESSONS_FOLDER})",
    )
    parser.add_argument(
        "--from-data",
        action="store_true",
        help="measure nothing: make the page again from the data in FOLDER",
    )
    config_flags.add_arguments(parser, "model", "dtype", "state-dir", "cache-dir")


def accept(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        help="endpoint of another cluster (default: the one that runs here); API key, where one "
        f"is needed, in {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--kill", action="store_true", help="kill a decode worker in mid-stream, to check resume"
    )
    parser.add_argument(
        "--seeds",
        type=_whole(1, ACCEPT_SEEDS_MAX),
        default=ACCEPT_SEEDS,
        metavar="N",
        help=f"prompts (default: {ACCEPT_SEEDS})",
    )
    parser.add_argument(
        "--floor-gb-s",
        type=float,
        default=ACCEPT_FLOOR_GB_S,
        metavar="X",
        help=f"blocks that move slower fail the bandwidth check (default: {ACCEPT_FLOOR_GB_S})",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    config_flags.add_arguments(parser, "state-dir")


# ---- administer ---------------------------------------------------------------------------------


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--link", metavar="PATH", type=Path, help="a link to make that leads to the model's folder"
    )
    read = ("model", "served-name", "dtype", "max-model-len", "kv-mib", "cache-dir")
    config_flags.add_arguments(parser, *read, model_positional=True)


def keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "revoke"), help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the key: for add and revoke")
    parser.add_argument(
        "--tenant", metavar="NAME", help="add: keys of one tenant share cached blocks (NAME's own)"
    )
    parser.add_argument(
        "--operator",
        action="store_true",
        help="add: opens what operators see too: status, ledger, explain, the live page",
    )
    for field, what in KEY_LIMITS.items():
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=_key_limit,
            metavar="N",
            help=f"add: {what}, of each ingress (default: no limit)",
        )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="instead of the configuration's keys.file"
    )
    parser.add_argument("--json", action="store_true", help="list: for machines")
    config_flags.add_arguments(parser, "state-dir")


def dashboards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("push", "diff", "pull"),
        help="push: files to Grafana; diff: what push would change; pull: Grafana's to files",
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:3000",
        help="the Grafana (default: http://127.0.0.1:3000)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds a service account's token (default: the variable "
        f"{GRAFANA_TOKEN_VARIABLE}, or none)",
    )
    parser.add_argument(
        "--folder", default="Headwater", help="title of the folder in Grafana, where it is made"
    )
    parser.add_argument(
        "--dir", type=Path, default=DASHBOARDS_FOLDER, help="the files (default: helm/dashboards)"
    )


# ---- values -------------------------------------------------------------------------------------


def _number(read: Callable[[str], Any], text: str) -> Any:  # noqa: ANN401 - what `read` gives
    try:
        return read(text)
    except ValueError as odd:
        raise argparse.ArgumentTypeError(str(odd)) from odd


def _seconds_from(least_s: float, most_s: float = float("inf")) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not least_s <= value <= most_s:
            raise argparse.ArgumentTypeError(f"{text} is not from {least_s:g} to {most_s:g} s")
        return value

    return read


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not in {least}..{most}")
        return value

    return read


def _key_limit(text: str) -> int:
    from deployments.edge.keys import LIMIT_MAX  # which needs msgspec; the help does not come here

    return _whole(1, LIMIT_MAX)(text)


def _size(text: str) -> int:
    from loadtests.planner.sizes import parse_size

    return int(_number(parse_size, text))


def _count(text: str) -> int:
    value = int(_number(int, text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _share(text: str) -> float:
    value = float(_number(float, text))
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _above_zero(kind: type[int | float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as odd:
            raise argparse.ArgumentTypeError(f"{text} is not a number") from odd
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return read


def _headroom(text: str) -> float:
    value = float(text)
    if not 0 <= value < PLAN_HEADROOM_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a share, such as 0.2")
    return value
