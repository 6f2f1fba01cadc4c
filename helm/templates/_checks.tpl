{{/*
What no schema can say: values that do not go together. Each message tells what to do. Included once,
by rayservice.yaml.
*/}}
{{- define "headwater.checks" -}}
{{- $values := .Values -}}

{{- if and $values.checkCrds (not (.Capabilities.APIVersions.Has "ray.io/v1/RayService")) -}}
{{- fail "\n\nThis cluster has no RayService (ray.io/v1): the KubeRay operator is missing. Install it:\n\n  helm repo add kuberay https://ray-project.github.io/kuberay-helm/\n  helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0 --namespace kuberay-system --create-namespace\n\nWithout a cluster at hand (helm template), say --api-versions ray.io/v1/RayService, or --set checkCrds=false.\n" -}}
{{- end -}}
{{- if and $values.checkCrds (or $values.monitoring.podMonitor $values.monitoring.serviceMonitor $values.alerts.enabled) (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail "monitoring.podMonitor, monitoring.serviceMonitor and alerts.enabled need the Prometheus operator's kinds (monitoring.coreos.com/v1), which this cluster has not: install it, or leave the three off and let Prometheus scrape port 8080 of the pods by their annotations" -}}
{{- end -}}

{{- range $key, $value := dict "model.dtype" $values.config.model.dtype "engine.kv_cache_mib" $values.config.engine.kv_cache_mib "workers.cores_per_worker" $values.config.workers.cores_per_worker -}}
{{- if eq (toString $value) "auto" -}}
{{- fail (printf "config.%s is auto, which only the serve command resolves: the chart sizes pods before it knows their nodes. Name a value; for config.model.dtype on CPUs, bfloat16 where the nodes list amx_bf16, avx512_bf16 or Arm's bf16 in /proc/cpuinfo, else float32" $key) -}}
{{- end -}}
{{- end -}}

{{- $model := $values.model -}}
{{- if eq $model.source "hub" -}}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$" $model.name) -}}
{{- fail (printf "model.source is hub, so model.name must be a hub name, owner/name, such as Qwen/Qwen3-8B; it is %q" $model.name) -}}
{{- end -}}
{{- else if $model.name -}}
{{- fail (printf "model.name (%s) is a hub model's, but model.source is %s: set model.source=hub, or leave the name out (model.servedName is what clients call it)" $model.name $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "volume") (eq (empty $model.volume.claim) (empty $model.volume.hostPath)) -}}
{{- fail "model.source is volume: name one of model.volume.claim (a PersistentVolumeClaim) and model.volume.hostPath (a folder on each node)" -}}
{{- end -}}
{{- if and (eq $model.source "image") (empty $model.image.reference) (empty $model.image.path) -}}
{{- fail "model.source is image: give model.image.reference (an OCI image whose files are the model, mounted as a volume), or model.image.path (the model's folder in the pods' own image)" -}}
{{- end -}}
{{- if and (has $model.source (list "volume" "image")) (not $model.servedName) -}}
{{- fail (printf "model.source is %s, whose folder has no name: set model.servedName, the name that clients use" $model.source) -}}
{{- end -}}

{{- if and $values.layer.enabled (not $values.layer.configMap) -}}
{{- fail "layer.enabled needs layer.configMap, which holds Headwater's code (make chart-layer says how to make it); or build an image (helm/images) and set layer.enabled=false" -}}
{{- end -}}
{{- if and (eq $values.accelerator "gpu") (eq $values.image.repository "rayproject/ray") -}}
{{- fail "accelerator is gpu, but image.repository is Ray's own image, which has no C compiler: engines on GPUs compile as they start (Triton). Build helm/images/Dockerfile.gpu, name it by image.repository and image.tag, and set layer.enabled=false" -}}
{{- end -}}
{{- if and (not $values.layer.enabled) (eq $values.image.repository "rayproject/ray") -}}
{{- fail "layer.enabled is false, but image.repository is Ray's own image, which has no Headwater in it: name the image that you built from helm/images" -}}
{{- end -}}
{{- $live := lookup "v1" "ServiceAccount" .Release.Namespace "default" -}}
{{- if and $live $values.layer.enabled (not (lookup "v1" "ConfigMap" .Release.Namespace $values.layer.configMap)) -}}
{{- fail (printf "\n\nThere is no ConfigMap %s in namespace %s, which brings Headwater's code to the pods. In the repository:\n\n  make chart-layer\n  kubectl create configmap %s --namespace %s --from-file=layer.tar.xz=build/headwater-layer.tar.xz\n" $values.layer.configMap .Release.Namespace $values.layer.configMap .Release.Namespace) -}}
{{- end -}}

{{- if eq $values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- with $values.upgrade.incremental -}}
{{- if not .gatewayClassName -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs upgrade.incremental.gatewayClassName: a GatewayClass of the cluster (kubectl get gatewayclass), and the feature gate RayServiceIncrementalUpgrade of the KubeRay operator" -}}
{{- end -}}
{{- if gt (int .stepSizePercent) (int .maxSurgePercent) -}}
{{- fail (printf "upgrade.incremental.stepSizePercent (%v) must be at most maxSurgePercent (%v)" .stepSizePercent .maxSurgePercent) -}}
{{- end -}}
{{- end -}}
{{- if not $values.autoscaling.enabled -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs autoscaling.enabled=true: KubeRay grows the new cluster by Ray's autoscaler" -}}
{{- end -}}
{{- if ne $values.frontend.through "proxy" -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs frontend.through=proxy: its Gateway sends requests to every worker pod, and only Serve's proxy listens on each" -}}
{{- end -}}
{{- end -}}

{{- range $role := list "prefill" "decode" "colocated" -}}
{{- $group := index $values $role -}}
{{- if and $values.autoscaling.enabled (lt (int $group.podsMax) (int $group.pods)) -}}
{{- fail (printf "%s.podsMax (%v) must be at least %s.pods (%v)" $role $group.podsMax $role $group.pods) -}}
{{- end -}}
{{- end -}}

{{- if $values.gcsFaultTolerance.enabled -}}
{{- with $values.gcsFaultTolerance.redis -}}
{{- if and (not .bundled) (not .address) -}}
{{- fail "gcsFaultTolerance.redis.bundled is false: give gcsFaultTolerance.redis.address, such as redis.databases.svc:6379" -}}
{{- end -}}
{{- if and .bundled .address -}}
{{- fail "gcsFaultTolerance.redis.address is another Redis: set gcsFaultTolerance.redis.bundled=false to use it" -}}
{{- end -}}
{{- if and .bundled (not .existingSecret) -}}
{{- fail "the bundled Redis needs a password: kubectl create secret generic headwater-redis --from-literal=password=$(openssl rand -hex 32), then gcsFaultTolerance.redis.existingSecret=headwater-redis" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host, the name under which clients reach it" -}}
{{- end -}}
{{- if gt (int $values.memory.objectStoreMiB) (int $values.memory.shmMiB) -}}
{{- fail (printf "memory.shmMiB (%v) must be at least memory.objectStoreMiB (%v): Ray's object store lies in /dev/shm" $values.memory.shmMiB $values.memory.objectStoreMiB) -}}
{{- end -}}
{{- end -}}
