"""The arithmetic and the memory traffic that a model's tokens need, from its files' heads.

Called by worker.py, once. Computed from shapes and not measured: sliding windows, activations and
what a kernel does twice are left out. Must not read weights.

FLOP = 2 x weights of layers x tokens + 2 x weights of the output layer x sampled positions
     + 4 x layers x heads x head size x pairs (scores, and values times them)
bytes = all weights x steps + KV of a token x (context tokens read + tokens written)
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.workers.step_totals import StepTotals

HEAD_LENGTH_BYTES = 8
HEAD_BYTES_MAX = 100_000_000  # as safetensors itself has it
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
INPUT, OUTPUT, EXPERT = "embed_tokens.", "lm_head.", ".experts."


class ModelWorkUnknown(Exception):
    """Files or config do not say what is needed."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Of one model, over all ranks. Weights are counted in numbers, not in bytes.

    layer_weights: that a token is multiplied with (of experts, those that it uses). read_weights:
    that a step reads (all experts: a batch uses most). attention_width: layers x heads x head size.
    """

    layer_weights: int
    output_weights: int
    read_weights: int
    weight_bytes: int
    attention_width: int
    kv_bytes_token: int

    def flop(self, steps: StepTotals) -> float:
        """Of all steps so far."""
        matrices = self.layer_weights * steps.tokens + self.output_weights * steps.requests
        return 2 * matrices + 4 * self.attention_width * steps.pairs

    def memory_bytes(self, steps: StepTotals) -> int:
        """Of all steps so far."""
        kv = self.kv_bytes_token * (steps.contexts + steps.tokens)
        return self.read_weights * self.weight_bytes * steps.steps + kv


def model_work(folder: Path, dtype: str) -> ModelWork:
    """Raises ModelWorkUnknown, OSError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        heads, layers = int(text["num_attention_heads"]), int(text["num_hidden_layers"])
        head_size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        used = int(text.get("num_experts_per_tok") or 0)
        experts = int(text.get("num_local_experts") or text.get("num_experts") or 0)
        weight_bytes = DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError, AttributeError) as lack:
        raise ModelWorkUnknown(f"config.json or dtype {dtype!r} does not tell {lack}") from lack
    sizes = _sizes(folder)
    inputs = sum(n for name, n in sizes.items() if INPUT in name)
    outputs = sum(n for name, n in sizes.items() if name.startswith(OUTPUT))
    of_experts = sum(n for name, n in sizes.items() if EXPERT in name)
    layer_weights = sum(sizes.values()) - inputs - outputs
    read = layer_weights + (outputs or inputs)  # tied: the input table is the output layer
    if of_experts and experts:
        layer_weights -= of_experts - of_experts * used // experts
    return ModelWork(
        layer_weights=layer_weights,
        output_weights=outputs or inputs,
        read_weights=read,
        weight_bytes=weight_bytes,
        attention_width=layers * heads * head_size,
        kv_bytes_token=2 * layers * kv_heads * head_size * weight_bytes,
    )


def _sizes(folder: Path) -> dict[str, int]:
    """Numbers in each tensor, by name."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _head(path).items():
            if name != "__metadata__":
                sizes[name] = prod(tensor["shape"])
    if not sizes:
        raise ModelWorkUnknown(f"{folder} has no safetensors files")
    return sizes


def _head(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(HEAD_LENGTH_BYTES)
        length = struct.unpack("<Q", raw)[0] if len(raw) == HEAD_LENGTH_BYTES else 0
        if not 0 < length <= HEAD_BYTES_MAX:
            raise ModelWorkUnknown(f"{path.name} is no safetensors file")
        try:
            head: dict[str, Any] = json.loads(file.read(length))
        except ValueError as bad:
            raise ModelWorkUnknown(f"{path.name} is no safetensors file") from bad
    return head
