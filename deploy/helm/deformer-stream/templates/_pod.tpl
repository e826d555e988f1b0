{{/*
The template of a pod. Its argument is a dict:
  root       the context of the chart
  component  bridge, consume, incidents, delivery or serve
  values     the values of the component
  port       number of the port, and portName its name
  args       list of arguments in YAML
  readiness  path of the readiness probe, and startup that of the startup probe
  needsModel whether the model is mounted
  env        further variables in YAML, "" or missing if there are none
  secrets    list of dicts: name of the Secret, folder below /etc/deformer, and keys (all of them if missing)
*/}}
{{- define "deformer.pod" -}}
{{- $root := .root -}}
{{- include "deformer.check" $root -}}
{{- $values := .values -}}
{{- $kafka := $root.Values.kafka -}}
{{- $secrets := .secrets | default list -}}
{{- with include "deformer.loginKey" $root -}}
{{- $secrets = append $secrets (dict "name" (include "deformer.kafkaSecret" $root) "folder" "kafka" "keys" (list .)) -}}
{{- end -}}
{{- with $kafka.security.tls -}}
{{- if .existingSecret -}}
{{- $keys := list "ca.crt" -}}
{{- if .clientCertificate -}}
{{- $keys = list "ca.crt" "tls.crt" "tls.key" -}}
{{- end -}}
{{- $secrets = append $secrets (dict "name" .existingSecret "folder" "tls" "keys" $keys) -}}
{{- end -}}
{{- end -}}
{{- $fetch := and .needsModel $root.Values.model.fetch.enabled -}}
metadata:
  labels:
    # Without the version of the chart, so that a new one does not restart pods that stay the same.
    {{- $selector := include "deformer.selectorLabels" $root | fromYaml }}
    {{- $_ := set $selector "app.kubernetes.io/component" .component }}
    {{- toYaml (mergeOverwrite (dict) ($root.Values.commonLabels | default dict) ($values.podLabels | default dict) $selector) | nindent 4 }}
  annotations:
    # A change of the configuration or of a Secret of the chart restarts the pods one after the other.
    {{- $secret := printf "%s %s %s" $kafka.security.username $kafka.security.password $root.Values.serve.auth.token }}
    {{- $annotations := dict "checksum/config" (include "deformer.config" $root | sha256sum) "checksum/secret" ($secret | sha256sum) }}
    {{- if $root.Values.monitoring.scrapeAnnotations }}
    {{- $_ := set $annotations "prometheus.io/scrape" "true" }}
    {{- $_ := set $annotations "prometheus.io/port" (.port | toString) }}
    {{- end }}
    {{- toYaml (mergeOverwrite $annotations ($values.podAnnotations | default dict)) | nindent 4 }}
spec:
  serviceAccountName: {{ include "deformer.serviceAccountName" $root }}
  automountServiceAccountToken: false
  # Kubernetes would set variables such as DEFORMER_STREAM_PORT, which look like options of the program.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $values.topologySpreadConstraints }}
    {{- toYaml $values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "deformer.selectorLabels" $root | nindent 10 }}
          app.kubernetes.io/component: {{ $.component }}
    {{- end }}
    {{- end }}
  {{- if $fetch }}
  initContainers:
    - name: fetch-model
      {{- with $root.Values.model.fetch }}
      image: {{ .image }}
      command:
        {{- toYaml .command | nindent 8 }}
      args:
        {{- if .args }}
        {{- toYaml .args | nindent 8 }}
        {{- else }}
        - sync
        - --config=/tmp/rclone.conf
        - {{ required "model.fetch.source is required with the default command, such as store:bucket/model" .source | quote }}
        - /models/{{ $root.Values.model.folder }}
        {{- end }}
      {{- with .env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      volumeMounts:
        - {name: model, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "deformer.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- .args | trim | nindent 8 }}
        {{- with $values.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        {{- if include "deformer.hasPassword" $root }}
        - name: DEFORMER_SASL_USERNAME
          valueFrom:
            secretKeyRef: {name: {{ include "deformer.kafkaSecret" $root }}, key: username}
        {{- end }}
        {{- with .env }}
        {{- . | trim | nindent 8 }}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: {{ .portName }}, containerPort: {{ .port }}}
      {{- /* The page answers only to the names by which it is known. */}}
      {{- $host := eq .component "serve" }}
      startupProbe:
        httpGet: {path: {{ .startup }}, port: {{ .portName }}{{ if $host }}, httpHeaders: [{name: Host, value: localhost}]{{ end }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div (int $values.startupSeconds) 5) }}
      livenessProbe:
        httpGet: {path: /healthz, port: {{ .portName }}{{ if $host }}, httpHeaders: [{name: Host, value: localhost}]{{ end }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: {{ .readiness }}, port: {{ .portName }}{{ if $host }}, httpHeaders: [{name: Host, value: localhost}]{{ end }}}
        periodSeconds: 5
        timeoutSeconds: 5
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/deformer/config, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if .needsModel }}
        - {name: model, mountPath: /models, readOnly: true}
        {{- end }}
        {{- range $secrets }}
        - {name: secret-{{ .folder }}, mountPath: /etc/deformer/{{ .folder }}, readOnly: true}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "deformer.fullname" $root }}}
    - name: tmp
      emptyDir: {sizeLimit: {{ $root.Values.tmpSizeLimit }}}
    {{- if .needsModel }}
    {{- $claim := $root.Values.model.claim }}
    {{- if or $claim.existing $claim.create }}
    - name: model
      persistentVolumeClaim:
        claimName: {{ default (printf "%s-model" (include "deformer.fullname" $root)) $claim.existing }}
        readOnly: true
    {{- else if not (and $claim.perPod (has .component (list "consume" "incidents"))) }}
    - name: model
      emptyDir: {sizeLimit: {{ $claim.size }}}
    {{- end }}
    {{- end }}
    {{- range $secrets }}
    - name: secret-{{ .folder }}
      secret:
        secretName: {{ .name }}
        {{- with .keys }}
        items:
          {{- range . }}
          - {key: {{ . }}, path: {{ . }}}
          {{- end }}
        {{- end }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The claims of a StatefulSet, one for each pod. */}}
{{- define "deformer.claimTemplates" -}}
{{- if and .Values.model.fetch.enabled .Values.model.claim.perPod -}}
persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Delete}
volumeClaimTemplates:
  - metadata:
      name: model
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .Values.model.claim.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests: {storage: {{ .Values.model.claim.size }}}
{{- end -}}
{{- end -}}
