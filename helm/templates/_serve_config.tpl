{{/*
The application as Serve is told of it. `args.config` is what headwater.yaml is on a laptop: read by
the same models, so what is wrong there is refused with the same words.
*/}}

{{/* Resources that place each role on its pods; the names mean the same to `ray start`. */}}
{{- define "headwater.prefillResource" -}}headwater_prefill{{- end -}}
{{- define "headwater.decodeResource" -}}headwater_decode{{- end -}}
{{- define "headwater.frontendResource" -}}headwater_frontend{{- end -}}
{{- define "headwater.modelPath" -}}/opt/headwater-state/model{{- end -}}
{{- define "headwater.secretPath" -}}/etc/headwater/cluster{{- end -}}
{{- define "headwater.keysPath" -}}/etc/headwater/api-keys{{- end -}}

{{- define "headwater.prefillWorkers" -}}
{{- get (include "headwater.prefillRole" . | fromJson) "replicas" -}}
{{- end -}}

{{- define "headwater.decodeWorkers" -}}
{{- get (include "headwater.decodeRole" . | fromJson) "replicas" -}}
{{- end -}}

{{- define "headwater.prefillRole" -}}
{{- $group := ternary .Values.prefill .Values.colocated (eq .Values.mode "split") -}}
{{- $each := ternary .Values.prefill.workersPerPod .Values.colocated.prefillWorkersPerPod (eq .Values.mode "split") -}}
{{- include "headwater.role" (dict "root" . "group" $group "each" $each "resource" (include "headwater.prefillResource" .)) -}}
{{- end -}}

{{- define "headwater.decodeRole" -}}
{{- $group := ternary .Values.decode .Values.colocated (eq .Values.mode "split") -}}
{{- $each := ternary .Values.decode.workersPerPod .Values.colocated.decodeWorkersPerPod (eq .Values.mode "split") -}}
{{- include "headwater.role" (dict "root" . "group" $group "each" $each "resource" (include "headwater.decodeResource" .)) -}}
{{- end -}}

{{/* One role's part of the configuration, as JSON: dict root, group, each (workers in a pod), resource. */}}
{{- define "headwater.role" -}}
{{- $role := dict "replicas" (mul .group.pods .each) "resources" (dict .resource 1) -}}
{{- if .root.Values.autoscaling.enabled -}}
{{- $_ := set $role "replicas_min" (mul .group.pods .each) -}}
{{- $_ := set $role "replicas_max" (mul .group.podsMax .each) -}}
{{- end -}}
{{- toJson $role -}}
{{- end -}}

{{- define "headwater.coresEach" -}}
{{- mul .Values.config.workers.cores_per_worker .Values.config.workers.tensor_parallel_size -}}
{{- end -}}

{{- define "headwater.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $model := dict "served_name" (include "headwater.servedName" .) -}}
{{- if eq .Values.model.source "bundled" -}}
{{- $_ := set $model "path_or_name" "SmolLM2-135M-Instruct" -}}
{{- else if eq .Values.model.source "hub" -}}
{{- $_ := set $model "path_or_name" .Values.model.name -}}
{{- with .Values.model.revision -}}{{- $_ := set $model "revision" . -}}{{- end -}}
{{- else -}}
{{- $_ := set $model "path_or_name" (include "headwater.modelPath" .) -}}
{{- end -}}
{{- $_ := set $config "model" (merge $model (default dict $config.model)) -}}
{{- $_ := set $config.workers "prefill" (include "headwater.prefillRole" . | fromJson) -}}
{{- $_ := set $config.workers "decode" (include "headwater.decodeRole" . | fromJson) -}}
{{- $_ := set $config.workers "drain_s" .Values.drain.timeoutSeconds -}}
{{- $_ := set $config "http" (merge (dict "host" "0.0.0.0" "port" 8000 "replicas" .Values.frontend.replicas "drain_s" .Values.drain.timeoutSeconds "through" .Values.frontend.through) (default dict $config.http)) -}}
{{- if .Values.secrets.apiKeys.existingSecret -}}
{{- $keys := default dict $config.keys -}}
{{- $_ := set $config "keys" (set $keys "file" (printf "%s/%s" (include "headwater.keysPath" .) .Values.secrets.apiKeys.key)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/*
In each pod template, so that a change makes another cluster: dict root, group. KubeRay compares
clusters without their numbers of pods and without tolerations: what changed in those alone would
never reach the running one, whose Serve would then wait for pods that nobody starts.
*/}}
{{- define "headwater.configDigest" -}}
{{- list (include "headwater.config" .root) .group.tolerations | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{- define "headwater.workerDeployment" -}}
{{- $options := dict "num_cpus" (include "headwater.coresEach" .root | int) "resources" (dict .resource 1) -}}
{{- if eq .root.Values.accelerator "gpu" -}}
{{- $_ := set $options "num_gpus" (.root.Values.config.workers.tensor_parallel_size | int) -}}
{{- end -}}
- name: {{ .name }}
  ray_actor_options:
    {{- toYaml $options | nindent 4 }}
{{- end -}}

{{- define "headwater.serveConfig" -}}
proxy_location: {{ ternary "EveryNode" "Disabled" (eq .Values.frontend.through "proxy") }}
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: headwater
    route_prefix: /
    import_path: cluster.application:build
    args:
      app: headwater
      model_path: {{ include "headwater.modelPath" . }}
      secret_file: {{ include "headwater.secretPath" . }}/{{ .Values.secrets.cluster.key }}
      config:
        {{- include "headwater.config" . | nindent 8 }}
    deployments:
      - name: Ingress
        num_replicas: {{ .Values.frontend.replicas }}
        ray_actor_options:
          num_cpus: 0
          resources:
            {{ include "headwater.frontendResource" . }}: 1
      {{- include "headwater.workerDeployment" (dict "root" . "name" "PrefillWorker" "resource" (include "headwater.prefillResource" .)) | nindent 6 }}
      {{- include "headwater.workerDeployment" (dict "root" . "name" "DecodeWorker" "resource" (include "headwater.decodeResource" .)) | nindent 6 }}
{{- end -}}
