"""A model's shape, as far as its KV cache depends on it, from the config.json of its folder.

Called by the plan command, cluster/model_store.py (size of a token) and tests. Must not: guess. A
config with a kind of attention or state that is not known here is refused by name (UnknownShape),
because a wrong figure is worse than none.

Layers that slide see only the last `window` tokens, and keep no older ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "fp8": 1,
        "fp8_e4m3": 1,
        "fp8_e5m2": 1,
    }
)
LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads")
HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model")
# A key of the config, and what it says of the model: other memory than keys and values of heads.
FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "kv_lora_rank": "multi-head latent attention (MLA), which keeps latent vectors",
        "mamba_d_state": "Mamba layers, which keep a state of fixed size",
        "mamba_d_conv": "Mamba layers, which keep a state of fixed size",
        "ssm_cfg": "a state-space model, which keeps a state of fixed size",
        "ssm_state_size": "state-space layers, which keep a state of fixed size",
        "state_size": "a state-space model, which keeps a state of fixed size",
        "linear_num_key_heads": "linear attention layers, which keep a state of fixed size",
        "attn_type_list": "linear attention layers, which keep a state of fixed size",
        "lru_width": "recurrent layers, which keep a state of fixed size",
        "block_types": "recurrent layers, which keep a state of fixed size",
        "layers_block_type": "layers of several kinds",
        "hybrid_override_pattern": "layers of several kinds",
        "attention_hidden_size": "RWKV, which keeps a state of fixed size",
        "block_configs": "another number of heads in each layer",
        "num_kv_shared_layers": "layers that share the keys and values of others",
        "global_head_dim": "two head sizes, by kind of layer",
        "num_global_key_value_heads": "two numbers of KV heads, by kind of layer",
        "attention_chunk_size": "chunked attention",
        "cross_attention_layers": "cross-attention layers",
        "index_topk": "sparse attention with an index of its own",
    }
)
# Without layer_types: each how many-th layer is full in these kinds of model, by model_type.
FULL_EVERY: Mapping[str, int] = MappingProxyType({"gemma2": 2, "gemma3_text": 6, "cohere2": 4})
SLIDE_IN_ALL = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
NEVER_SLIDE_UNLESS_TOLD = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})


class UnknownShape(ValueError):  # its base says Error
    """The config does not tell the size of the KV cache, or not in terms that are known here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token keeps: `windows` has an entry a layer, None where it looks at all tokens.

    notes: what was taken for granted.
    """

    model_type: str
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    context_tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """All of them."""
        return len(self.windows)

    @property
    def attention(self) -> str:
        """MHA, GQA or MQA."""
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"


def read_config(path: Path) -> dict[str, Any]:
    """The JSON of config.json, from its folder or the file. Raises UnknownShape."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as gone:
        raise UnknownShape(f"{file} cannot be read: {gone.strerror}") from gone
    except ValueError as odd:
        raise UnknownShape(f"{file} is not JSON: {odd}") from odd
    if not isinstance(found, dict):
        raise UnknownShape(f"{file} is not a model's config: it holds no object")
    return found


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Raises UnknownShape, naming what is missing or not understood."""
    text = text_part(config)
    kind = str(text.get("model_type") or config.get("model_type") or "?")
    _refuse_foreign(text, kind)
    layers, heads = _count(text, LAYER_NAMES), _count(text, HEAD_NAMES)
    kv_heads, notes = _kv_heads(text, kind, heads)
    if heads % kv_heads:
        raise UnknownShape(f"{heads} heads cannot be shared out to {kv_heads} KV heads")
    return Shape(
        kind,
        _windows(text, kind, layers),
        heads,
        kv_heads,
        _head_dim(text, heads),
        dtype_of(config),
        _whole(text.get("max_position_embeddings")),
        notes,
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Models of several media keep the language model's values apart."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _refuse_foreign(text: Mapping[str, Any], kind: str) -> None:
    if text.get("is_encoder_decoder"):
        raise UnknownShape(f"{kind} has an encoder and cross-attention, which is not understood")
    for key, what in FOREIGN.items():
        if text.get(key):
            raise UnknownShape(f"{kind} has {what} ({key}): its KV memory is not understood here")
    head_dim, value_dim = text.get("head_dim"), text.get("v_head_dim")
    if value_dim is not None and value_dim != head_dim:
        raise UnknownShape(f"{kind} has values of another size than keys (v_head_dim)")


def _kv_heads(text: Mapping[str, Any], kind: str, heads: int) -> tuple[int, tuple[str, ...]]:
    told = text.get("num_key_value_heads")
    if kind == "falcon":  # num_kv_heads counts in the newer decoder alone
        if text.get("new_decoder_architecture"):
            told = text.get("num_kv_heads", heads)
        else:
            told = 1 if text.get("multi_query", True) else heads
    elif told is None and isinstance(text.get("attn_config"), dict):
        told = text["attn_config"].get("kv_n_heads")
    elif told is None and text.get("multi_query_attention"):
        told = text.get("multi_query_group_num")
    elif told is None and text.get("multi_query"):
        told = 1
    elif told is None:
        told = text.get("num_kv_heads")
    if told is None:
        return heads, ("the config names no KV heads: one for each head (MHA) is taken",)
    if _whole(told) is None:
        raise UnknownShape(f"{kind} names {told!r} as its number of KV heads, not one for all")
    return int(told), ()


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    told = text.get("head_dim") or text.get("kv_channels")
    if told is None:
        hidden = _count(text, HIDDEN_NAMES)
        if hidden % heads:
            raise UnknownShape(f"no head_dim, and hidden size {hidden} is no multiple of {heads}")
        return hidden // heads
    if _whole(told) is None:
        raise UnknownShape(f"head_dim is {told!r}, not a number")
    return int(told)


def _windows(text: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window = _whole(text.get("sliding_window"))
    types = text.get("layer_types")
    if isinstance(types, list):
        odd = sorted({str(one) for one in types} - {FULL, SLIDING})
        if odd:
            raise UnknownShape(f"{kind} has layers of kind {', '.join(odd)}: not understood here")
        if len(types) != layers:
            raise UnknownShape(f"layer_types has {len(types)} entries, the model {layers} layers")
        if SLIDING in types and window is None:
            raise UnknownShape(f"{kind} has sliding layers, and names no sliding_window")
        return tuple(window if one == SLIDING else None for one in types)
    asked = text.get("use_sliding_window", kind not in NEVER_SLIDE_UNLESS_TOLD)
    if window is None or not asked:
        return (None,) * layers
    every = _whole(text.get("sliding_window_pattern")) or FULL_EVERY.get(kind)
    if every is not None:
        return tuple(None if (n + 1) % every == 0 else window for n in range(layers))
    full = _whole(text.get("max_window_layers"))
    if kind in NEVER_SLIDE_UNLESS_TOLD and full is not None:
        return tuple(None if n < full else window for n in range(layers))
    if kind in SLIDE_IN_ALL:
        return (window,) * layers
    raise UnknownShape(f"{kind} has a sliding window, and its config does not say in which layers")


def dtype_of(config: Mapping[str, Any]) -> str:
    """The weights' own type; float32 where none is named, as transformers has it."""
    for part in (text_part(config), config):
        told = part.get("dtype") or part.get("torch_dtype")
        if told:
            return str(told).removeprefix("torch.")
    return "float32"


def _count(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if name in text:
            found = _whole(text[name])
            if found is None:
                raise UnknownShape(f"{name} is {text[name]!r}, not a number above 0")
            return found
    raise UnknownShape(f"the config has no {names[0]}: is it the config.json of a language model?")


def _whole(value: object) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return int(str(value)) if is_number and int(str(value)) > 0 else None
