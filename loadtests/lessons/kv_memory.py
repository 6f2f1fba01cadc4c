"""Lesson: how much memory the keys and values of a token take, by formula and by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from loadtests import plots as style
from loadtests.lessons.figures import memory, percent, times
from loadtests.lessons.lesson import Bench, Data, Table
from loadtests.lessons.records import EngineFacts

NAME = "kv_memory"
TITLE = "KV memory: the formula and the engine"
QUESTION = "How much memory does a token's KV cache take, and how much do fewer KV heads save?"
TERMS = ("KV cache", "MHA, GQA, MQA", "block", "context", "GB and GiB")
EXPLANATION = """
In each layer, attention keeps a key and a value of every KV head for every token. So a token takes
2 · layers · KV heads · head size · bytes of a number. The engine knows nothing of this sum: it
allocates tensors for a number of blocks, and their sizes are read here.

Then three models that are alike but for their KV heads: one for each query head (MHA), one for
four of them (GQA), one for all (MQA). Their weights are random, since memory does not depend on
what a model says. Each gets the same bytes for its KV cache; the engine tells how many tokens fit.
"""
CACHE_BYTES = 32 << 20
HEADS, HEAD_SIZE, LAYERS = 16, 64, 4
KINDS = {"MHA": 16, "GQA": 4, "MQA": 1}  # KV heads
CONTEXT = 2048
EXACT = 1e-9


def measure(bench: Bench) -> Data:
    """The served model; then three made-up ones of the same cache size."""
    bench.say(f"the KV cache of {bench.model.name}")
    models = [_told(bench.model.name, bench.engine().facts())]
    for kind, kv_heads in KINDS.items():
        bench.say(f"a model with {kv_heads} KV heads for {HEADS} query heads ({kind})")
        folder = bench.scratch / kind
        write_config(folder, kv_heads)
        engine = bench.engine(
            model=str(folder),
            random_weights=True,
            kv_cache_bytes=CACHE_BYTES,
            max_model_len=CONTEXT // 2,
            max_num_batched_tokens=CONTEXT // 2,
        )
        models.append(_told(kind, engine.facts()))
        bench.end(engine)
    return {
        "n": {"engines": len(models)},
        "conditions": {
            "bytes for the cache of each made-up model": f"{CACHE_BYTES >> 20} MiB",
            "made-up models": f"{LAYERS} layers, {HEADS} query heads of {HEAD_SIZE}",
        },
        "models": models,
    }


def write_config(folder: Path, kv_heads: int) -> None:
    """A Llama's config.json, without weights or a tokenizer. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 32_000,
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 2 * HEADS * HEAD_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _told(name: str, facts: EngineFacts) -> dict[str, Any]:
    return {
        "name": name,
        "layers": facts.layers,
        "query_heads": facts.query_heads,
        "kv_heads": facts.kv_heads,
        "head_size": facts.head_size,
        "element_bytes": facts.kv_element_bytes,
        "block_tokens": facts.block_size,
        "blocks": facts.blocks,
        "cache_bytes": facts.cache_bytes,
    }


def formula_bytes(model: dict[str, Any]) -> int:
    """Bytes of one token's keys and values."""
    found: int = (
        2 * model["layers"] * model["kv_heads"] * model["head_size"] * model["element_bytes"]
    )
    return found


def engine_bytes(model: dict[str, Any]) -> float:
    """The same from the engine's tensors and blocks."""
    return float(model["cache_bytes"] / model["blocks"] / model["block_tokens"])


def fitting_tokens(model: dict[str, Any]) -> int:
    """Tokens that the engine's blocks hold, without vLLM's null block."""
    return int((model["blocks"] - 1) * model["block_tokens"])


def reading(data: Data) -> tuple[str, str]:
    """The formula against the engine; KV heads against room."""
    served, *made_up = data["models"]
    formula, engine = formula_bytes(served), engine_bytes(served)
    block = engine * served["block_tokens"]
    sizes = (
        f"2 · {served['layers']} layers · {served['kv_heads']} KV heads · {served['head_size']} · "
        f"{served['element_bytes']} bytes = {formula:,} bytes a token"
    )
    if abs(engine / formula - 1) < EXACT:
        agrees = "the engine's own tensors have exactly that"
    else:
        agrees = f"the engine's tensors have {engine:,.0f}, {percent(engine / formula - 1)} more"
    first = (
        f"{served['name']}: {sizes}, and {agrees}, {block:,.0f} bytes a block of "
        f"{served['block_tokens']} tokens ({memory(block)}); a "
        f"context of {CONTEXT:,} tokens takes {memory(engine * CONTEXT)}."
    )
    most, *fewer = made_up
    room = fitting_tokens(most)
    told = ", ".join(
        f"{times(fitting_tokens(model) / room)} as many with {model['kv_heads']} ({model['name']})"
        for model in fewer
    )
    begins = (
        f"In {most['cache_bytes'] / 2**20:.3g} MiB a model of {most['query_heads']} query heads "
        f"keeps {room:,} tokens with {most['kv_heads']} KV heads ({most['name']})"
    )
    if all(fitting_tokens(model) > room for model in fewer):
        second = f"{begins}, and {told}."
    else:
        second = f"Effect not seen: {begins}, and {told}, so fewer KV heads brought no room."
    return first, second


def plots(data: Data) -> list[Figure]:
    """Bytes a token by formula and engine; tokens that fit."""
    models = data["models"]
    names = [f"{m['name']} ({m['kv_heads']} KV)" for m in models]
    sizes, axes = style.figure("One token's keys and values", "", "KiB")
    style.bars(
        axes,
        names,
        {
            "formula": [formula_bytes(model) / 1024 for model in models],
            "engine's tensors": [engine_bytes(model) / 1024 for model in models],
        },
    )
    axes.tick_params(axis="x", labelsize=7)
    style.legend(axes)
    fits, axes = style.figure(f"Tokens in {CACHE_BYTES >> 20} MiB", "", "tokens")
    style.bars(axes, names[1:], {"fit": [float(fitting_tokens(m)) for m in models[1:]]})
    return [sizes, fits]


def tables(data: Data) -> list[Table]:
    """All figures that the engine gave."""
    rows = tuple(
        (
            model["name"],
            str(model["layers"]),
            f"{model['query_heads']} / {model['kv_heads']}",
            f"{formula_bytes(model):,}",
            f"{engine_bytes(model):,.0f}",
            f"{model['blocks']:,}",
            f"{model['cache_bytes'] / 2**20:,.1f} MiB ({model['cache_bytes'] / 1e6:,.1f} MB)",
        )
        for model in data["models"]
    )
    head = (
        *("model", "layers", "query / KV heads", "bytes a token, formula"),
        *("bytes a token, engine", "blocks", "KV cache"),
    )
    return [Table("As the engines tell it", head, rows)]
