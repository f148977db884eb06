{{- define "server.name" -}}styrmin-server{{- end -}}

{{- define "server.selector" -}}
app.kubernetes.io/name: {{ include "server.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "server.labels" -}}
{{ include "server.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "server.sqlite" -}}
{{- if eq .Values.database.kind "sqlite" }}true{{ end -}}
{{- end -}}

{{- /* What would only show later, as a server that does not start, or loses something. */ -}}
{{- define "server.check" -}}
{{- if not .Values.publicUrl -}}
{{- fail "publicUrl is empty: set it to the URL of this server, as people, agents and Flux reach it" -}}
{{- end -}}
{{- if not .Values.keys.secretName -}}
{{- fail "keys.secretName is empty: make the keys with `styrmin-server keys --to FOLDER`, keep a copy, and name the Secret made of them (kubectl create secret generic NAME --from-file=FOLDER)" -}}
{{- end -}}
{{- if and (include "server.sqlite" .) (gt (int .Values.replicas) 1) -}}
{{- fail (printf "replicas is %d, but SQLite serves one: use database.kind=postgresql for more" (int .Values.replicas)) -}}
{{- end -}}
{{- if and (not (include "server.sqlite" .)) (not .Values.database.postgresql.secretName) -}}
{{- fail "database.postgresql.secretName is empty: name the Secret with the URL of the database" -}}
{{- end -}}
{{- if and .Values.drivers.configMaps .Values.drivers.volume -}}
{{- fail "drivers.configMaps and drivers.volume are both set: choose one" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.host is empty: set it to the host of publicUrl" -}}
{{- end -}}
{{- end -}}
