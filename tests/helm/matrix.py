"""Sets of flags that the chart is rendered with: every values file, and each switch by itself."""

from __future__ import annotations

from tests.helm.chart import VALUES_FILES, sets

REDIS = ("gcsFaultTolerance.enabled=true", "gcsFaultTolerance.redis.existingSecret=r")
INCREMENTAL = (
    "upgrade.strategy=NewClusterWithIncrementalUpgrade",
    "upgrade.incremental.gatewayClassName=off",  # which YAML takes for false
    "autoscaling.enabled=true",
    "frontend.through=proxy",
)
# Of an image with a compiler, which Ray's own has not.
GPUS = ("accelerator=gpu", "image.repository=r.example.com/headwater")
SWITCHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "colocated": ("mode=colocated",),
    "gpu": (*GPUS, "layer.enabled=false", "gpu.runtimeClassName=nvidia"),
    "colocated on GPUs with ranks": (
        "mode=colocated",
        *GPUS,
        "config.workers.tensor_parallel_size=2",
        "colocated.decodeWorkersPerPod=3",
    ),
    "several workers a pod": ("prefill.pods=2", "prefill.workersPerPod=3", "decode.pods=4"),
    "through Serve's proxy": ("frontend.through=proxy", "frontend.replicas=2"),
    "image with Headwater": ("layer.enabled=false", "image.repository=r.example.com/headwater"),
    "image by digest": (f"image.digest=sha256:{'0' * 64}", "image.pullSecrets={a,b}"),
    "index": ("layer.pipIndexUrl=https://i.example.com/simple", "layer.revision=second"),
    "hub": (
        "model.source=hub",
        "model.name=Qwen/Qwen3-8B",
        "model.revision=0123abc",
        "model.hub.tokenSecret.name=hub",
        "model.hub.cacheClaim=cache",
        "model.hub.endpoint=https://hub.example.com",
    ),
    "hub without a token": ("model.source=hub", "model.name=Qwen/Qwen3-8B"),
    "claim": (
        "model.source=volume",
        "model.volume.claim=c",
        "model.volume.subPath=m/x",
        "model.servedName=m",
    ),
    "folder of the node": (
        "model.source=volume",
        "model.volume.hostPath=/models/m",
        "model.servedName=m",
    ),
    "model image": (
        "model.source=image",
        "model.image.reference=r.example.com/m:1",
        "model.image.path=/weights",
        "model.servedName=m",
    ),
    "model in the pods' image": (
        "model.source=image",
        "model.image.path=/models/m",
        "model.servedName=m",
        "layer.enabled=false",
        "image.repository=r.example.com/headwater",
    ),
    "bundled Redis": REDIS,
    "bundled Redis with a class": (*REDIS, "gcsFaultTolerance.redis.storageClassName=fast"),
    "another Redis": (
        "gcsFaultTolerance.enabled=true",
        "gcsFaultTolerance.redis.bundled=false",
        "gcsFaultTolerance.redis.address=redis://r:6379",
        "gcsFaultTolerance.redis.username=u",
        "gcsFaultTolerance.redis.existingSecret=r",
    ),
    "incremental": INCREMENTAL,
    "no upgrade": ("upgrade.strategy=None", "upgrade.initializingTimeout=2h"),
    "autoscaling": ("autoscaling.enabled=true", "prefill.podsMax=3", "decode.podsMax=4"),
    "a key for the test": ("test.apiKey.existingSecret=k",),
    "keys": ("secrets.apiKeys.existingSecret=k", "secrets.cluster.existingSecret=c"),
    "more secrets": (
        "secrets.files[0].existingSecret=s",
        "secrets.files[0].mountPath=/etc/headwater/s",
    ),
    "no Ray token": ("rayAuth.enabled=false",),
    "a Ray token": ("rayAuth.existingSecret=t",),
    "ingress by nginx": (
        "ingress.enabled=true",
        "ingress.host=h.example.com",
        "ingress.tlsSecret=t",
        "ingress.className=nginx",
    ),
    "ingress by HAProxy": (
        "ingress.enabled=true",
        "ingress.host=h.example.com",
        "ingress.controller=haproxy",
        "ingress.paths={/v1,/ready}",
    ),
    "load balancer": ("service.type=LoadBalancer", "service.loadBalancerSourceRanges={10.0.0.0/8}"),
    "no budget": ("podDisruptionBudget.enabled=false",),
    "open network": ("networkPolicy.enabled=false",),
    "closed network": (
        "networkPolicy.denyEgress=true",
        "networkPolicy.clients[0].namespaceSelector.matchLabels.team=a",
        "networkPolicy.egress[0].ports[0].port=443",
        *REDIS,
    ),
    "pod monitor": ("monitoring.podMonitor=true", "monitoring.labels.release=p"),
    "service monitor": ("monitoring.serviceMonitor=true",),
    "alerts": ("alerts.enabled=true", "alerts.labels.release=p"),
    "no dashboards": ("dashboards.enabled=false",),
    "another account": ("serviceAccount.create=false", "serviceAccount.name=mine"),
    "read-only": ("podSecurity.readOnlyRootFilesystem=true",),
    "no test": ("test.enabled=false",),
    "placed": (
        "decode.nodeSelector.pool=d",
        "decode.tolerations[0].key=gpu",
        "decode.tolerations[0].operator=Exists",
        "decode.podLabels.team=a",
        "decode.podAnnotations.why=b",
        "priorityClassName=high",
        "extraEnv[0].name=A",
        "extraEnv[0].value=b",
    ),
    "more objects": (
        "extraObjects[0].apiVersion=v1",
        "extraObjects[0].kind=ConfigMap",
        "extraObjects[0].metadata.name=more",
    ),
}
# Texts that YAML would take for something else.
ODD_TEXTS: dict[str, tuple[str, ...]] = {
    "numbers for names": (
        "model.source=volume",
        "model.servedName=7",
        "model.volume.claim=1234",
        "model.volume.subPath=2024",
        "layer.configMap=12",
        "layer.revision=3",
        "image.pullSecrets[0]=5",
        "secrets.cluster.existingSecret=1",
        "secrets.cluster.key=2",
        "secrets.apiKeys.existingSecret=3",
        "secrets.files[0].existingSecret=4",
        "secrets.files[0].mountPath=/etc/headwater/5",
        "rayAuth.existingSecret=6",
        "gcsFaultTolerance.enabled=true",
        "gcsFaultTolerance.redis.existingSecret=8",
        "gcsFaultTolerance.redis.key=9",
        "gcsFaultTolerance.redis.storageClassName=10",
        "test.apiKey.existingSecret=11",
        "test.apiKey.key=12",
        "serviceAccount.name=13",
        "priorityClassName=14",
        "ingress.enabled=true",
        "ingress.host=h.example.com",
        "ingress.className=15",
        "ingress.tlsSecret=16",
    ),
    "words for names": (
        "priorityClassName=on",
        "image.repository=null",
        "image.tag=1",
        "accelerator=gpu",
        "gpu.runtimeClassName=yes",
        "model.source=hub",
        "model.name=1/2",
        "model.hub.tokenSecret.name=true",
        "model.hub.tokenSecret.key=null",
        "model.hub.cacheClaim=no",
    ),
    "numbers for images": (
        "model.source=image",
        "model.servedName=true",
        "model.image.reference=1:2",
        "model.image.path=/2024",
        "image.repository=12",
        "image.tag=34",
    ),
}


def _as_texts(assignments: tuple[str, ...]) -> tuple[str, ...]:
    """Flags that leave texts alone: --set would make numbers of some. Switches are none."""
    flags = ("--set" if one.endswith(".enabled=true") else "--set-string" for one in assignments)
    return tuple(word for pair in zip(flags, assignments, strict=True) for word in pair)


MATRIX: dict[str, tuple[str, ...]] = {
    **{path.name: ("--values", str(path)) for path in VALUES_FILES},
    **{name: sets(*assignments) for name, assignments in SWITCHES.items()},
    **{name: _as_texts(assignments) for name, assignments in ODD_TEXTS.items()},
}
