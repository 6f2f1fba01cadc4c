"""A client's own name for its request counts, wherever it gave it."""

from __future__ import annotations

import pytest

from deployments.engine.request_names import request_name

SERVE = "6f1c2a0e-93ab-4c1d-8e2f-0123456789ab"
VLLM = "923b090ca356434a"


@pytest.mark.parametrize(
    ("header", "body", "name"),
    [
        ("mine", "also-mine", "mine"),
        ("mine", VLLM, "mine"),
        (SERVE, "mine", "mine"),
        (SERVE, VLLM, SERVE),  # may be the client's own UUID
        (SERVE, None, SERVE),
        (None, "mine", "mine"),
        (None, VLLM, VLLM),
        (None, None, None),
    ],
)
def test_what_a_client_gave_comes_before_what_was_drawn(
    header: str | None, body: str | None, name: str | None
) -> None:
    assert request_name(header, body) == name


@pytest.mark.parametrize("unsafe", ["", "two words", "line\nbreak", "x" * 129])
def test_a_name_that_is_not_safe_to_repeat_is_not_used(unsafe: str) -> None:
    assert request_name(SERVE, unsafe) == SERVE
    assert request_name(None, unsafe) is None
