{{/* Name of the release's objects. */}}
{{- define "deformer.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of the release. */}}
{{- define "deformer.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "deformer.labels" -}}
{{ include "deformer.extendLabels" (dict "root" .) }}
{{- end -}}

{{/*
Labels of an object, each once: YAML forbids a key that comes twice. Its argument is a dict:
  root   the context of the chart
  extra  further labels, which have precedence
*/}}
{{- define "deformer.extendLabels" -}}
{{- with .root -}}
{{- $version := printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" -}}
{{- $labels := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/managed-by" .Release.Service "helm.sh/chart" $version -}}
{{- $selector := include "deformer.selectorLabels" . | fromYaml -}}
{{- toYaml (mergeOverwrite $labels (.Values.commonLabels | default dict) ($.extra | default dict) $selector) -}}
{{- end -}}
{{- end -}}

{{- define "deformer.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "deformer.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required if serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "deformer.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether the brokers require a login. */}}
{{- define "deformer.hasLogin" -}}
{{- if hasPrefix "SASL_" .Values.kafka.security.protocol -}}true{{- end -}}
{{- end -}}

{{/* Whether it is a login with a user name and a password. */}}
{{- define "deformer.hasPassword" -}}
{{- $mechanism := .Values.kafka.security.mechanism -}}
{{- if and (include "deformer.hasLogin" .) (or (eq $mechanism "PLAIN") (hasPrefix "SCRAM-" $mechanism)) -}}true{{- end -}}
{{- end -}}

{{/* The key of the Secret with the login that is mounted as a file, if there is one. */}}
{{- define "deformer.loginKey" -}}
{{- if include "deformer.hasPassword" . -}}
password
{{- else if and (eq .Values.kafka.security.mechanism "OAUTHBEARER") .Values.kafka.security.existingSecret -}}
client-secret
{{- end -}}
{{- end -}}

{{- define "deformer.kafkaSecret" -}}
{{- default (printf "%s-kafka" (include "deformer.fullname" .)) .Values.kafka.security.existingSecret -}}
{{- end -}}

{{- define "deformer.pageSecret" -}}
{{- default (printf "%s-page" (include "deformer.fullname" .)) .Values.serve.auth.existingSecret -}}
{{- end -}}

{{/* Whether `consume` is scaled by KEDA or by the HPA. */}}
{{- define "deformer.isScaled" -}}
{{- if or .Values.autoscaling.keda.enabled .Values.autoscaling.hpa.enabled -}}true{{- end -}}
{{- end -}}

{{/* The smallest number of replicas of `consume`. */}}
{{- define "deformer.minReplicas" -}}
{{- if .Values.autoscaling.keda.enabled -}}
{{- .Values.autoscaling.keda.minReplicas -}}
{{- else if .Values.autoscaling.hpa.enabled -}}
{{- .Values.autoscaling.hpa.minReplicas -}}
{{- else -}}
{{- .Values.consume.replicas -}}
{{- end -}}
{{- end -}}

{{/* The largest number of replicas of `consume`. */}}
{{- define "deformer.maxReplicas" -}}
{{- if .Values.autoscaling.keda.enabled -}}
{{- .Values.autoscaling.keda.maxReplicas -}}
{{- else if .Values.autoscaling.hpa.enabled -}}
{{- .Values.autoscaling.hpa.maxReplicas -}}
{{- else -}}
{{- .Values.consume.replicas -}}
{{- end -}}
{{- end -}}

{{/* The address of the page, "" if it is not known. */}}
{{- define "deformer.pageUrl" -}}
{{- if .Values.serve.externalUrl -}}
{{- .Values.serve.externalUrl -}}
{{- else if and .Values.serve.enabled .Values.serve.ingress.enabled -}}
http{{ if .Values.serve.ingress.tlsSecret }}s{{ end }}://{{ .Values.serve.ingress.host }}
{{- end -}}
{{- end -}}

{{/* The addresses of the metrics that the page shows, with commas. Pods that autoscaling adds are not among them. */}}
{{- define "deformer.metricsUrls" -}}
{{- $name := include "deformer.fullname" . -}}
{{- $urls := list -}}
{{- range $number := until (int (include "deformer.minReplicas" .)) -}}
{{- $urls = append $urls (printf "http://%s-consume-%d.%s-consume:9464/metrics" $name $number $name) -}}
{{- end -}}
{{- if .Values.incidents.enabled -}}
{{- range $number := until (int .Values.incidents.replicas) -}}
{{- $urls = append $urls (printf "http://%s-incidents-%d.%s-incidents:9465/metrics" $name $number $name) -}}
{{- end -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{/* A value of TOML: a text, a number, a boolean, a list of them, or a table of them. JSON's texts are TOML's. */}}
{{- define "deformer.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ toJson $key }} = {{ include "deformer.tomlValue" (get $ $key) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{- range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "deformer.tomlValue" $item }}{{ end -}}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* The lines of a table of TOML. A value that is null is left out. */}}
{{- define "deformer.tomlTable" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "deformer.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The configuration file of all processes: options of all commands, and a table for each command. */}}
{{- define "deformer.config" -}}
{{- $kafka := .Values.kafka -}}
{{- $security := $kafka.security -}}
{{- $shared := dict "topic" $kafka.topic "bootstrap-servers" $kafka.bootstrapServers "group" $kafka.group -}}
{{- $_ := set $shared (ternary "models" "model" .Values.model.several) (printf "/models/%s" .Values.model.folder) -}}
{{- if ne $security.protocol "PLAINTEXT" -}}
{{- $_ := set $shared "security-protocol" $security.protocol -}}
{{- end -}}
{{- if include "deformer.hasLogin" . -}}
{{- $_ := set $shared "sasl-mechanism" (required "kafka.security.mechanism is required with SASL" $security.mechanism) -}}
{{- end -}}
{{- with include "deformer.loginKey" . -}}
{{- $_ := set $shared (ternary "sasl-password-file" "sasl-oauth-client-secret-file" (eq . "password")) (printf "/etc/deformer/kafka/%s" .) -}}
{{- end -}}
{{- if $security.tls.existingSecret -}}
{{- $_ := set $shared "ssl-cafile" "/etc/deformer/tls/ca.crt" -}}
{{- if $security.tls.clientCertificate -}}
{{- $_ := set $shared "ssl-certfile" "/etc/deformer/tls/tls.crt" -}}
{{- $_ := set $shared "ssl-keyfile" "/etc/deformer/tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- $consume := dict "http" "0.0.0.0:9464" "alerts" "" -}}
{{- with .Values.model.by -}}
{{- $_ := set $consume "model-by" . -}}
{{- end -}}
{{- with .Values.model.pattern -}}
{{- $_ := set $consume "model-pattern" . -}}
{{- end -}}
{{- $incidents := dict "http" "0.0.0.0:9465" -}}
{{- $serve := dict "http" "0.0.0.0:8080" "metrics" (include "deformer.metricsUrls" .) -}}
{{- if .Values.incidents.enabled -}}
{{- $_ := set $consume "evidence" "on" -}}
{{- end -}}
{{- if eq .Values.serve.auth.key "users" -}}
{{- $_ := set $serve "users-file" "/etc/deformer/page/users" -}}
{{- else -}}
{{- $_ := set $serve "token-file" "/etc/deformer/page/token" -}}
{{- end -}}
{{- with include "deformer.pageUrl" . -}}
{{- $_ := set $serve "external-url" . -}}
{{- end -}}
{{- $bridge := dict -}}
{{- with .Values.bridge -}}
{{- if .enabled -}}
{{- $bridge = dict "http" "0.0.0.0:9466" "source" .source -}}
{{- with .security.username -}}
{{- $_ := set $bridge "source-username" . -}}
{{- end -}}
{{- if .security.existingSecret -}}
{{- $_ := set $bridge "source-password-file" "/etc/deformer/source/password" -}}
{{- end -}}
{{- if .security.tls.existingSecret -}}
{{- $_ := set $bridge "source-cafile" "/etc/deformer/source-tls/ca.crt" -}}
{{- if .security.tls.clientCertificate -}}
{{- $_ := set $bridge "source-certfile" "/etc/deformer/source-tls/tls.crt" -}}
{{- $_ := set $bridge "source-keyfile" "/etc/deformer/source-tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
# All options of all processes. Passwords are not among them.
{{- include "deformer.tomlTable" (mergeOverwrite $shared .Values.options) }}

[consume]
{{- include "deformer.tomlTable" (mergeOverwrite $consume .Values.consume.options) }}

[incidents]
{{- include "deformer.tomlTable" (mergeOverwrite $incidents .Values.incidents.options) }}

[serve]
{{- include "deformer.tomlTable" (mergeOverwrite $serve .Values.serve.options) }}
{{- if .Values.bridge.enabled }}

[bridge]
{{- include "deformer.tomlTable" (mergeOverwrite $bridge .Values.bridge.options) }}
{{- end }}
{{- end -}}

{{/* The flags that name the receivers of incidents. */}}
{{- define "deformer.receiverArgs" -}}
{{- $receivers := .Values.receivers -}}
{{- with $receivers.alertmanager }}
- --alertmanager={{ join "," . }}
{{- end }}
{{- with $receivers.webhook }}
- --webhook={{ join "," . }}
{{- end }}
{{- if $receivers.secret.existing }}
{{- if $receivers.secret.webhookSecret }}
- --webhook-secret-file=/etc/deformer/receivers/webhook-secret
{{- end }}
{{- if $receivers.secret.pagerdutyKey }}
- --pagerduty-key-file=/etc/deformer/receivers/pagerduty-key
{{- end }}
{{- if $receivers.secret.notify }}
- --notify-file=/etc/deformer/receivers/notify
{{- end }}
{{- end }}
{{- with default (include "deformer.pageUrl" .) $receivers.externalUrl }}
- --external-url={{ . }}
{{- end }}
{{- with $receivers.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The variables with receivers of incidents, whose addresses are secret. */}}
{{- define "deformer.receiverEnv" -}}
{{- with .Values.receivers.secret }}
{{- if .webhook }}
- name: DEFORMER_WEBHOOK
  valueFrom:
    secretKeyRef: {name: {{ .existing }}, key: webhook}
{{- end }}
{{- end }}
{{- end -}}

{{/* Fails if values contradict each other. */}}
{{- define "deformer.check" -}}
{{- if and .Values.autoscaling.keda.enabled .Values.autoscaling.hpa.enabled -}}
{{- fail "autoscaling: enable either keda or hpa, not both" -}}
{{- end -}}
{{- $claim := .Values.model.claim -}}
{{- if and $claim.existing (or $claim.create $claim.perPod) -}}
{{- fail "model.claim.existing names a claim, so neither model.claim.create nor model.claim.perPod can be set" -}}
{{- end -}}
{{- if and $claim.create $claim.perPod -}}
{{- fail "model.claim: set either create (one claim for all pods) or perPod (one for each), not both" -}}
{{- end -}}
{{- if and .Values.model.fetch.enabled (or $claim.existing $claim.create) -}}
{{- fail "model.fetch writes the model when a pod starts, and a claim that pods share is read-only: use model.claim.perPod or no claim" -}}
{{- end -}}
{{- if not (or $claim.existing $claim.create .Values.model.fetch.enabled) -}}
{{- fail "the model is missing: name a claim that holds it (model.claim.existing), or enable model.fetch" -}}
{{- end -}}
{{- if and (or .Values.model.by .Values.model.pattern) (not .Values.model.several) -}}
{{- fail "model.by and model.pattern choose one of several models: set model.several=true" -}}
{{- end -}}
{{- $login := .Values.kafka.security -}}
{{- if and (include "deformer.hasPassword" .) (not $login.existingSecret) (not (and $login.username $login.password)) -}}
{{- fail "kafka.security: SASL needs existingSecret (keys username and password), or username and password" -}}
{{- end -}}
{{- if and (not (include "deformer.hasLogin" .)) (or $login.mechanism $login.existingSecret $login.username $login.password) -}}
{{- fail (printf "kafka.security: a login needs protocol SASL_SSL or SASL_PLAINTEXT, and it is %s: correct it, or remove mechanism, existingSecret, username and password" $login.protocol) -}}
{{- end -}}
{{- if and $login.tls.existingSecret (not (hasSuffix "SSL" $login.protocol)) -}}
{{- fail (printf "kafka.security.tls.existingSecret needs protocol SSL or SASL_SSL: with %s, connections to the brokers are not encrypted" $login.protocol) -}}
{{- end -}}
{{- if and $login.tls.clientCertificate (not $login.tls.existingSecret) -}}
{{- fail "kafka.security.tls.clientCertificate needs kafka.security.tls.existingSecret, a Secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- if and .Values.serve.enabled (not .Values.serve.auth.existingSecret) (not .Values.serve.auth.token) -}}
{{- fail "serve.auth: name a Secret with the key token or users (serve.auth.existingSecret), give serve.auth.token, or set serve.enabled=false" -}}
{{- end -}}
{{- if and .Values.serve.enabled (gt (int .Values.serve.replicas) 1) -}}
{{- fail "serve.replicas: each replica knows only the logins that it has accepted itself, so use one replica" -}}
{{- end -}}
{{- if and .Values.delivery.enabled (not .Values.incidents.enabled) -}}
{{- fail "delivery notifies receivers of incidents: set incidents.enabled=true" -}}
{{- end -}}
{{- with .Values.bridge -}}
{{- if and .enabled (not .source) -}}
{{- fail "bridge.source is required with bridge.enabled, such as mqtts://broker.plant.example/plant/#" -}}
{{- end -}}
{{- if and .enabled (gt (int .replicas) 1) (not (contains "/$share/" .source)) -}}
{{- fail "bridge: several replicas would each write every reading: use a shared subscription, such as mqtt://HOST/$share/bridges/plant/#, or one replica" -}}
{{- end -}}
{{- if and .enabled .security.tls.clientCertificate (not .security.tls.existingSecret) -}}
{{- fail "bridge.security.tls.clientCertificate needs bridge.security.tls.existingSecret, a Secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- end -}}
{{- range $name, $labels := dict "commonLabels" .Values.commonLabels "bridge.podLabels" .Values.bridge.podLabels "consume.podLabels" .Values.consume.podLabels "incidents.podLabels" .Values.incidents.podLabels "delivery.podLabels" .Values.delivery.podLabels "serve.podLabels" .Values.serve.podLabels -}}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- if hasKey ($labels | default dict) . -}}
{{- fail (printf "%s: the chart finds its pods by the label %s, so its value cannot be replaced: remove it, or set nameOverride" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.serve.ingress.enabled (not .Values.serve.ingress.host) -}}
{{- fail "serve.ingress.host is required with serve.ingress.enabled" -}}
{{- end -}}
{{- $receivers := .Values.receivers -}}
{{- range $key := list "webhook" "webhookSecret" "pagerdutyKey" "notify" -}}
{{- if and (get $receivers.secret $key) (not $receivers.secret.existing) -}}
{{- fail (printf "receivers.secret.%s says what a Secret has: name the Secret in receivers.secret.existing" $key) -}}
{{- end -}}
{{- end -}}
{{- if and $receivers.webhook $receivers.secret.webhook -}}
{{- fail "receivers.webhook and receivers.secret.webhook both give addresses of webhooks, and one would be ignored: put all of them into one of the two" -}}
{{- end -}}
{{- $named := or $receivers.alertmanager $receivers.webhook $receivers.extraArgs $receivers.secret.webhook $receivers.secret.pagerdutyKey $receivers.secret.notify .Values.delivery.extraArgs .Values.delivery.extraEnvFrom -}}
{{- range .Values.delivery.extraEnv -}}
{{- if has .name (list "DEFORMER_ALERTMANAGER" "DEFORMER_WEBHOOK" "DEFORMER_PAGERDUTY_KEY" "DEFORMER_PAGERDUTY_KEY_FILE" "DEFORMER_NOTIFY" "DEFORMER_NOTIFY_FILE") -}}
{{- $named = true -}}
{{- end -}}
{{- end -}}
{{- if and .Values.delivery.enabled (not $named) -}}
{{- fail "delivery has no receiver: set receivers.alertmanager, receivers.webhook or receivers.secret, or a variable such as DEFORMER_WEBHOOK in delivery.extraEnv" -}}
{{- end -}}
{{- end -}}
