"""The work of a model's tokens, from the heads of its files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from deployments.workers.model_work import ModelWorkUnknown, model_work
from deployments.workers.step_totals import StepTotals

LLAMA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 64,
}
EMBEDDING, MATRIX, NORM = [1000, 64], [64, 64], [64]


def model(folder: Path, config: dict[str, Any], *files: dict[str, list[int]]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for number, tensors in enumerate(files):
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        head |= {
            name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
            for name, shape in tensors.items()
        }
        raw = json.dumps(head).encode()
        data = struct.pack("<Q", len(raw)) + raw
        (folder / f"model-{number}.safetensors").write_bytes(data)
    return folder


def test_with_tied_embeddings_the_input_table_is_the_output_layer(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.layers.0.q_proj.weight": MATRIX}
    found = model_work(model(tmp_path, LLAMA, tensors, {"model.norm.weight": NORM}), "bfloat16")
    assert found.layer_weights == 64 * 64 + 64
    assert found.output_weights == 64_000
    assert found.read_weights == 64 * 64 + 64 + 64_000
    assert found.attention_width == 3 * 64
    assert found.kv_bytes_token == 2 * 3 * 2 * 16 * 2


def test_an_output_layer_of_its_own_is_read_and_the_input_table_is_not(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": EMBEDDING,
        "lm_head.weight": EMBEDDING,
        "model.layers.0.q_proj.weight": MATRIX,
    }
    found = model_work(model(tmp_path, LLAMA, tensors), "float32")
    assert (found.layer_weights, found.output_weights) == (4096, 64_000)
    assert found.read_weights == 4096 + 64_000
    assert found.weight_bytes == 4


def test_of_experts_a_token_uses_some_and_a_step_reads_all(tmp_path: Path) -> None:
    config = {**LLAMA, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    experts = {f"model.layers.0.mlp.experts.{n}.w1.weight": MATRIX for n in range(8)}
    tensors = {"model.embed_tokens.weight": EMBEDDING, **experts}
    found = model_work(model(tmp_path, {"text_config": config}, tensors), "bfloat16")
    assert found.layer_weights == 2 * 4096
    assert found.read_weights == 8 * 4096 + 64_000
    assert found.attention_width == 3 * 4 * 8


def test_a_prompt_in_two_chunks_needs_the_flop_of_one_and_reads_the_weights_twice(
    tmp_path: Path,
) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.layers.0.q_proj.weight": MATRIX}
    work = model_work(model(tmp_path, LLAMA, tensors), "bfloat16")
    whole, chunks = StepTotals(), StepTotals()
    whole.add(100, 1, 100 * 50.0, 100, took_s=1.0)
    chunks.add(50, 1, 50 * 25.0, 50, took_s=1.0)
    chunks.add(50, 1, 50 * 75.0, 100, took_s=1.0)
    # The output layer is computed for a chunk's last position too.
    assert work.flop(chunks) == work.flop(whole) + 2 * work.output_weights
    more = work.read_weights * 2 + 50 * work.kv_bytes_token
    assert work.memory_bytes(chunks) == work.memory_bytes(whole) + more


@pytest.mark.parametrize(
    ("config", "data", "words"),
    [
        ({}, b"", "num_attention_heads"),
        ({**LLAMA, "num_attention_heads": "x"}, b"", "config.json"),
        (LLAMA, None, "no safetensors"),
        (LLAMA, b"", "model.safetensors is no"),
        (LLAMA, struct.pack("<Q", 1 << 60), "model.safetensors is no"),
        (LLAMA, struct.pack("<Q", 4) + b"{not", "model.safetensors is no"),
    ],
)
def test_what_files_do_not_tell_is_said(
    tmp_path: Path, config: dict[str, Any], data: bytes | None, words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if data is not None:
        (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelWorkUnknown, match=words):
        model_work(tmp_path, "bfloat16")


def test_a_type_that_is_not_served_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelWorkUnknown, match="int8"):
        model_work(model(tmp_path, LLAMA, {"model.norm.weight": NORM}), "int8")
