"""The answer to a request that is still on its way.

Called by the block store, whose reader thread resolves it, and by the connector, which polls done()
or waits in result(). An answer that nobody will read gives back what it brings: see give_up().
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcache.errors import StoreUnavailable

T = TypeVar("T")


class Pending(Generic[T]):
    """Read it with result(), or say with give_up() that nobody will."""

    def __init__(
        self,
        unwanted: Callable[[T], None] | None = None,
        on_give_up: Callable[[], None] | None = None,
    ) -> None:
        """Unwanted gets the value if it comes for nobody; on_give_up runs when nobody waits more.
        Each is called at most once, in the thread that causes it, and must not block.
        """
        self._condition = threading.Condition(threading.Lock())
        self._is_done = False
        self._is_given_up = False
        self._is_taken = False
        self._value: T | None = None
        self._error: StoreUnavailable | None = None
        self._unwanted = unwanted
        self._on_give_up = on_give_up

    @classmethod
    def failed(cls, error: StoreUnavailable) -> Pending[T]:
        """One that has failed before it began."""
        pending = cls()
        pending.fail(error)
        return pending

    def done(self) -> bool:
        """True once result() returns or raises at once."""
        return self._is_done or self._is_given_up

    def result(self, timeout_s: float) -> T:
        """Waits. Raises StoreUnavailable when the agent is lost, when it was given up, and when
        timeout_s (seconds, 0 or more) runs out, which gives it up.
        """
        with self._condition:
            if not self._condition.wait_for(self.done, timeout_s):
                is_late = True
            else:
                is_late = False
                if self._is_given_up:
                    raise StoreUnavailable("given up")
                if self._error is not None:
                    raise StoreUnavailable(str(self._error)) from self._error
                self._is_taken = True
        if is_late:
            self.give_up()
            raise StoreUnavailable(f"the agent did not answer within {timeout_s} s")
        return self._value  # type: ignore[return-value]  # None only where T is

    def give_up(self) -> None:
        """Nobody will read the result: what it grants or leases goes back. No effect once a result
        was read; safe to call twice.
        """
        with self._condition:
            if self._is_given_up or self._is_taken or self._error is not None:
                return
            self._is_given_up = True
            is_done, value = self._is_done, self._value
            self._condition.notify_all()
        if self._on_give_up is not None:
            self._on_give_up()
        if is_done and self._unwanted is not None:
            self._unwanted(value)  # type: ignore[arg-type]  # done without error: it is a T

    def resolve(self, value: T) -> None:
        """For the reader thread."""
        with self._condition:
            self._is_done = True
            self._value = value
            is_unwanted = self._is_given_up
            self._condition.notify_all()
        if is_unwanted and self._unwanted is not None:
            self._unwanted(value)

    def fail(self, error: StoreUnavailable) -> None:
        """For the reader thread."""
        with self._condition:
            self._is_done = True
            self._error = error
            self._condition.notify_all()
