"""A Llama of a few hundred bytes as a GGUF file, with weights whose conversion is known."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADS, KV_HEADS, HIDDEN, INNER = 2, 1, 8, 12
TOKENS = ["<|end|>", "a", "b", "ab", "1"]
TYPES = {str: 8, int: 4, float: 6, list: 9}


def metadata() -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 0.5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


def tensors() -> dict[str, NDArray[np.float32]]:
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def write(
    path: Path,
    values: Mapping[str, object] | None = None,
    arrays: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    values = metadata() if values is None else values
    arrays = tensors() if arrays is None else arrays
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(values))
    for key, value in values.items():
        head += _text(key) + struct.pack("<I", TYPES[type(value)]) + _value(value)
    body = b""
    for name, array in arrays.items():
        head += _text(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        head += struct.pack("<IQ", 0, len(body))
        body += array.tobytes() + b"\0" * (-array.nbytes % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        kind = TYPES[type(value[0])]
        return struct.pack("<IQ", kind, len(value)) + b"".join(_value(item) for item in value)
    return struct.pack("<f" if isinstance(value, float) else "<I", value)
