"""What auto becomes on which nodes, and what is said of a configured value that is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.auto_values import Resolved, has_auto, in_words, resolve
from cluster.config import MIB, Config, EngineConfig, ModelConfig
from cluster.errors import ConfigError
from cluster.kv_room import check_kv_room
from cluster.machine_limits import Memory
from cluster.model_store import BUNDLED_FIGURES, ModelFigures
from cluster.node_facts import NodeFacts
from tests.fakes.nodes import FAST, SLOW

GPU = replace(SLOW, has_gpu=True)


def config(**sections: object) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [
        ([FAST], "bfloat16"),
        ([SLOW], "float32"),
        ([FAST, SLOW], "float32"),
    ],
)
def test_dtype_auto_suits_every_node(nodes: list[NodeFacts], dtype: str) -> None:
    found = resolve(config(), nodes, BUNDLED_FIGURES)
    assert found.config.model.dtype == found.choices["model.dtype"].value == dtype
    assert found.warnings == ()
    assert ("slow" in found.choices["model.dtype"].why) == (SLOW in nodes)


@pytest.mark.parametrize(
    ("own", "dtype"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("fp8", "bfloat16")]
)
def test_dtype_auto_on_gpus_is_the_checkpoints(own: str, dtype: str) -> None:
    found = resolve(config(), [GPU], ModelFigures(own, 100))
    assert found.config.model.dtype == dtype


def test_configured_slow_dtype_is_kept_with_one_warning() -> None:
    for dtype in ("bfloat16", "float16"):
        found = resolve(config(model={"dtype": dtype}), [SLOW, FAST, SLOW], BUNDLED_FIGURES)
        assert found.config.model.dtype == dtype
        (warning,) = found.warnings
        assert dtype in warning and SLOW.slow[dtype] in warning and "fast" not in warning


def test_configured_float32_warns_where_bfloat16_is_native_everywhere() -> None:
    asked = config(model={"dtype": "float32"})
    (warning,) = resolve(asked, [FAST], BUNDLED_FIGURES).warnings
    assert "float32 is slow on fast" in warning and "times as long" in warning
    assert resolve(asked, [FAST, SLOW], BUNDLED_FIGURES).warnings == ()
    assert resolve(asked, [], BUNDLED_FIGURES).warnings == ()


def test_configured_dtype_that_is_not_slow_gives_no_warning() -> None:
    for dtype, node in (("bfloat16", FAST), ("float32", SLOW), ("bfloat16", GPU)):
        assert resolve(config(model={"dtype": dtype}), [node], BUNDLED_FIGURES).warnings == ()


def test_unresolved_values_build_nothing() -> None:
    assert has_auto(config())
    with pytest.raises(ConfigError, match=r"model\.dtype is auto"):
        _ = ModelConfig().resolved_dtype
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_mib is auto"):
        _ = EngineConfig().kv_cache_bytes
    resolved = resolve(config(), [FAST], BUNDLED_FIGURES).config
    assert not has_auto(resolved)


def test_choices_in_words_name_value_and_reason() -> None:
    words = in_words(resolve(config(), [FAST], BUNDLED_FIGURES).choices)
    assert "model.dtype bfloat16 (" in words and "avx512_bf16" in words
    assert "\n" not in words


def kv_of(found: Resolved) -> int:
    return found.config.engine.kv_cache_bytes // MIB


@pytest.mark.parametrize(("node", "mib"), [(FAST, 360), (SLOW, 720)])
def test_kv_auto_holds_full_length_and_slots(node: NodeFacts, mib: int) -> None:
    found = resolve(config(), [node], BUNDLED_FIGURES)
    assert kv_of(found) == found.choices["engine.kv_cache_mib"].value == mib
    assert mib * MIB >= (8192 + 16 * 512) * BUNDLED_FIGURES.kv_bytes_per_token(
        found.config.model.resolved_dtype
    )


def test_kv_auto_stays_within_its_share_of_free_memory() -> None:
    def free(gib: float, **sections: object) -> int:
        node = replace(FAST, memory=Memory(64 << 30, int(gib * 2**30)))
        return kv_of(resolve(config(**sections), [node], BUNDLED_FIGURES))

    assert free(2.0) == 256  # a quarter, for two workers
    assert free(2.0, workers={"decode": {"replicas": 3}}) == 181  # full length takes more
    assert free(0.1) == 181
    assert kv_of(resolve(config(), [FAST, FAST], BUNDLED_FIGURES)) == 360


def test_kv_auto_knows_which_nodes_a_role_may_run_on() -> None:
    small = replace(FAST, resources=frozenset({"CPU"}), memory=Memory(1 << 30, 1 << 30))
    large = replace(FAST, resources=frozenset({"CPU", "big"}))
    roles = {name: {"resources": {"big": 1}} for name in ("prefill", "decode")}
    found = resolve(config(workers=roles), [small, large], BUNDLED_FIGURES)
    assert kv_of(found) == 360


@pytest.mark.parametrize("length", [64, 8192, 1 << 20])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("node", [FAST, SLOW, GPU, replace(FAST, memory=Memory(0, 0))])
@pytest.mark.parametrize("model", [BUNDLED_FIGURES, ModelFigures(), ModelFigures("float32", 10**5)])
def test_kv_auto_is_refused_by_no_combination(
    length: int, dtype: str, node: NodeFacts, model: ModelFigures
) -> None:
    asked = config(model={"dtype": dtype, "max_model_len": length})
    check_kv_room(resolve(asked, [node], model).config, model)


def test_configured_kv_is_kept() -> None:
    found = resolve(config(engine={"kv_cache_mib": 64}), [FAST], BUNDLED_FIGURES)
    assert kv_of(found) == 64
    assert found.choices["engine.kv_cache_mib"].why == "configured"


def with_cores(*counts: int, **workers: object) -> tuple[int, int]:
    """Cores of a prefill and of a decode worker on nodes with so many."""
    nodes = [replace(FAST, cores=count) for count in counts]
    found = resolve(config(workers=workers), nodes, BUNDLED_FIGURES).config.workers
    return found.cores_of(found.prefill), found.cores_of(found.decode)


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        (1, (1, 1)),
        (2, (1, 1)),
        (3, (1, 1)),
        (4, (2, 1)),
        (8, (4, 3)),
        (16, (7, 7)),
        (64, (16, 16)),
    ],
)
def test_cores_auto_shares_out_a_node(cores: int, shares: tuple[int, int]) -> None:
    assert with_cores(cores) == shares


def test_cores_auto_counts_workers_and_ranks() -> None:
    assert with_cores(8, decode={"replicas": 2}) == (3, 2)
    assert with_cores(8, decode={"replicas": 1, "replicas_max": 6}) == (1, 1)
    assert with_cores(8, tensor_parallel_size=2) == (4, 2)
    assert with_cores(2, prefill={"replicas": 3}) == (1, 1)


def test_cores_auto_suits_the_smallest_node_of_a_cluster() -> None:
    assert with_cores(8, 4) == (2, 1)
    assert with_cores(8, 8, prefill={"replicas": 2}, decode={"replicas": 2}) == (4, 3)


def test_cores_auto_leaves_a_node_to_the_role_that_it_is_for() -> None:
    nodes = [
        replace(FAST, cores=8, resources=frozenset({"prefill"})),
        replace(FAST, cores=4, resources=frozenset({"decode"})),
    ]
    roles = {name: {"resources": {name: 1}} for name in ("prefill", "decode")}
    found = resolve(config(workers=roles), nodes, BUNDLED_FIGURES).config.workers
    assert (found.cores_of(found.prefill), found.cores_of(found.decode)) == (7, 3)


def test_configured_cores_are_kept() -> None:
    assert with_cores(8, cores_per_worker=2) == (2, 2)
    assert with_cores(8, cores_per_worker=2, decode={"cores_per_worker": 1}) == (2, 1)
    assert with_cores(8, prefill={"cores_per_worker": 2}) == (2, 3)


def test_gpu_engines_get_a_core_each() -> None:
    found = resolve(config(), [replace(GPU, cores=64)], BUNDLED_FIGURES).config.workers
    assert found.cores_wanted == 2
