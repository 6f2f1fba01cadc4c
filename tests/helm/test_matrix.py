"""Every values file and each switch: lint, the API server's schemas, KubeRay's schema and rules."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jsonschema
import pytest

from tests.conftest import MISSING
from tests.helm import crd, monitor_schemas
from tests.helm.chart import CHART, Helm, Json, Manifests
from tests.helm.matrix import MATRIX

KUBERNETES = "1.37"
each = pytest.mark.parametrize("name", MATRIX)


@pytest.fixture(scope="session")
def kubernetes() -> object:
    return pytest.importorskip(
        "kubernetes_validate", reason=f"{MISSING}kubernetes-validate (requirements/helm.lock)"
    )


@pytest.fixture(scope="session", autouse=True)
def schemas_read_once(kubernetes: object) -> Iterator[None]:
    from kubernetes_validate import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


def faults_of(one: Json) -> list[str]:
    """Of one object, strictly; a kind that nobody knows is a fault."""
    import kubernetes_validate

    where = f"{one['kind']}/{one['metadata'].get('name')}"
    if one["kind"] == "RayService":
        return []  # its schema is KubeRay's
    if one["kind"] in monitor_schemas.SPECS:
        spec = jsonschema.Draft202012Validator(monitor_schemas.SPECS[one["kind"]])
        return [f"{where}: {fault.message}" for fault in spec.iter_errors(one["spec"])]
    try:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as fault:
        return [f"{where}: {fault.message}"]
    return []


def pod_templates(manifests: Manifests) -> Iterator[Json]:
    for name, group in manifests.groups.items():
        metadata = {"name": name}
        yield {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": metadata,
            "template": group["template"],
        }


@each
def test_lint_finds_nothing(helm: Helm, name: str) -> None:
    done = helm.run("lint", "--strict", str(CHART), *MATRIX[name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout and "[ERROR]" not in done.stdout


@each
def test_the_api_server_would_take_each_object(helm: Helm, name: str) -> None:
    manifests = helm.render(*MATRIX[name])
    objects = [*manifests, *pod_templates(manifests)]
    assert [fault for one in objects for fault in faults_of(one)] == []


@each
def test_kuberays_schema_takes_the_service(helm: Helm, name: str) -> None:
    assert crd.schema_faults(helm.render(*MATRIX[name]).one("RayService")) == []


@each
def test_kuberays_own_rules_hold(helm: Helm, name: str) -> None:
    assert crd.go_faults(helm.render(*MATRIX[name])) == []


@each
def test_no_object_is_rendered_twice_and_all_are_in_the_releases_namespace(
    helm: Helm, name: str
) -> None:
    keys = [(one["kind"], one["metadata"]["name"]) for one in helm.render(*MATRIX[name])]
    assert len(keys) == len(set(keys))
    assert ("RayService", "hw-headwater") in keys


def test_an_object_of_an_unknown_kind_or_with_a_slip_is_found(kubernetes: object) -> None:
    unknown = {"apiVersion": "example.com/v1", "kind": "Nothing", "metadata": {"name": "n"}}
    slip = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"prot": []}}
    monitor: Json = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor"}
    monitor |= {"metadata": {"name": "m"}, "spec": {"selektor": {}}}
    assert [len(faults_of(one)) > 0 for one in (unknown, slip, monitor)] == [True] * 3


def test_a_slip_in_the_service_is_found(helm: Helm) -> None:
    service = helm.render().one("RayService")
    pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    pod["containers"][0]["livenessProb"] = pod["containers"][0].pop("livenessProbe")
    (fault,) = crd.schema_faults(service)
    assert "livenessProb" in fault


def test_the_operators_rules_find_what_they_are_there_for(helm: Helm) -> None:
    broken = helm.render()
    broken.one("RayService")["metadata"]["name"] = "x" * 48
    broken.service["upgradeStrategy"]["type"] = "Recreate"
    broken.cluster["headGroupSpec"]["headService"] = {"metadata": {"name": "n"}}
    broken.groups["decode"]["minReplicas"] = 5
    assert crd.go_faults(broken) == [
        f"name {'x' * 48}",
        "upgradeStrategy.type",
        "headGroupSpec.headService",
        "decode: 5 <= 1 <= 1",
    ]
