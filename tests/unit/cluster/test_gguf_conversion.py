"""GGUF to safetensors, on a Llama of a few hundred bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import gguf_conversion
from cluster.errors import ModelDamagedError, ModelError
from cluster.gguf_file import read_gguf
from tests.unit.cluster import tiny_gguf


def silent(_: str) -> None:
    """Shows no progress."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    gguf_conversion.convert(read_gguf(source), made, silent)
    return made


def test_the_config_describes_the_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["head_dim"] == tiny_gguf.HIDDEN // tiny_gguf.HEADS
    assert config["rms_norm_eps"] == 0.5
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(tiny_gguf.TOKENS)


def test_an_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    arrays = tiny_gguf.tensors()
    arrays["output.weight"] = arrays["token_embd.weight"]
    source = read_gguf(tiny_gguf.write(tmp_path / "untied.gguf", arrays=arrays))
    assert gguf_conversion.config(source)["tie_word_embeddings"] is False


def test_the_tokenizer_splits_digits_and_knows_special_tokens(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]] == [
        "Digits",
        "ByteLevel",
    ]
    assert [token["content"] for token in tokenizer["added_tokens"]] == ["<|end|>"]
    assert tokenizer["model"]["merges"] == [["a", "b"]]
    named = json.loads((folder / "tokenizer_config.json").read_text())
    assert named["eos_token"] == "<|end|>"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_the_weights_are_those_of_the_file_in_bfloat16(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    arrays = tiny_gguf.tensors()
    assert len(head) == len(arrays) + 1
    start, end = head["model.layers.0.mlp.down_proj.weight"]["data_offsets"]
    stored = np.frombuffer(data[8 + length + start : 8 + length + end], dtype=np.uint16)
    expected = gguf_conversion.to_bfloat16(arrays["blk.0.ffn_down.weight"])
    assert np.array_equal(stored, expected.reshape(-1))
    assert 8 + length + max(
        item["data_offsets"][1] for key, item in head.items() if key[0] != "_"
    ) == len(data)


@given(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))
def test_bfloat16_is_the_nearest_of_its_neighbours(value: float) -> None:
    exact = np.array([value], dtype=np.float32)
    stored = gguf_conversion.to_bfloat16(exact)
    back = (stored.astype(np.uint32) << 16).view(np.float32)
    for neighbour in (stored - np.uint16(1), stored + np.uint16(1)):
        other = (neighbour.astype(np.uint32) << 16).view(np.float32)
        if np.isfinite(other[0]):
            assert abs(float(back[0]) - value) <= abs(float(other[0]) - value)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_the_rope_order_is_undone(heads: int, half: int, columns: int) -> None:
    rows = heads * half * 2
    original = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    halves = original.reshape(heads, 2, half, columns)
    interleaved = halves.swapaxes(1, 2).reshape(rows, columns)
    assert np.array_equal(gguf_conversion.undo_rope_order(interleaved, heads), original)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = {**tiny_gguf.metadata(), "general.architecture": "mamba"}
    source = read_gguf(tiny_gguf.write(tmp_path / "other.gguf", values=other))
    with pytest.raises(ModelError, match="architecture mamba"):
        gguf_conversion.convert(source, tmp_path, silent)


def test_a_tensor_that_no_llama_has_is_refused(tmp_path: Path) -> None:
    arrays = {**tiny_gguf.tensors(), "blk.0.ssm_a.weight": np.zeros((2, 2), np.float32)}
    source = read_gguf(tiny_gguf.write(tmp_path / "other.gguf", arrays=arrays))
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a\.weight"):
        gguf_conversion.convert(source, tmp_path, silent)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    values = tiny_gguf.metadata()
    del values["llama.block_count"]
    source = read_gguf(tiny_gguf.write(tmp_path / "bare.gguf", values=values))
    with pytest.raises(ModelDamagedError, match=r"llama\.block_count"):
        gguf_conversion.config(source)


@pytest.mark.parametrize("keep", [3, 30, 200, 500])
def test_a_cut_off_head_is_damage(source: Path, keep: int) -> None:
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(ModelDamagedError):
        read_gguf(source)


def test_cut_off_weights_are_damage(source: Path, tmp_path: Path) -> None:
    source.write_bytes(source.read_bytes()[:-64])
    with pytest.raises(ModelError, match="ends within tensor"):
        gguf_conversion.convert(read_gguf(source), tmp_path, silent)


def test_another_file_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(ModelDamagedError, match="not GGUF"):
        read_gguf(path)
