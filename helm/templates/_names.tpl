{{/*
Names and labels. A name that had to be changed to suit Kubernetes ends in a hash of what it was, so
that two that differ stay apart.
*/}}

{{/* headwater.label: dict text, max -> a DNS-1035 label of at most max characters. */}}
{{- define "headwater.dnsLabel" -}}
{{- $clean := .text | lower | replace "." "-" | replace "_" "-" | replace "/" "-" -}}
{{- $clean = regexReplaceAll "[^a-z0-9-]" $clean "-" -}}
{{- $clean = regexReplaceAll "^[^a-z]+" $clean "" | trimSuffix "-" -}}
{{- $max := int .max -}}
{{- if or (ne $clean .text) (gt (len $clean) $max) -}}
{{- $hash := sha256sum .text | trunc 6 -}}
{{- $room := sub $max 7 | int -}}
{{- printf "%s-%s" (default "hw" ($clean | trunc $room | trimSuffix "-")) $hash -}}
{{- else -}}
{{- $clean -}}
{{- end -}}
{{- end -}}

{{/* headwater.labelValue: any text as the value of a label, 63 characters at most. */}}
{{- define "headwater.labelValue" -}}
{{- $clean := regexReplaceAll "[^A-Za-z0-9._-]" . "_" -}}
{{- $clean = regexReplaceAll "^[^A-Za-z0-9]+" $clean "" -}}
{{- $clean = regexReplaceAll "[^A-Za-z0-9]+$" $clean "" -}}
{{- if or (ne $clean .) (gt (len $clean) 63) -}}
{{- printf "%s.%s" (default "model" (regexReplaceAll "[^A-Za-z0-9]+$" ($clean | trunc 56) "")) (sha256sum . | trunc 6) -}}
{{- else -}}
{{- $clean -}}
{{- end -}}
{{- end -}}

{{/*
KubeRay takes 47 for a RayService: its clusters and pods get names made from it. One less leaves room
for the label that Redis' StatefulSet gives its pod, its own name and a hash of ten.
*/}}
{{- define "headwater.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $text := .Values.fullnameOverride -}}
{{- if not $text -}}
{{- $text = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- include "headwater.dnsLabel" (dict "text" $text "max" 46) -}}
{{- end -}}

{{- define "headwater.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "headwater.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "headwater.secretName" -}}
{{- default (printf "%s-secret" (include "headwater.fullname" .)) .Values.secrets.cluster.existingSecret -}}
{{- end -}}

{{- define "headwater.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of pods too, where a change would mean another cluster: so no version is among them. */}}
{{- define "headwater.selectorLabels" -}}
app.kubernetes.io/instance: {{ include "headwater.fullname" . | quote }}
app.kubernetes.io/part-of: headwater
{{- end -}}

{{- define "headwater.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: headwater
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "headwater.selectorLabels" . }}
{{- end -}}

{{/* The name that clients use. */}}
{{- define "headwater.servedName" -}}
{{- $model := .Values.model -}}
{{- if $model.servedName -}}
{{- $model.servedName -}}
{{- else if eq $model.source "bundled" -}}
SmolLM2-135M-Instruct
{{- else if eq $model.source "hub" -}}
{{- $model.name | splitList "/" | last -}}
{{- end -}}
{{- end -}}
