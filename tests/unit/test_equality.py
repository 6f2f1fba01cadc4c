"""tests/equality.py: what passes as the same, and that everything else does not."""

from __future__ import annotations

import numpy as np
import pytest

from tests import equality
from tests.equality import (
    KV_ROUNDING,
    TIE_NATS,
    KvDiffers,
    Reference,
    Tally,
    TokensDiffer,
    check_blocks,
    check_tokens,
    kv_difference,
)

LAYERS = 3
NUMBERS = 2 * 4 * 32 * 8  # of a layer
NEAR, FAR = TIE_NATS["float32"] / 2, 0.3


@pytest.fixture(autouse=True)
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    fresh = Tally()
    monkeypatch.setattr(equality, "TALLY", fresh)
    return fresh


def test_tokens_equal_are_equal_and_counted(tally: Tally) -> None:
    assert check_tokens([1, 2, 3], Reference([1, 2, 3], [FAR] * 3))
    assert (tally.answers, tally.ties) == (1, [])


def test_tokens_that_part_at_a_tie_are_counted(tally: Tally) -> None:
    assert not check_tokens([1, 9, 9, 9], Reference([1, 2, 3], [FAR, NEAR, FAR]))
    assert len(tally.ties) == 1


@pytest.mark.parametrize(
    "got", [[1, 9, 3], [1, 2], [1, 2, 3, 4], []], ids=["other", "short", "long", "none"]
)
def test_tokens_that_part_elsewhere_fail(got: list[int], tally: Tally) -> None:
    with pytest.raises(TokensDiffer):
        check_tokens(got, Reference([1, 2, 3], [FAR, FAR, NEAR]))
    assert tally.ties == []


def test_ties_beyond_their_share_fail(tally: Tally) -> None:
    reference = Reference([1], [NEAR])
    for _ in range(tally.allowed):
        check_tokens([9], reference)
    with pytest.raises(TokensDiffer, match="too many ties"):
        check_tokens([9], reference)


def test_reference_cut_keeps_leads_with_tokens() -> None:
    whole = Reference([1, 2, 3], [0.1, 0.2, 0.3])
    assert whole.after(1) == Reference([2, 3], [0.2, 0.3])
    assert whole.until(1) == Reference([1], [0.1])


def block(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(LAYERS * NUMBERS).astype(np.float32)


def test_blocks_rounded_otherwise_are_true() -> None:
    truth = {bytes([n]): block(n).tobytes() for n in range(3)}
    noise = 1 + 1e-6 * block(9)
    apart = check_blocks({b"\0": (block(0) * noise).tobytes()}, truth, LAYERS)
    assert 0 < apart[b"\0"] < KV_ROUNDING / 10


@pytest.mark.parametrize("damage", ["another block", "zeros", "one token's values", "no numbers"])
def test_blocks_that_are_wrong_fail(damage: str) -> None:
    truth = {bytes([n]): block(n).tobytes() for n in range(3)}
    wrong = block(1 if damage == "another block" else 0)
    if damage == "zeros":
        wrong[:] = 0
    elif damage == "one token's values":
        wrong[NUMBERS : NUMBERS + 8] = 0
    elif damage == "no numbers":
        wrong[7] = np.nan
    assert kv_difference(wrong.tobytes(), truth[b"\0"], LAYERS) > 100 * KV_ROUNDING
    with pytest.raises(KvDiffers):
        check_blocks({b"\0": wrong.tobytes()}, truth, LAYERS)


def test_references_that_are_alike_prove_nothing() -> None:
    same = block(0).tobytes()
    with pytest.raises(KvDiffers, match="alike"):
        check_blocks({}, {b"a": same, b"b": same}, LAYERS)
