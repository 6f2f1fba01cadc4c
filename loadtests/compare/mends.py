"""Mends two defects of vLLM's NixlConnector on CPUs, inside a peer's processes.

vLLM loads it as a plugin (`vllm.general_plugins`, loadtests/compare/peers.py) in each process of an
engine; it does nothing unless CORE_VARIABLE names the engine's core. Without the mends the
comparison would measure the defects:

- The connector's worker binds its own thread, which computes, to the last core of each NUMA node
  (nixl/base_worker.py, vLLM 0.32): all engines of a machine to the same one. Here: to the engine's
  own.
- NIXL's progress thread polls without pause (`pthrDelay = 0` in nixl/_api.py, NIXL 1.5) and takes
  up to a core from the engine. Here it pauses PAUSE_US between polls.

Must not: change what the connector does.
"""

from __future__ import annotations

import importlib
import os

CORE_VARIABLE = "HEADWATER_COMPARE_CORE"
PAUSE_US = 1000
MENDED = (
    "each engine stays on its own core, where vLLM's NixlConnector binds all to the last one",
    f"NIXL's progress thread pauses {PAUSE_US / 1000:g} ms between polls, where it does not pause",
)


def mend() -> None:
    """In this process; may be called again."""
    core = os.environ.get(CORE_VARIABLE)
    if core is None:
        return
    _own_core(int(core))
    _paused_progress()


def _own_core(core: int) -> None:
    from vllm.platforms.cpu import CpuPlatform

    def own(_: type) -> list[list[int]]:
        return [[core]]

    CpuPlatform.discover_numa_topology = classmethod(own)


def _paused_progress() -> None:
    try:
        bindings = importlib.import_module("nixl._api").nixlBind
    except ImportError:
        return  # the connector itself says so
    if getattr(bindings.nixlAgentConfig, "paused", False):
        return

    class Paused(bindings.nixlAgentConfig):  # type: ignore[misc, name-defined]
        paused = True

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Paused
