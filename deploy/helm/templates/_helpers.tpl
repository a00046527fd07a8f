{{- define "archerfish.labels" -}}
app.kubernetes.io/name: archerfish
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "archerfish.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* What pods have in common. Service links would set variables named ARCHERFISH_..., and archerfish refuses those that it does not know. */}}
{{- define "archerfish.pod" -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds .Values.graceSeconds 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
volumes:
  - name: models
    {{- include "archerfish.volume" (list . "models" .Values.modelVolume) | nindent 4 }}
  - name: kernels
    {{- include "archerfish.volume" (list . "kernels" .Values.kernelVolume) | nindent 4 }}
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
  {{- if .Values.config }}
  - name: config
    configMap: {name: {{ .Release.Name }}}
  {{- end }}
  {{- with .Values.apiKeys.secret }}
  - name: keys
    secret: {secretName: {{ . }}}
  {{- end }}
{{- with .Values.pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "archerfish.volume" -}}
{{- $release := (index . 0).Release.Name }}{{ $volume := index . 2 -}}
{{- if or $volume.claim $volume.size -}}
persistentVolumeClaim: {claimName: {{ $volume.claim | default (printf "%s-%s" $release (index . 1)) }}}
{{- else -}}
emptyDir: {}
{{- end }}
{{- end }}

{{/* What containers have in common. */}}
{{- define "archerfish.container" -}}
{{ include "archerfish.image" . }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: ARCHERFISH_SERVE_DRAIN_S, value: {{ .Values.drainSeconds | quote }}}
  - {name: ARCHERFISH_SERVE_GRACE_S, value: {{ .Values.graceSeconds | quote }}}
  {{- if .Values.config }}
  - {name: ARCHERFISH_CONFIG, value: /etc/archerfish/archerfish.toml}
  {{- end }}
  {{- if .Values.apiKeys.secret }}
  - {name: ARCHERFISH_SERVE_API_KEYS_FILE, value: /etc/archerfish-keys/keys.toml}
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: kernels, mountPath: /kernels}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- if .Values.config }}
  - {name: config, mountPath: /etc/archerfish, readOnly: true}
  {{- end }}
  {{- if .Values.apiKeys.secret }}
  - {name: keys, mountPath: /etc/archerfish-keys, readOnly: true}
  {{- end }}
{{- end }}

{{- define "archerfish.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- with .Values.gpus -}}
{{- $resources = merge (dict "limits" (dict "nvidia.com/gpu" .) "requests" (dict "nvidia.com/gpu" .)) $resources -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end }}

{{/* Pulls models before the first container runs. */}}
{{- define "archerfish.init" -}}
{{- with .Values.models }}
initContainers:
  - name: pull
    args: {{ concat (list "pull") . | toJson }}
    {{- include "archerfish.container" $ | nindent 4 }}
    {{- include "archerfish.resources" $ | nindent 4 }}
{{- end }}
{{- end }}
