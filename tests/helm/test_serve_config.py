"""What Serve is told: read by the very loader of the local YAML, and built into the application."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster import config_sources
from cluster.application import BuildArguments, build
from cluster.config import Config
from tests.helm.chart import Helm, Json, Manifests, sets
from tests.helm.matrix import MATRIX, SWITCHES

each = pytest.mark.parametrize("name", MATRIX)


def arguments_of(application: Json) -> BuildArguments:
    return BuildArguments.model_validate(application["args"])


def loaded(text: str, tmp_path: Path) -> Config:
    """As `./headwater serve --config FILE` reads it. Raises ConfigError."""
    path = tmp_path / "headwater.yaml"
    path.write_text(text, encoding="utf-8")
    return config_sources.load(argparse.Namespace(config=path, set=[]), environ={}).config


def deployments(application: Json) -> dict[str, Json]:
    return {one["name"]: one for one in application["deployments"]}


def built(arguments: BuildArguments) -> dict[str, Any]:
    """The deployments that the application builder makes, by name."""
    ingress = build(arguments)
    workers = [
        one for one in ingress._bound_deployment.init_args if hasattr(one, "_bound_deployment")
    ]
    found = [ingress, *workers]
    return {one._bound_deployment.name: one._bound_deployment for one in found}


def model_config(manifests: Manifests, group: str) -> str:
    """What the pod's model is prepared by, as Kubernetes hands it over."""
    (init,) = [
        one for one in manifests.pod(group)["spec"]["initContainers"] if one["name"] == "model"
    ]
    (text,) = [one["value"] for one in init["env"] if one["name"] == "MODEL_CONFIG"]
    return str(text).replace("$$", "$")


@each
def test_serve_takes_it_and_the_local_loader_reads_its_configuration(
    helm: Helm, name: str, tmp_path: Path
) -> None:
    manifests = helm.render(*MATRIX[name])
    ServeDeploySchema.model_validate(manifests.serve_config)
    application = manifests.application
    config = loaded(yaml.safe_dump(application["args"]["config"]), tmp_path)
    assert arguments_of(application).config == config
    for group in manifests.groups.keys() - {"head"}:
        assert loaded(model_config(manifests, group), tmp_path) == config


@each
def test_the_builder_makes_what_the_chart_places(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    application = manifests.application
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    arguments = arguments_of(application)
    placed, made = deployments(application), built(arguments)
    assert placed.keys() == made.keys()
    for role in ("PrefillWorker", "DecodeWorker"):
        chosen, own = placed[role]["ray_actor_options"], made[role].ray_actor_options
        # What is named here replaces what the builder asked for: it must ask for the same.
        assert {key: chosen[key] for key in ("num_cpus", "resources")} == {
            key: own[key] for key in ("num_cpus", "resources")
        }
        assert "num_replicas" not in placed[role]


@each
def test_the_pods_offer_what_the_workers_take(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    config = arguments_of(manifests.application).config
    offered: dict[str, float] = {}
    for group in manifests.cluster["workerGroupSpecs"]:
        for resource, amount in resources_of(group).items():
            offered[resource] = offered.get(resource, 0) + amount * group["replicas"]
    workers = {
        "headwater_prefill": config.workers.prefill,
        "headwater_decode": config.workers.decode,
    }
    for resource, role in workers.items():
        assert role.resources == {resource: 1}
        assert offered[resource] == role.replicas
    placed = deployments(manifests.application)
    assert offered["headwater_frontend"] == placed["Ingress"]["num_replicas"]
    devices = sum(
        placed[f"{role}Worker"]["ray_actor_options"].get("num_gpus", 0) * workers[resource].replicas
        for role, resource in (("Prefill", "headwater_prefill"), ("Decode", "headwater_decode"))
    )
    assert offered["GPU"] == devices
    assert offered["CPU"] == sum(config.workers.cores_of(r) * r.replicas for r in workers.values())


def resources_of(group: Json) -> dict[str, float]:
    """What `ray start` is told, as the operator's shell line hands it over."""
    start = group["rayStartParams"]
    (own,) = shlex.split(start["resources"])
    found: dict[str, float] = json.loads(own)
    found |= {"CPU": int(start["num-cpus"]), "GPU": int(start["num-gpus"])}
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits.get("nvidia.com/gpu", 0)) == found["GPU"]
    return found


def test_nothing_of_ours_runs_on_the_head(helm: Helm) -> None:
    start = helm.render().groups["head"]["rayStartParams"]
    assert start["num-cpus"] == start["num-gpus"] == "0"
    assert "resources" not in start


@pytest.mark.parametrize(("through", "location"), [("ingress", "Disabled"), ("proxy", "EveryNode")])
def test_clients_reach_what_the_configuration_says(helm: Helm, through: str, location: str) -> None:
    manifests = helm.render(*sets(f"frontend.through={through}"))
    assert manifests.serve_config["proxy_location"] == location
    http = arguments_of(manifests.application).config.http
    assert (http.host, http.port, http.through) == ("0.0.0.0", 8000, through)
    (port,) = [one for one in manifests.container("frontend")["ports"] if one["name"] == "serve"]
    assert port["containerPort"] == manifests.serve_config["http_options"]["port"] == http.port
    service = manifests.one("Service", "hw-headwater")["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]


def test_what_the_ordinary_file_says_the_chart_says_in_the_same_words(
    helm: Helm, tmp_path: Path
) -> None:
    ordinary = {
        "model": {"dtype": "float32", "max_model_len": 4096},
        "engine": {"max_num_batched_tokens": 65536, "max_num_seqs": 8},
        "limits": {"request_body_max_bytes": 33554432},
        "router": {"caused_weight_idle": 0.25},
        "workers": {"stall_s": 30},
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"config": ordinary}))
    found = arguments_of(helm.render("--values", str(values)).application).config
    local = loaded(yaml.safe_dump(ordinary), tmp_path)
    same = ("limits", "router", "slab")
    assert found.engine == local.engine.model_copy(update={"kv_cache_mib": 256})
    assert [getattr(found, name) for name in same] == [getattr(local, name) for name in same]
    assert (found.model.dtype, found.model.max_model_len) == ("float32", 4096)
    assert found.workers.stall_s == 30


