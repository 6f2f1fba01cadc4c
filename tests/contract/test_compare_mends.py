"""What loadtests/compare mends in other projects is still there to be mended. No engine runs."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from loadtests.compare import mends

pytestmark = [pytest.mark.full, pytest.mark.contract, pytest.mark.filterwarnings("ignore")]


def test_nixls_worker_binds_itself_to_the_cores_that_the_platform_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.platforms.cpu import CpuPlatform

    found = importlib.util.find_spec(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
    )
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    assert "numa_core_list = current_platform.discover_numa_topology()" in source
    assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source
    assert "max(each_numa_core_list) for each_numa_core_list in numa_core_list" in source
    # Set and set back: the mend is for a peer's process, not for this one.
    monkeypatch.setattr(CpuPlatform, "discover_numa_topology", None)
    monkeypatch.setenv(mends.CORE_VARIABLE, "5")
    mends.mend()
    assert CpuPlatform.discover_numa_topology() == [[5]]


def test_vllm_loads_the_plugins_of_our_group_in_engines_and_workers() -> None:
    from vllm import plugins

    assert plugins.DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    for module in ("vllm.v1.engine.core", "vllm.v1.worker.worker_base"):
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        assert "load_general_plugins()" in Path(found.origin).read_text(encoding="utf-8")


def test_rays_prefix_router_makes_no_text_of_token_ids() -> None:
    """Once it does, TokenPrefixRouter is not needed."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
        PrefixCacheAffinityRouter,
    )

    from loadtests.compare.prefix_router import TokenPrefixRouter

    theirs = object.__new__(PrefixCacheAffinityRouter)
    ours = object.__new__(TokenPrefixRouter)
    assert theirs._normalize_prompt_to_string([1000, 2000]) == ""
    assert len(ours._normalize_prompt_to_string([1000, 2000])) == 2
    assert ours._normalize_prompt_to_string("text") == "text"
    called = inspect.getsource(PrefixCacheAffinityRouter._extract_text_from_request)
    assert "_normalize_prompt_to_string(prompt)" in called
