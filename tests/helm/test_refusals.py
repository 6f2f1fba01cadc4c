"""Values that cannot be: one message, which says what to do."""

from __future__ import annotations

import pytest

from tests.helm.chart import Helm, Refused, sets

CASES = {
    "model.source=hub": "model.name must be a hub name, owner/name",
    "model.source=hub,model.name=qwen": 'it is "qwen"',
    "model.source=hub,model.name=a/b/c": "owner/name",
    "model.name=a/b": "set model.source=hub, or leave the name out",
    "model.source=volume,model.servedName=m": "name one of model.volume.claim",
    "model.source=volume,model.servedName=m,model.volume.claim=c,model.volume.hostPath=/x": (
        "name one of model.volume.claim"
    ),
    "model.source=volume,model.volume.claim=c": "set model.servedName",
    "model.source=image,model.servedName=m": "give model.image.reference",
    "layer.configMap=": "needs layer.configMap",
    "accelerator=gpu": "Build helm/images/Dockerfile.gpu, name it by image.repository",
    "layer.enabled=false": "name the image that you built from helm/images",
    "upgrade.strategy=NewClusterWithIncrementalUpgrade": "kubectl get gatewayclass",
    (
        "upgrade.strategy=NewClusterWithIncrementalUpgrade,upgrade.incremental.gatewayClassName=g"
    ): "needs autoscaling.enabled=true",
    (
        "upgrade.strategy=NewClusterWithIncrementalUpgrade,"
        "upgrade.incremental.gatewayClassName=g,autoscaling.enabled=true"
    ): "needs frontend.through=proxy",
    (
        "upgrade.strategy=NewClusterWithIncrementalUpgrade,"
        "upgrade.incremental.gatewayClassName=g,upgrade.incremental.stepSizePercent=60"
    ): "stepSizePercent (60) must be at most maxSurgePercent (50)",
    "autoscaling.enabled=true,decode.pods=3": "decode.podsMax (1) must be at least decode.pods (3)",
    "gcsFaultTolerance.enabled=true": "kubectl create secret generic headwater-redis",
    "gcsFaultTolerance.enabled=true,gcsFaultTolerance.redis.bundled=false": (
        "give gcsFaultTolerance.redis.address"
    ),
    (
        "gcsFaultTolerance.enabled=true,gcsFaultTolerance.redis.existingSecret=r,"
        "gcsFaultTolerance.redis.address=redis://r:6379"
    ): "set gcsFaultTolerance.redis.bundled=false",
    "ingress.enabled=true": "needs ingress.host",
    "memory.objectStoreMiB=512": "memory.shmMiB (256) must be at least",
    # By the schema.
    "mode=both": "'split', 'colocated'",
    "decode.replicas=3": "'replicas' not allowed",
    "config.engine.kv_cache=3": "'kv_cache' not allowed",
    "config.model.dtype=auto": "config.model.dtype is auto, which only the serve command resolves",
    "config.engine.kv_cache_mib=auto": "config.engine.kv_cache_mib is auto",
    "config.workers.cores_per_worker=auto": "config.workers.cores_per_worker is auto",
    "config.model.dtype=int8": "'bfloat16', 'float16', 'float32'",
    "config.http.host=1.2.3.4": "'host' not allowed",
    "prefill.pods=0": "minimum",
    "probes.startupSeconds=60": "minimum",
    "podSecurity.runAsUser=0": "minimum",
    "config.slab.mib=null": "missing property 'mib'",
    "memory=null": "missing property 'memory'",
    "image.repository=null": "missing property 'repository'",
    "image.digest=abc": "does not match pattern",
}


@pytest.mark.parametrize("values", CASES)
def test_it_is_refused_and_told_what_to_do(helm: Helm, values: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(*sets(*values.split(",")))
    assert CASES[values] in str(refused.value)


def test_a_cluster_without_kuberay_is_told_the_command_that_installs_it(helm: Helm) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(kinds=())
    words = str(refused.value)
    assert "helm install kuberay-operator kuberay/kuberay-operator" in words
    assert "helm repo add kuberay https://" in words
    assert helm.render("--set", "checkCrds=false", kinds=()).service


@pytest.mark.parametrize("switch", ["podMonitor", "serviceMonitor"])
def test_a_monitor_without_the_operators_kinds_is_refused(helm: Helm, switch: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render("--set", f"monitoring.{switch}=true", kinds=("ray.io/v1/RayService",))
    assert "need the Prometheus operator's kinds" in str(refused.value)
    assert helm.render(kinds=("ray.io/v1/RayService",)).service
