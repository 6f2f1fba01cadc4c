from __future__ import annotations

import threading

import pytest

from kvcache.errors import StoreUnavailable
from kvcache.pending import Pending


def test_a_result_can_be_polled_and_read_twice() -> None:
    pending: Pending[int] = Pending()
    assert not pending.done()
    pending.resolve(7)
    assert pending.done()
    assert (pending.result(0.0), pending.result(0.0)) == (7, 7)


def test_a_result_wakes_who_waits_for_it() -> None:
    pending: Pending[int] = Pending()
    threading.Thread(target=pending.resolve, args=(7,)).start()
    assert pending.result(10.0) == 7


def test_a_failure_is_raised_to_whoever_reads() -> None:
    pending: Pending[int] = Pending.failed(StoreUnavailable("gone"))
    assert pending.done()
    with pytest.raises(StoreUnavailable, match="gone"):
        pending.result(0.0)


def test_a_time_out_gives_the_operation_up_and_its_late_value_goes_back() -> None:
    returned: list[int] = []
    pending: Pending[int] = Pending(unwanted=returned.append)
    with pytest.raises(StoreUnavailable, match="did not answer"):
        pending.result(0.0)
    assert pending.done()
    with pytest.raises(StoreUnavailable, match="given up"):
        pending.result(0.0)
    pending.resolve(7)
    assert returned == [7]


def test_giving_up_what_has_come_returns_it_once() -> None:
    returned: list[int] = []
    ended: list[bool] = []
    pending: Pending[int] = Pending(returned.append, lambda: ended.append(True))
    pending.resolve(7)
    pending.give_up()
    pending.give_up()
    assert (returned, ended) == ([7], [True])


def test_giving_up_what_was_read_or_failed_returns_nothing() -> None:
    returned: list[int] = []
    read: Pending[int] = Pending(unwanted=returned.append)
    read.resolve(7)
    read.result(0.0)
    read.give_up()
    failed: Pending[int] = Pending(unwanted=returned.append)
    failed.fail(StoreUnavailable("gone"))
    failed.give_up()
    assert returned == []
