"""Workers that die or stand still under requests, with the counting engine: all are answered."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.leaks.conftest import LEASE_S, Bench
from tests.leaks.ledger import wait_clean
from tests.leaks.site import Process, Site
from tests.leaks.tenant import SALT
from tests.simulation.model import BLOCK, reference
from tests.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

TOKENS = 20
PROMPT = 4 * BLOCK + 1
LINKED_S = 10.0
CLEAN_S = 2 * LEASE_S


class Asked:
    """Requests on their way at the same time."""

    def __init__(self, here: Site, count: int) -> None:
        self._here = here
        self._prompts = {}
        for _ in range(count):
            prompt = here.new_prompt(PROMPT)
            name = f"asked-{here.started}"
            self._prompts[name] = prompt
            here.ingress.call("ask", name, prompt, TOKENS)

    def answer(self) -> None:
        """Wait for all; each is the right one."""
        for name, prompt in self._prompts.items():
            answer, failure = self._here.ended(name).what[2:]
            assert failure == ""
            assert answer == reference(prompt, SALT, TOKENS, TOKENS, None)[0]

    def workers(self) -> set[str]:
        """Who was given any of them."""
        return {
            what.split()[2]
            for _, subject, what in self._here.ingress.call("log")
            if what.startswith("submitted") and subject.partition("~")[0] in self._prompts
        }


def linked(here: Site) -> None:
    here.tell_members()
    wait_until(here.is_linked, timeout_s=LINKED_S, what="links")


@contextlib.contextmanager
def stopped(process: Process) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_decode_lives_through_five_deaths_of_prefill_and_takes_over_from_each_next_one(
    bench: Bench,
) -> None:
    here = bench.here
    decode = here.workers["decode"]
    for _ in range(5):
        dying = Asked(here, 10)
        here.workers["prefill"].kill()
        dying.answer()
        here.start_worker("prefill")
        linked(here)
        after = Asked(here, 10)
        after.answer()
        assert after.workers() == {here.workers["prefill"].name, decode.name}
        wait_clean(here, CLEAN_S)
    assert here.workers["decode"] is decode
    assert not decode.has_ended


def test_requests_at_a_dead_or_blackholed_worker_go_on_elsewhere_and_it_serves_again(
    bench: Bench,
) -> None:
    here = bench.here
    here.start_worker("decode", "spare")
    linked(here)
    asked = Asked(here, 20)
    dead = here.workers["spare"]
    dead.kill()
    asked.answer()
    # Serve has not noticed yet: its port refuses, and nobody is given to it.
    asked = Asked(here, 20)
    asked.answer()
    assert dead.name not in asked.workers()
    del here.workers["spare"]
    linked(here)
    standing = here.workers["decode"]
    with stopped(standing):
        asked = Asked(here, 20)
        asked.answer()
        assert standing.name not in here.ingress.call("links")
        asked = Asked(here, 20)
        asked.answer()
        assert standing.name not in asked.workers()
    linked(here)
    asked = Asked(here, 20)
    asked.answer()
    assert standing.name in asked.workers()
    wait_clean(here, CLEAN_S)
