"""Two ingresses of one cluster behind HAProxy: each serves, and one that leaves takes nobody along.

A cluster of its own. What balancers do at which moment is tried in tests/loadbalancer with stubs;
here the ingresses, their ports, their /ready and their end are the real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cluster.ports import held, listen_briefly
from tests.e2e.client import Streamed, body_of, reference, stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster, serving
from tests.e2e.corpus import prompt
from tests.equality import check_tokens
from tests.loadbalancer.balancers import Balancer, balancer, is_there
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not is_there("haproxy"), reason="missing: haproxy"),
]

TOKENS = 40
BACK_TIMEOUT_S = START_TIMEOUT_S


def two_free_ports() -> int:
    """The first of two in a row that nobody has."""
    while True:
        first = listen_briefly("127.0.0.1", 0)
        try:
            with held("127.0.0.1", first, first + 1):
                return first
        except (OSError, OverflowError):
            continue


@pytest.fixture(scope="module")
def first_port() -> int:
    return two_free_ports()


@pytest.fixture(scope="module")
def doubled(first_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype", "float32", "--port", str(first_port), "--set", "http.replicas=2")
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


@pytest_asyncio.fixture
async def front(doubled: Cluster, first_port: int, tmp_path: Path) -> AsyncIterator[Balancer]:
    async with balancer("haproxy", [first_port, first_port + 1], tmp_path) as found:
        yield found


def status_at(port: int) -> dict[str, Any]:
    return dict(httpx.get(f"http://127.0.0.1:{port}/headwater/status", timeout=30).json())


def answers_at(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def test_both_ingresses_serve_and_the_death_of_one_fails_no_later_request(
    doubled: Cluster, first_port: int, front: Balancer
) -> None:
    await asyncio.to_thread(both_serve_and_one_dies, doubled, first_port, front.url)


def both_serve_and_one_dies(doubled: Cluster, first_port: int, url: str) -> None:
    ports = (first_port, first_port + 1)
    names = [str(status_at(port)["ingress"]) for port in ports]
    assert len(set(names)) == 2
    with httpx.Client(base_url=url, timeout=180) as http:
        through = Cluster(url, doubled.state_dir, http)

        def ask() -> Streamed:
            return stream(through, body_of(prompt(40, 1), max_tokens=TOKENS))

        def finished() -> list[int]:
            return [status_at(port)["requests"]["outcomes"]["finished"] for port in ports]

        expected = reference(through, prompt(40, 1), max_tokens=TOKENS)
        before = finished()
        asked = [ask() for _ in range(4)]
        assert all(now > then for now, then in zip(finished(), before, strict=True))
        for one in asked:
            check_tokens(one.token_ids, expected)
        for one in asked:  # whichever ingress has its record
            story = doubled.cli("explain", one.trace_id)
            assert (story.returncode, story.stderr) == (0, "")
            assert "finished" in story.stdout
        os.kill(int(names[0].split("-")[1]), signal.SIGKILL)
        later = [ask() for _ in range(4)]
        for one in later:
            check_tokens(one.token_ids, expected)
        wait_until(
            lambda: answers_at(ports[0]), timeout_s=BACK_TIMEOUT_S, what="an ingress at its port"
        )
        assert status_at(ports[0])["ingress"] != names[0]
        check_tokens(ask().token_ids, expected)
