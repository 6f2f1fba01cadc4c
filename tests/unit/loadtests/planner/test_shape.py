from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtests.planner.shape import UnknownShape, read_config, shape_of
from tests.unit.loadtests.planner.examples import GEMMA_3_270M, LLAMA_3_8B, LLAMA_7B, SMOLLM2


def test_heads_and_their_size_are_read_or_derived() -> None:
    shape = shape_of(LLAMA_3_8B)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 32, 8, 128)
    assert (shape.attention, shape.dtype, shape.context_tokens_max) == ("GQA", "bfloat16", 8192)
    assert shape_of(SMOLLM2).head_dim == 64


def test_a_config_without_kv_heads_is_taken_as_mha_and_says_so() -> None:
    shape = shape_of(LLAMA_7B)
    assert (shape.kv_heads, shape.attention) == (32, "MHA")
    assert "one for each head" in shape.notes[0]


@pytest.mark.parametrize(
    ("config", "kv_heads", "attention"),
    [
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 71}, 1, "MQA"),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8}, 8, "GQA"),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1, "MQA"),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": 4}}, 4, "GQA"),
        ({"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2}, 2,
         "GQA"),
    ],
)  # fmt: skip
def test_other_names_of_kv_heads_are_known(
    config: dict[str, Any], kv_heads: int, attention: str
) -> None:
    shape = shape_of({"n_head": 64, "n_layer": 2, "n_embd": 4096, **config})
    assert (shape.kv_heads, shape.attention, shape.head_dim) == (kv_heads, attention, 64)


def test_sliding_layers_are_those_of_layer_types() -> None:
    windows = shape_of(GEMMA_3_270M).windows
    assert windows == (*[512] * 5, None) * 3


def test_without_layer_types_the_model_type_tells_which_layers_slide() -> None:
    gemma = {key: value for key, value in GEMMA_3_270M.items() if key != "layer_types"}
    assert shape_of(gemma).windows == shape_of(GEMMA_3_270M).windows
    mistral = {**LLAMA_7B, "model_type": "mistral", "sliding_window": 1024}
    assert shape_of(mistral).windows == (1024,) * 32
    qwen = {**LLAMA_7B, "model_type": "qwen2", "sliding_window": 1024, "max_window_layers": 28}
    assert shape_of(qwen).windows == (None,) * 32
    assert shape_of({**qwen, "use_sliding_window": True}).windows == (None,) * 28 + (1024,) * 4


def test_a_model_of_several_media_has_its_language_part_looked_at() -> None:
    inner = {key: value for key, value in LLAMA_3_8B.items() if key != "torch_dtype"}
    shape = shape_of({"model_type": "llava", "torch_dtype": "float16", "text_config": inner})
    assert (shape.model_type, shape.kv_heads, shape.dtype) == ("llama", 8, "float16")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"\(MLA\)"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "Mamba"),
        ({"model_type": "mamba", "state_size": 16}, "state-space"),
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, "linear_attention"),
        ({"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({"layer_types": ["full_attention"] * 3}, "3 entries"),
        ({"layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
        ({"model_type": "unheard", "sliding_window": 512}, "in which layers"),
        ({"num_kv_shared_layers": 10}, "share the keys"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"num_key_value_heads": [8, 4]}, "not one for all"),
        ({"num_key_value_heads": 5}, "cannot be shared out"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"num_hidden_layers": "many"}, "not a number"),
        ({"hidden_size": 4097}, "no multiple"),
        ({"head_dim": "big"}, "not a number"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownShape, match=named):
        shape_of({**LLAMA_7B, **more})


def test_a_config_of_no_language_model_says_so() -> None:
    with pytest.raises(UnknownShape, match="of a language model"):
        shape_of({"hello": 1})


@pytest.mark.parametrize(("text", "named"), [("[1]", "no object"), ("{", "not JSON")])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownShape, match=named):
        read_config(tmp_path)
    with pytest.raises(UnknownShape, match="cannot be read"):
        read_config(tmp_path / "other.json")
