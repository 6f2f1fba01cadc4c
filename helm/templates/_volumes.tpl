{{/*
What pods have mounted. Arguments are those of "headwater.podTemplate" (_pod.tpl).
*/}}

{{/* Whether pods of a component hold the model. */}}
{{- define "headwater.holdsModel" -}}
{{- if ne . "head" -}}true{{- end -}}
{{- end -}}

{{- define "headwater.mounts" -}}
{{- $values := .root.Values -}}
- name: state
  mountPath: /opt/headwater-state
- name: tmp
  mountPath: /tmp
- name: shared-mem
  mountPath: /dev/shm
- name: scripts
  mountPath: /etc/headwater/scripts
  readOnly: true
- name: cluster-secret
  mountPath: {{ include "headwater.secretPath" .root }}
  readOnly: true
{{- if $values.layer.enabled }}
- name: layer
  mountPath: /opt/headwater
{{- end }}
{{- if include "headwater.holdsModel" .component }}
{{- if eq $values.model.source "volume" }}
- name: model
  mountPath: {{ include "headwater.modelPath" .root }}
  readOnly: true
  {{- with $values.model.volume.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- else if and (eq $values.model.source "image") $values.model.image.reference }}
- name: model
  mountPath: {{ include "headwater.modelPath" .root }}
  readOnly: true
  {{- with $values.model.image.path }}
  subPath: {{ . | trimPrefix "/" | quote }}
  {{- end }}
{{- else if eq $values.model.source "hub" }}
{{- if $values.model.hub.cacheClaim }}
- name: hub-cache
  mountPath: /opt/headwater-state/hub
{{- end }}
{{- if $values.model.hub.tokenSecret.name }}
- name: hub-token
  mountPath: /etc/headwater/hub
  readOnly: true
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .component "frontend") $values.secrets.apiKeys.existingSecret }}
- name: api-keys
  mountPath: {{ include "headwater.keysPath" .root }}
  readOnly: true
{{- end }}
{{- range $index, $file := $values.secrets.files }}
- name: secret-{{ $index }}
  mountPath: {{ $file.mountPath | quote }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "headwater.volumes" -}}
{{- $values := .root.Values -}}
- name: state
  emptyDir: {}
- name: tmp
  emptyDir: {}
# Ray's object store, and what vLLM's ranks say to each other.
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ $values.memory.shmMiB }}Mi
- name: scripts
  configMap:
    name: {{ include "headwater.fullname" .root }}-scripts
    defaultMode: 0555
- name: cluster-secret
  secret:
    secretName: {{ include "headwater.secretName" .root | quote }}
    defaultMode: 0440
{{- if $values.layer.enabled }}
- name: layer
  emptyDir: {}
- name: layer-archive
  configMap:
    name: {{ $values.layer.configMap | quote }}
{{- end }}
{{- if include "headwater.holdsModel" .component }}
{{- if eq $values.model.source "volume" }}
- name: model
  {{- if $values.model.volume.claim }}
  persistentVolumeClaim:
    claimName: {{ $values.model.volume.claim | quote }}
    readOnly: true
  {{- else }}
  hostPath:
    path: {{ $values.model.volume.hostPath | quote }}
    type: Directory
  {{- end }}
{{- else if and (eq $values.model.source "image") $values.model.image.reference }}
- name: model
  image:
    reference: {{ $values.model.image.reference | quote }}
    pullPolicy: {{ $values.model.image.pullPolicy }}
{{- else if eq $values.model.source "hub" }}
{{- with $values.model.hub.cacheClaim }}
- name: hub-cache
  persistentVolumeClaim:
    claimName: {{ . | quote }}
{{- end }}
{{- with $values.model.hub.tokenSecret.name }}
- name: hub-token
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .component "frontend") $values.secrets.apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ $values.secrets.apiKeys.existingSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- range $index, $file := $values.secrets.files }}
- name: secret-{{ $index }}
  secret:
    secretName: {{ $file.existingSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- end -}}
