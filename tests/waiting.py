"""Waiting for a condition with a deadline: the only place in the tests that sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
POLL_FIRST_S = 0.001
POLL_S = 0.02


def wait_until(condition: Callable[[], T], *, timeout_s: float, what: str | Callable[[], str]) -> T:
    """Poll until the condition is true and return its value; AssertionError after the deadline."""
    deadline_s, poll_s = time.monotonic() + timeout_s, POLL_FIRST_S
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline_s:
            name = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {timeout_s} s for {name}")
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, POLL_S)


async def wait_until_async(
    condition: Callable[[], Awaitable[T]], *, timeout_s: float, what: str
) -> T:
    """The same on an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = await condition()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        await asyncio.sleep(POLL_S)
