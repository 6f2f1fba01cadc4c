"""KV memory of a model: bytes a token and a sequence, blocks, and what fits into a device.

Called by the plan command and loadtests/planner/textbook.py. Must not: read files.

A token keeps, in each layer, a key and a value of head_dim numbers for each KV head:

  bytes/token = 2 × layers × KV heads × head_dim × bytes/number

Tensor parallelism gives each rank KV heads / TP; with fewer KV heads than ranks each rank keeps
one, so that they are there several times. A sequence takes whole blocks; a layer that slides keeps
its window alone, and one block more, since the window need not begin where a block does (vLLM 0.32,
v1/kv_cache_interface.py, SlidingWindowSpec; while a prompt is computed it keeps those tokens too).
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.planner.shape import DTYPE_BYTES, Shape, UnknownShape


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How an engine keeps a model's KV. kv_dtype: "auto" is that of the model as it is served."""

    shape: Shape
    dtype: str
    kv_dtype: str = "auto"
    tensor_parallel: int = 1
    block_tokens: int = 16

    def __post_init__(self) -> None:
        """Raises UnknownShape for what cannot be split or is no type."""
        heads, ranks = self.shape.kv_heads, self.tensor_parallel
        if self.shape.heads % ranks:
            raise UnknownShape(f"{self.shape.heads} heads cannot be split over {ranks} ranks")
        if heads % ranks and ranks % heads:
            raise UnknownShape(f"{heads} KV heads can neither be split nor copied to {ranks} ranks")
        if self.stored_dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise UnknownShape(f"KV of type {self.stored_dtype} is not understood ({known} are)")

    @property
    def stored_dtype(self) -> str:
        """Of the numbers in the cache."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def number_bytes(self) -> int:
        """Of one number in the cache."""
        return DTYPE_BYTES[self.stored_dtype]

    @property
    def rank_kv_heads(self) -> int:
        """KV heads that one rank keeps."""
        return max(1, self.shape.kv_heads // self.tensor_parallel)

    @property
    def copies(self) -> int:
        """How often each KV head is there, over all ranks."""
        return max(1, self.tensor_parallel // self.shape.kv_heads)

    @property
    def layer_token_bytes(self) -> int:
        """One token in one layer, on one rank."""
        return 2 * self.rank_kv_heads * self.shape.head_dim * self.number_bytes

    @property
    def token_bytes(self) -> int:
        """One token in all layers, on one rank, where every layer keeps it."""
        return self.shape.layers * self.layer_token_bytes

    @property
    def block_bytes(self) -> int:
        """One block of all layers, on one rank."""
        return self.block_tokens * self.token_bytes

    def exact_bytes(self, tokens: int) -> int:
        """A sequence without rounding, on one rank: what the formula in books gives."""
        kept = sum(tokens if w is None else min(tokens, w) for w in self.shape.windows)
        return kept * self.layer_token_bytes

    def sequence_bytes(self, tokens: int) -> int:
        """A sequence as blocks hold it, on one rank."""
        blocks = sum(self._layer_blocks(tokens, window) for window in self.shape.windows)
        return blocks * self.block_tokens * self.layer_token_bytes

    def sequences(self, kv_bytes: int, tokens: int) -> int:
        """Whole sequences of that length that fit into a rank's KV memory."""
        if all(window is None for window in self.shape.windows):  # one pool of whole blocks
            return (kv_bytes // self.block_bytes) // self._layer_blocks(tokens, None)
        return kv_bytes // self.sequence_bytes(tokens)

    def _layer_blocks(self, tokens: int, window: int | None) -> int:
        whole = -(-tokens // self.block_tokens)
        return whole if window is None else min(whole, -(-window // self.block_tokens) + 1)


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of one rank's device, and what of it is no KV. All in bytes.

    share: of the device that the engine may use (vLLM: gpu_memory_utilization). reserve: what it
    needs besides weights and KV: activations, the CUDA context, graphs.
    """

    total_bytes: int
    share: float
    weights_bytes: int
    reserve_bytes: int

    @property
    def kv_bytes(self) -> int:
        """What is left for KV; negative where the model does not fit."""
        return int(self.total_bytes * self.share) - self.weights_bytes - self.reserve_bytes
