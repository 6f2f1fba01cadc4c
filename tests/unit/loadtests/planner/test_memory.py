"""Known values: each is written out, so that a wrong formula cannot agree with itself."""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.planner.memory import Device, KvLayout
from loadtests.planner.shape import UnknownShape, shape_of
from loadtests.planner.sizes import GB, GIB, parse_size
from tests.unit.loadtests.planner.examples import (
    GEMMA_3_270M,
    LLAMA_3_8B,
    LLAMA_7B,
    LLAMA_13B,
    SMOLLM2,
)

MIB = 1 << 20


def layout(config: dict[str, Any], dtype: str = "float16", **more: Any) -> KvLayout:
    return KvLayout(shape_of(config), dtype, **more)


def test_32_layers_of_8_kv_heads_keep_4096_tokens_in_512_mib() -> None:
    assert layout(LLAMA_3_8B, "bfloat16").sequence_bytes(4096) == 512 * MIB


def test_llama_7b_keeps_2048_tokens_in_1_gib_so_80_gb_hold_about_75() -> None:
    found = layout(LLAMA_7B)
    assert found.sequence_bytes(2048) == GIB
    assert pytest.approx(74.5, abs=0.01) == 80 * GB / GIB
    assert found.sequences(80 * GB, 2048) == 74  # whole ones
    assert found.sequences(80 * GIB, 2048) == 80


def test_llama_13b_keeps_4096_tokens_in_3_125_gib_so_44_gb_hold_13_and_64_need_5_gpus() -> None:
    found = layout(LLAMA_13B)
    assert found.sequence_bytes(4096) == 3.125 * GIB
    assert found.sequences(44 * GB, 4096) == 13
    assert found.sequences(44 * GIB, 4096) == 14  # so the figure is true in GB alone
    assert -(-64 // found.sequences(44 * GB, 4096)) == 5


def test_with_four_query_heads_a_kv_head_a_quarter_is_kept_and_52_fit() -> None:
    grouped = layout({**LLAMA_13B, "num_key_value_heads": 10})
    assert grouped.sequence_bytes(4096) == 0.78125 * GIB
    assert grouped.sequences(44 * GB, 4096) == 52


def test_the_bundled_model_takes_what_its_engine_reports() -> None:
    found = layout(SMOLLM2, "bfloat16", block_tokens=32)
    assert (found.token_bytes, found.block_bytes) == (23_040, 737_280)


def test_fp8_halves_what_16_bits_keep() -> None:
    assert layout(LLAMA_7B, kv_dtype="fp8").sequence_bytes(2048) == GIB // 2
    assert layout(LLAMA_7B, "float32").sequence_bytes(2048) == 2 * GIB


def test_a_sequence_takes_whole_blocks() -> None:
    found = layout(LLAMA_7B, block_tokens=16)
    assert found.sequence_bytes(17) == found.sequence_bytes(32) == 2 * found.block_bytes
    assert found.exact_bytes(17) == 17 * found.token_bytes
    # Three blocks and a half hold one sequence of two blocks, and no half one.
    assert found.sequences(found.block_bytes * 7 // 2, 17) == 1


def test_ranks_share_kv_heads_until_each_has_one_and_more_ranks_save_nothing() -> None:
    sizes = [
        layout(LLAMA_3_8B, tensor_parallel=ranks).sequence_bytes(4096) for ranks in (1, 2, 8, 16)
    ]
    assert sizes == [512 * MIB, 256 * MIB, 64 * MIB, 64 * MIB]
    assert layout(LLAMA_3_8B, tensor_parallel=16).copies == 2


@pytest.mark.parametrize(
    ("config", "ranks", "named"),
    [
        (LLAMA_7B, 3, "heads cannot be split"),
        ({**LLAMA_13B, "num_key_value_heads": 10}, 4, "neither be split nor copied"),
    ],
)
def test_what_cannot_be_split_is_refused(config: dict[str, Any], ranks: int, named: str) -> None:
    with pytest.raises(UnknownShape, match=named):
        layout(config, tensor_parallel=ranks)


def test_an_unknown_type_of_number_is_refused() -> None:
    with pytest.raises(UnknownShape, match="int3"):
        layout(LLAMA_7B, kv_dtype="int3")


def test_a_sliding_layer_keeps_its_window_and_a_block_more() -> None:
    found = layout(GEMMA_3_270M, "bfloat16", block_tokens=32)
    a_layer = 2 * 1 * 256 * 2
    assert found.layer_token_bytes == a_layer
    # 15 of 18 layers keep 512 tokens in 17 blocks, 3 keep all 128 blocks.
    assert found.sequence_bytes(4096) == (15 * 17 + 3 * 128) * 32 * a_layer
    assert found.exact_bytes(4096) == (15 * 512 + 3 * 4096) * a_layer
    assert found.sequence_bytes(100) == 18 * 4 * 32 * a_layer  # nothing slides yet
    assert found.sequences(10 * found.sequence_bytes(4096) - 1, 4096) == 9


def test_weights_and_reserve_come_off_before_kv() -> None:
    device = Device(parse_size("80GB"), 0.9, parse_size("16GB"), parse_size("2GB"))
    assert device.kv_bytes == 54 * GB
    assert Device(parse_size("8GB"), 0.9, parse_size("16GB"), 0).kv_bytes < 0
