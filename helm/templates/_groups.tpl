{{/*
Groups of worker pods. A pod's memory is what its engines take, the slab, what lies in /dev/shm, and
what Ray itself needs: shared memory is charged to the pod like any other.
*/}}

{{/* MiB of one worker, all its ranks together; on a GPU the KV cache is not the pod's. */}}
{{- define "headwater.workerMiB" -}}
{{- if eq .Values.accelerator "cpu" -}}
{{- add .Values.memory.workerMiB (mul .Values.config.engine.kv_cache_mib .Values.config.workers.tensor_parallel_size) -}}
{{- else -}}
{{- .Values.memory.workerMiB -}}
{{- end -}}
{{- end -}}

{{/* One group: dict root, component, group, workers (engines in a pod), resources (Ray's). */}}
{{- define "headwater.workerGroup" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $memory := $values.memory -}}
{{- $workersMiB := mul .workers (include "headwater.workerMiB" $root | int) -}}
{{- $memoryMiB := add $workersMiB $values.config.slab.mib $memory.shmMiB $memory.podOverheadMiB -}}
{{- $cores := mul .workers (include "headwater.coresEach" $root | int) -}}
{{- $gpus := 0 -}}
{{- if eq $values.accelerator "gpu" -}}
{{- $gpus = mul .workers $values.config.workers.tensor_parallel_size -}}
{{- end -}}
- groupName: {{ .component }}
  replicas: {{ .group.pods }}
  {{- if $values.autoscaling.enabled }}
  minReplicas: {{ ternary 0 .group.pods (eq $values.upgrade.strategy "NewClusterWithIncrementalUpgrade") }}
  maxReplicas: {{ .group.podsMax }}
  {{- else }}
  minReplicas: {{ .group.pods }}
  maxReplicas: {{ .group.pods }}
  {{- end }}
  rayStartParams:
    num-cpus: {{ $cores | toString | quote }}
    num-gpus: {{ $gpus | toString | quote }}
    object-store-memory: {{ mul $memory.objectStoreMiB 1048576 | toString | quote }}
    resources: {{ printf "'%s'" (.resources | toJson) | quote }}
  template:
    {{- include "headwater.podTemplate" (dict "root" $root "component" .component "group" .group "cpu" (add $cores 1) "memoryMiB" $memoryMiB "gpus" $gpus) | nindent 4 }}
{{- end -}}

{{- define "headwater.frontendGroup" -}}
{{- $values := .Values -}}
- groupName: frontend
  replicas: {{ $values.frontend.replicas }}
  minReplicas: {{ ternary 0 $values.frontend.replicas (eq $values.upgrade.strategy "NewClusterWithIncrementalUpgrade") }}
  maxReplicas: {{ $values.frontend.replicas }}
  rayStartParams:
    num-cpus: "0"
    num-gpus: "0"
    object-store-memory: {{ mul $values.memory.objectStoreMiB 1048576 | toString | quote }}
    resources: {{ printf "'%s'" (dict (include "headwater.frontendResource" .) 1 | toJson) | quote }}
  template:
    {{- include "headwater.podTemplate" (dict "root" . "component" "frontend" "group" $values.frontend "cpu" $values.frontend.cpu "memoryMiB" $values.frontend.memoryMiB "gpus" 0) | nindent 4 }}
{{- end -}}
