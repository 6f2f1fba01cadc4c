"""Turns a GGUF file of a Llama model into a folder that vLLM and transformers load.

Called by cluster/model_store.py for the bundled model. It handles what that file has: the `llama`
architecture, a byte-level BPE vocabulary, tensors that package gguf can dequantize. It needs
neither torch nor transformers, and takes seconds; tests/contract compares its output with what
transformers makes of the same file.

Source: transformers 5.19, modeling_gguf_pytorch_utils.py (names, the permutation of Q and K).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from cluster.errors import ModelError
from cluster.gguf_file import GgufFile, TensorPlace

ARCHITECTURE = "llama"
VOCABULARY = "gpt2"
CONTROL_TOKEN = 3
USER_TOKEN = 4
BFLOAT16_BYTES = 2
PROGRESS_TENSORS = 68
# How the pre-tokenizers that we know split text before byte-level BPE.
SPLITS_DIGITS = {"smollm": True, "gpt-2": False, "default": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Progress = Callable[[str], None]


def convert(source: GgufFile, folder: Path, progress: Progress) -> None:
    """Writes config, tokenizer and bfloat16 weights into an existing folder.

    Raises ModelError for a model of another kind, ModelDamagedError for missing parts.
    """
    architecture = source.text("general.architecture")
    vocabulary = source.text("tokenizer.ggml.model")
    splitter = source.text("tokenizer.ggml.pre")
    if architecture != ARCHITECTURE or vocabulary != VOCABULARY or splitter not in SPLITS_DIGITS:
        message = (
            f"cannot convert a GGUF model of architecture {architecture}, vocabulary {vocabulary}, "
            f"pre-tokenizer {splitter}; give a folder with safetensors instead"
        )
        raise ModelError(message)
    progress("writing the tokenizer")
    _write_json(folder / "config.json", config(source))
    _write_json(folder / "generation_config.json", generation_config(source))
    _write_json(folder / "tokenizer.json", tokenizer(source))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    template = source.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_weights(source, folder / "model.safetensors", progress)


def config(source: GgufFile) -> dict[str, object]:
    """The content of config.json."""
    heads = source.integer("llama.attention.head_count")
    hidden = source.integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": source.integer("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": source.integer("tokenizer.ggml.eos_token_id"),
        "head_dim": source.metadata.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.integer("llama.feed_forward_length"),
        "max_position_embeddings": source.integer("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": source.integer("llama.block_count"),
        "num_key_value_heads": source.integer("llama.attention.head_count_kv"),
        "pad_token_id": source.integer("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": source.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": source.number("llama.rope.freq_base"),
            "rope_type": "default",
        },
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "vocab_size": len(source.texts("tokenizer.ggml.tokens")),
    }


def generation_config(source: GgufFile) -> dict[str, object]:
    """The content of generation_config.json."""
    return {
        "bos_token_id": source.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.integer("tokenizer.ggml.padding_token_id"),
    }


def tokenizer(source: GgufFile) -> dict[str, object]:
    """The content of tokenizer.json: byte-level BPE.

    transformers ignores `tokenizer.ggml.pre`; the model was trained with digits split off first.
    """
    tokens = source.texts("tokenizer.ggml.tokens")
    kinds = source.integers("tokenizer.ggml.token_type")
    splitter: dict[str, object] = {**BYTE_LEVEL, "use_regex": True}
    if SPLITS_DIGITS[source.text("tokenizer.ggml.pre")]:
        digits = {"type": "Digits", "individual_digits": True}
        splitter = {"type": "Sequence", "pretokenizers": [digits, splitter]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL_TOKEN,
            }
            for number, kind in enumerate(kinds)
            if kind in {CONTROL_TOKEN, USER_TOKEN}
        ],
        "normalizer": None,
        "pre_tokenizer": splitter,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [
                merge.split(" ", maxsplit=1) for merge in source.texts("tokenizer.ggml.merges")
            ],
        },
    }


def tokenizer_config(source: GgufFile) -> dict[str, object]:
    """The content of tokenizer_config.json."""
    tokens = source.texts("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.integer("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **{
            f"{role}_token": tokens[source.integer(f"tokenizer.ggml.{key}_token_id")]
            for role, key in {
                "bos": "bos",
                "eos": "eos",
                "pad": "padding",
                "unk": "unknown",
            }.items()
        },
    }


def write_weights(source: GgufFile, path: Path, progress: Progress) -> None:
    """Writes all tensors as bfloat16; raises ModelError on a name that is not a Llama's.

    A safetensors file is a length, a JSON head with each tensor's offsets, then the tensors.
    """
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for place in source.tensors.values():
        start, end = end, end + int(np.prod(place.shape)) * BFLOAT16_BYTES
        head[hugging_face_name(place.name)] = {
            "dtype": "BF16",
            "shape": place.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for count, place in enumerate(source.tensors.values(), start=1):
            to_bfloat16(load_weight(source, place)).tofile(stream)
            if count % PROGRESS_TENSORS == 0:
                progress(f"dequantized {count} of {len(source.tensors)} tensors")


def hugging_face_name(name: str) -> str:
    """What a tensor is called in a Hugging Face Llama; raises ModelError if there is none."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight"
    message = f"the GGUF file has tensor {name}, which no Llama model has"
    raise ModelError(message)


def load_weight(source: GgufFile, place: TensorPlace) -> NDArray[np.float32]:
    """One tensor in Hugging Face's order of rows, float32."""
    tensor = load_tensor(source, place)
    if place.name.endswith(".attn_q.weight"):
        return undo_rope_order(tensor, source.integer("llama.attention.head_count"))
    if place.name.endswith(".attn_k.weight"):
        return undo_rope_order(tensor, source.integer("llama.attention.head_count_kv"))
    return tensor


def load_tensor(source: GgufFile, place: TensorPlace) -> NDArray[np.float32]:
    """One tensor, dequantized. Raises ModelError if its bytes are cut off."""
    kind = gguf.GGMLQuantizationType(place.ggml_type)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(place.shape)) // per_block * block_bytes
    raw = source.data[place.offset_bytes : place.offset_bytes + size]
    if raw.size != size:
        message = f"the GGUF file ends within tensor {place.name}"
        raise ModelError(message)
    values = np.asarray(dequantize(raw.reshape(-1, block_bytes), kind), dtype=np.float32)
    return values.reshape(place.shape)


def undo_rope_order(tensor: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of Q or K from GGUF's order (interleaved pairs) to Hugging Face's (two halves)."""
    rows, columns = tensor.shape
    pairs = tensor.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest, ties to even. Weights are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounding = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
