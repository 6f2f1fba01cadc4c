"""What a model's KV takes and how much of it fits, step by step, in words.

Called by the plan command. Must not: print a size without its unit, or a result without the
numbers that it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.planner.memory import Device, KvLayout
from loadtests.planner.shape import Shape
from loadtests.planner.sizes import binary, both, decimal
from loadtests.planner.textbook import note_on
from loadtests.planner.weights import Weights

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class MemoryAsked:
    """What is to be planned. device or kv_bytes: where the KV goes; both None: only its size.

    contexts: tokens of a sequence, prompt and output together. concurrent: sequences to be held.
    """

    layout: KvLayout
    contexts: tuple[int, ...]
    device: Device | None = None
    kv_bytes: int | None = None
    weights: Weights | None = None
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """Sequences of one length. devices: that hold `concurrent` of them, None where none can."""

    tokens: int
    sequence_bytes: int
    blocks: int
    sequences: int | None
    devices: int | None


def default_contexts(shape: Shape) -> tuple[int, ...]:
    """The usual lengths, up to the model's longest."""
    longest = shape.context_tokens_max or CONTEXTS[3]
    return tuple(length for length in CONTEXTS if length <= longest) or (longest,)


def kv_room_bytes(asked: MemoryAsked) -> int | None:
    """KV memory of one rank's device, None where no device is named."""
    if asked.kv_bytes is not None:
        return asked.kv_bytes
    return None if asked.device is None else asked.device.kv_bytes


def fits(asked: MemoryAsked) -> list[Fit]:
    """By length."""
    found = []
    room = kv_room_bytes(asked)
    ranks = asked.layout.tensor_parallel
    for tokens in asked.contexts:
        sequences = None if room is None else max(0, asked.layout.sequences(max(0, room), tokens))
        devices = None
        if sequences and asked.concurrent:
            devices = ranks * -(-asked.concurrent // sequences)
        blocks = -(-tokens // asked.layout.block_tokens)
        size = asked.layout.sequence_bytes(tokens)
        found.append(Fit(tokens, size, blocks, sequences, devices))
    return found


def lines_of(asked: MemoryAsked) -> list[str]:
    """The whole calculation."""
    layout, shape = asked.layout, asked.layout.shape
    lines = [
        (
            f"Model: {shape.model_type}, {shape.layers} layers, {shape.heads} heads, "
            f"{shape.kv_heads} KV heads ({shape.attention}), head_dim {shape.head_dim}"
        ),
        *(f"  note: {note}" for note in shape.notes),
        *_window_lines(shape),
        "KV of one token" + _rank_words(layout) + ":",
        (
            f"  2 (key, value) × {shape.layers} layers × {layout.rank_kv_heads} KV heads × "
            f"{shape.head_dim} × {layout.number_bytes} B ({layout.stored_dtype}) = "
            f"{layout.token_bytes:,} B = {both(layout.token_bytes)}"
        ),
    ]
    if layout.copies > 1:
        lines.append(
            f"  note: {shape.kv_heads} KV heads on {layout.tensor_parallel} ranks: each is kept "
            f"{layout.copies} times, and more ranks save no KV memory"
        )
    lines.append(
        f"KV of one block of {layout.block_tokens} tokens: {layout.block_tokens} × "
        f"{layout.token_bytes:,} B = {both(layout.block_bytes)}"
    )
    lines += _room_lines(asked)
    lines += ["By length of a sequence (prompt and output together), in whole blocks:"]
    for fit in fits(asked):
        lines += _fit_lines(asked, fit)
    return lines


def _rank_words(layout: KvLayout) -> str:
    ranks = layout.tensor_parallel
    return f", on each of {ranks} ranks" if ranks > 1 else ""


def _window_lines(shape: Shape) -> list[str]:
    sliding = [window for window in shape.windows if window is not None]
    if not sliding:
        return []
    widths = ", ".join(f"{width:,}" for width in sorted(set(sliding)))
    return [
        (
            f"  {len(sliding)} of {shape.layers} layers slide: they keep the last {widths} tokens, "
            "where the engine frees what is behind (vLLM does, unless its hybrid KV cache is off)"
        )
    ]


def _room_lines(asked: MemoryAsked) -> list[str]:
    room = kv_room_bytes(asked)
    ranks = asked.layout.tensor_parallel
    lines = []
    if asked.weights is not None:
        share = f", / {ranks} ranks" if ranks > 1 else ""
        lines.append(f"Weights: {both(asked.weights.size_bytes)}: {asked.weights.how}{share}")
    device = asked.device
    if asked.kv_bytes is None and device is not None:
        used, left = both(int(device.total_bytes * device.share)), device.kv_bytes
        lines.append(
            f"Memory of a device: {both(device.total_bytes)} × {device.share:g} that the engine "
            f"may use = {used}"
        )
        lines.append(
            f"  − weights {both(device.weights_bytes)} − reserve {both(device.reserve_bytes)} "
            f"(activations, CUDA context, graphs: assumed) = "
            f"{both(left) if left > 0 else 'less than nothing'}"
        )
        if device.kv_bytes <= 0:
            lines.append("  THE MODEL DOES NOT FIT: take larger devices, more ranks or fp8 weights")
    if room is not None and room > 0:
        blocks = room // asked.layout.block_bytes
        lines.append(
            f"KV memory of a device: {both(room)} / {both(asked.layout.block_bytes)} = {blocks:,} "
            f"blocks = {blocks * asked.layout.block_tokens:,} tokens, none sliding"
        )
    return lines


def _fit_lines(asked: MemoryAsked, fit: Fit) -> list[str]:
    layout = asked.layout
    line = f"  {fit.tokens:>7,} tokens, {fit.blocks:,} blocks: {both(fit.sequence_bytes)}"
    exact = layout.exact_bytes(fit.tokens)
    if exact != fit.sequence_bytes:
        line += f" ({both(exact)} without rounding to blocks)"
    room = kv_room_bytes(asked)
    if fit.sequences is None or room is None:
        return [line, *_notes(layout, fit.tokens)]
    line += f"; fit: {fit.sequences:,}"
    if room > 0:
        line += f" ({decimal(room)} = {binary(room)}: {room / fit.sequence_bytes:.2f})"
    if asked.concurrent:
        line += _devices_words(asked, fit)
    return [line, *_notes(layout, fit.tokens)]


def _devices_words(asked: MemoryAsked, fit: Fit) -> str:
    if fit.devices is None:
        return f"; {asked.concurrent:,} at once: none fits"
    ranks = f" × {asked.layout.tensor_parallel} ranks" if asked.layout.tensor_parallel > 1 else ""
    return (
        f"; {asked.concurrent:,} at once: ceil({asked.concurrent:,} / {fit.sequences:,}){ranks} "
        f"= {fit.devices:,} devices"
    )


def _notes(layout: KvLayout, tokens: int) -> Sequence[str]:
    return [f"          note: {note}" for note in note_on(layout, tokens)]
