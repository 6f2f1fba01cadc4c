from __future__ import annotations

import re
from typing import Any

from loadtests.planner import textbook
from loadtests.planner.memory import Device, KvLayout
from loadtests.planner.memory_plan import MemoryAsked, default_contexts, fits, lines_of
from loadtests.planner.shape import shape_of
from loadtests.planner.sizes import GB, GIB
from loadtests.planner.weights import Weights
from tests.unit.loadtests.planner.examples import GEMMA_3_270M, LLAMA_3_8B, LLAMA_7B, LLAMA_13B

# A size in bytes has a unit; B alone is of single numbers and tokens.
BARE_GIGA = re.compile(r"[0-9] ?G\b")


def asked(config: dict[str, Any], *contexts: int, **more: Any) -> MemoryAsked:
    layout = KvLayout(
        shape_of(config), "float16", tensor_parallel=more.pop("ranks", 1), block_tokens=16
    )
    return MemoryAsked(layout, contexts, **more)


def text(plan: MemoryAsked) -> str:
    return "\n".join(lines_of(plan))


def test_each_step_has_its_numbers_and_both_units() -> None:
    plan = asked(LLAMA_13B, 4096, kv_bytes=44 * GB, concurrent=64)
    told = text(plan)
    assert "2 (key, value) × 40 layers × 40 KV heads × 128 × 2 B (float16) = 819,200 B" in told
    assert "3.125 GiB (3.355 GB)" in told
    assert "fit: 13 (44 GB = 40.98 GiB: 13.11)" in told
    assert "64 at once: ceil(64 / 13) = 5 devices" in told
    assert not BARE_GIGA.search(told)


def test_the_texts_that_halve_llama_7b_are_contradicted_where_it_is_planned() -> None:
    told = text(asked(LLAMA_7B, 1024, 2048, kv_bytes=80 * GB))
    assert told.count("contradict their own formula, which gives 1 GiB, 2 times as much") == 1
    assert "74.5 requests in 80 GB (80 in 80 GiB)" in told
    assert "contradict" not in text(asked(LLAMA_3_8B, 2048))


def test_examples_name_the_unit_in_which_each_figure_is_true() -> None:
    told = "\n".join(textbook.examples())
    assert "512 MiB" in told
    assert "75 is true in GB (as 74.5; 74 whole ones)" in told
    assert "13 is true in GB" in told
    assert "64 at once, whole sequences a GPU: 5 with 44 GB" in told
    assert "52 is true in GB" in told
    assert "40 ms TPOT = 25 tokens/s" in told


def test_a_claim_that_no_unit_makes_true_is_said_to_be_wrong() -> None:
    claim = textbook.Claim(textbook.LLAMA_7B, 2048, 80, 150)
    assert "150 is true in neither" in claim.line()


def test_a_device_is_shown_less_weights_and_reserve() -> None:
    device = Device(80 * GB, 0.9, 16 * GB, 2 * GB)
    plan = asked(LLAMA_3_8B, 8192, device=device, weights=Weights(16 * GB, "as given"))
    told = text(plan)
    assert "74.51 GiB (80 GB) × 0.9" in told
    assert "= 50.29 GiB (54 GB)" in told
    (fit,) = fits(plan)
    assert (fit.sequences, fit.devices) == (54 * GB // GIB, None)


def test_a_model_that_does_not_fit_is_said_not_to() -> None:
    plan = asked(LLAMA_3_8B, 8192, device=Device(8 * GB, 0.9, 16 * GB, 2 * GB), concurrent=4)
    assert "THE MODEL DOES NOT FIT" in text(plan)
    assert [fit.sequences for fit in fits(plan)] == [0]
    assert "4 at once: none fits" in text(plan)


def test_ranks_count_as_devices_and_copies_of_kv_heads_are_told() -> None:
    plan = asked(LLAMA_3_8B, 4096, ranks=16, kv_bytes=GIB, concurrent=32)
    (fit,) = fits(plan)
    assert (fit.sequences, fit.devices) == (16, 32)
    assert "each is kept 2 times" in text(plan)


def test_windows_are_told() -> None:
    told = text(asked(GEMMA_3_270M, 4096))
    assert "15 of 18 layers slide: they keep the last 512 tokens" in told


def test_lengths_that_nobody_named_end_at_the_models_own() -> None:
    assert default_contexts(shape_of(LLAMA_7B)) == (1024, 2048)
    short = {**LLAMA_7B, "max_position_embeddings": 512}
    assert default_contexts(shape_of(short)) == (512,)
    assert default_contexts(shape_of(GEMMA_3_270M))[-1] == 8192
