{{/*
The pods of the RayService. One template for head, frontend, prefill, decode and colocated; what
differs is its argument:

  root         the chart's context
  component    head, frontend, prefill, decode, colocated
  group        its values
  cpu          cores of the pod
  memoryMiB    its memory, all of it: what is in shared memory counts, too
  gpus         devices of the pod; 0: none
*/}}

{{/* Environment of every process in a pod, Ray's own among them. */}}
{{- define "headwater.environment" -}}
- name: PATH
  value: /opt/headwater/venv/bin:/home/ray/anaconda3/bin:/usr/local/nvidia/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
- name: PYTHONPATH
  value: /opt/headwater/code
- name: LD_LIBRARY_PATH
  value: /opt/headwater/lib:/usr/local/nvidia/lib64
- name: HOME
  value: /opt/headwater-state/home
- name: TMPDIR
  value: /tmp
- name: HEADWATER_VENV
  value: /opt/headwater/venv
- name: HEADWATER_BUILD
  value: {{ .Values.accelerator }}
- name: HF_HOME
  value: /opt/headwater-state/hub
# Replicas start at nice 15 otherwise, and wait behind whatever else the node does.
- name: RAY_worker_niceness
  value: "0"
# A pod's preStop has drained it. Ray would wait half a minute more, for the node agent, which ends
# with its node alone, and would be killed meanwhile.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: "0"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- with .Values.model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if and (eq .Values.model.source "hub") .Values.model.hub.tokenSecret.name }}
- name: HF_TOKEN_PATH
  value: /etc/headwater/hub/{{ .Values.model.hub.tokenSecret.key }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headwater.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: {{ .Values.podSecurity.readOnlyRootFilesystem }}
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "headwater.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "headwater.initContainers" -}}
{{- $values := .root.Values -}}
{{- if $values.layer.enabled }}
# Headwater's code, and its hashed lock from a package index, beside Ray's own image.
- name: install
  image: {{ include "headwater.image" .root | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command: [/bin/bash, /etc/headwater/scripts/install.sh]
  env:
    {{- include "headwater.environment" .root | nindent 4 }}
    # A pod installs once: a cache would take the packages' room a second time.
    - name: PIP_NO_CACHE_DIR
      value: "1"
    {{- with $values.layer.pipIndexUrl }}
    - name: PIP_INDEX_URL
      value: {{ . | quote }}
    {{- end }}
    {{- with $values.layer.pipExtraIndexUrl }}
    - name: PIP_EXTRA_INDEX_URL
      value: {{ . | quote }}
    {{- end }}
  resources:
    requests: {cpu: "1", memory: 1Gi}
    limits: {cpu: "2", memory: 2Gi}
  securityContext:
    {{- include "headwater.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    {{- include "headwater.mounts" . | nindent 4 }}
    - name: layer-archive
      mountPath: /etc/headwater/layer
      readOnly: true
{{- end }}
{{- if include "headwater.holdsModel" .component }}
# The model, ready to be loaded: a wrong name or a damaged folder ends here, with what to do.
- name: model
  image: {{ include "headwater.image" .root | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command: [/bin/bash, /etc/headwater/scripts/prepare-model.sh]
  env:
    {{- include "headwater.environment" .root | nindent 4 }}
    # In the pod and not in the ConfigMap: while a new cluster starts, the old one's pods keep their
    # model, however late they are made.
    - name: MODEL_CONFIG
      value: |
        {{- /* Kubernetes makes one of two, and would put another variable's value for $(NAME). */}}
        {{- include "headwater.config" .root | replace "$" "$$" | nindent 8 }}
    {{- if and (eq $values.model.source "image") (not $values.model.image.reference) }}
    - name: MODEL_FOLDER
      value: {{ $values.model.image.path | quote }}
    {{- end }}
  resources:
    requests: {cpu: "1", memory: 1Gi}
    limits: {cpu: "2", memory: 4Gi}
  securityContext:
    {{- include "headwater.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    {{- include "headwater.mounts" . | nindent 4 }}
{{- end }}
{{- end -}}

{{/*
What may end a pod looks at Ray's own process on it and nothing else: a worker that loads a model for
an hour is alive. What decides about traffic looks at what can be answered.
*/}}
{{- define "headwater.probes" -}}
{{- $probes := .root.Values.probes -}}
startupProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ div (add $probes.startupSeconds $probes.periodSeconds -1) $probes.periodSeconds }}
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ div (add $probes.livenessSeconds $probes.periodSeconds -1) $probes.periodSeconds }}
readinessProbe:
  {{- if eq .component "head" }}
  httpGet: {path: /api/healthz, port: 52365}
  {{- else if eq .component "frontend" }}
  httpGet: {path: /ready, port: 8000}
  {{- else }}
  exec:
    command: [/bin/bash, /etc/headwater/scripts/worker-ready.sh]
  {{- end }}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.readinessFailures }}
{{- end -}}

{{/* MiB of the node's own disk that a pod fills: packages, and weights that no claim holds. */}}
{{- define "headwater.diskMiB" -}}
{{- $values := .root.Values -}}
{{- $layer := ternary $values.layer.storageMiB 0 $values.layer.enabled -}}
{{- $loads := and (eq $values.model.source "hub") (not $values.model.hub.cacheClaim) (include "headwater.holdsModel" .component) -}}
{{- add $layer (ternary $values.model.hub.storageMiB 0 (not (empty $loads))) -}}
{{- end -}}

{{- define "headwater.resources" -}}
{{- $diskMiB := include "headwater.diskMiB" . | int -}}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memoryMiB }}Mi
  {{- if $diskMiB }}
  ephemeral-storage: {{ $diskMiB }}Mi
  {{- end }}
  {{- if .gpus }}
  {{ .root.Values.gpu.resource }}: {{ .gpus | toString | quote }}
  {{- end }}
limits:
  cpu: {{ .cpu | quote }}
  memory: {{ .memoryMiB }}Mi
  {{- if .gpus }}
  {{ .root.Values.gpu.resource }}: {{ .gpus | toString | quote }}
  {{- end }}
{{- end -}}

{{- define "headwater.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "headwater.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    headwater/model: {{ include "headwater.labelValue" (include "headwater.servedName" $root) | quote }}
    {{- with .group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: "8080"
    headwater/layer: {{ $values.layer.revision | quote }}
    # Another configuration is another cluster, and so is another number of pods: the one that runs
    # serves until the new one does.
    headwater/config: {{ include "headwater.configDigest" . | quote }}
    {{- with .group.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "headwater.serviceAccountName" $root | quote }}
  # Ray's autoscaler, in the head, is the only one that talks to Kubernetes.
  automountServiceAccountToken: {{ and $values.autoscaling.enabled (eq .component "head") }}
  terminationGracePeriodSeconds: {{ add $values.drain.timeoutSeconds $values.drain.marginSeconds }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- if and .gpus $values.gpu.runtimeClassName }}
  runtimeClassName: {{ $values.gpu.runtimeClassName | quote }}
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "headwater.podSecurity" $root | nindent 4 }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if .group.topologySpreadConstraints }}
    {{- toYaml .group.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "headwater.selectorLabels" $root | nindent 10 }}
          app.kubernetes.io/component: {{ .component }}
    {{- end }}
  {{- with include "headwater.initContainers" . }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" (eq .component "head") }}
      image: {{ include "headwater.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        {{- include "headwater.environment" $root | nindent 8 }}
        {{- if eq $values.frontend.through "proxy" }}
        - name: HEADWATER_PROXY_PORT
          value: "8000"
        {{- end }}
      ports:
        {{- if eq .component "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: 8000}
      resources:
        {{- include "headwater.resources" . | nindent 8 }}
      securityContext:
        {{- include "headwater.containerSecurity" $root | nindent 8 }}
      {{- include "headwater.probes" . | nindent 6 }}
      lifecycle:
        {{- /* The 15 s are a worker's to hand over what it has not finished after its time is up, which
        Serve leaves it, too (cluster/application.py). */}}
        {{- $drain_s := add $values.drain.timeoutSeconds 15 | toString }}
        {{- if eq .component "head" }}
        preStop:
          exec:
            command: [/bin/bash, /etc/headwater/scripts/drain-head.sh, {{ $drain_s | quote }}]
        {{- else }}
        postStart:
          exec:
            # /tmp outlives a container, and the next one's processes get the same numbers.
            command: [/bin/bash, -c, 'rm -f "${TMPDIR:-/tmp}/headwater-$(id -u)"/ready-*']
        preStop:
          exec:
            command: [/bin/bash, /etc/headwater/scripts/drain.sh, {{ $drain_s | quote }}]
        {{- end }}
      volumeMounts:
        {{- include "headwater.mounts" . | nindent 8 }}
  volumes:
    {{- include "headwater.volumes" . | nindent 4 }}
{{- end -}}
