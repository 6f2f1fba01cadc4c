"""vLLM's own prefill and decode pair with its NixlConnector. Started by measuring.py.

The proxy before it works as vLLM's own example does (loadtests/compare/pair_proxy.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtests.compare import peers
from loadtests.compare.mends import CORE_VARIABLE, MENDED
from loadtests.compare.plain import TOLD, servers_up
from loadtests.compare.setups import Place, Running
from loadtests.sides import VllmServer, free_port, running, wait_for

TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
UCX = {
    # No network but loopback, and shared memory.
    "UCX_TLS": "tcp,shm,self",
    "UCX_NET_DEVICES": "lo",
    # As vLLM would set it, were NIXL not imported before.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}


@dataclass(frozen=True, slots=True)
class NixlPair:
    """One prefill and one decode server, a core each. stock: with its defects."""

    label: str
    place: Place
    stock: bool = False

    @property
    def title(self) -> str:
        return f"vLLM NixlConnector, 1 prefill, 1 decode{', stock' if self.stock else ''}"

    @property
    def how(self) -> str:
        return (
            "two of vLLM's own servers with NixlConnector (UCX over shared memory), and a proxy "
            "that does what vLLM's example does: the prompt to the prefill server with one token "
            "to make, then to the decode server with where the KV is; cached tokens are the decode "
            "server's, as it tells them"
        )

    @property
    def mended(self) -> Sequence[str]:
        return () if self.stock else MENDED

    @contextmanager
    def start(self, folder: Path) -> Iterator[Running]:
        prefill, decode = (
            VllmServer(
                role,
                self.place.limits,
                core=core,
                flags=(*TOLD, "--kv-transfer-config", json.dumps(TRANSFER)),
                environment=self._environment(core),
            )
            for role, core in zip(("prefill", "decode"), self.place.cores, strict=False)
        )
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "loadtests.compare.pair_proxy", "--port", str(port)),
            *("--prefill", prefill.url, "--decode", decode.url),
        ]
        log = folder / "proxy.log"
        with (
            servers_up((prefill, decode), folder) as roots,
            running("the pair's proxy", command, {}, log) as proxy,
        ):
            wait_for(f"{url}/health", proxy, log)
            yield Running((url,), self.place.limits.name, (*roots, psutil.Process(proxy.pid)))

    def _environment(self, core: int) -> dict[str, str]:
        packages = self.place.packages
        nixl = peers.installed(peers.NIXL, packages / "nixl")
        side_channel = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        if self.stock:
            return {**UCX, **side_channel, "PYTHONPATH": peers.python_path(nixl)}
        return {
            **UCX,
            **side_channel,
            "PYTHONPATH": peers.python_path(nixl, peers.mends(packages / "mends")),
            CORE_VARIABLE: str(core),
        }
