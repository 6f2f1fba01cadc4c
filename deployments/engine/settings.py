"""Settings of one engine, as the worker gives them to InprocessEngine.

Called by: workers and tests. Must not: import vLLM (the settings travel through Ray).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CPU_BLOCK_SIZE_STEP = 32
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is built from.

    model_path: local folder with safetensors, config and tokenizer.
    served_model: name that clients use; every event and namespace carries it.
    role: "prefill" or "decode"; only the connector and metrics care.
    dtype: weights and activations: "bfloat16", "float16", "float32".
    max_model_len: longest sequence, prompt and output together, in tokens.
    block_size: tokens in a KV block; a multiple of 32 on a CPU.
    kv_cache_bytes: memory of the engine's own KV cache, of all its ranks together.
    max_num_seqs: requests in one step at most; bounds memory and the latency of a step.
    max_num_batched_tokens: tokens in one step at most; a longer prompt is prefilled in chunks.
    enforce_eager: no torch.compile: starts about 70 s sooner on a CPU, decodes about 30 % slower.
    agent_socket: Unix socket of this node's agent; None: no connector, no shared blocks.
    owner: the worker's id, unique for one life of the worker.
    core: CPU core that the building thread is pinned to after the build; None: leave it alone.
    tensor_parallel_size: ranks, each a process with a share of the heads; 1: this process is it.
    rank_cores: cores of all ranks together, as many for each; empty: they share the thread's.
    seed: of the engine's own random numbers, for requests without a seed.
    connector_extra: more keys for the connector's extra_config.
    """

    model_path: str
    served_model: str
    role: str
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    block_size: int = 32
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enforce_eager: bool = True
    agent_socket: str | None = None
    owner: str = "engine"
    core: int | None = None
    tensor_parallel_size: int = 1
    rank_cores: tuple[int, ...] = ()
    seed: int = 0
    connector_extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check bounds. Raises ValueError naming the field."""
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}, must be one of {', '.join(ROLES)}")
        if self.block_size <= 0 or self.block_size % CPU_BLOCK_SIZE_STEP:
            raise ValueError(f"block_size is {self.block_size}, must be a multiple of 32")
        for name in (
            *("max_model_len", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens"),
            "tensor_parallel_size",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if len(self.rank_cores) % self.tensor_parallel_size:
            raise ValueError("rank_cores must be as many for each of tensor_parallel_size ranks")
        for name in ("model_path", "served_model", "owner", "dtype"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")


@dataclass(frozen=True, slots=True)
class FrontEndSettings:
    """What vLLM's front end is configured with; must match the engines'.

    Attributes:
        model_path: folder with config and tokenizer; weights are not read.
        tool_call_parser: vLLM's parser name, or empty for no automatic tool choice.
        max_logprobs: most alternatives a client may ask for.
        engine_requests_max: engine requests at once in one ingress (n and lists of prompts count).

    """

    model_path: str
    served_model: str
    dtype: str
    max_model_len: int
    block_size: int
    tool_call_parser: str = "hermes"
    max_logprobs: int = 20
    engine_requests_max: int = 256
