from __future__ import annotations

import pytest

pytest.importorskip("ray")

from loadtests.compare.prefix_router import text_of


def test_equal_prefixes_of_ids_are_equal_text_and_others_are_not() -> None:
    ids = [0, 31, 1000, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 200_000]
    text = text_of(ids)
    assert len(text) == len(ids) == len(set(text))
    assert text_of(ids[:5]) == text[:5]


def test_the_text_can_be_sent_between_processes() -> None:
    text = text_of(list(range(0xD7F0, 0xE010)))
    assert text.encode().decode() == text
