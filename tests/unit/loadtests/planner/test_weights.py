from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from loadtests.planner.shape import UnknownShape, shape_of
from loadtests.planner.weights import parameters, weights_of
from tests.unit.loadtests.planner.examples import GEMMA_3_270M, LLAMA_7B, LLAMA_13B, SMOLLM2

QWEN2_7B = {
    **LLAMA_7B,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
MISTRAL_7B = {
    **LLAMA_7B,
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MIXTRAL = {
    **MISTRAL_7B,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_7B, 6_738_415_616),
        (LLAMA_13B, 13_015_864_320),
        (SMOLLM2, 134_515_008),
        (QWEN2_7B, 7_615_616_512),
        (MISTRAL_7B, 7_241_732_096),
        (MIXTRAL, 46_702_792_704),
    ],
)
def test_parameters_are_those_that_the_models_have(config: dict[str, Any], published: int) -> None:
    assert parameters(config, shape_of(config)) == published


def test_a_model_that_is_not_known_is_not_counted() -> None:
    with pytest.raises(UnknownShape, match="gemma3_text"):
        parameters(GEMMA_3_270M, shape_of(GEMMA_3_270M))
    lacking = {key: value for key, value in LLAMA_7B.items() if key != "vocab_size"}
    with pytest.raises(UnknownShape, match="vocab_size"):
        parameters(lacking, shape_of(lacking))


def safetensors(path: Path, tensors: dict[str, Any]) -> None:
    head = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head)


def tensor(kind: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [8, 8 + size]}


def test_heads_of_files_tell_the_size_in_the_type_that_is_served(tmp_path: Path) -> None:
    tensors = {"a": tensor("F32", [10, 20], 800), "__metadata__": {"format": "pt"}}
    safetensors(tmp_path / "model.safetensors", tensors)
    found = weights_of(tmp_path, LLAMA_7B, shape_of(LLAMA_7B), "bfloat16")
    assert found.size_bytes == 400
    assert "1 safetensors" in found.how


def test_quantised_tensors_keep_their_size(tmp_path: Path) -> None:
    tensors = {"a": tensor("I32", [10, 20], 800), "scale": tensor("F32", [4], 16)}
    safetensors(tmp_path / "model.safetensors", tensors)
    assert weights_of(tmp_path, LLAMA_7B, shape_of(LLAMA_7B), "bfloat16").size_bytes == 816


def test_an_index_whose_files_are_elsewhere_tells_the_size(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 1000}, "weight_map": {"a": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = shape_of(LLAMA_7B)
    assert weights_of(tmp_path, LLAMA_7B, shape, "float16").size_bytes == 1000
    assert weights_of(tmp_path, LLAMA_7B, shape, "float32").size_bytes == 2000
    safetensors(tmp_path / "1.safetensors", {"a": tensor("F16", [7], 14)})
    safetensors(tmp_path / "other.safetensors", {"a": tensor("F16", [900], 1800)})
    assert weights_of(tmp_path, LLAMA_7B, shape, "float16").size_bytes == 14


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[1]x"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnknownShape, match=r"model\.safetensors"):
        weights_of(tmp_path, LLAMA_7B, shape_of(LLAMA_7B), "float16")


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UnknownShape, match="no index"):
        weights_of(tmp_path, LLAMA_7B, shape_of(LLAMA_7B), "float16")


def test_quantised_weights_without_files_are_not_counted() -> None:
    config = {**LLAMA_7B, "quantization_config": {"bits": 4}}
    with pytest.raises(UnknownShape, match="quantised"):
        weights_of(None, config, shape_of(config), "float16")
    assert weights_of(None, LLAMA_7B, shape_of(LLAMA_7B), "float16").size_bytes == 13_476_831_232
