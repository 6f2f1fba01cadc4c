"""Every panel and every rule in a real Prometheus, which scrapes one sample of each metric of ours.

That the product exports these is tests/e2e/test_prometheus.py's part.
"""

from __future__ import annotations

import http.server
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.dashboards.__main__ import DASHBOARDS
from cluster.dashboards.panels import Dashboard
from deployments.measures.all_metrics import METRICS
from deployments.measures.metric import Metric
from tests.prometheus_server import Prometheus, prometheus
from tests.unit.cluster.promql import HELM, plain
from tests.waiting import wait_until

pytestmark = [pytest.mark.contract, pytest.mark.slow]
SCRAPES_LEAST = 3
WINDOW = "10s"


def pages() -> Iterator[str]:
    """The exporter's page at each scrape: everything grows."""
    for turn in itertools.count(1):
        yield "".join(family(metric, turn) for metric in METRICS)


def family(metric: Metric, turn: int) -> str:
    values = [("m",) if isinstance(v, str) else v for v in metric.labels.values()]
    lines = [
        f"# HELP {metric.exported} {metric.meaning}",
        f"# TYPE {metric.exported} {metric.kind}",
    ]
    for chosen in itertools.product(*values):
        named = [*zip(metric.labels, chosen, strict=True), ("WorkerId", "w")]
        labels = ",".join(f'{name}="{value}"' for name, value in named)
        if metric.kind != "histogram":
            lines.append(f"{metric.exported}{{{labels}}} {turn}")
            continue
        bounds = [*map(float, metric.bounds), "+Inf"]
        lines += [
            f'{metric.exported}_bucket{{{labels},le="{bound}"}} {turn * place}'
            for place, bound in enumerate(bounds, start=1)
        ]
        lines += [f"{metric.exported}_{end}{{{labels}}} {turn * 9}" for end in ("sum", "count")]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def exporter() -> Iterator[str]:
    """Its address."""
    page = pages()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = next(page).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, name="exporter")
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def scraped(exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen the page a few times."""
    rules = [HELM / "alerts" / "headwater.yaml"]
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, targets=[exporter], rules=rules) as running:
        seen = f"count_over_time(up[{WINDOW}])"
        wait_until(lambda: running.total(seen) >= SCRAPES_LEAST, timeout_s=60, what="three scrapes")
        yield running


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_query_of_every_panel_gives_samples(
    scraped: Prometheus, dashboard: Dashboard
) -> None:
    queries = [
        (panel.title, query.expr)
        for row in dashboard.rows
        for panel in row.panels
        for query in panel.queries
    ]
    assert queries
    empty = [(t, e) for t, e in queries if not scraped.samples(plain(e, window=WINDOW))]
    assert not empty


def test_every_rule_is_evaluated_without_an_error(scraped: Prometheus) -> None:
    def evaluated() -> list[str]:
        groups = scraped.ask("rules")["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    wait_until(lambda: "unknown" not in evaluated(), timeout_s=60, what="rules evaluated")
    assert set(evaluated()) == {"ok"}


def test_each_family_keeps_its_kind_and_meaning_in_prometheus(scraped: Prometheus) -> None:
    told = scraped.ask("metadata")
    for metric in METRICS:
        (found,) = told[metric.exported]
        assert (found["type"], found["help"]) == (metric.kind, metric.meaning)
