"""RayService as KubeRay checks it: its CRD's schema, and the rules of its Go code.

The CRD is data beside the checkout: HEADWATER_KUBERAY_CRD, or ../shared/kuberay. The rules are
those of ray-operator/controllers/ray/utils/validation.go (KubeRay 1.7), as far as this chart can
break them.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.helm.chart import ROOT, Json, Manifests

CRD = Path(
    os.environ.get("HEADWATER_KUBERAY_CRD")
    or ROOT.parent / "shared/kuberay/ray.io_rayservices.yaml"
)
NAME_LENGTH_MAX = 47
UPGRADES = {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?)?")
START_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}


@functools.cache
def validator() -> Draft202012Validator:
    """Of the CRD, made strict. Skips the test where there is no CRD."""
    if not CRD.is_file():
        pytest.skip(f"no RayService CRD at {CRD}: name KubeRay's file by HEADWATER_KUBERAY_CRD")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    crd = yaml.load(CRD.read_text(encoding="utf-8"), Loader=loader)
    (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
    return Draft202012Validator(closed(version["schema"]["openAPIV3Schema"], top=True))


def closed(node: Any, *, top: bool = False) -> Any:
    """A structural schema that refuses what the API server would silently leave out.

    And does not ask for what the API server fills in.
    """
    if isinstance(node, list):
        return [closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: closed(value) for key, value in node.items() if key != "properties"}
    if isinstance(node.get("properties"), dict):
        properties = node["properties"]
        found["properties"] = {key: closed(value) for key, value in properties.items()}
        if not top and not node.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
        if isinstance(node.get("required"), list):
            kept = [key for key in node["required"] if "default" not in properties.get(key, {})]
            found["required"] = kept
    return found


def schema_faults(service: Json) -> list[str]:
    """What the CRD's schema finds. `metadata` is every object's own."""
    bare = {**service, "metadata": {}}
    return [f"{error.json_path}: {error.message}" for error in validator().iter_errors(bare)]


def go_faults(manifests: Manifests) -> list[str]:
    """What the operator's own rules find."""
    service = manifests.one("RayService")
    name, spec = service["metadata"]["name"], service["spec"]
    cluster = spec["rayClusterConfig"]
    faults = []
    if len(name) > NAME_LENGTH_MAX or not LABEL_1035.fullmatch(name):
        faults.append(f"name {name}")
    if spec["upgradeStrategy"]["type"] not in UPGRADES:
        faults.append("upgradeStrategy.type")
    if "headService" in cluster["headGroupSpec"]:
        faults.append("headGroupSpec.headService")
    if "upgradeStrategy" in cluster:
        faults.append("rayClusterConfig.upgradeStrategy")
    if "enableK8sTokenAuth" in cluster.get("authOptions", {}):
        faults.append("authOptions.enableK8sTokenAuth")
    if cluster.get("authOptions") and not cluster.get("rayVersion"):
        faults.append("authOptions without rayVersion")
    faults += _incremental_faults(spec)
    faults += [fault for group in manifests.groups.values() for fault in _group_faults(group)]
    faults += _redis_faults(manifests)
    return faults


def _incremental_faults(spec: Json) -> list[str]:
    strategy = spec["upgradeStrategy"]
    if strategy["type"] != "NewClusterWithIncrementalUpgrade":
        return []
    options = strategy.get("clusterUpgradeOptions", {})
    step, surge = options.get("stepSizePercent", -1), options.get("maxSurgePercent", -1)
    checks = {
        "autoscaler": spec["rayClusterConfig"].get("enableInTreeAutoscaling"),
        "gatewayClassName": options.get("gatewayClassName"),
        "intervalSeconds": options.get("intervalSeconds", 0) > 0,
        "stepSizePercent": 0 <= step <= surge <= 100,
    }
    return [f"incremental: {name}" for name, holds in checks.items() if not holds]


def _group_faults(group: Json) -> list[str]:
    name = group.get("groupName", "head")
    faults = []
    if not group["template"]["spec"]["containers"]:
        faults.append(f"{name}: no container")
    start = group["rayStartParams"]
    if START_RESOURCES & start.keys() and group.get("resources"):
        faults.append(f"{name}: resources twice")
    if "labels" in start:
        faults.append(f"{name}: labels in rayStartParams")
    if not all(isinstance(value, str) for value in start.values()):
        faults.append(f"{name}: rayStartParams are text")
    if name != "head":
        least, most = group.get("minReplicas", -1), group.get("maxReplicas", -1)
        if not 0 <= least <= group["replicas"] <= most:
            faults.append(f"{name}: {least} <= {group['replicas']} <= {most}")
        if not LABEL_1035.fullmatch(name):
            faults.append(f"{name}: no name for a NetworkPolicy")
    labels = group["template"]["metadata"]["labels"]
    faults += [
        f"{name}: label {key}={value}"
        for key, value in labels.items()
        if len(value) > 63 or not LABEL_VALUE.fullmatch(value)
    ]
    return faults


def _redis_faults(manifests: Manifests) -> list[str]:
    names = {one["name"] for one in manifests.container("head")["env"]}
    taken = names & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
    options = manifests.cluster.get("gcsFaultToleranceOptions", {})
    return [f"head has {name}" for name in taken] + (["storage"] if "storage" in options else [])
