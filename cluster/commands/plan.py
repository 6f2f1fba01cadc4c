"""`headwater plan`: what a model's KV takes, and how many workers an SLA needs, step by step.

The arithmetic is loadtests/planner's; this reads flags and files, and prints. With nothing but a
model it is about memory; with an SLA, about cards, and with a profile too, about workers.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from loadtests.planner.shape import UnknownShape
from loadtests.planner.weights import Weights, weights_of


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
