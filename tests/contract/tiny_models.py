"""Small models with random weights, made on the spot: kinds of KV cache, not of language.

Called by tests of what the bundled model is not: several ranks, sliding windows, other caches; and
by tests in which equality matters and text does not: a small model with random weights gives
another answer when one block of its prompt is another, which the bundled model often does not. The
tokenizer is the bundled model's, since engines want one.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

KV_HEADS = 4
HEAD = 32
LAYERS = 3
VOCABULARY = 49152  # of the tokenizer
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": KV_HEADS * HEAD,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    # Large enough that different prompts have different answers.
    "initializer_range": 0.2,
}

SMALL_BLOCK_BYTES = 4 * 32 * LAYERS * 2 * KV_HEADS * HEAD  # 32 tokens in float32

# The same with the bundled model's size of a block, so that transfers take their time, while a
# token costs a fourteenth.
LARGE_BLOCKS: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
LARGE_BLOCK_NUMBERS = 32 * LAYERS * 2 * 32 * 64  # of 32 tokens: keys and values of each layer


def make_model(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a model of a transformers family such as "Llama" or "Gemma3". Returns its folder."""
    import torch
    import transformers

    torch.manual_seed(7)
    # Where a family reads images too, the part that reads text has a configuration of its own.
    family = next(name for name in (f"{kind}TextConfig", f"{kind}Config") if _has(name))
    path = folder / kind.lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, family)(**{**SMALL, **changes})
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(os.environ["HEADWATER_TEST_MODEL"]) / name, path)
    return path


def _has(name: str) -> bool:
    import transformers

    return hasattr(transformers, name)
