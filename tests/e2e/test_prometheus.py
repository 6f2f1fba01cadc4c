"""A real Prometheus scrapes a cluster under mixed traffic; its numbers are those of the answers.

Requests in = sum of the outcomes; tokens in metrics = tokens in answers; cached tokens in usage =
the engines' own; every panel has a sample, or says why it may have none.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.dashboards.__main__ import DASHBOARDS
from deployments.measures import ingress_list as ingress
from deployments.measures import worker_list as worker
from deployments.measures.all_metrics import METRICS
from deployments.measures.metric import Metric
from tests.e2e.client import Streamed, body_of, complete, raw_stream, stream
from tests.e2e.conftest import START_TIMEOUT_S, Cluster, Together
from tests.e2e.corpus import CONTEXT, prompt
from tests.e2e.test_limits import scrape
from tests.prometheus_server import Prometheus, prometheus
from tests.unit.cluster.promql import HELM, plain
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow]

REPORTED_S = 60.0  # processes tell Ray's agent every few seconds, Prometheus asks every second
WINDOW = "5m"
RAYS_LABELS = "label names should be written in 'snake_case' not 'camelCase'"
# Without a sample until what they count happens for the first time.
UNTIL_FIRST = {ingress.REFUSALS.name, ingress.DOUBTS.name}
PROCESSES = 4  # that count, in a small cluster: an ingress, two workers, the node agent


@pytest.fixture(scope="module")
def watched(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that finds the cluster by Ray's own list of targets."""
    found = cluster.ray_session() / "prom_metrics_service_discovery.json"
    wait_until(found.exists, timeout_s=60, what="Ray's list of targets")
    rules = [HELM / "alerts" / "headwater.yaml"]
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, targets_file=found, rules=rules) as running:
        wait_until(
            lambda: running.samples(ingress.RECEIVED.exported),
            timeout_s=REPORTED_S,
            what="the ingress's metrics",
        )
        yield running


@dataclass
class Books:
    """What Prometheus says now, of all processes that ever ran."""

    outcomes: dict[str, int]
    received: int
    in_flight: int
    prompt_tokens: dict[str, int]
    output_tokens: dict[str, int]
    cached: int
    engines_cached: int
    engines_prompts: int
    e2e: dict[str, int]
    first_tokens: int
    refusals: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, seen: Prometheus) -> Books:
        """All in one go; they may be of different moments until traffic has ceased."""

        def by(metric: Metric, label: str, end: str = "") -> dict[str, int]:
            found = seen.by(metric.exported + end, label)
            return {name: round(value) for name, value in found.items()}

        def total(metric: Metric) -> int:
            return round(seen.total(metric.exported))

        return cls(
            outcomes=by(ingress.ENDED, "outcome"),
            received=total(ingress.RECEIVED),
            in_flight=total(ingress.IN_FLIGHT),
            prompt_tokens=by(ingress.PROMPT_TOKENS, "outcome"),
            output_tokens=by(ingress.OUTPUT_TOKENS, "outcome"),
            cached=total(ingress.CACHED_TOKENS),
            # Asked first: what is waited for must not be newer than what is asserted.
            engines_prompts=total(worker.PROMPTS),
            engines_cached=total(worker.CACHED),
            e2e=by(ingress.E2E, "outcome", "_count"),
            first_tokens=total(ingress.FIRST_TOKENS),
            refusals=by(ingress.REFUSALS, "status"),
        )

    def grown(self, before: Books) -> Books:
        """This, less what was there before."""

        def less(now: Any, then: Any) -> Any:
            if isinstance(now, dict):
                grown = {name: value - then.get(name, 0) for name, value in now.items()}
                return {name: value for name, value in grown.items() if value}
            return now - then

        names = self.__dataclass_fields__
        return Books(**{name: less(getattr(self, name), getattr(before, name)) for name in names})


