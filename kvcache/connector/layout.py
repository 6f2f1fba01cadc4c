"""What this engine's blocks are called and how their bytes lie: Namespace, Layout, EngineCache.

Called by block_connector.py when vLLM registers the KV caches.
Source (vLLM 0.32): v1/attention/backends/cpu_attn.py (_get_attn_isa packs the inside of a block per
instruction set), v1/worker/gpu_model_runner.py (initialize_kv_cache_tensors: one tensor a layer,
(blocks, kv_heads, block_size, 2 x head)), v1/core/kv_cache_utils.py (resolve_none_hash_seed).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
import xxhash
from numpy.typing import NDArray
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvcache.connector.copies import BlockCopies, HostCopies
from kvcache.connector.device_copies import cuda_copies
from kvcache.connector.errors import ConnectorMisconfigured, EngineUnsupported
from kvcache.connector.planes import planes_of
from kvcache.identity import Layout, Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HASH_ALGORITHM = "sha256_cbor"
# Grows when our own packing of a slot changes.
SLOT_FORMAT = 1
_READ_BYTES = 8 << 20
_ONE_ONLY = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


class EngineCache:
    """The engine's KV cache as planes of bytes (planes.py); on CPUs also as numpy arrays of them.

    A slot is all layers of one block, one after another. Shared layers (one tensor under two names)
    count once. copy_out and copy_in are for caches in host memory; copies.py has the general way.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor], blocks: int) -> None:
        """Raises EngineUnsupported for caches whose blocks' bytes cannot be told."""
        self.planes = planes_of(kv_caches, blocks)
        self.block_shape = self.planes.block_shape
        self.on_host = self.planes.device.type == "cpu"
        if not self.on_host and self.planes.device.type != "cuda":
            raise EngineUnsupported(f"caches on {self.planes.device} are not handled")
        # A slice a block and plane moves at half of memcpy, three times torch's indexing.
        self._layers: list[NDArray[np.uint8]] = (
            [row.numpy() for row in self.planes.rows] if self.on_host else []
        )
        self.layers = self.planes.layers
        self.layer_bytes = self.planes.row_bytes * self.planes.layer_planes
        self.slot_bytes = self.planes.slot_bytes
        self.blocks = blocks

    def copies(self, bounce_bytes_max: int, *, pin_slab: bool) -> BlockCopies:
        """New copies to and from this cache. Close them."""
        if self.on_host:
            return HostCopies(self)
        return cuda_copies(self.planes, bounce_bytes_max, pin_slab=pin_slab)

    def copy_out(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        """Copy a block of the engine into `slot` (uint8, slot_bytes). Mutates slot."""
        rows = slot.reshape(-1, self.planes.row_bytes)
        for layer, row in zip(self._layers, rows, strict=True):
            row[:] = layer[block_id]

    def copy_in(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        """Copy `slot` (uint8, slot_bytes) into a block of the engine. Mutates that block."""
        rows = slot.reshape(-1, self.planes.row_bytes)
        for layer, row in zip(self._layers, rows, strict=True):
            layer[block_id] = row


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what this connector does not handle. Raises with the setting's name."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        raise ConnectorMisconfigured(
            f"prefix_caching_hash_algo is {algorithm!r}; block names are {HASH_ALGORITHM!r} here"
        )
    groups = kv_cache_config.kv_cache_groups
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    if len(groups) != 1:
        raise EngineUnsupported(
            f"the model has {len(groups)} KV cache groups ({kinds}); only models with one group, "
            "of full attention, are handled"
        )
    if type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        # Windows leave blocks out that a prefix has; other kinds lie otherwise in memory.
        raise EngineUnsupported(
            f"the model's KV cache is of kind {kinds}; only full attention "
            f"({FullAttentionSpec.__name__}) is handled"
        )
    _check_parallelism(vllm_config)
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        raise ConnectorMisconfigured(
            "kv_load_failure_policy must be 'recompute': a lost block is a miss, never an error"
        )


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in _ONE_ONLY:
        size = getattr(parallel, name)
        if size != 1:
            raise EngineUnsupported(f"{name} is {size}; only tensor_parallel_size may exceed 1")
    ranks = parallel.tensor_parallel_size
    kv_heads = vllm_config.model_config.get_total_num_kv_heads()
    if kv_heads % ranks:
        raise EngineUnsupported(
            f"tensor_parallel_size is {ranks}, which does not divide the model's KV heads "
            f"({kv_heads})"
        )


def hash_root(configured: str) -> str:
    """Hex of the root: as configured, or the one that the engine is going to use itself.

    The engine sets its NONE_HASH after it registered its caches, hence computed and checked later.
    """
    if configured:
        return configured
    function = get_hash_fn_by_name(HASH_ALGORITHM)
    return str(function(resolve_none_hash_seed(function)).hex())


def namespace_of(vllm_config: VllmConfig, model: str, root: str) -> Namespace:
    """The logical identity of this engine's blocks. Reads the weight files, all of them."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    lora = vllm_config.lora_config
    build = (
        f"vllm {vllm.__version__}, slot format {SLOT_FORMAT}, {vllm_config.device_config.device}, "
        f"quantization {model_config.quantization}, lora {'on' if lora else 'off'}"
        f"{by_length(model_config.hf_text_config, model_config.max_model_len)}"
    )
    return Namespace(
        model=model,
        revision=weights_fingerprint(vllm_config),
        dtype=str(model_config.dtype).removeprefix("torch."),
        kv_dtype=str(cache_config.cache_dtype),
        block_size=int(cache_config.block_size),
        hash_algorithm=HASH_ALGORITHM,
        hash_root=root,
        build=build,
    )


def by_length(config: object, max_model_len: int) -> str:
    """What of the served length keys depend on: "", but for models with LongRoPE.

    These have two sets of factors, and vLLM 0.32 takes one of them for all positions, by
    max_model_len (layers/rotary_embedding/phi3_long_rope_scaled_rope.py).
    """
    told = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    is_long = any(f"{kind!r}" in str(told) for kind in ("longrope", "su"))
    return f", max_model_len {max_model_len}" if is_long else ""


class RankPart:
    """One rank's part of each slot, behind the interface of EngineCache: the others' stay as is."""

    def __init__(self, cache: EngineCache, rank: int, ranks: int) -> None:
        """Raises EngineUnsupported for a cache that is not in host memory."""
        assert 0 <= rank < ranks, (rank, ranks)
        if not cache.on_host:
            raise EngineUnsupported(f"tensor_parallel_size {ranks} is handled on CPUs only")
        self._cache = cache
        self._part = slice(rank * cache.slot_bytes, (rank + 1) * cache.slot_bytes)
        self.slot_bytes = ranks * cache.slot_bytes

    def copy_out(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        """Copy a block of this rank into its part of `slot` (uint8, slot_bytes). Mutates slot."""
        self._cache.copy_out(block_id, slot[self._part])

    def copy_in(self, block_id: int, slot: NDArray[np.uint8]) -> None:
        """Copy this rank's part of `slot` into a block of the engine. Mutates that block."""
        self._cache.copy_in(block_id, slot[self._part])


def layout_of(vllm_config: VllmConfig, cache: EngineCache) -> Layout:
    """How a block's bytes lie in a slot, as a rank sees it that has this cache."""
    isa = _packing(vllm_config, cache)
    kv_heads = int(cache.block_shape[0])
    return _layout(vllm_config, cache.layers, cache.layer_bytes, kv_heads, isa)


def planned_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Layout:
    """The same from vLLM's plan, where the caches are in other processes. On CPUs."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    isa = _host_packing(vllm_config, spec.head_size)
    layers = len(group.layer_names)
    return _layout(vllm_config, layers, spec.page_size_bytes, spec.num_kv_heads, isa)


def _layout(
    vllm_config: VllmConfig, layers: int, layer_bytes: int, kv_heads: int, isa: str
) -> Layout:
    """Of what one rank has; all ranks have as much, and a slot holds all their parts."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    return Layout(
        slot_bytes=ranks * layers * layer_bytes,
        layers=layers,
        layer_bytes=ranks * layer_bytes,
        kv_heads=ranks * kv_heads,
        head_range=(0, ranks * kv_heads),
        isa=isa,
        order=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        ranks=ranks,
    )


