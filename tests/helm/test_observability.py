"""Monitors, dashboards, alert rules, the notes, the hook: what operators find afterwards."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import yaml

from deployments.edge.http_edge import GENERATE_PATHS
from deployments.edge.key_gate import API_PATHS, API_PREFIXES, OPEN_PATHS
from deployments.edge.live_page import LIVE_PATH
from tests.helm.chart import CHART, Helm, Json, Manifests, sets
from tests.helm.matrix import GPUS, SWITCHES
from tests.helm.test_pods import matches, operated

DASHBOARD = {"title": "Fleet", "panels": [{"legendFormat": "{{worker}}"}]}
RULES: Json = {
    "groups": [
        {
            "name": "headwater",
            "rules": [
                {
                    "alert": "HeadwaterDown",
                    "expr": "up == 0",
                    "for": "5m",
                    "labels": {"severity": "page"},
                    "annotations": {"summary": "{{ $labels.pod }} is down"},
                }
            ],
        }
    ]
}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A copy with a dashboard, alert rules, and promtool's test of them."""
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy, ignore=shutil.ignore_patterns("dashboards", "alerts"))
    (copy / "dashboards").mkdir()
    (copy / "dashboards/Fleet_Overview.json").write_text(json.dumps(DASHBOARD, indent=2))
    (copy / "alerts").mkdir()
    (copy / "alerts/headwater.yaml").write_text("# Rules.\n" + yaml.safe_dump(RULES))
    (copy / "alerts/headwater_test.yaml").write_text("rule_files: [headwater.yaml]\ntests: []\n")
    return copy


def test_each_dashboard_is_a_configmap_that_grafanas_sidecar_finds(helm: Helm, chart: Path) -> None:
    manifests = helm.render(chart=chart)
    (found,) = [one for one in manifests.of("ConfigMap") if "dashboard" in one["metadata"]["name"]]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["Fleet_Overview.json"]) == DASHBOARD
    without = helm.render("--set", "dashboards.enabled=false", chart=chart)
    assert not [one for one in without.of("ConfigMap") if "dashboard" in one["metadata"]["name"]]


