"""What pods get: memory, probes, rights, secrets, places; and who may reach or move them."""

from __future__ import annotations

import json

import pytest

from tests.helm.chart import Helm, Json, Manifests, mebibytes, sets
from tests.helm.matrix import GPUS, MATRIX, SWITCHES

each = pytest.mark.parametrize("name", MATRIX)
WORKERS = ("prefill", "decode", "colocated")


def limit_mib(manifests: Manifests, group: str) -> int:
    return mebibytes(manifests.container(group)["resources"]["limits"]["memory"])


def matches(selector: Json, labels: Json) -> bool:
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and wanted.items() <= labels.items()


def operated(labels: Json, group: str) -> Json:
    """With what the operator adds."""
    kind = "head" if group == "head" else "worker"
    return labels | {"ray.io/is-ray-node": "yes", "ray.io/node-type": kind}


def test_the_slab_and_shared_memory_are_part_of_the_pods_memory(helm: Helm) -> None:
    before = helm.render()
    after = helm.render(*sets("config.slab.mib=4096", "memory.shmMiB=1256"))
    for group in ("prefill", "decode"):
        grown = limit_mib(after, group) - limit_mib(before, group)
        assert grown == (4096 - 512) + (1256 - 256)
        (shm,) = [v for v in after.pod(group)["spec"]["volumes"] if v["name"] == "shared-mem"]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1256Mi"}
    for group in ("head", "frontend"):
        assert limit_mib(after, group) == limit_mib(before, group)


def test_each_engine_adds_its_own_and_on_cpus_its_kv_cache(helm: Helm) -> None:
    one, three = helm.render(), helm.render(*sets("decode.workersPerPod=3"))
    assert limit_mib(three, "decode") - limit_mib(one, "decode") == 2 * (2048 + 256)
    on_gpus = helm.render(*sets(*GPUS, "decode.workersPerPod=3"))
    assert limit_mib(three, "decode") - limit_mib(on_gpus, "decode") == 3 * 256
    resources = on_gpus.container("decode")["resources"]
    # Whole cores of its own (CPU manager) are for pods whose limits of these are their requests.
    for name in ("cpu", "memory", "nvidia.com/gpu"):
        assert resources["limits"][name] == resources["requests"][name]
    assert resources["limits"]["nvidia.com/gpu"] == "3"


@pytest.mark.parametrize(
    ("values", "packages_mib", "weights_mib"),
    [
        ((), 6144, 0),
        (("layer.storageMiB=9000",), 9000, 0),
        (SWITCHES["image with Headwater"], 0, 0),
        (SWITCHES["hub"], 6144, 0),  # on a claim
        (SWITCHES["hub without a token"], 6144, 20480),
        (("model.hub.storageMiB=70000", *SWITCHES["hub without a token"]), 6144, 70000),
    ],
)
def test_a_pod_asks_for_the_disk_that_it_fills(
    helm: Helm, values: tuple[str, ...], packages_mib: int, weights_mib: int
) -> None:
    manifests = helm.render(*sets(*values))
    for group in manifests.groups:
        resources = manifests.container(group)["resources"]
        asked = mebibytes(resources["requests"].get("ephemeral-storage", "0Mi"))
        assert asked == packages_mib + (0 if group == "head" else weights_mib)
        assert "ephemeral-storage" not in resources["limits"]  # beyond one a pod is evicted


def test_the_object_store_fits_into_shared_memory(helm: Helm) -> None:
    for group in helm.render().groups.values():
        assert int(group["rayStartParams"]["object-store-memory"]) <= 256 << 20


@each
def test_no_probe_that_ends_a_pod_looks_at_the_model(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    for group in manifests.groups:
        container = manifests.container(group)
        for probe in ("startupProbe", "livenessProbe"):
            # Of Ray's own process on this pod: neither peers nor engines are in it.
            assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}
        start = container["startupProbe"]
        assert start["failureThreshold"] * start["periodSeconds"] >= 600
        assert "readinessProbe" in container


def test_the_leave_of_the_probes_is_what_the_values_say(helm: Helm) -> None:
    manifests = helm.render(
        *sets("probes.startupSeconds=605", "probes.livenessSeconds=65", "probes.periodSeconds=10")
    )
    container = manifests.container("decode")
    assert container["startupProbe"]["failureThreshold"] == 61
    assert container["livenessProbe"]["failureThreshold"] == 7


def test_traffic_comes_when_a_token_can_be_made(helm: Helm) -> None:
    manifests = helm.render()
    frontend = manifests.container("frontend")["readinessProbe"]
    assert frontend["httpGet"] == {"path": "/ready", "port": 8000}
    for group in ("prefill", "decode"):
        script = manifests.container(group)["readinessProbe"]["exec"]["command"][-1]
        assert script == "/etc/headwater/scripts/worker-ready.sh"


