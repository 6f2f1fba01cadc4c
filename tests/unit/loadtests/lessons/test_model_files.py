from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.lessons.kv_memory import write_config
from loadtests.lessons.model_files import kv_bytes_per_token, positions_of, weight_bytes

LLAMA_7B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 2048,
}


def model(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_token_of_a_known_model_takes_what_is_known(tmp_path: Path) -> None:
    folder = model(tmp_path, LLAMA_7B)
    assert kv_bytes_per_token(folder, "float16") * 2048 == 2**30
    assert kv_bytes_per_token(folder, "float32") * 1024 == 2**30
    grouped = model(tmp_path, {**LLAMA_7B, "num_key_value_heads": 8, "head_dim": 128})
    assert kv_bytes_per_token(grouped, "bfloat16") * 4096 == 512 * 2**20


def test_a_model_that_reads_images_too_has_its_text_part_read(tmp_path: Path) -> None:
    folder = model(tmp_path, {"text_config": LLAMA_7B, "hidden_size": 1})
    assert kv_bytes_per_token(folder, "float16") * 2048 == 2**30
    assert positions_of(folder) == 2048


@pytest.mark.parametrize("config", [{}, [], {"max_position_embeddings": "many"}])
def test_a_config_that_does_not_say_is_a_guess_and_no_error(tmp_path: Path, config: Any) -> None:
    folder = model(tmp_path, config)
    assert (positions_of(folder), kv_bytes_per_token(folder, "bfloat16")) == (2048, 0)


def test_without_a_config_there_is_no_error_either(tmp_path: Path) -> None:
    assert (positions_of(tmp_path), kv_bytes_per_token(tmp_path, "bfloat16")) == (2048, 0)
    assert weight_bytes(tmp_path, "bfloat16") == 0


def test_weights_are_counted_in_the_engines_dtype_over_all_files(tmp_path: Path) -> None:
    for name, shape in (("a", [3, 5]), ("b", [7])):
        head = {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]},
        }
        text = json.dumps(head).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert weight_bytes(tmp_path, "bfloat16") == 44
    assert weight_bytes(tmp_path, "float32") == 88


def test_the_made_up_models_differ_in_their_kv_heads_alone(tmp_path: Path) -> None:
    for kv_heads in (16, 4, 1):
        write_config(tmp_path / str(kv_heads), kv_heads)
    each = [kv_bytes_per_token(tmp_path / name, "bfloat16") for name in ("16", "4", "1")]
    assert each == [16_384, 4096, 1024]
