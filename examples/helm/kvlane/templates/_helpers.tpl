{{- define "kvlane.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Begins with its own newline and indentation, because it may be empty. */}}
{{- define "kvlane.pullSecrets" }}
{{- with .Values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . | quote }}
        {{- end }}
{{- end }}
{{- end }}

{{- /* Flags of TLS; the argument is how they begin. */}}
{{- define "kvlane.tlsFlags" -}}
- {{ . }}tls-certificate=/etc/kvlane-tls/tls.crt
- {{ . }}tls-key=/etc/kvlane-tls/tls.key
- {{ . }}tls-authority=/etc/kvlane-tls/ca.crt
{{- end }}

{{- define "kvlane.clusterMounts" -}}
- {name: cluster, mountPath: /etc/kvlane-cluster, readOnly: true}
{{- if .Values.index.tlsSecret }}
- {name: tls, mountPath: /etc/kvlane-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvlane.clusterVolumes" -}}
- name: cluster
  # For root alone: kvlane refuses a secret that others may read.
  secret: {secretName: {{ .Values.index.tokenSecret | quote }}, defaultMode: 0400}
{{- with .Values.index.tlsSecret }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0400}
{{- end }}
{{- end }}

{{- define "kvlane.podIp" -}}
# Kubernetes puts the pod's address where the flags name $(POD_IP).
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}

{{- /*
A policy for the pods of an app: `rules` is a list of a port and of the peers that may reach it. A rule without peers is left
out, because an empty "from" lets everybody in.
*/}}
{{- define "kvlane.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .app }}
spec:
  podSelector:
    matchLabels: {app: {{ .app }}}
  policyTypes: [Ingress]
  {{- $rules := list }}
  {{- range .rules }}
  {{- if .from }}
  {{- $rules = append $rules (dict "ports" (list (dict "port" .port)) "from" .from) }}
  {{- end }}
  {{- end }}
  {{- if $rules }}
  ingress:
    {{- toYaml $rules | nindent 4 }}
  {{- else }}
  ingress: []
  {{- end }}
{{- end }}

{{- /* A peer of a policy: the pods of an app in this namespace. */}}
{{- define "kvlane.peer" -}}
podSelector: {matchLabels: {app: {{ . }}}}
{{- end }}
