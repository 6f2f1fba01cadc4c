"""How an engine's KV tensors lie in memory: planes, each a row of bytes for every block.

Called by layout.py, and by the GPU benchmark. Pure index arithmetic over strides, so that it holds
for CPU and CUDA tensors alike, and is tested on the former. Must not import vllm, or move a byte.

Layouts of one layer, as logical shapes over one allocation:

    (blocks, heads, tokens, content)      a block is one run of bytes: 1 plane. HND and NHD differ
                                          in the order inside the run, which nobody here looks at
    (2, blocks, tokens, heads, head)      keys, then values: 2 planes
    heads outside blocks (vLLM's LHBNC)   a plane for each head
    layers inside blocks (vLLM's BLHNC)   1 plane, whose rows lie a whole block of all layers apart

Source: vLLM 0.32, v1/kv_cache_layout.py (KVCacheLayout), v1/worker/utils.py (allocate_kv_cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from kvcache.connector.errors import EngineUnsupported

# Widest first: a gather of eight bytes an element is several times one of single bytes.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_PAIR = 2  # keys and values


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of all layers, in order; a slot is a block's row of each, one after another.

    rows: uint8 tensors, shape (blocks, row_bytes), rows compact, on the engine's device; they
    share its memory. layer_planes: planes of one layer. block_shape: a layer's shape, its dimension
    of blocks left out.
    """

    rows: tuple[torch.Tensor, ...]
    blocks: int
    row_bytes: int
    layer_planes: int
    block_shape: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Layers with a cache of their own."""
        return len(self.rows) // self.layer_planes

    @property
    def slot_bytes(self) -> int:
        """All layers of one block."""
        return len(self.rows) * self.row_bytes

    @property
    def device(self) -> torch.device:
        """Where the engine's cache is."""
        return self.rows[0].device

    def words(self) -> tuple[torch.Tensor, ...]:
        """The same memory in the widest integers that rows and distances are multiples of."""
        for dtype in _WORDS:
            size = dtype.itemsize
            if self.row_bytes % size == 0 and all(
                row.stride(0) % size == 0 and row.data_ptr() % size == 0 for row in self.rows
            ):
                return tuple(row if size == 1 else row.view(dtype) for row in self.rows)
        raise AssertionError("bytes are always possible")


def planes_of(kv_caches: Mapping[str, torch.Tensor], blocks: int) -> Planes:
    """Find the planes of each layer. Layers that share a tensor count once.

    Raises EngineUnsupported, naming the layer, where a block's bytes cannot be told.
    """
    tensors = {tensor.data_ptr(): (name, tensor) for name, tensor in kv_caches.items()}
    if not tensors:
        raise EngineUnsupported("the engine registered no KV cache")
    first = next(iter(tensors.values()))[1]
    rows: list[torch.Tensor] = []
    shapes, counts = set(), set()
    for name, tensor in tensors.values():
        if tensor.device != first.device:
            raise EngineUnsupported(f"{name} is on {tensor.device}, others on {first.device}")
        dimension = _block_dimension(name, tensor, blocks)
        found = _rows(name, tensor, dimension)
        shapes.add(tuple(size for n, size in enumerate(tensor.shape) if n != dimension))
        counts.add((len(found), found[0].shape[1]))
        rows += found
    if len(shapes) != 1 or len(counts) != 1:
        raise EngineUnsupported("layers with blocks of different shapes are not handled")
    ((layer_planes, row_bytes),) = counts
    return Planes(tuple(rows), blocks, row_bytes, layer_planes, shapes.pop())


def _block_dimension(name: str, tensor: torch.Tensor, blocks: int) -> int:
    shape = tuple(tensor.shape)
    if shape[:1] == (blocks,):
        return 0
    if shape[:2] == (_PAIR, blocks):
        return 1
    raise EngineUnsupported(f"{name} has shape {shape}; wanted {blocks} blocks")


def _rows(name: str, tensor: torch.Tensor, dimension: int) -> list[torch.Tensor]:
    """The planes of one tensor, by their place in memory."""
    size, itemsize = tensor.shape, tensor.element_size()
    inside = [n for n in range(tensor.dim()) if n != dimension and size[n] > 1]
    inside.sort(key=tensor.stride)
    run = 1  # elements of a block that follow each other in memory, from the innermost on
    while inside and tensor.stride(inside[0]) == run:
        run *= size[inside.pop(0)]
    stride = tensor.stride(dimension)
    if stride < run or any(tensor.stride(n) <= stride for n in inside):
        raise EngineUnsupported(
            f"{name} has shape {tuple(size)} and strides {tensor.stride()}; a block's bytes must "
            "be compact, but for outer dimensions"
        )
    outer = list(reversed(inside))
    starts = [
        int(tensor.storage_offset())
        + sum(i * tensor.stride(n) for i, n in zip(at, outer, strict=True))
        for at in product(*(range(size[n]) for n in outer))
    ]
    return [
        _bytes_at(tensor, start * itemsize, (size[dimension], run * itemsize), stride * itemsize)
        for start in starts
    ]


def _bytes_at(
    tensor: torch.Tensor, offset: int, shape: Sequence[int], stride_bytes: int
) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, tuple(shape), (stride_bytes, 1))
