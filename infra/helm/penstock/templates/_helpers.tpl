{{/* Labels of objects, beside their own name's. Selectors and pods have none of these: they change with each release. */}}
{{- define "penstock.labels" -}}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Name, namespace and labels. Takes root, name, and `app`: the label app.kubernetes.io/name. */}}
{{- define "penstock.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- with .app }}
  app.kubernetes.io/name: {{ . }}
  {{- end }}
  {{- include "penstock.labels" .root | nindent 2 }}
{{- end }}

{{/* A model's settings: those of `workers`, but for what the model says itself. Takes root and model. */}}
{{- define "penstock.model" -}}
{{- $settings := deepCopy .root.Values.workers -}}
{{- range $key, $value := .model -}}
{{- $_ := set $settings $key $value -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{/* Models that are scaled, with their settings, by name. */}}
{{- define "penstock.scaled" -}}
{{- $scaled := dict -}}
{{- range $name, $model := .Values.models -}}
{{- $settings := include "penstock.model" (dict "root" $ "model" $model) | fromYaml -}}
{{- if and (not $settings.replicas) (ne $.Values.scaling.mode "none") -}}
{{- $_ := set $scaled $name $settings -}}
{{- end -}}
{{- end -}}
{{- toYaml $scaled -}}
{{- end }}

{{/* Whether Penstock's autoscaler runs: "true" or nothing. */}}
{{- define "penstock.autoscales" -}}
{{- if and (ne .Values.scaling.mode "keda-sqs") (include "penstock.scaled" . | fromYaml) }}true{{ end -}}
{{- end }}

{{/* Whether files are in a volume: "true" or nothing. */}}
{{- define "penstock.filesVolume" -}}
{{- if not (hasPrefix "s3://" .Values.files.dir) }}true{{ end -}}
{{- end }}

{{- define "penstock.image" -}}
{{- printf "%s:%s" .repository .tag -}}
{{- end }}

{{/* Annotations of pods. Takes root, and `checksums`: what a pod has read at its start, by name. */}}
{{- define "penstock.annotations" -}}
{{- $annotations := deepCopy .root.Values.podAnnotations -}}
{{- range $name, $text := .checksums -}}
{{- $_ := set $annotations (printf "checksum/%s" $name) (sha256sum $text) -}}
{{- end -}}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of a pod: its security, and where it may run. Takes root, process (its values), and `shares`: whether volumes are
others' too. */}}
{{- define "penstock.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  {{- if .shares }}
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- include "penstock.placement" .process }}
{{- end }}

{{- define "penstock.placement" }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Pods of one kind on different nodes, if there are some. Takes the labels that choose them. */}}
{{- define "penstock.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- toYaml . | nindent 6 }}
{{- end }}

{{/* Of a container: servers, settings and variables. Takes root, role, and `settings`: whether it reads FILES_DIR. */}}
{{- define "penstock.environment" -}}
{{- with .root.Values.imagePullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
envFrom:
  - secretRef: {name: {{ .root.Values.secrets.prefix }}{{ .role }}}
  {{- if .settings }}
  - configMapRef: {name: penstock}
  {{- end }}
{{- $env := concat .root.Values.extraEnv (.env | default list) }}
{{- if and .key .root.Values.secrets.keySecret }}
{{- $env = append $env (dict "name" "PENSTOCK_SECRETS_KEY_FILE" "value" "/etc/penstock/secrets.key") }}
{{- end }}
{{- with $env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "penstock.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Probes of a process with --health-port. */}}
{{- define "penstock.probes" -}}
livenessProbe:
  httpGet: {path: /livez, port: health}
  {{- if .delay }}
  initialDelaySeconds: {{ .delay }}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}

{{/* Volumes that a pod mounts, and where. Both take root, and what it needs besides /tmp: models (and modelsClaim),
files, kernels, `config`: the ConfigMap of its settings, in /etc/penstock; `backup`: the place and the key of backups; `key`: that
of secrets in the store. */}}
{{- define "penstock.mounts" -}}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: ca, mountPath: /etc/penstock, readOnly: true}
  {{- if .models }}
  - {name: models, mountPath: /models}
  {{- end }}
  {{- if and .files (include "penstock.filesVolume" .root) }}
  - {name: files, mountPath: {{ .root.Values.files.dir }}}
  {{- end }}
  {{- if and .backup .root.Values.backup.claim }}
  - {name: backups, mountPath: {{ .root.Values.backup.place }}}
  {{- end }}
  {{- if .kernels }}
  - {name: kernels, mountPath: /cache/triton}
  {{- end }}
{{- end }}

{{- define "penstock.volumes" -}}
volumes:
  - name: tmp
    emptyDir: {}
  - name: ca
    {{- $key := and .key .root.Values.secrets.keySecret }}
    {{- if or .config .backup $key }}
    projected:
      {{- if or .backup $key }}
      # Processes warn of a key that others may read.
      defaultMode: 0440
      {{- end }}
      sources:
        - configMap: {name: {{ .root.Values.secrets.caConfigMap }}, optional: true}
        {{- with .config }}
        - configMap: {name: {{ . }}}
        {{- end }}
        {{- if .backup }}
        - secret: {name: {{ .root.Values.backup.keySecret }}}
        {{- end }}
        {{- with $key }}
        - secret: {name: {{ . }}}
        {{- end }}
    {{- else }}
    configMap: {name: {{ .root.Values.secrets.caConfigMap }}, optional: true}
    {{- end }}
  {{- if .models }}
  - name: models
    {{- if .modelsClaim }}
    persistentVolumeClaim: {claimName: {{ .modelsClaim }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- end }}
  {{- if and .files (include "penstock.filesVolume" .root) }}
  - name: files
    persistentVolumeClaim: {claimName: {{ .root.Values.files.existingClaim | default "penstock-files" }}}
  {{- end }}
  {{- if and .backup .root.Values.backup.claim }}
  - name: backups
    persistentVolumeClaim: {claimName: {{ .root.Values.backup.claim }}}
  {{- end }}
  {{- if .kernels }}
  - name: kernels
    emptyDir: {}
  {{- end }}
{{- end }}

{{/* Lets one pod at a time be evicted, and pods that are not ready at any time. Takes root, name, and labels. */}}
{{- define "penstock.budget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "penstock.metadata" (dict "root" .root "name" .name) | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- toYaml .selector | nindent 6 }}
{{- end }}

{{/* Takes root and name. */}}
{{- define "penstock.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "penstock.metadata" (dict "root" .root "name" .name) | nindent 2 }}
  {{- with index .root.Values.serviceAccountAnnotations .name }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* What the autoscaler reads: a table for each model. */}}
{{- define "penstock.scaling" -}}
{{- $root := . -}}
{{- range $name, $settings := include "penstock.scaled" . | fromYaml }}
[[pool]]
model = {{ $settings.model | quote }}
min = {{ $settings.min }}
max = {{ $settings.max }}
cool_down = {{ $root.Values.scaling.coolDown }}
{{- if eq $root.Values.scaling.mode "actuator" }}
actuator = "kubernetes://{{ $root.Release.Namespace }}/worker-{{ $name }}"
{{- else }}
actuator = "export"
{{- end }}
{{- range $key := list "patience" "worth" }}
{{- $value := index $root.Values.scaling $key }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ $value }}
{{- end }}
{{- end }}
{{- with $root.Values.scaling.poolSettings }}
{{ . | trim }}
{{- end }}
{{ end }}
{{- end }}

{{/* What every pod with FILES_DIR reads. */}}
{{- define "penstock.settings" -}}
FILES_DIR: {{ .Values.files.dir | quote }}
{{- end }}
