"""Block names: vLLM's own chained hash, with a root that is the same in every process.

Called by: the ingress (block_hashes, hash_root) and InprocessEngine (pin_hash_root).
Must not: compute a hash in a way of its own; a name that differs from the engine's is a lost hit.
Source: vllm/v1/core/kv_cache_utils.py (0.32): init_none_hash, get_request_block_hasher,
generate_block_hash_extra_keys. The root is the module global NONE_HASH, which init_none_hash
derives from PYTHONHASHSEED when that is set; we set the global itself instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.request import Request

from deployments.engine.errors import EngineMismatch

HASH_ALGORITHM = "sha256_cbor"
# vLLM's own default for a cryptographic hash, so that a stock vLLM gives the same names.
HASH_SEED = "vllm-none-hash"


@dataclass(frozen=True, slots=True)
class LoraName:
    """The part of a LoRA adapter that enters a block's name."""

    lora_name: str
    lora_path: str


@dataclass(slots=True)
class _HashInput:
    """What vLLM's hasher reads of a Request, for text prompts."""

    all_token_ids: Sequence[int]
    cache_salt: str | None
    lora_request: LoraName | None
    block_hashes: list[BlockHash] = field(default_factory=list)
    mm_features: tuple[()] = ()
    prompt_embeds: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def pin_hash_root() -> None:
    """Fix the hash root of this process, whatever PYTHONHASHSEED says.

    Mutates two globals of vllm.v1.core.kv_cache_utils. To be called after an EngineCore was built
    (its constructor sets them from the environment) and before its first request.
    """
    for name in ("NONE_HASH", "_NONE_HASH_SEED"):
        if name not in kv_cache_utils.__annotations__:
            raise EngineMismatch(f"vllm.v1.core.kv_cache_utils has no {name}")
    kv_cache_utils.NONE_HASH = BlockHash(_hash_function()(HASH_SEED))
    kv_cache_utils._NONE_HASH_SEED = HASH_SEED  # noqa: SLF001


def hash_root() -> str:
    """Return the pinned root, 32 bytes in hex: what HELLO and Namespace compare."""
    return bytes(_hash_function()(HASH_SEED)).hex()


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str | None = None,
    lora: LoraName | None = None,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Name each full block of a text sequence, first block first; 32 bytes each.

    The names equal those of the engine for a prompt without multimodal input or embeddings.
    known: names already computed for a prefix of the same sequence; the chain goes on from there.
    About 3 us a block: hash long prompts off the event loop.
    """
    _ensure_root()
    source = _HashInput(token_ids, cache_salt, lora, [BlockHash(name) for name in known])
    new = _hasher(block_size)(cast("Request", source))
    return [*known, *new]


@lru_cache(maxsize=8)
def _hasher(block_size: int) -> Any:
    return get_request_block_hasher(block_size, _hash_function())


def _hash_function() -> Any:
    return get_hash_fn_by_name(HASH_ALGORITHM)


def _ensure_root() -> None:
    """Pin the root where no engine runs (the ingress), and mend it if something reset it."""
    if getattr(kv_cache_utils, "_NONE_HASH_SEED", None) != HASH_SEED:
        pin_hash_root()