def _packing(vllm_config: VllmConfig, cache: EngineCache) -> str:
    """What else decides which byte of a block means what."""
    if not cache.on_host:
        # Kernels read the tensors by their strides: shape, planes and `order` say it all, but for
        # the backends that pack in a way of their own.
        shape = "x".join(map(str, cache.block_shape))
        backend = vllm_config.attention_config.backend
        return f"cuda/{backend}/{shape}/{cache.planes.layer_planes} planes".lower()
    return _host_packing(vllm_config, cache.block_shape[-1] // 2)


def _host_packing(vllm_config: VllmConfig, head_size: int) -> str:
    cache_config, model_config = vllm_config.cache_config, vllm_config.model_config
    isa = _get_attn_isa(
        model_config.dtype, cache_config.block_size, head_size, cache_config.cache_dtype
    )
    # The vector width decides the packing inside "vec" too, so it is part of the tag.
    return f"cpu/{isa}/{torch.backends.cpu.get_cpu_capability()}".lower()


def weights_fingerprint(vllm_config: VllmConfig) -> str:
    """32 hex digits that change with the weights or the model's configuration.

    Local folders have no revision, so the weights' own bytes stand for it, all of them: two
    fine-tunings may differ in a few layers only. They were just loaded, hence come from the page
    cache at some GB/s (269 MB: 0.1 s).
    """
    model_config = vllm_config.model_config
    digest = xxhash.xxh3_128(_config_json(model_config.hf_config))
    digest.update(f"{model_config.revision}|{model_config.hf_overrides}".encode())
    folder = Path(model_config.model)
    if folder.is_dir():
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
            digest.update(f"{path.name}|{path.stat().st_size}".encode())
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
    else:
        digest.update(str(model_config.model).encode())
    return digest.hexdigest()


def _config_json(hf_config: Any) -> bytes:
    values = hf_config.to_dict()
    # Where the files lie says nothing about what is in them.
    values.pop("_name_or_path", None)
    return json.dumps(values, sort_keys=True, default=str).encode()
