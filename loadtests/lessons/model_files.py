"""What a model's folder tells before any engine is built: sizes, from its small files and heads.

Called by lesson.py and the lessons. Must not import torch. Where config.json does not say, the
answer is 0 or a modest guess, and vLLM has the last word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POSITIONS_UNKNOWN = 2048
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# A safetensors file begins with the length of its JSON head.
HEAD_LENGTH_BYTES = 8


def positions_of(model: Path) -> int:
    """The longest context that a model was made for."""
    return _number(_config(model), "max_position_embeddings") or POSITIONS_UNKNOWN


def kv_bytes_per_token(model: Path, dtype: str) -> int:
    """Keys and values of one token over all layers; 0 if config.json does not say."""
    config = _config(model)
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    head = _number(config, "head_dim") or (hidden // heads if heads else 0)
    kv_heads = _number(config, "num_key_value_heads") or heads
    return 2 * _number(config, "num_hidden_layers") * kv_heads * head * DTYPE_BYTES.get(dtype, 4)


def weight_bytes(model: Path, dtype: str) -> int:
    """All weights as an engine of this dtype reads them; 0 without safetensors."""
    elements = sum(_elements(path) for path in model.glob("*.safetensors"))
    return elements * DTYPE_BYTES.get(dtype, 4)


def _elements(path: Path) -> int:
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(HEAD_LENGTH_BYTES), "little")
        head: Mapping[str, Any] = json.loads(stream.read(length))
    return sum(math.prod(item["shape"]) for name, item in head.items() if name != "__metadata__")


def _config(model: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")  # of a model that reads images too
    return text if isinstance(text, dict) else config


def _number(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    return found if isinstance(found, int) and found > 0 else 0
