{{- /* The name of everything: the admission policy and the leases know it, so a cluster has one release. */ -}}
{{- define "agent.name" -}}styrmin-agent{{- end -}}

{{- define "agent.selector" -}}
app.kubernetes.io/name: {{ include "agent.name" . }}
{{- end -}}

{{- define "agent.labels" -}}
{{ include "agent.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "agent.image" -}}
{{ .Values.image.registry }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* What the restricted profile asks for, of a pod and of a container. */ -}}
{{- define "agent.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "agent.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* What would only show later, as an agent that does nothing. */ -}}
{{- define "agent.check" -}}
{{- if ne .Release.Namespace "styrmin-system" -}}
{{- fail (printf "the agent works in namespace styrmin-system, where its drivers and its lease are: install it with --namespace styrmin-system, not %s" .Release.Namespace) -}}
{{- end -}}
{{- if not .Values.server.address -}}
{{- fail "server.address is empty: set it to the address of the Styrmin server, as pods of this cluster reach it" -}}
{{- end -}}
{{- if ge (int .Values.operator.deploymentReadyTimeout) (int .Values.operator.helmReleaseTimeout) -}}
{{- fail "operator.deploymentReadyTimeout has to be below operator.helmReleaseTimeout: otherwise Helm rolls back before the pods that are not ready can be named" -}}
{{- end -}}
{{- end -}}
