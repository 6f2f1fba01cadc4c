"""On PYTHONPATH, makes every Python process compute as on a CPU that has AVX2 and nothing newer.

    PYTHONPATH=tests/avx2 python -m pytest tests/contract

PyTorch, oneDNN and MKL have environment variables for it; they are set here. vLLM has none: it
chooses its kernel library (`vllm._C_AVX2`) and its branches by `torch.cpu.get_capabilities()`,
which an import hook masks, so that processes without torch start as fast as before. Child processes
inherit PYTHONPATH and with it all of this, Ray's workers too. The flags in /proc/cpuinfo and the
time that a computation takes remain the machine's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType
from typing import Any

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
NEWER = ("amx_", "avx10_", "avx512_", "avx_ne_", "avx_vnni")
MASKED = "torch.cpu"


def mask(module: Any) -> None:
    """Take the newer instruction sets from what torch.cpu's `_is_..._supported` look at."""
    real = module.get_capabilities

    def get_capabilities() -> Mapping[str, Any]:
        known = {n: False if n.startswith(NEWER) else v for n, v in real().items()}
        return MappingProxyType(known)

    module.get_capabilities = get_capabilities


class MaskingFinder:
    """Finds torch.cpu alone; the other finders find the rest."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == MASKED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_mask(module: ModuleType) -> None:
            execute(module)
            mask(module)

        spec.loader.exec_module = execute_and_mask  # type: ignore[method-assign]
        return spec


os.environ.update(VARIABLES)
sys.meta_path.insert(0, MaskingFinder)
