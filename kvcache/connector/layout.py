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
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise EngineUnsupported(
            f"the model has {groups} KV cache groups (sliding windows, Mamba or the like); "
            "only models with one group are handled"
        )
    world = vllm_config.parallel_config.world_size
    if world != 1:
        raise EngineUnsupported(f"the engine has {world} ranks; only one rank is handled")
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        raise ConnectorMisconfigured(
            "kv_load_failure_policy must be 'recompute': a lost block is a miss, never an error"
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


def layout_of(vllm_config: VllmConfig, cache: EngineCache) -> Layout:
    """How a block's bytes lie in a slot, with the instruction set that packed them."""
    kv_heads = int(cache.block_shape[0])
    return Layout(
        slot_bytes=cache.slot_bytes,
        layers=cache.layers,
        layer_bytes=cache.layer_bytes,
        kv_heads=kv_heads,
        head_range=(0, kv_heads),
        isa=_packing(vllm_config, cache),
        order=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
    )


def _packing(vllm_config: VllmConfig, cache: EngineCache) -> str:
    """What else decides which byte of a block means what."""
    cache_config, model_config = vllm_config.cache_config, vllm_config.model_config
    if not cache.on_host:
        # Kernels read the tensors by their strides: shape, planes and `order` say it all, but for
        # the backends that pack in a way of their own.
        shape = "x".join(map(str, cache.block_shape))
        backend = vllm_config.attention_config.backend
        return f"cuda/{backend}/{shape}/{cache.planes.layer_planes} planes".lower()
    content = cache.block_shape[-1]
    isa = _get_attn_isa(
        model_config.dtype, cache_config.block_size, content // 2, cache_config.cache_dtype
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
