"""`headwater plan`: what a model's KV takes, and how many workers an SLA needs, step by step.

The arithmetic is loadtests/planner's; this reads flags and files, and prints. With nothing but a
model it is about memory; with an SLA, about cards, and with a profile too, about workers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cluster import config_sources, plan_workers
from cluster.config import Config
from cluster.config_section import AUTO
from cluster.errors import ModelError
from cluster.model_store import FLOAT_BYTES
from cluster.plan_model import PlannedModel, find_model
from loadtests.planner import memory_plan, textbook
from loadtests.planner.memory import Device, KvLayout
from loadtests.planner.shape import DTYPE_BYTES, UnknownShape
from loadtests.planner.sizes import GIB, parse_size
from loadtests.planner.weights import Weights, weights_of

SUMMARY = "plan capacity: KV memory of a model, workers for an SLA"
SHARE = 0.92  # as vLLM 0.32 takes it
RESERVE_BYTES = 2 * GIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags. Mutates the parser."""
    parser.add_argument(
        "--examples", action="store_true", help="the sums that texts print, done again"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
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
        default=RESERVE_BYTES,
        metavar="SIZE",
        help="of a device, for activations and the like (default: 2GiB, assumed)",
    )
    memory.add_argument(
        "--memory-share",
        type=_share,
        default=SHARE,
        metavar="X",
        help=f"of a device that the engine may use (default: {SHARE:g})",
    )
    memory.add_argument("--concurrent", type=_count, metavar="N", help="requests at once")
    plan_workers.add_arguments(parser)
    config_sources.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError, ModelError, and AnswerError of a validation."""
    if arguments.examples:
        _print(arguments, textbook.examples(), {})
        return 0
    loaded = config_sources.load(arguments)
    if arguments.validate:
        _print(arguments, *plan_workers.validate_profile(arguments, loaded))
        return 0
    if plan_workers.is_about_load(arguments):
        _print(arguments, *plan_workers.plan_load(arguments, loaded))
        return 0
    named = loaded.sources["model.path_or_name"] != "default"
    try:
        asked = _memory_asked(arguments, loaded.config, find_model(loaded.config, named=named))
    except UnknownShape as unknown:
        raise ModelError(str(unknown)) from unknown
    data = {
        "token_bytes": asked.layout.token_bytes,
        "block_bytes": asked.layout.block_bytes,
        "weights_bytes": asked.weights.size_bytes if asked.weights else None,
        "kv_bytes": memory_plan.kv_room_bytes(asked),
        "fits": [asdict(fit) for fit in memory_plan.fits(asked)],
    }
    _print(arguments, memory_plan.lines_of(asked), data)
    return 0


def _memory_asked(
    arguments: argparse.Namespace, config: Config, model: PlannedModel
) -> memory_plan.MemoryAsked:
    """Raises UnknownShape where a figure is needed that nothing tells."""
    ranks = arguments.tp or config.workers.tensor_parallel_size
    layout = KvLayout(
        model.shape,
        _dtype(config, model),
        arguments.kv_dtype,
        ranks,
        arguments.block_tokens or config.engine.block_size_tokens,
    )
    weights = _weights(arguments, config, model)
    device = None
    if arguments.device_memory is not None and arguments.kv_memory is None:
        if weights is None:
            raise UnknownShape(
                f"the size of {model.name}'s weights is not known: give --weights SIZE, or "
                "--kv-memory SIZE instead of --device-memory"
            )
        rank_bytes = -(-weights.size_bytes // ranks)
        device = Device(
            arguments.device_memory, arguments.memory_share, rank_bytes, arguments.reserve
        )
    contexts = tuple(arguments.context or memory_plan.default_contexts(model.shape))
    return memory_plan.MemoryAsked(
        layout, contexts, device, arguments.kv_memory, weights, arguments.concurrent
    )


def _dtype(config: Config, model: PlannedModel) -> str:
    """A plan may be for other machines: where the dtype is auto, the checkpoint's own."""
    if config.model.dtype != AUTO:
        return config.model.dtype
    return model.shape.dtype if model.shape.dtype in FLOAT_BYTES else "bfloat16"


def _weights(arguments: argparse.Namespace, config: Config, model: PlannedModel) -> Weights | None:
    if arguments.weights is not None:
        return Weights(arguments.weights, "as given")
    try:
        return weights_of(model.folder, model.config, model.shape, _dtype(config, model))
    except UnknownShape:
        return None


def _print(arguments: argparse.Namespace, lines: list[str], data: dict[str, Any]) -> None:
    if arguments.json:
        sys.stdout.write(json.dumps({**data, "lines": lines}, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(lines) + "\n")


def _number(read: Callable[[str], Any], text: str) -> Any:  # noqa: ANN401 - what `read` gives
    try:
        return read(text)
    except ValueError as odd:
        raise argparse.ArgumentTypeError(str(odd)) from odd


def _size(text: str) -> int:
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