def settled(cluster: Cluster, seen: Prometheus) -> Books:
    """The books, once Prometheus says of each outcome what the ingress says."""
    status = cluster.status()
    told = {n: c for n, c in status["requests"]["outcomes"].items() if c}
    prompts = {one["prompt_tokens_total"] for one in status["workers"]} - {0}
    books = Books.read(seen)

    def same() -> bool:
        nonlocal books
        # By process: counters of those that are gone stay, and may never come out even.
        ingresses: dict[str, dict[str, int]] = {}
        for labels, value in seen.samples(ingress.ENDED.exported):
            if value:
                ingresses.setdefault(labels["WorkerId"], {})[labels["outcome"]] = round(value)
        engines = {round(value) for value in seen.by(worker.PROMPTS.exported, "WorkerId").values()}
        books = Books.read(seen)  # last: not older than what is waited for
        known = not told or told in ingresses.values()
        return known and prompts <= engines and books.in_flight == 0

    wait_until(same, timeout_s=REPORTED_S, what=lambda: f"prometheus to say {told}, not {books}")
    return books


def usage_of(reply: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt, completion and cached tokens that the client is told."""
    usage = reply["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0


def test_requests_and_tokens_of_mixed_traffic_are_those_of_the_answers(
    cluster: Cluster, watched: Prometheus
) -> None:
    before, tag = settled(cluster, watched), uuid.uuid4().hex
    shared = prompt(200, 9900)
    answers = [
        complete(cluster, [*shared, *prompt(40, 9901 + n)], max_tokens=5, ignore_eos=True)[0]
        for n in range(3)
    ]
    both = {"n": 2, "temperature": 1.0, "seed": 1}
    answers.append(complete(cluster, shared, max_tokens=4, ignore_eos=True, **both)[0])
    streamed = stream(cluster, body_of(shared, max_tokens=6, ignore_eos=True))
    assert streamed.usage is not None
    two = stream(cluster, body_of(shared, max_tokens=3, ignore_eos=True, **both))
    assert two.usage is not None
    told = [usage_of(one) for one in (*answers, {"usage": streamed.usage}, {"usage": two.usage})]
    bad: list[dict[str, Any]] = [
        {"max_tokens": -1},
        {"temperature": -2},
        {"prompt": [1] * (CONTEXT + 1)},
    ]
    for wrong in bad:
        reply = cluster.http.post("/v1/completions", json={**body_of([5, 6]), **wrong})
        assert reply.status_code == 400, reply.text
    for number in range(2):
        body = body_of(prompt(30, 9910 + number), max_tokens=900, ignore_eos=True)
        with raw_stream(cluster, body, f"{tag}-{number}") as raw:
            raw.read_events(2)
            raw.leave("close")
    expected = {"finished": 8, "cancelled": 2, "refused": 3}

    grown = before

    def counted() -> bool:
        nonlocal grown
        grown = Books.read(watched).grown(before)
        # The engines tell last, every few seconds.
        return grown.outcomes == expected and grown.engines_prompts == sum(
            grown.prompt_tokens.values()
        )

    wait_until(counted, timeout_s=REPORTED_S, what=lambda: f"{expected}, not {grown}")
    assert grown.received == 13
    assert grown.in_flight == 0
    assert grown.refusals == {"400": 3}
    assert grown.e2e == {"finished": 8, "cancelled": 2}  # no choice was made of refused ones
    assert grown.first_tokens == 10
    prompts, outputs, cached = (sum(one[place] for one in told) for place in range(3))
    # The two choices of a request have its prompt each; its client is told of it once.
    assert grown.prompt_tokens == {"finished": prompts + 2 * len(shared), "cancelled": 60}
    assert grown.output_tokens["finished"] == outputs == 3 * 5 + 2 * 4 + 6 + 2 * 3
    assert grown.cached == grown.engines_cached
    # What the second choices had from caches is in no usage.
    assert 0 < cached <= grown.cached <= cached + 2 * len(shared)


def test_every_metric_is_named_and_bounded_as_the_list_says(
    cluster: Cluster, watched: Prometheus
) -> None:
    complete(cluster, prompt(40, 9920), max_tokens=2)
    settled(cluster, watched)
    known = {name: metric for metric in METRICS for name in metric.series_names}

    def missing() -> set[str]:
        names = {
            labels["__name__"] for labels, _ in watched.samples('{__name__=~"ray_headwater_.+"}')
        }
        assert names <= known.keys(), names - known.keys()
        found = {known[name].name for name in names}
        return {metric.name for metric in METRICS} - found - UNTIL_FIRST

    wait_until(lambda: not missing(), timeout_s=REPORTED_S, what=lambda: f"{missing()}")
    # By process: a node's exporter keeps the counters and histograms of those that have gone.
    counted: Counter[tuple[str, Metric]] = Counter()
    for labels, _ in watched.samples('{__name__=~"ray_headwater_.+"}'):
        metric = known[labels["__name__"]]
        counted[labels["WorkerId"], metric] += 1
        for label, allowed in metric.labels.items():
            assert isinstance(allowed, str) or labels[label] in allowed, labels
    processes = {process for process, _ in counted}
    assert "" not in processes
    assert len(processes) >= PROCESSES
    many = {place: count for place, count in counted.items() if count > place[1].series_max}
    assert not many, many


def test_prometheus_linter_complains_of_rays_own_labels_alone(cluster: Cluster) -> None:
    lines = [line for line in scrape(cluster).splitlines() if "ray_headwater_" in line]
    page = "\n".join(dict.fromkeys(lines)) + "\n"
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    complaints = (done.stdout + done.stderr).splitlines()
    assert [line for line in complaints if not line.endswith(RAYS_LABELS)] == []
    for kind in ("HELP", "TYPE"):
        families = re.findall(rf"^# {kind} (\S+)", page, re.MULTILINE)
        assert len(set(families)) == len(families)


def test_every_panel_has_a_sample_or_says_why_it_may_have_none(
    cluster: Cluster, watched: Prometheus
) -> None:
    for number in range(2):
        complete(cluster, prompt(300, 9930), max_tokens=3 + number, ignore_eos=True)
    settled(cluster, watched)

    def empty() -> list[str]:
        return [
            f"{dashboard.name}/{panel.title}: {query.expr}"
            for dashboard in DASHBOARDS
            for row in dashboard.rows
            for panel in row.panels
            for query in panel.queries
            if not panel.silent and not watched.samples(plain(query.expr, window=WINDOW))
        ]

    wait_until(lambda: not empty(), timeout_s=REPORTED_S, what=lambda: "\n".join(empty()))


def test_the_rules_are_evaluated_and_no_alarm_of_wrong_tokens_or_missing_metrics_is_firing(
    cluster: Cluster, watched: Prometheus
) -> None:
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="ready")

    def rules() -> dict[str, dict[str, Any]]:
        groups = watched.ask("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    wait_until(
        lambda: "unknown" not in {rule["health"] for rule in rules().values()},
        timeout_s=REPORTED_S,
        what="rules evaluated",
    )
    assert {rule["health"] for rule in rules().values()} == {"ok"}
    critical = {n for n, rule in rules().items() if rule["state"] == "firing"}
    assert not critical & {"HeadwaterWrongTokens", "HeadwaterBlocksCorrupt", "HeadwaterNoMetrics"}


@pytest.mark.chaos
def test_a_stream_that_met_two_deaths_is_one_failure_with_its_reason(
    cluster: Cluster, watched: Prometheus
) -> None:
    before = settled(cluster, watched)
    faults = watched.by(ingress.FAULTED.exported, "reason")
    victims = [cluster.worker(role)["pid"] for role in ("decode", "prefill")]

    def watch(so_far: Streamed) -> None:
        if victims and len(so_far.token_ids) >= 12 * (3 - len(victims)):
            os.kill(victims.pop(0), signal.SIGKILL)

    body = body_of(prompt(24, 9940), max_tokens=900, ignore_eos=True)
    (got,) = Together([lambda: stream(cluster, body, on_tokens=watch)]).results()
    assert len(got.errors) == 1
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="workers back")
    grown = settled(cluster, watched).grown(before)
    assert grown.outcomes == grown.e2e == {"failed": 1}
    assert grown.output_tokens == {"failed": len(got.token_ids)}
    now = watched.by(ingress.FAULTED.exported, "reason")
    assert {r: now[r] - faults.get(r, 0) for r in now if now[r] != faults.get(r, 0)} == {
        "poison_request": 1
    }
