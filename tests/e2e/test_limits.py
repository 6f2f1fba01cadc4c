"""What the cluster refuses, and what it says of itself: overload, metrics, commands."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from tests.e2e.client import body_of, complete, stream
from tests.e2e.conftest import QUEUE_MAX, Cluster, Together
from tests.e2e.corpus import prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SLOTS = 16


def test_overload_is_refused_with_an_estimate_and_the_rest_finish(cluster: Cluster) -> None:
    limit = SLOTS + QUEUE_MAX
    sent = limit + 16

    def one(seed: int) -> tuple[int, dict[str, str], dict[str, object]]:
        body = body_of(prompt(40, 4000 + seed), max_tokens=30, ignore_eos=True)
        reply = cluster.http.post("/v1/completions", json=body)
        return reply.status_code, dict(reply.headers), reply.json()

    answers = Together([lambda seed=seed: one(seed) for seed in range(sent)]).results()
    codes = [status for status, _, _ in answers]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= limit
    for status, headers, body in answers:
        if status == 429:
            assert 1 <= int(headers["retry-after"]) <= 120
            assert body["error"]["code"] == "overloaded"
            assert "x-headwater-request" in headers
        else:
            assert body["usage"]["completion_tokens"] == 30
    # After the burst a request is taken at once.
    complete(cluster, prompt(40, 4100), max_tokens=2)


def test_commands_show_workers_and_tell_the_story_of_a_request(cluster: Cluster) -> None:
    _, trace = complete(cluster, prompt(400, 4200), max_tokens=3)
    status = json.loads(cluster.cli("status", "--json").stdout)
    wanted = {
        *("id", "role", "model", "pid", "state", "running", "waiting"),
        *("blocks_published_total", "blocks_loaded_total"),
    }
    assert [w["role"] for w in status["workers"]] == ["decode", "prefill"]
    assert all(wanted <= w.keys() for w in status["workers"])
    told = cluster.cli("explain", trace).stdout
    assert "prefill on prefill-" in told
    assert "First token after" in told
    table = cluster.cli("status", "--ledger").stdout
    assert "Slab of node" in table
    unknown = cluster.cli("explain", "no-such-request")
    assert unknown.returncode != 0
    assert "no-such-request" in unknown.stderr


def test_a_second_serve_on_the_same_state_is_refused(cluster: Cluster) -> None:
    refused = cluster.cli("serve")
    assert refused.returncode != 0
    assert "runs already" in refused.stderr
    assert "headwater stop" in refused.stderr


def test_metrics_leave_through_the_exporter_of_ray(cluster: Cluster) -> None:
    complete(cluster, prompt(60, 4300), max_tokens=2)
    outcomes = cluster.status()["requests"]["outcomes"]

    def exported() -> list[float]:
        """Of each ingress that ever ran: a dead one's counts stay."""
        return [
            float(line.rpartition(" ")[2])
            for line in scrape(cluster).splitlines()
            if line.startswith("ray_headwater_requests_total{") and 'outcome="finished"' in line
        ]

    wait_until(lambda: outcomes["finished"] in exported(), timeout_s=60, what="metrics exported")
    text = scrape(cluster)
    assert "ray_headwater_degraded{" in text
    assert 'what="directory"' in text


def scrape(cluster: Cluster) -> str:
    """All targets that Ray names for Prometheus."""
    found = cluster.ray_session() / "prom_metrics_service_discovery.json"
    wait_until(found.exists, timeout_s=60, what="Ray's list of targets")
    pages = []
    for group in json.loads(found.read_text()):
        for target in group["targets"]:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as page:
                pages.append(page.read().decode())
    return "\n".join(pages)


def test_nothing_but_loopback_is_listened_on(cluster: Cluster) -> None:
    session = {w["pid"] for w in cluster.status()["workers"]}
    found = listening_addresses()
    ours = {address for pid, address in found if pid in session}
    assert ours
    assert ours <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found


def listening_addresses() -> set[tuple[int, str]]:
    """(pid, address) of every listening TCP socket of this user."""
    import psutil

    return {
        (connection.pid, connection.laddr.ip)
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid is not None
    }


def test_a_stream_of_many_tokens_is_not_buffered(cluster: Cluster) -> None:
    seen: list[tuple[float, int]] = []
    got = stream(
        cluster,
        body_of(prompt(50, 4400), max_tokens=40, ignore_eos=True),
        on_tokens=lambda so_far: seen.append((time.monotonic(), len(so_far.token_ids))),
    )
    assert len(got.token_ids) == 40
    # A token at a time, not in one piece at the end.
    assert len({count for _, count in seen}) >= 20
