"""The share of prompts that caches had, in all and over the last minute."""

from __future__ import annotations

import pytest

from deployments.ingress.cached_share import CachedShare


def test_without_prompts_there_is_no_share() -> None:
    nothing = {"prompt_tokens": 0, "cached_tokens": 0, "cached_share": None}
    assert CachedShare().as_json(5.0) == {"total": nothing, "last_minute": nothing}


def test_prompts_are_weighed_by_their_tokens() -> None:
    share = CachedShare()
    share.add(900, 900, 1.0)
    share.add(100, 0, 1.5)
    found = share.as_json(2.0)
    assert found["total"] == {"prompt_tokens": 1000, "cached_tokens": 900, "cached_share": 0.9}
    assert found["last_minute"] == found["total"]


def test_what_is_older_than_a_minute_counts_in_the_total_alone() -> None:
    share = CachedShare()
    share.add(100, 0, 10.9)
    share.add(100, 100, 40.0)
    assert share.as_json(69.9)["last_minute"]["cached_share"] == 0.5
    assert share.as_json(70.0)["last_minute"]["cached_share"] == 1.0
    assert share.as_json(200.0)["last_minute"]["prompt_tokens"] == 0
    assert share.as_json(200.0)["total"]["cached_share"] == 0.5


def test_the_window_holds_a_bucket_a_second_at_most() -> None:
    share = CachedShare()
    for step in range(10_000):
        share.add(10, 5, step * 0.1)
    assert len(share._seconds) <= 61
    assert share.as_json(1000.0)["total"]["prompt_tokens"] == 100_000


def test_more_cached_than_there_was_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        CachedShare().add(1, 2, 0.0)
