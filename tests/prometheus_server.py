"""A real Prometheus for tests: scrapes what it is told to, and answers queries.

Needs the program `prometheus` (Debian package prometheus); without it the test is skipped, in CI it
fails. Listens on a free port of loopback, keeps its data in the test's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import wait_until

SCRAPE_S = 1
START_TIMEOUT_S = 60.0
LISTENING = re.compile(r'msg="Listening on" address=(127\.0\.0\.1:\d+)')


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """An answer's data."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as reply:
            body = json.load(reply)
        assert body["status"] == "success", body
        return body["data"]

    def samples(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant vector, NaN left out."""
        data = self.ask("query", query=expr)
        found = [(one["metric"], float(one["value"][1])) for one in data["result"]]
        return [(labels, value) for labels, value in found if value == value]  # noqa: PLR0124 - NaN

    def total(self, expr: str) -> float:
        """The sum of all series; 0 without any."""
        return sum(value for _, value in self.samples(expr))

    def by(self, expr: str, label: str) -> dict[str, float]:
        """Sums by a label."""
        found: dict[str, float] = {}
        for labels, value in self.samples(expr):
            found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found


@contextlib.contextmanager
def prometheus(
    folder: Path,
    *,
    targets: Sequence[str] = (),
    targets_file: Path | None = None,
    rules: Sequence[Path] = (),
) -> Iterator[Prometheus]:
    """Run one until the block ends. targets_file: as Ray writes it (file_sd)."""
    if shutil.which("prometheus") is None:
        words = "prometheus is not installed (Debian package prometheus)"
        if os.environ.get("CI"):
            pytest.fail(words)
        pytest.skip(words)
    job: dict[str, Any] = {"job_name": "ray", "static_configs": [{"targets": list(targets)}]}
    if targets_file is not None:
        job["file_sd_configs"] = [{"files": [str(targets_file)], "refresh_interval": "1s"}]
    timing = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    settings = {
        "global": timing,
        "scrape_configs": [job],
        "rule_files": [str(path) for path in rules],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Prometheus(f"http://{_address(process, log)}")
    finally:
        process.terminate()
        process.wait(timeout=60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it answers, once it does."""

    def ready() -> str | None:
        text = log.read_text()
        if process.poll() is not None:
            pytest.fail(f"prometheus ended with {process.returncode}:\n{text[-2000:]}")
        found = LISTENING.search(text)
        return found[1] if found and "Server is ready" in text else None

    return wait_until(ready, timeout_s=START_TIMEOUT_S, what="prometheus") or ""