def test_what_is_left_out_is_the_products_own_default(helm: Helm) -> None:
    found = arguments_of(helm.render().application).config
    own = Config()
    assert found.engine == own.engine.model_copy(update={"kv_cache_mib": 256})
    for name in ("slab", "router", "limits", "tenants"):
        assert getattr(found, name) == getattr(own, name)
    # On a node with several pods each would take the same first cores.
    assert found.workers.pin_cores is False


@pytest.mark.parametrize(
    ("switch", "model", "served"),
    [
        ("default", "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("hub", "Qwen/Qwen3-8B", "Qwen3-8B"),
        ("claim", "/opt/headwater-state/model", "m"),
        ("model image", "/opt/headwater-state/model", "m"),
    ],
)
def test_the_model_is_named_by_where_it_comes_from(
    helm: Helm, switch: str, model: str, served: str
) -> None:
    arguments = arguments_of(helm.render(*sets(*SWITCHES[switch])).application)
    assert arguments.config.model.path_or_name == model
    assert arguments.config.model.served == served
    assert arguments.model_path == "/opt/headwater-state/model"


def test_pods_of_the_cluster_before_keep_their_model_when_a_release_changes(helm: Helm) -> None:
    hub = ("model.source=hub", "model.servedName=m")
    old = helm.render(*sets(*hub, "model.name=a/old", "model.revision=0123abc"))
    new = helm.render(*sets(*hub, "model.name=a/new", "config.engine.max_num_seqs=3"))
    # Both clusters' pods mount it; Serve's arguments are each cluster's own.
    scripts = [one.one("ConfigMap", "hw-headwater-scripts")["data"] for one in (old, new)]
    assert scripts[0] == scripts[1]
    for group in ("frontend", "prefill", "decode"):
        model = yaml.safe_load(model_config(old, group))["model"]
        assert (model["path_or_name"], model["revision"]) == ("a/old", "0123abc")


def test_a_dollar_in_a_name_is_no_variable_of_the_pods(helm: Helm) -> None:
    manifests = helm.render(*sets("model.servedName=$(HOME)"))
    (init,) = [
        one for one in manifests.pod("decode")["spec"]["initContainers"] if one["name"] == "model"
    ]
    (text,) = [one["value"] for one in init["env"] if one["name"] == "MODEL_CONFIG"]
    assert yaml.safe_load(text)["model"]["served_name"] == "$$(HOME)"


def test_a_files_keys_reach_the_frontends_alone(helm: Helm) -> None:
    manifests = helm.render(*sets(*SWITCHES["keys"]))
    arguments = arguments_of(manifests.application)
    assert arguments.config.keys.file == Path("/etc/headwater/api-keys/keys.json")
    assert mounts(manifests, "frontend").get("/etc/headwater/api-keys") == "k"
    for group in ("head", "prefill", "decode"):
        assert "/etc/headwater/api-keys" not in mounts(manifests, group)
        assert mounts(manifests, group)["/etc/headwater/cluster"] == "c"


def mounts(manifests: Manifests, group: str) -> dict[str, str | None]:
    """Secrets by the path where a group's containers see them."""
    spec = manifests.pod(group)["spec"]
    volumes = {one["name"]: one.get("secret", {}).get("secretName") for one in spec["volumes"]}
    return {
        one["mountPath"]: volumes[one["name"]] for one in manifests.container(group)["volumeMounts"]
    }


def test_draining_lasts_as_long_for_serve_as_for_the_pod(helm: Helm) -> None:
    manifests = helm.render(*sets("drain.timeoutSeconds=120", "drain.marginSeconds=45"))
    arguments = arguments_of(manifests.application)
    assert arguments.config.workers.drain_s == 120
    assert arguments.config.http.drain_s == 120
    made = built(arguments)
    # Serve ends a worker by force only after it has handed over; the pod waits as long.
    hard_s = made["DecodeWorker"]._deployment_config.graceful_shutdown_timeout_s
    assert made["Ingress"]._deployment_config.graceful_shutdown_timeout_s == hard_s
    for placed in deployments(manifests.application).values():
        assert "graceful_shutdown_timeout_s" not in placed
    for group in ("frontend", "prefill", "decode"):
        start = manifests.container(group)["lifecycle"]["postStart"]["exec"]["command"]
        assert start[-1].startswith("rm -f ") and start[-1].endswith("/ready-*")
        hook = manifests.container(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[-2:] == ["/etc/headwater/scripts/drain.sh", f"{hard_s:.0f}"]
    head = manifests.container("head")["lifecycle"]["preStop"]["exec"]["command"]
    assert head[-2:] == ["/etc/headwater/scripts/drain-head.sh", f"{hard_s:.0f}"]
    for group in manifests.groups:
        assert manifests.pod(group)["spec"]["terminationGracePeriodSeconds"] == 165 > hard_s
        # After preStop nothing of Ray's own takes the rest of it.
        environ = {one["name"]: one.get("value") for one in manifests.container(group)["env"]}
        assert environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


def test_redis_is_cleared_after_the_head_has_ended_however_long_that_takes(helm: Helm) -> None:
    drain = ("drain.timeoutSeconds=3600", "drain.marginSeconds=45")
    manifests = helm.render(*sets(*SWITCHES["bundled Redis"], *drain))
    grace_s = manifests.pod("head")["spec"]["terminationGracePeriodSeconds"]
    notes = manifests.one("RayService")["metadata"]["annotations"]
    assert int(notes["ray.io/gcs-ft-deletion-timeout"]) == grace_s + 300
    assert "annotations" not in helm.render().one("RayService")["metadata"]


def test_each_role_scales_between_what_its_pods_can_hold(helm: Helm) -> None:
    values = ("prefill.podsMax=3", "decode.podsMax=4", "decode.workersPerPod=2")
    manifests = helm.render(*sets("autoscaling.enabled=true", *values))
    made = built(arguments_of(manifests.application))
    for role, least, most in (("prefill", 1, 3), ("decode", 2, 8)):
        bounds = made[f"{role.capitalize()}Worker"]._deployment_config.autoscaling_config
        assert (bounds.min_replicas, bounds.max_replicas) == (least, most)
        group = manifests.groups[role]
        each = resources_of(group)[f"headwater_{role}"]
        assert (group["minReplicas"] * each, group["maxReplicas"] * each) == (least, most)
    fixed = built(arguments_of(helm.render().application))
    assert fixed["DecodeWorker"]._deployment_config.autoscaling_config is None
    assert manifests.cluster["enableInTreeAutoscaling"] is True


def test_there_are_as_many_ingresses_as_frontends(helm: Helm) -> None:
    manifests = helm.render(*sets("frontend.replicas=3"))
    arguments = arguments_of(manifests.application)
    assert arguments.config.http.replicas == 3
    assert built(arguments)["Ingress"].num_replicas == 3
    assert manifests.groups["frontend"]["replicas"] == 3
    # Each has a pod of its own, and so the first port.
    assert resources_of(manifests.groups["frontend"])["headwater_frontend"] == 1
