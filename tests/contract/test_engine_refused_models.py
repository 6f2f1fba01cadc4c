"""Engines whose blocks a slab cannot hold are refused as they start, by the name of the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.agent import AgentServer
from tests.contract.engine_harness import running_engine
from tests.contract.tiny_models import HEAD, KV_HEADS, make_model

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WINDOW = 64


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    agent = AgentServer(str(tmp_path / "agent.sock"), slab_bytes=16 << 20)
    yield agent
    assert agent.models() == ()  # nothing was registered
    agent.close()


def start(model: Path, agent: AgentServer, ranks: int = 1) -> None:
    with running_engine(
        model_path=str(model),
        kv_cache_bytes=16 << 20,
        agent_socket=agent.socket_path,
        tensor_parallel_size=ranks,
    ):
        raise AssertionError("it started")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_several_kinds_of_layers_is_refused(
    agent: AgentServer, tmp_path: Path, ranks: int
) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make_model(tmp_path, "Gemma3", sliding_window=WINDOW, layer_types=kinds)
    from kvcache.connector.errors import EngineUnsupported

    words = r"\d KV cache groups \(FullAttentionSpec, SlidingWindowSpec\)"
    with pytest.raises(EngineUnsupported, match=words):
        start(model, agent, ranks)


def test_a_model_of_sliding_windows_alone_is_refused(agent: AgentServer, tmp_path: Path) -> None:
    """One group only, but blocks that left the window are vLLM's null block: not the prefix's."""
    model = make_model(tmp_path, "Mistral", sliding_window=WINDOW)
    from kvcache.connector.errors import EngineUnsupported

    with pytest.raises(EngineUnsupported, match="SlidingWindowSpec; only full attention"):
        start(model, agent)


# ---- the same check on vLLM's own objects, for what takes more than a small model to start ------


def specs() -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    heads: dict[str, Any] = {
        "block_size": 32,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD,
        "dtype": torch.float32,
    }
    return {
        "full": FullAttentionSpec(**heads),
        "window": SlidingWindowSpec(**heads, sliding_window=WINDOW),
        "chunked": ChunkedLocalAttentionSpec(**heads, attention_chunk_size=WINDOW),
        "mla": MLAAttentionSpec(**{**heads, "num_kv_heads": 1}),
        "mamba": MambaSpec(block_size=32, shapes=((16, 16),), dtypes=(torch.float32,)),
    }


def check(kinds: tuple[str, ...], **parallel: int) -> None:
    from vllm.config import ParallelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from kvcache.connector.layout import HASH_ALGORITHM, check_engine

    found = specs()
    groups = [KVCacheGroupSpec([f"layer {n}"], found[kind]) for n, kind in enumerate(kinds)]
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=HASH_ALGORITHM),
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: KV_HEADS),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
    )
    for name, size in parallel.items():
        assert hasattr(config.parallel_config, name)
        setattr(config.parallel_config, name, size)
    check_engine(config, KVCacheConfig(8, [], groups))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_full_attention_on_ranks_that_divide_its_heads_is_taken(ranks: int) -> None:
    check(("full",), tensor_parallel_size=ranks)


@pytest.mark.parametrize(
    ("kinds", "name"),
    [
        (("window",), "SlidingWindowSpec"),
        (("chunked",), "ChunkedLocalAttentionSpec"),
        (("mla",), "MLAAttentionSpec"),
        (("mamba",), "MambaSpec"),
        (("full", "window"), "2 KV cache groups .*SlidingWindowSpec"),
        (("full", "mamba"), "2 KV cache groups .*MambaSpec"),
        (("full", "full"), "2 KV cache groups"),
    ],
    ids=str,
)
def test_other_caches_are_refused_by_kind(kinds: tuple[str, ...], name: str) -> None:
    from kvcache.connector.errors import EngineUnsupported

    with pytest.raises(EngineUnsupported, match=name):
        check(kinds)


@pytest.mark.parametrize(
    "name",
    [
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ],
)
def test_other_parallelism_than_of_tensors_is_refused_by_its_name(name: str) -> None:
    from kvcache.connector.errors import EngineUnsupported

    with pytest.raises(EngineUnsupported, match=f"{name} is 2"):
        check(("full",), **{name: 2})


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    from kvcache.connector.errors import EngineUnsupported

    with pytest.raises(EngineUnsupported, match=rf"tensor_parallel_size is {ranks}.*\(4\)"):
        check(("full",), tensor_parallel_size=ranks)
