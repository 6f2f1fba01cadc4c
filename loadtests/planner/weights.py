"""The size of a model's weights: from its safetensors files, else counted from its config.

Called by the plan command. Must not: read weights, only the heads and the index of their files; or
count the parameters of a model whose layers are not known here.

Counted are Llama and its kin: embeddings, for each layer queries, keys, values, output, a gated MLP
(for Mixtral one an expert, and the router) and two norms, and the last norm.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from loadtests.planner.shape import DTYPE_BYTES, Shape, UnknownShape, text_part

HEAD_LENGTH_BYTES = 8
HEAD_BYTES_MAX = 100_000_000  # as safetensors itself has it
COUNTED = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Weights:
    """size_bytes: over all ranks, in the type that is served. how: where it is known from."""

    size_bytes: int
    how: str


def weights_of(folder: Path | None, config: Mapping[str, Any], shape: Shape, dtype: str) -> Weights:
    """Raises UnknownShape where neither files nor the config tell."""
    if folder is not None and folder.is_dir():
        found = _from_files(folder, shape, dtype)
        if found is not None:
            return found
    if config.get("quantization_config") or text_part(config).get("quantization_config"):
        raise UnknownShape("the weights are quantised, and no safetensors files tell their size")
    count = parameters(text_part(config), shape)
    size = count * DTYPE_BYTES[dtype]
    return Weights(size, f"{count:,} parameters, counted from the config, × {dtype}")


def parameters(text: Mapping[str, Any], shape: Shape) -> int:
    """Raises UnknownShape for another kind of model than those above."""
    if shape.model_type not in COUNTED:
        raise UnknownShape(f"the parameters of {shape.model_type} are not counted here")
    try:
        hidden, inner, words = (
            int(text[name]) for name in ("hidden_size", "intermediate_size", "vocab_size")
        )
    except (KeyError, TypeError, ValueError) as lack:
        raise UnknownShape(f"parameters cannot be counted: the config has no {lack}") from lack
    own, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = hidden * (2 * own + 2 * shared)
    if shape.model_type == "qwen2" or text.get("attention_bias"):
        attention += own + 2 * shared + (hidden if text.get("attention_bias") else 0)
    if shape.model_type == "qwen3":
        attention += 2 * shape.head_dim
    mlp = 3 * hidden * inner
    if shape.model_type == "mixtral":
        experts = int(text.get("num_local_experts", 8))
        mlp = experts * mlp + experts * hidden
    embeddings = words * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return embeddings + shape.layers * (attention + mlp + 2 * hidden) + hidden


def _from_files(folder: Path, shape: Shape, dtype: str) -> Weights | None:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = _read_index(index)
        if all((folder / name).is_file() for name in named[1]):
            files = [folder / name for name in sorted(named[1])]
        elif named[0] is not None:
            stored = DTYPE_BYTES.get(shape.dtype)
            served = DTYPE_BYTES[dtype]
            size = named[0] * served // stored if stored else named[0]
            return Weights(size, f"total_size of {index.name}, stored as {shape.dtype}")
    if not files:
        return None
    size = sum(_served_bytes(file, dtype) for file in files)
    return Weights(size, f"tensors of {len(files)} safetensors file(s), served as {dtype}")


def _read_index(path: Path) -> tuple[int | None, set[str]]:
    """(bytes of all tensors, names of the files)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        total = found.get("metadata", {}).get("total_size")
        return (int(total) if total is not None else None), set(found["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as odd:
        raise UnknownShape(f"{path} is no index of safetensors files: {odd}") from odd


def _served_bytes(path: Path, dtype: str) -> int:
    """Floats take the size of the type that is served; what is quantised stays as it is."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(HEAD_LENGTH_BYTES))
            if length > HEAD_BYTES_MAX:
                raise UnknownShape(f"{path} is no safetensors file: its head has {length} bytes")
            head = json.loads(file.read(length))
        tensors = [one for name, one in head.items() if name != "__metadata__"]
        quantised = any(one["dtype"] not in FLOATS for one in tensors)
        return sum(
            prod(one["shape"]) * DTYPE_BYTES[dtype]
            if one["dtype"] in FLOATS and not quantised
            else one["data_offsets"][1] - one["data_offsets"][0]
            for one in tensors
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as odd:
        raise UnknownShape(f"{path} is no whole safetensors file: {odd}") from odd
