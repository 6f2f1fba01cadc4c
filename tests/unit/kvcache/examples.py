"""Blocks, owners and registrations that the tests of kvcache share."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
from numpy.typing import NDArray

from kvcache.identity import Layout, Namespace
from kvcache.leases import Owner
from kvcache.store import Registration

MODEL = "test-model"
SLOT_BYTES = 4096
SLOTS = 8
SLAB_BYTES = SLOTS * SLOT_BYTES

NAMESPACE = Namespace(
    model=MODEL,
    revision="main",
    dtype="bfloat16",
    kv_dtype="auto",
    block_size=32,
    hash_algorithm="sha256_cbor",
    hash_root="00" * 32,
    build="vllm 0.32.0 cpu",
)
LAYOUT = Layout(
    slot_bytes=SLOT_BYTES,
    layers=4,
    layer_bytes=SLOT_BYTES // 4,
    kv_heads=3,
    head_range=(0, 3),
    isa="avx2",
    order="block,head,token,dim",
)
PREFILL = Owner("prefill-0", 1)
DECODE = Owner("decode-0", 2)


def block(number: int) -> bytes:
    """The name of the number-th block."""
    return number.to_bytes(32, "big")


def chain(count: int, start: int = 1) -> list[bytes]:
    """Names of count blocks, each the child of the one before."""
    return [block(number) for number in range(start, start + count)]


def content(name: bytes, slot_bytes: int = SLOT_BYTES) -> NDArray[np.uint8]:
    """The bytes that a block of that name has, different for each name."""
    generator = np.random.default_rng(int.from_bytes(name, "big"))
    return generator.integers(0, 256, slot_bytes, dtype=np.uint8)


def registration(owner: str, **changes: object) -> Registration:
    """Of a worker with the namespace and layout above, but for changes to either."""
    in_namespace = {name: value for name, value in changes.items() if hasattr(NAMESPACE, name)}
    in_layout = {name: value for name, value in changes.items() if hasattr(LAYOUT, name)}
    return Registration(
        owner=owner,
        role="prefill",
        pid=os.getpid(),
        namespace=dataclasses.replace(NAMESPACE, **in_namespace),  # type: ignore[arg-type]
        layout=dataclasses.replace(LAYOUT, **in_layout),  # type: ignore[arg-type]
    )
