"""Resolves the configuration values that are `auto`, once for a cluster, and says why.

Called by serve (which deploys the result), config, doctor, prepare and lessons. Pure: what a value
depends on comes as facts of the nodes (cluster/node_facts.py) and figures of the model
(cluster/model_store.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import Config
from cluster.config_section import AUTO
from cluster.model_store import FLOAT_BYTES, ModelFigures
from cluster.node_facts import NodeFacts

CONFIGURED = "configured"


@dataclass(frozen=True, slots=True)
class Choice:
    """One value, and why: by which rule, or that somebody configured it."""

    value: str | int
    why: str


Choices = dict[str, Choice]  # by dotted key


@dataclass(frozen=True, slots=True)
class Resolved:
    """config: without any auto. warnings: of configured values that are slow here."""

    config: Config
    choices: Choices
    warnings: tuple[str, ...]


def has_auto(config: Config) -> bool:
    """Whether anything is left to be chosen."""
    return config.model.dtype == AUTO


def configured(config: Config) -> Choices:
    """The choices of a configuration that leaves none to be made."""
    return resolve(config, [], ModelFigures()).choices


def in_words(choices: Choices) -> str:
    """All choices in one line."""
    return "; ".join(f"{key} {choice.value} ({choice.why})" for key, choice in choices.items())


def resolve(config: Config, nodes: Sequence[NodeFacts], model: ModelFigures) -> Resolved:
    """Choose what is auto. One choice serves all nodes: they share blocks."""
    dtype = _dtype(config, nodes, model)
    chosen = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": dtype.value})}
    )
    return Resolved(chosen, {"model.dtype": dtype}, _warnings(config, nodes))


def _dtype(config: Config, nodes: Sequence[NodeFacts], model: ModelFigures) -> Choice:
    if config.model.dtype != AUTO:
        return Choice(config.model.dtype, CONFIGURED)
    if all(node.has_gpu for node in nodes):
        own = model.checkpoint_dtype
        if own in FLOAT_BYTES:
            return Choice(own, "the checkpoint's own")
        return Choice("bfloat16", "the checkpoint's own is not one that is served")
    without = _slow_nodes("bfloat16", nodes)
    if without:
        return Choice("float32", f"{_names(without)} does not compute bfloat16 natively")
    flags = sorted({node.native.get("bfloat16", "unknown flags") for node in nodes})
    return Choice("bfloat16", f"computed natively ({', '.join(flags)})")


def _warnings(config: Config, nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """One for all the nodes that compute a configured precision slowly."""
    slow = _slow_nodes(config.model.dtype, nodes)
    if not slow:
        return ()
    reason = slow[0].slow[config.model.dtype]
    return (f"model.dtype {config.model.dtype} is slow on {_names(slow)}: {reason}",)


def _slow_nodes(dtype: str, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    return [node for node in nodes if dtype in node.slow and not node.has_gpu]


def _names(nodes: Sequence[NodeFacts]) -> str:
    return ", ".join(node.name for node in nodes)
