"""Expressions as promtool and Prometheus see them: without Grafana's variables."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

HELM = Path(__file__).resolve().parents[3] / "helm"
NAME = re.compile(r"\bray_[a-zA-Z0-9_]+")


def dashboards() -> dict[str, dict[str, Any]]:
    """The shipped ones by their file's stem."""
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted((HELM / "dashboards").glob("*.json"))
    }


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that ask for something."""
    return [panel for panel in dashboard["panels"] if panel.get("targets")]


def plain(expr: str, *, window: str = "5m") -> str:
    """With values for Grafana's variables; none may be left."""
    done = expr.replace("$__rate_interval", window).replace("$model", ".*")
    assert "$" not in done, done
    return done


def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    text = (HELM / "alerts" / "headwater.yaml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def promtool(*words: str, folder: Path | None = None) -> str:
    """Its output. Skips without it, fails where it complains."""
    if shutil.which("promtool") is None:
        pytest.skip("missing: promtool (Debian package prometheus)")
    done = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
