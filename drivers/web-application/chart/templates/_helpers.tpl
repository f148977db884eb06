{{/* Name of every object. Short enough for a suffix: Helm limits a release name to 53 characters. */}}
{{- define "web-application.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{/* What finds the pods. Must never change: the selector of a Deployment is immutable. */}}
{{- define "web-application.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: web
{{- end -}}

{{/* Labels of objects. Not for pods: a new chart version alone must not restart them. */}}
{{- define "web-application.labels" -}}
{{ include "web-application.selectorLabels" . }}
{{- with .Values.applicationVersion }}
app.kubernetes.io/version: {{ regexReplaceAll "[^A-Za-z0-9._-]" . "_" | trunc 63 | trimAll "._-" | quote }}
{{- end }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{- end -}}

{{/* The check of all three probes, so that they never disagree about what healthy means. */}}
{{- define "web-application.probe" -}}
{{- if .Values.healthPath -}}
httpGet:
  path: {{ .Values.healthPath | quote }}
  port: http
{{- else -}}
tcpSocket:
  port: http
{{- end }}
timeoutSeconds: 5
{{- end -}}
