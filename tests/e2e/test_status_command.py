"""`headwater status` against a whole cluster: its figures are the engines' own, live and once."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.e2e.client import body_of, complete, raw_stream
from tests.e2e.conftest import ROOT, Cluster
from tests.e2e.corpus import BLOCK, prompt
from tests.terminal import CTRL_C, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_live_on_a_terminal_it_shows_the_table_again_and_ends_on_ctrl_c(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "cluster.cli", "status", "--interval", "0.2"]
    command += ["--state-dir", str(cluster.state_dir)]
    ids = [worker["id"] for worker in cluster.status()["workers"]]
    with terminal(command, ROOT) as screen:
        # The table's head, since a worker's id may be named below the table, too.
        screen.read_until(lambda shown: shown.count("WORKER") >= 2)
        screen.press(CTRL_C)
        assert screen.ended() == 0
    assert all(name in screen.shown for name in ids)
    assert "Traceback" not in screen.shown
    assert screen.shown.rindex("\x1b[?25h") > screen.shown.rindex("\x1b[?25l")  # the cursor is back


def test_a_prompt_that_was_seen_before_counts_as_cached(cluster: Cluster) -> None:
    ids = prompt(10 * BLOCK + 1, 9200)
    complete(cluster, ids, max_tokens=2)
    before = _json(cluster)["cache"]["total"]
    complete(cluster, ids, max_tokens=2)
    after = _json(cluster)
    grown = {
        name: after["cache"]["total"][name] - before[name]
        for name in ("prompt_tokens", "cached_tokens")
    }
    assert grown == {"prompt_tokens": len(ids), "cached_tokens": 10 * BLOCK}
    workers = after["workers"]
    assert sum(w["cached_tokens_total"] for w in workers) >= 10 * BLOCK
    assert all(w["cached_share"] is None or 0 <= w["cached_share"] <= 1 for w in workers)
    (node,) = after["nodes"]
    assert node["slots_total"] > 0
    assert node["leases"] == node["leased_slots"] == 0
    assert after["admission"]["in_flight"] == 0


def test_the_ledger_names_owner_and_age_of_all_that_a_running_request_holds(
    cluster: Cluster,
) -> None:
    body = body_of(prompt(BLOCK, 9300), max_tokens=1500, ignore_eos=True)
    with raw_stream(cluster, body, "ledger") as raw:
        raw.read_events(2)
        told = cluster.cli("status", "--ledger").stdout
        held = _json(cluster, "--ledger")["held"]
    ingress = cluster.status()["ingress"]
    (request,) = held["requests"]
    assert (request["stage"], request["handoff"]) == ("decode", None)
    assert "ledger" in request["request"]
    assert request["age_s"] > 0
    attempts = {w["worker"]: w["attempts"] for w in held["workers"]}
    assert attempts.keys() == {worker["id"] for worker in cluster.status()["workers"]}
    (attempt,) = [one for ones in attempts.values() for one in ones]
    assert attempts[request["worker"]] == [attempt]
    assert (attempt["owner"], attempt["status"]) == (ingress, "running")
    assert 0 < attempt["age_s"] <= request["age_s"] + 1
    assert f"of {ingress}: running, " in told
    assert "Ingress: 1 request." in told
    assert all(w["loads"] == [] and w["staging"] == [] for w in held["workers"])


def _json(cluster: Cluster, *flags: str) -> dict[str, Any]:
    found = cluster.cli("status", "--json", *flags)
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))
