"""Shadow audits on a whole cluster: they agree, they show, and no user's book knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.client import complete
from tests.e2e.conftest import Cluster, ledger_faults, serving
from tests.e2e.corpus import BLOCK, prompt
from tests.e2e.test_accounting import exported
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]
AUDIT_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that audits whatever it can."""
    flags = ("--dtype", "float32", "--set", "slab.audit_share=1")
    with serving(tmp_path_factory.mktemp("audits"), *flags) as running:
        yield running


def audits(cluster: Cluster) -> dict[str, Any]:
    return dict(cluster.status()["audits"])


def latest(cluster: Cluster) -> list[str]:
    """Names of the records."""
    return list(cluster.http.get("/headwater/requests?count=100").json()["requests"])


def test_requests_that_reused_blocks_are_audited_and_nothing_of_it_is_in_the_books(
    audited: Cluster,
) -> None:
    prompts = [prompt(8 * BLOCK + 7, 9700 + number) for number in range(3)]
    traces, first = [], []
    for ids in prompts:
        answer, trace = complete(audited, ids, max_tokens=12)
        first.append(answer["choices"][0]["token_ids"])
        traces.append(trace)
    again = []
    for ids in prompts:
        answer, trace = complete(audited, ids, max_tokens=12)
        again.append(answer["choices"][0]["token_ids"])
        traces.append(trace)
    assert first == again
    before, names = audited.status(), latest(audited)
    assert set(traces) <= set(names)
    wait_until(
        lambda: audits(audited)["outcomes"]["agreed"] >= len(prompts),
        timeout_s=AUDIT_TIMEOUT_S,
        what=lambda: f"audits to end: {audits(audited)}",
    )
    wait_until(
        lambda: not audits(audited)["waiting"] and not audits(audited)["running_at"],
        timeout_s=AUDIT_TIMEOUT_S,
        what="the last audit to end",
    )
    after = audited.status()
    assert after["audits"]["outcomes"]["disagreed"] == 0
    assert after["audits"]["disagreements"] == after["degraded"] == []
    # What users are told of their requests has not changed by it.
    for name in ("requests", "cache"):
        assert _totals(after[name]) == _totals(before[name])
    assert latest(audited) == names
    shown = audited.cli("status", "--once")
    assert f"{after['audits']['outcomes']['agreed']} agreed" in shown.stdout
    wait_until(
        lambda: exported(audited, "headwater_audits_total", "outcome").get("agreed", 0) >= 3,
        timeout_s=AUDIT_TIMEOUT_S,
        what="the exporter to tell of them",
    )
    # The workers' own counters come the same way.
    told = exported(audited, "headwater_kv_blocks_total", "way")
    assert told["published"] > 0
    wait_until(
        lambda: not ledger_faults(audited),
        timeout_s=AUDIT_TIMEOUT_S,
        what=lambda: f"clean ledger: {ledger_faults(audited)}",
    )


def _totals(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "last_minute"}
