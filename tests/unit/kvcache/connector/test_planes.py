"""Where the bytes of a block lie, in every layout that engines have."""

from __future__ import annotations

import pytest
import torch

from kvcache.connector.errors import EngineUnsupported
from kvcache.connector.planes import Planes, planes_of

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 6, 3, 4, 10, 2


def flat(elements: int) -> torch.Tensor:
    """Distinct values, so that any byte out of place is seen."""
    return torch.arange(elements, dtype=torch.int16)


def compact(layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """vLLM's LBHNC: a block of a layer is one run."""
    shape = (layers, BLOCKS, HEADS, TOKENS, CONTENT)
    whole = flat(layers * BLOCKS * HEADS * TOKENS * CONTENT).view(shape)
    return {f"layer {n}": whole[n] for n in range(layers)}


def tokens_first() -> dict[str, torch.Tensor]:
    """LBNHC (NHD): the same logical shape over another order."""
    shape = (LAYERS, BLOCKS, TOKENS, HEADS, CONTENT)
    whole = flat(LAYERS * BLOCKS * TOKENS * HEADS * CONTENT).view(shape)
    return {f"layer {n}": whole[n].permute(0, 2, 1, 3) for n in range(LAYERS)}


def heads_outside() -> dict[str, torch.Tensor]:
    """LHBNC: a block is a run a head."""
    shape = (LAYERS, HEADS, BLOCKS, TOKENS, CONTENT)
    whole = flat(LAYERS * HEADS * BLOCKS * TOKENS * CONTENT).view(shape)
    return {f"layer {n}": whole[n].transpose(0, 1) for n in range(LAYERS)}


def layers_inside() -> dict[str, torch.Tensor]:
    """BLHNC: a block of all layers is one run, so that a layer's blocks lie apart."""
    shape = (BLOCKS, LAYERS, HEADS, TOKENS, CONTENT)
    whole = flat(BLOCKS * LAYERS * HEADS * TOKENS * CONTENT).view(shape)
    return {f"layer {n}": whole[:, n] for n in range(LAYERS)}


def keys_then_values() -> dict[str, torch.Tensor]:
    """[2, blocks, ...]: two runs a block."""
    shape = (LAYERS, 2, BLOCKS, TOKENS, HEADS, CONTENT)
    whole = flat(LAYERS * 2 * BLOCKS * TOKENS * HEADS * CONTENT).view(shape)
    return {f"layer {n}": whole[n] for n in range(LAYERS)}


def pair_inside() -> dict[str, torch.Tensor]:
    """[blocks, 2, ...]: keys and values of a block in one run."""
    shape = (LAYERS, BLOCKS, 2, TOKENS, HEADS, CONTENT)
    whole = flat(LAYERS * BLOCKS * 2 * TOKENS * HEADS * CONTENT).view(shape)
    return {f"layer {n}": whole[n] for n in range(LAYERS)}


LAYOUTS = {
    "compact": (compact, 1),
    "tokens first": (tokens_first, 1),
    "heads outside": (heads_outside, HEADS),
    "layers inside": (layers_inside, 1),
    "keys then values": (keys_then_values, 2),
    "pair inside": (pair_inside, 1),
}


def block_of(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[:, block] if tensor.shape[0] == 2 else tensor[block]


def bytes_of(planes: Planes, block: int) -> torch.Tensor:
    return torch.cat([row[block] for row in planes.rows])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_has_all_bytes_of_its_block_and_none_of_another(layout: str) -> None:
    make, layer_planes = LAYOUTS[layout]
    caches = make()
    planes = planes_of(caches, BLOCKS)
    assert (planes.layers, planes.layer_planes) == (LAYERS, layer_planes)
    for block in range(BLOCKS):
        found = bytes_of(planes, block).view(torch.int16)
        wanted = torch.cat([block_of(tensor, block).flatten() for tensor in caches.values()])
        assert planes.slot_bytes == 2 * len(wanted)
        assert found.sort().values.equal(wanted.sort().values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_share_the_engines_memory(layout: str) -> None:
    caches = LAYOUTS[layout][0]()
    planes = planes_of(caches, BLOCKS)
    for row in planes.rows:
        row[4] = 0
    for tensor in caches.values():
        left = tensor.clone()
        assert not block_of(left, 4).any()
        block_of(left, 4).fill_(1)
        assert (left == 0).sum() <= 1  # the very first value of all is 0


def test_a_compact_block_keeps_the_order_of_its_bytes() -> None:
    caches = compact()
    planes = planes_of(caches, BLOCKS)
    wanted = torch.cat([tensor[2].flatten() for tensor in caches.values()])
    assert bytes_of(planes, 2).view(torch.int16).equal(wanted)


def test_two_blocks_of_a_pair_are_told_from_a_pair_of_two_blocks() -> None:
    pairs = {"layer 0": torch.zeros(2, 2, TOKENS, CONTENT)}
    assert planes_of(pairs, 2).layer_planes == 1


def test_words_are_as_wide_as_rows_and_distances_allow() -> None:
    wide = planes_of(compact(), BLOCKS)
    assert wide.row_bytes == 240
    assert {word.dtype for word in wide.words()} == {torch.int64}
    odd = planes_of({"layer 0": torch.zeros(BLOCKS, 3, dtype=torch.int16)}, BLOCKS)
    assert {word.dtype for word in odd.words()} == {torch.int16}
    bytewise = planes_of({"layer 0": torch.zeros(BLOCKS, 3, dtype=torch.uint8)}, BLOCKS)
    assert {word.dtype for word in bytewise.words()} == {torch.uint8}


def test_layers_that_share_a_tensor_count_once() -> None:
    caches = compact()
    caches["a layer that shares"] = caches["layer 0"]
    assert planes_of(caches, BLOCKS).layers == LAYERS


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({}, "no KV cache"),
        ({"odd": torch.zeros(BLOCKS + 1, 4)}, "odd has shape"),
        ({"a": torch.zeros(BLOCKS, 4), "b": torch.zeros(BLOCKS, 8)}, "different shapes"),
        ({"gaps": torch.zeros(BLOCKS, 4, 8)[:, :, ::2]}, "gaps has shape"),
        ({"twice": torch.zeros(4).expand(BLOCKS, 4)}, "twice has shape"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    caches: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(EngineUnsupported, match=words):
        planes_of(caches, BLOCKS)
