"""The alert rules: promtool runs them over made-up hours; each has its entry in the runbook."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import Config
from deployments.measures.all_metrics import METRICS
from tests.unit.cluster import promql
from tests.unit.cluster.promql import HELM, NAME

RULES = promql.rules()
RULES_FILE = HELM / "alerts" / "headwater.yaml"
HOURS = Path(__file__).with_name("alert_hours.yaml")
KNOWN = {name: metric for metric in METRICS for name in metric.series_names}
RUNBOOK = (HELM / "alerts" / "RUNBOOK.md").read_text()
LABELS = {"ray_cluster"}  # of the chart's monitors: they look like names of metrics
EACH = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(RULES)} rules found" in promql.promtool("check", "rules", str(RULES_FILE))


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    shutil.copy(RULES_FILE, tmp_path)
    shutil.copy(HOURS, tmp_path)
    assert "SUCCESS" in promql.promtool("test", "rules", HOURS.name, folder=tmp_path)


def test_the_made_up_hours_have_each_alert_firing_once_and_silent_once() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for hour in yaml.safe_load(HOURS.read_text())["tests"]:
        for look in hour["alert_rule_test"]:
            (fires if look.get("exp_alerts") else silent).add(look["alertname"])
    names = {rule["alert"] for rule in RULES}
    assert fires == names
    assert silent == names


@EACH
def test_an_alert_names_only_metrics_labels_and_values_of_ours(rule: dict[str, Any]) -> None:
    names = set(NAME.findall(rule["expr"])) - LABELS
    assert names or "(up{" in rule["expr"]
    assert names <= KNOWN.keys(), names - KNOWN.keys()
    for name, selector in re.findall(r"(ray_\w+)\{([^}]*)\}", rule["expr"]):
        for label, how, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
            if label == "le":
                bounds = {float(part) for part in value.split("|")}
                assert bounds <= set(KNOWN[name].bounds), rule["alert"]
                continue
            allowed = KNOWN[name].labels[label]
            wanted = value.split("|") if how == "=~" else [value]
            assert isinstance(allowed, str) or set(wanted) <= set(allowed), rule["alert"]


@EACH
def test_an_alert_is_of_one_release(rule: dict[str, Any]) -> None:
    grouped = re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", rule["expr"])
    assert grouped or rule["expr"].startswith("absent(")
    for labels in grouped:
        assert labels.startswith("namespace, rayservice"), labels


@EACH
def test_an_alert_says_how_grave_it_is_and_what_it_is(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description"}


def entry(alert: str) -> str:
    _, _, rest = RUNBOOK.partition(f"\n## {alert}\n")
    return rest.partition("\n## ")[0]


@EACH
def test_an_alert_has_its_entry_in_the_runbook(rule: dict[str, Any]) -> None:
    text = entry(rule["alert"])
    parts = [
        re.search(rf"\*\*{part}\.\*\* (.+)", text) for part in ("Meaning", "First look", "Action")
    ]
    assert all(parts), f"{rule['alert']} lacks a part"


def test_the_runbook_has_no_entry_of_an_alert_that_is_gone() -> None:
    assert re.findall(r"^## (\w+)", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in RULES]
    names = {rule["alert"] for rule in RULES}
    assert set(re.findall(r"\bHeadwater[A-Z]\w+", RUNBOOK)) == names


def test_panels_settings_and_metrics_that_the_runbook_names_exist() -> None:
    titles = {
        panel["title"]
        for dashboard in promql.dashboards().values()
        for panel in promql.panels(dashboard)
    }
    settings = {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    }
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", RUNBOOK)) - {"headwater.yaml"}
    assert named
    assert named <= settings, named - settings
    assert set(NAME.findall(RUNBOOK)) <= KNOWN.keys()
    known_words = {*titles, "fleet", "way of a request", "KV plane"}
    for shown in re.findall(r"[Dd]ashboard \*([^*]+)\*(?:, panel)?[:,] \*([^*]+)\*", RUNBOOK):
        for words in shown:
            assert words in known_words or any(t.startswith(words) for t in titles), words
