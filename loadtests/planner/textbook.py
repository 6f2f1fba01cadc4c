"""The sums that texts on KV memory print, done again: which come out, and in which unit.

Called by `plan --examples`, and by the memory plan where its model is one of theirs. Must not: hold
a result; claims of texts are quoted, everything beside them is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.planner.memory import KvLayout
from loadtests.planner.shape import Shape
from loadtests.planner.sizes import GB, GIB, binary, both
from loadtests.planner.sla import tpot_ms_of

MIB = 1 << 20


def simple(name: str, layers: int, heads: int, kv_heads: int, head_dim: int) -> Shape:
    """A shape without windows."""
    return Shape(name, (None,) * layers, heads, kv_heads, head_dim, "float16")


LLAMA_3_8B = KvLayout(simple("llama", 32, 32, 8, 128), "bfloat16")
LLAMA_7B = KvLayout(simple("llama", 32, 32, 32, 128), "float16")
LLAMA_13B = KvLayout(simple("llama", 40, 40, 40, 128), "float16")
LLAMA_13B_GQA = KvLayout(simple("llama", 40, 40, 10, 128), "float16")
OFTEN_SAID_BYTES, OFTEN_SAID_REQUESTS = 512 * MIB, 150


@dataclass(frozen=True, slots=True)
class Claim:
    """So many sequences of `tokens` fit into `amount` GB, or GiB: which of them is to be found."""

    layout: KvLayout
    tokens: int
    amount: float
    sequences: int

    def fits(self, unit_bytes: int) -> float:
        """How many, not rounded, with that unit."""
        return self.amount * unit_bytes / self.layout.exact_bytes(self.tokens)

    def units(self) -> list[str]:
        """Those in which the claim comes out, by whole sequences or to the nearest one."""
        found = []
        for name, unit in (("GB", GB), ("GiB", GIB)):
            fits = self.fits(unit)
            if int(fits) == self.sequences:
                found.append(name)
            elif round(fits) == self.sequences or f"{fits:.1f}" == f"{self.sequences - 0.5:.1f}":
                found.append(f"{name} (as {fits:.1f}; {int(fits)} whole ones)")
        return found

    def line(self) -> str:
        """The claim, and what comes out."""
        true_in = self.units()
        verdict = f"true in {' and '.join(true_in)}" if true_in else "true in neither"
        return (
            f"  {self.amount:g} GB hold {self.fits(GB):.2f} of them, {self.amount:g} GiB "
            f"{self.fits(GIB):.2f}: {self.sequences} is {verdict}"
        )


def examples() -> list[str]:
    """Each one with its formula."""
    lines = [
        _formula("32 layers, 8 KV heads (GQA)", LLAMA_3_8B, 4096),
        _formula("Llama-7B", LLAMA_7B, 2048),
        Claim(LLAMA_7B, 2048, 80, 75).line(),
        *(f"  note: {note}" for note in note_on(LLAMA_7B, 2048)),
        _formula("Llama-13B", LLAMA_13B, 4096),
        Claim(LLAMA_13B, 4096, 44, 13).line(),
        *_devices(Claim(LLAMA_13B, 4096, 44, 13), 64),
        _formula("The same with four query heads a KV head", LLAMA_13B_GQA, 4096),
        Claim(LLAMA_13B_GQA, 4096, 44, 52).line(),
    ]
    tpot = tpot_ms_of(ttft_ms=1000, e2e_ms=5000, output_tokens=101)
    lines.append(
        "TTFT 1 s, in all 5 s, 101 tokens: (5 s − 1 s) / (101 − 1) gaps = "
        f"{tpot:g} ms TPOT = {1000 / tpot:g} tokens/s for that user"
    )
    return lines


def note_on(layout: KvLayout, tokens: int) -> list[str]:
    """What texts say wrongly about this very case; empty for any other."""
    mine, theirs = layout.shape, LLAMA_7B.shape
    is_theirs = (
        (mine.windows, mine.kv_heads, mine.head_dim)
        == (theirs.windows, theirs.kv_heads, theirs.head_dim)
        and tokens == 2048  # noqa: PLR2004 - theirs
        and (layout.number_bytes, layout.tensor_parallel) == (LLAMA_7B.number_bytes, 1)
    )
    if not is_theirs:
        return []
    size = layout.exact_bytes(tokens)
    said = f"512 MB, and {OFTEN_SAID_REQUESTS} requests in 80 GB,"
    note = (
        f"texts that say {said} contradict their own formula, which gives {binary(size)}, "
        f"{size / OFTEN_SAID_BYTES:g} times as much (half of it is keys, or values, alone), and "
        f"{80 * GB / size:.1f} requests in 80 GB ({80 * GIB / size:.0f} in 80 GiB)"
    )
    return [note]


def _formula(name: str, layout: KvLayout, tokens: int) -> str:
    shape = layout.shape
    return (
        f"{name}: 2 × {shape.layers} × {shape.kv_heads} × {shape.head_dim} × {layout.number_bytes} "
        f"B ({layout.stored_dtype}) × {tokens:,} tokens = {both(layout.exact_bytes(tokens))}"
    )


def _devices(claim: Claim, concurrent: int) -> list[str]:
    counts = {
        name: -(-concurrent // int(claim.fits(unit))) for name, unit in (("GB", GB), ("GiB", GIB))
    }
    told = ", ".join(f"{count} with {claim.amount:g} {name}" for name, count in counts.items())
    return [f"  {concurrent} at once, whole sequences a GPU: {told}"]
