{{/* Name of every object. Short enough for a suffix: Helm limits a release name to 53 characters. */}}
{{- define "postgresql.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{/* What finds the pod. Must never change: the selector of a StatefulSet is immutable. */}}
{{- define "postgresql.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: database
{{- end -}}

{{/* Labels of objects. Not for pods: a new chart version alone must not restart the server. */}}
{{- define "postgresql.labels" -}}
{{ include "postgresql.selectorLabels" . }}
{{- with .Values.applicationVersion }}
app.kubernetes.io/version: {{ regexReplaceAll "[^A-Za-z0-9._-]" . "_" | trunc 63 | trimAll "._-" | quote }}
{{- end }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- end -}}

{{/* A setting as postgresql.conf wants it: quoted, with \ and ' escaped. toJson writes numbers without an exponent. */}}
{{- define "postgresql.setting" -}}
{{- $text := kindIs "string" . | ternary . (toJson .) -}}
'{{ $text | replace "\\" "\\\\" | replace "'" "''" }}'
{{- end -}}

{{/*
Everything in postgresql.conf that is ours. The file of the data directory comes first, so
that what initdb found out (locale, time zone) counts where we say nothing.
*/}}
{{- define "postgresql.conf" -}}
include '/var/lib/postgresql/data/pgdata/postgresql.conf'
listen_addresses = '*'
max_connections = {{ int .Values.maxConnections }}
shared_buffers = {{ include "postgresql.setting" .Values.sharedBuffers }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ include "postgresql.setting" $value }}
{{- end }}
{{ end -}}