def test_alert_rules_are_a_configmap_and_where_asked_a_prometheus_rule(
    helm: Helm, chart: Path
) -> None:
    plain = helm.render(chart=chart)
    assert yaml.safe_load(
        plain.one("ConfigMap", "hw-headwater-alerts")["data"]["headwater.yaml"]
    ) == (RULES)
    assert plain.of("PrometheusRule") == []
    ruled = helm.render(*sets(*SWITCHES["alerts"]), chart=chart)
    rule = ruled.one("PrometheusRule")
    assert rule["spec"] == RULES
    assert rule["metadata"]["labels"]["release"] == "p"


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_each_release_with_a_monitor_asks_for_its_own_silence(helm: Helm, monitor: str) -> None:
    def silent(*values: str) -> set[str]:
        manifests = helm.render(*sets("alerts.enabled=true", *values))
        read = yaml.safe_load(
            manifests.one("ConfigMap", "hw-headwater-alerts")["data"]["headwater.yaml"]
        )
        both = (read, manifests.one("PrometheusRule")["spec"])
        return {
            rule["expr"]
            for one in both
            for group in one["groups"]
            for rule in group["rules"]
            if rule["alert"] == "HeadwaterNoMetrics"
        }

    assert silent() == {"absent(ray_headwater_workers)"}
    own = 'absent(ray_headwater_workers{namespace="serving", rayservice="hw-headwater"})'
    assert silent(f"monitoring.{monitor}=true") == {own}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_monitors_add_the_labels_that_alerts_tell_releases_apart_by(helm: Helm, kind: str) -> None:
    switch = f"monitoring.{kind[0].lower()}{kind[1:]}=true"
    manifests = helm.render("--set", switch)
    spec = manifests.one(kind)["spec"]
    (endpoint,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    added = {one["targetLabel"]: one["sourceLabels"] for one in endpoint["relabelings"]}
    prefix = "__meta_kubernetes_pod_label_"
    assert added["rayservice"] == [f"{prefix}app_kubernetes_io_instance"]
    assert added["ray_cluster"] == [f"{prefix}ray_io_cluster"]
    labels = manifests.pod("frontend")["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == manifests.one("RayService")["metadata"]["name"]


def test_a_chart_without_dashboards_and_rules_renders_too(helm: Helm, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(CHART, bare, ignore=shutil.ignore_patterns("dashboards", "alerts"))
    manifests = helm.render("--set", "alerts.enabled=true", chart=bare)
    assert {one["metadata"]["name"] for one in manifests.of("ConfigMap")} == {
        "hw-headwater-scripts",
        "hw-headwater-test",
    }


def test_a_monitor_finds_the_pods_by_a_port_that_they_have(helm: Helm) -> None:
    manifests = helm.render(*sets("monitoring.podMonitor=true"))
    spec = manifests.one("PodMonitor")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    for group in manifests.groups:
        labels = operated(manifests.pod(group)["metadata"]["labels"], group)
        assert matches(spec["selector"], labels)
        ports = {one["name"]: one["containerPort"] for one in manifests.container(group)["ports"]}
        assert ports[endpoint["port"]] == 8080
    assert not matches(spec["selector"], manifests.one("Pod")["metadata"]["labels"])


def test_a_service_monitor_has_a_service_with_its_port_and_the_pods_behind_it(helm: Helm) -> None:
    manifests = helm.render(*sets("monitoring.serviceMonitor=true"))
    spec = manifests.one("ServiceMonitor")["spec"]
    (service,) = [
        one
        for one in manifests.of("Service")
        if matches(spec["selector"], one["metadata"]["labels"])
    ]
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    assert port["name"] == spec["endpoints"][0]["port"]
    for group in manifests.groups:
        labels = operated(manifests.pod(group)["metadata"]["labels"], group)
        assert matches(service["spec"]["selector"], labels)
        ports = {one["name"] for one in manifests.container(group)["ports"]}
        assert port["targetPort"] in ports


def test_the_hook_asks_the_service_that_there_is(helm: Helm) -> None:
    manifests = helm.render(*sets("test.apiKey.existingSecret=k", "service.port=8080"))
    pod = manifests.one("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    environ = {one["name"]: one["value"] for one in container["env"]}
    assert environ["ENDPOINT"] == "http://hw-headwater:8080"
    assert manifests.one("Service", "hw-headwater")["spec"]["ports"][0]["port"] == 8080
    assert environ["KEY_FILE"] == "/etc/headwater/api-key/key"
    script = manifests.one("ConfigMap", "hw-headwater-test")["data"]["question.py"]
    assert script == (CHART / "files/question.py").read_text()
    assert container["command"][-1] == "/etc/headwater/test/question.py"


@pytest.mark.parametrize("controller", ["nginx", "haproxy"])
def test_streams_pass_an_ingress_unbuffered_for_as_long_as_told(
    helm: Helm, controller: str
) -> None:
    flags = sets("ingress.enabled=true", "ingress.host=h", f"ingress.controller={controller}")
    more = sets("ingress.timeoutSeconds=900", "config.limits.request_body_max_bytes=16777216")
    ingress = helm.render(*flags, *more).one("Ingress")
    notes = ingress["metadata"]["annotations"]
    if controller == "nginx":
        prefix = "nginx.ingress.kubernetes.io/"
        assert notes[f"{prefix}proxy-buffering"] == "off"
        assert notes[f"{prefix}proxy-read-timeout"] == notes[f"{prefix}proxy-send-timeout"] == "900"
        assert notes[f"{prefix}proxy-body-size"] == "16777216"
        assert notes[f"{prefix}proxy-next-upstream"] == "error"
    else:
        assert notes["haproxy.org/timeout-server"] == notes["haproxy.org/timeout-client"] == "900s"
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "hw-headwater", "port": {"name": "http"}}


def let_out(helm: Helm, *values: str) -> list[str]:
    given = sets("ingress.enabled=true", "ingress.host=h", *values)
    (rule,) = helm.render(*given).one("Ingress")["spec"]["rules"]
    paths = rule["http"]["paths"]
    assert {one["pathType"] for one in paths} == {"Prefix"}
    return [one["path"] for one in paths]


def is_out(paths: list[str], path: str) -> bool:
    """As Kubernetes' Prefix compares: element by element."""
    return any(f"{path}/".startswith(f"{one.rstrip('/')}/") for one in paths)


def test_without_keys_an_ingress_lets_out_the_api_and_nothing_of_the_operators(helm: Helm) -> None:
    paths = let_out(helm)
    api = {*API_PATHS, *OPEN_PATHS, *GENERATE_PATHS, *(f"{one}x" for one in API_PREFIXES)}
    assert {path for path in api if not is_out(paths, path)} == set()
    inside = ("/", LIVE_PATH, "/headwater/status", "/headwater/requests/x", "/metrics", "/-/routes")
    assert [path for path in inside if is_out(paths, path)] == []
    # Nothing goes out that a key of the API would not open.
    assert {*paths} <= {*API_PATHS, *OPEN_PATHS, *(one.rstrip("/") for one in API_PREFIXES)}


def test_keys_guard_all_routes_and_named_paths_are_those_that_go_out(helm: Helm) -> None:
    assert let_out(helm, *SWITCHES["keys"]) == ["/"]
    assert let_out(helm, *SWITCHES["keys"], "ingress.paths={/v1}") == ["/v1"]
    assert let_out(helm, "ingress.paths={/v1,/ready}") == ["/v1", "/ready"]


def notes(helm: Helm, *flags: str) -> str:
    """NOTES.txt, which `helm template` does not print."""
    words = ["install", "hw", str(CHART), "--dry-run=client", "--namespace", "serving"]
    done = helm.run(*words, "--set", "checkCrds=false", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_the_notes_tell_how_to_ask_and_where_to_look(helm: Helm) -> None:
    text = notes(helm)
    assert "kubectl --namespace serving port-forward service/hw-headwater 8000:80" in text
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in text
    assert '"model": "SmolLM2-135M-Instruct"' in text
    assert "port-forward service/hw-headwater-head-svc 8265:8265" in text
    assert "helm test hw --namespace serving" in text
    assert "ConfigMap headwater-layer" in text
    assert "No API keys are set" in text


def test_the_notes_tell_of_keys_ingress_and_gpus_where_there_are(helm: Helm) -> None:
    more = sets("ingress.enabled=true", "ingress.host=h.example.com", "ingress.tlsSecret=t")
    text = notes(helm, *sets(*SWITCHES["keys"]), *more, *sets(*GPUS))
    assert '-H "authorization: Bearer $KEY"' in text
    assert "https://h.example.com/v1" in text
    assert "not been run on GPUs" in text
    assert "No API keys" not in text
    assert "stay inside" not in text
    assert "(/headwater/...) stay inside" in notes(helm, *more)


def test_a_generated_secret_is_long_and_none_is_made_where_one_is_named(helm: Helm) -> None:
    secret = helm.render().one("Secret")
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert len(base64.b64decode(secret["data"]["secret"])) == 64
    named: Manifests = helm.render(*sets("secrets.cluster.existingSecret=mine"))
    assert named.of("Secret") == []


def test_values_that_name_every_secret_render_the_same_each_time(helm: Helm) -> None:
    words = ["template", "hw", str(CHART), "--set", "checkCrds=false"]
    words += ["--values", str(CHART / "values/multi-tenant.yaml")]
    first, second = helm.run(*words), helm.run(*words)
    assert first.returncode == 0
    assert first.stdout == second.stdout