@each
def test_no_process_is_root_or_may_become_it(helm: Helm, name: str) -> None:
    for pod, template in helm.render(*MATRIX[name]).all_pods():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, pod
        assert spec["securityContext"]["runAsUser"] > 0, pod
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), pod
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False, (pod, container["name"])
            assert rights["capabilities"] == {"drop": ["ALL"]}, (pod, container["name"])
            assert not rights.get("privileged"), (pod, container["name"])
            assert container["resources"]["limits"]["memory"], (pod, container["name"])


@each
def test_no_secret_is_in_an_environment_or_a_command(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    for pod, template in manifests.all_pods():
        for container in template["spec"]["containers"]:
            for variable in container.get("env", []):
                assert "valueFrom" not in variable, (pod, variable)
            assert "secretKeyRef" not in json.dumps(container), pod
    for secret in manifests.of("Secret"):
        value = secret["data"]["secret"]
        rest = [one for one in manifests if one is not secret]
        assert value not in json.dumps(rest)


def test_pods_have_no_token_of_kubernetes_but_the_head_for_the_autoscaler(helm: Helm) -> None:
    plain, scaled = helm.render(), helm.render(*sets("autoscaling.enabled=true"))
    for group in plain.groups:
        assert plain.pod(group)["spec"]["automountServiceAccountToken"] is False
        expected = group == "head"
        assert scaled.pod(group)["spec"]["automountServiceAccountToken"] is expected


@each
def test_a_budget_matches_its_pods_and_lets_one_be_moved(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    groups = [group for group in manifests.groups if group != "head"]
    budgets = manifests.of("PodDisruptionBudget")
    if not budgets:
        assert "podDisruptionBudget.enabled=false" in MATRIX[name] or name == "cpu-demo.yaml"
        return
    for group in groups:
        labels = manifests.pod(group)["metadata"]["labels"]
        (budget,) = [one for one in budgets if matches(one["spec"]["selector"], labels)]
        assert "maxUnavailable" not in budget["spec"]  # RayCluster has no scale subresource
        assert budget["spec"]["minAvailable"] == max(0, manifests.groups[group]["replicas"] - 1)
    assert len(budgets) == len(groups)


@each
def test_the_service_reaches_the_frontends_and_nothing_else(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    service = manifests.one("Service", "hw-headwater")["spec"]
    reached = {
        pod
        for pod, template in manifests.all_pods()
        if matches(service["selector"], template["metadata"].get("labels", {}))
    }
    assert reached == {"frontend"}


@each
def test_the_network_lets_clients_to_the_frontends_port_alone(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    policies = manifests.of("NetworkPolicy")
    if not policies:
        assert name == "open network"
        return
    open_to: dict[str, set[int]] = {}
    for group in manifests.groups:
        labels = operated(manifests.pod(group)["metadata"]["labels"], group)
        chosen = [one for one in policies if matches(one["spec"]["podSelector"], labels)]
        assert chosen, group
        for rule in (rule for one in chosen for rule in one["spec"]["ingress"]):
            if "from" not in rule:
                open_to.setdefault(group, set()).update(port["port"] for port in rule["ports"])
    clients_are_named = name in {"multi-tenant.yaml", "closed network"}
    reached = manifests.groups.keys() - {"head"} if name == "incremental" else {"frontend"}
    assert open_to == ({} if clients_are_named else {group: {8000} for group in reached})


def test_workers_of_a_release_reach_each_other_on_all_ports(helm: Helm) -> None:
    manifests = helm.render()
    (rule, *_) = manifests.one("NetworkPolicy", "hw-headwater")["spec"]["ingress"]
    assert "ports" not in rule
    (peer,) = rule["from"]
    for group in manifests.groups:
        labels = operated(manifests.pod(group)["metadata"]["labels"], group)
        assert matches(peer["podSelector"], labels)
    other = helm.render(release="other").pod("decode")["metadata"]["labels"]
    assert not matches(peer["podSelector"], operated(other, "decode"))
    question = manifests.one("Pod")["metadata"]["labels"]
    assert not matches(peer["podSelector"], question)


def test_pods_are_placed_as_told_and_else_spread_over_nodes(helm: Helm) -> None:
    manifests = helm.render(*sets(*SWITCHES["placed"]))
    decode = manifests.pod("decode")
    assert decode["spec"]["nodeSelector"] == {"pool": "d"}
    assert decode["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert decode["metadata"]["labels"]["team"] == "a"
    assert decode["metadata"]["annotations"]["why"] == "b"
    assert "nodeSelector" not in manifests.pod("prefill")["spec"]
    for group in manifests.groups:
        pod = manifests.pod(group)
        assert pod["spec"]["priorityClassName"] == "high"
        assert {"name": "A", "value": "b"} in manifests.container(group)["env"]
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert matches(spread["labelSelector"], pod["metadata"]["labels"])


@each
def test_every_mount_has_its_volume_and_every_volume_its_mount(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    for pod, template in manifests.all_pods():
        spec = template["spec"]
        volumes = [one["name"] for one in spec.get("volumes", [])]
        assert len(volumes) == len(set(volumes)), pod
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        mounted = {one["name"] for c in containers for one in c.get("volumeMounts", [])}
        claimed = {"data"} if pod.endswith("-redis") else set()
        assert mounted == {*volumes, *claimed}, pod
        for container in containers:
            paths = [one["mountPath"] for one in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths)), (pod, container["name"])


@each
def test_what_a_pods_commands_run_is_in_the_mounted_scripts(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    scripts = manifests.one("ConfigMap", "hw-headwater-scripts")["data"]
    named = {
        word.rpartition("/")[2]
        for group in manifests.groups
        for word in json.dumps(manifests.pod(group)).split('"')
        if word.startswith("/etc/headwater/scripts/")
    }
    assert {"drain.sh", "prepare-model.sh", "worker-ready.sh"} <= named <= scripts.keys()


def test_the_layer_comes_before_the_model_and_an_image_needs_none(helm: Helm) -> None:
    layered = helm.render().pod("decode")["spec"]["initContainers"]
    assert [one["name"] for one in layered] == ["install", "model"]
    assert [one["name"] for one in helm.render().pod("head")["spec"]["initContainers"]] == [
        "install"
    ]
    image = helm.render(*sets(*SWITCHES["image with Headwater"]))
    assert [one["name"] for one in image.pod("decode")["spec"]["initContainers"]] == ["model"]
    assert "initContainers" not in image.pod("head")["spec"]


def compared(manifests: Manifests) -> str:
    """What KubeRay compares to tell one cluster from another (its utils/util.go)."""
    cluster = manifests.cluster
    for group in manifests.groups.values():
        for ignored in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(ignored, None)
        group["template"]["spec"].pop("tolerations", None)
    return json.dumps(cluster, sort_keys=True)


@pytest.mark.parametrize(
    "change",
    [
        ("config.engine.max_num_seqs=3",),
        ("model.source=hub", "model.servedName=m", "model.name=a/b"),
        ("prefill.pods=3",),
        ("decode.pods=2",),
        ("frontend.replicas=2",),
        ("autoscaling.enabled=true", "decode.podsMax=4"),
        ("mode=colocated", "colocated.pods=2"),
        ("decode.tolerations[0].key=gpu",),
    ],
)
def test_whatever_changes_in_pods_or_configuration_makes_another_cluster(
    helm: Helm, change: tuple[str, ...]
) -> None:
    # Those switches that change a cluster by themselves.
    before = tuple(one for one in change if one in {"autoscaling.enabled=true", "mode=colocated"})
    assert compared(helm.render(*sets(*change))) != compared(helm.render(*sets(*before)))


def test_what_is_no_pods_business_leaves_the_cluster(helm: Helm) -> None:
    changed = helm.render(*sets("service.port=8080", "test.enabled=false"))
    assert compared(changed) == compared(helm.render())


def test_a_new_version_of_the_chart_alone_replaces_no_pod(helm: Helm) -> None:
    manifests = helm.render()
    for group in manifests.groups:
        labels = manifests.pod(group)["metadata"]["labels"]
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


NAME_SERVERS = {53, 5353}


def egress_ports(manifests: Manifests) -> set[int]:
    rules = manifests.one("NetworkPolicy", "hw-headwater")["spec"]["egress"]
    return {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ((), {80, 443}),
        (SWITCHES["image with Headwater"], set()),
        ((*SWITCHES["image with Headwater"], *SWITCHES["hub"]), {80, 443}),
        ((*SWITCHES["image with Headwater"], "autoscaling.enabled=true"), {443, 6443}),
        ((*SWITCHES["image with Headwater"], *SWITCHES["another Redis"]), {6379}),
    ],
)
def test_a_closed_network_lets_out_what_the_other_values_need(
    helm: Helm, values: tuple[str, ...], ports: set[int]
) -> None:
    closed = helm.render(*sets("networkPolicy.denyEgress=true", *values))
    assert egress_ports(closed) == ports | NAME_SERVERS
    policy = closed.one("NetworkPolicy", "hw-headwater")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    peers = [peer for rule in policy["egress"] for peer in rule.get("to", [])]
    inside = [one for one in peers if "podSelector" in one]
    for group in closed.groups:
        labels = closed.pod(group)["metadata"]["labels"]
        assert any(matches(one["podSelector"], labels) for one in inside)


def test_the_bundled_redis_is_for_the_releases_head_alone(helm: Helm) -> None:
    manifests = helm.render(*sets(*SWITCHES["bundled Redis"]))
    (rule,) = manifests.one("NetworkPolicy", "hw-headwater-redis")["spec"]["ingress"]
    let_in = {
        group
        for group in manifests.groups
        for peer in rule["from"]
        if matches(peer["podSelector"], operated(manifests.pod(group)["metadata"]["labels"], group))
    }
    assert let_in == {"head"}
    other = helm.render(release="other").pod("head")["metadata"]["labels"]
    assert not any(matches(p["podSelector"], operated(other, "head")) for p in rule["from"])
    redis = manifests.one("StatefulSet")
    options = manifests.cluster["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"redis://{redis['metadata']['name']}:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "r", "key": "password"}
    assert manifests.one("Service", redis["metadata"]["name"])["spec"]["selector"].items() <= (
        redis["spec"]["template"]["metadata"]["labels"].items()
    )
