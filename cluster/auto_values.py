"""Resolves the configuration values that are `auto`, once for a cluster, and says why.

Called by serve (which deploys the result), config, doctor, prepare and lessons. Pure: what a value
depends on comes as facts of the nodes (cluster/node_facts.py) and figures of the model
(cluster/model_store.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.config import (
    KV_MEMORY_SHARE,
    KV_MIB_MAX,
    KV_MIB_MIN,
    KV_SEQUENCE_TOKENS,
    MIB,
    Config,
)
from cluster.config_section import AUTO, Section
from cluster.config_workers import AUTO_CORES_MAX, CORES_A_RESERVED, RESERVED_ABOVE_CORES
from cluster.kv_room import full_length_mib, kv_mib
from cluster.model_store import FLOAT_BYTES, ModelFigures
from cluster.node_facts import NodeFacts

Part = TypeVar("Part", bound=Section)
CONFIGURED = "configured"
CORES, PREFILL_CORES = "workers.cores_per_worker", "workers.prefill.cores_per_worker"
# TTFT of 1,000 tokens, and GEMMs alone, on one core with avx512_bf16; more with amx_bf16.
FLOAT32_SLOWDOWN = "2 to 5"
KV_UNKNOWN_MIB = 256  # in two-byte precisions


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
    keys = (config.model.dtype, config.engine.kv_cache_mib, config.workers.cores_per_worker)
    return AUTO in keys


def configured(config: Config) -> Choices:
    """The choices of a configuration that leaves none to be made."""
    return resolve(config, [], ModelFigures()).choices


def in_words(choices: Choices) -> str:
    """All choices in one line."""
    return "; ".join(f"{key} {choice.value} ({choice.why})" for key, choice in choices.items())


def resolve(config: Config, nodes: Sequence[NodeFacts], model: ModelFigures) -> Resolved:
    """Choose what is auto. One choice serves all nodes: they share blocks."""
    dtype = _dtype(config, nodes, model)
    kv = _kv(config, nodes, model, str(dtype.value))
    choices = {"model.dtype": dtype, "engine.kv_cache_mib": kv} | _cores(config, nodes)
    return Resolved(_with(config, choices), choices, _warnings(config, nodes))


def _with(config: Config, choices: Choices) -> Config:
    for key, choice in choices.items():
        config = _set(config, key, choice.value)
    return config


def _set(section: Part, key: str, value: str | int) -> Part:
    name, _, rest = key.partition(".")
    changed = _set(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: changed})


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


def _kv(config: Config, nodes: Sequence[NodeFacts], model: ModelFigures, dtype: str) -> Choice:
    """One request of full length always; more within the share of each node's free memory."""
    engine, full = config.engine, config.model.max_model_len
    if engine.kv_cache_mib != AUTO:
        return Choice(engine.kv_cache_mib, CONFIGURED)
    needed = full_length_mib(config, dtype, model)
    if not needed:
        unknown = KV_UNKNOWN_MIB * FLOAT_BYTES[dtype] // FLOAT_BYTES["bfloat16"]
        return Choice(unknown, "the model's KV size is not known")
    wanted = kv_mib(full + engine.max_num_seqs * KV_SEQUENCE_TOKENS, dtype, model)
    shares = [
        int(node.memory.available_bytes * KV_MEMORY_SHARE) // MIB // sum(workers)
        for node, workers in zip(nodes, _workers_by_node(config, nodes), strict=True)
        if any(workers) and not node.has_gpu  # whose KV cache is not in the node's own memory
    ]
    wanted = max(wanted, needed)
    value = max(needed, min([wanted, *shares]))
    why = f"one request of {full} tokens and {engine.max_num_seqs} of {KV_SEQUENCE_TOKENS}"
    if value < wanted:
        why = f"{KV_MEMORY_SHARE:.0%} of the free memory"
        if value == needed:
            why = f"one request of {full} tokens, more than {why} holds"
    return Choice(min(max(value, KV_MIB_MIN), KV_MIB_MAX), why)


def _cores(config: Config, nodes: Sequence[NodeFacts]) -> Choices:
    """Equal shares for all workers; what is left over is for prefill, which scales best."""
    workers, ranks = config.workers, config.workers.tensor_parallel_size
    if workers.cores_per_worker != AUTO:
        return {CORES: Choice(workers.cores_per_worker, CONFIGURED)}
    shares = [
        _shares(node.cores, prefill * ranks, decode * ranks)
        for node, (prefill, decode) in zip(nodes, _workers_by_node(config, nodes), strict=True)
        if not node.has_gpu  # whose engines compute elsewhere
    ]
    prefill = min((share for share, _ in shares if share), default=1)
    decode = min((share for _, share in shares if share), default=1)
    cores = ", ".join(sorted({str(node.cores) for node in nodes}))
    why = f"{cores} on a node, shared out to the workers"
    found = {CORES: Choice(decode, why)}
    if prefill != decode and workers.prefill.cores_per_worker is None:
        found[PREFILL_CORES] = Choice(prefill, "what equal shares leave over computes prompts")
    return found


def _shares(cores: int, prefill_ranks: int, decode_ranks: int) -> tuple[int, int]:
    """Cores of a prefill and of a decode rank on one node; 0 for a role that is not on it."""
    reserved = 1 + cores // CORES_A_RESERVED if cores > RESERVED_ABOVE_CORES else 0
    ranks, free = prefill_ranks + decode_ranks, cores - reserved
    if not ranks:
        return 0, 0
    each = max(1, free // ranks)
    over = max(0, free - each * ranks) // prefill_ranks if prefill_ranks else 0
    return (
        min(AUTO_CORES_MAX, each + over) if prefill_ranks else 0,
        min(AUTO_CORES_MAX, each) if decode_ranks else 0,
    )


def _workers_by_node(config: Config, nodes: Sequence[NodeFacts]) -> list[tuple[int, int]]:
    """The most prefill and decode workers that each node may get where Ray spreads them."""
    counts: list[list[int]] = []
    for role in (config.workers.prefill, config.workers.decode):
        fitting = [role.resources.keys() <= node.resources for node in nodes]
        if not any(fitting):  # a cluster that is started here offers them
            fitting = [True] * len(nodes)
        each = -(-role.most // max(1, sum(fitting)))
        counts.append([each if fits else 0 for fits in fitting])
    return list(zip(*counts, strict=True))


def _warnings(config: Config, nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """At most one, for all the nodes that compute a configured precision slowly."""
    dtype = config.model.dtype
    slow = _slow_nodes(dtype, nodes)
    if slow:
        return (f"model.dtype {dtype} is slow on {_names(slow)}: {slow[0].slow[dtype]}",)
    native = [node for node in nodes if "bfloat16" in node.native and not node.has_gpu]
    if dtype == "float32" and native and len(native) == len(nodes):
        reason = (
            f"prompts take about {FLOAT32_SLOWDOWN} times as long as in bfloat16, which the CPU "
            "computes natively"
        )
        return (f"model.dtype float32 is slow on {_names(native)}: {reason}",)
    return ()


def _slow_nodes(dtype: str, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    return [node for node in nodes if dtype in node.slow and not node.has_gpu]


def _names(nodes: Sequence[NodeFacts]) -> str:
    return ", ".join(node.name for node in nodes)
