"""Checks of the image, the Helm chart and the alert rules with the programs that read them.

pytest collects this file only if it is named, as `make test-deploy` does, which also installs the programs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from deformer_stream.cli.bridge import build_bridge
from deformer_stream.cli.incidents import build_incidents
from deformer_stream.cli.serve import build_serve
from deformer_stream.cli.stream import build_consume
from deformer_stream.settings import SETTINGS_BY_COMMAND, load_settings
from tests.conftest import ROOT
from tests.deploy.tools import KUBERNETES_VERSIONS, PROGRAMS, SCHEMAS

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "deformer-stream"
VALUE_FILES = sorted((DEPLOY / "helm").glob("values-*.yaml"))
NEWEST = KUBERNETES_VERSIONS[-1]
BUILD_BY_COMMAND = {
    "bridge": build_bridge,
    "consume": build_consume,
    "incidents": build_incidents,
    "serve": build_serve,
}
MINIMAL = ["--values", str(DEPLOY / "helm" / "values-minimal.yaml")]


def run_program(name: str, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of the installed programs in the folder of the rules' tests and return its result."""
    program = PROGRAMS / name
    assert program.exists(), f"{name} is missing: run `make deploy-tools`"
    return subprocess.run(
        [program, *words], input=text, capture_output=True, text=True, cwd=ROOT / "tests" / "deploy", check=False
    )


def render(*words: str, version: str = NEWEST, release: str = "plant") -> str:
    """Return the objects of a release of the chart as YAML."""
    result = run_program("helm", "template", release, str(CHART), "--kube-version", version, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses mappings in which a key comes twice, which YAML forbids."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping."""
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{node.start_mark}: a key comes twice among {keys}"
        return super().construct_mapping(node, deep)


def load_objects(*words: str, release: str = "plant", namespace: str = "plant") -> list[dict[str, Any]]:
    """Return the objects of a release of the chart."""
    text = render(*words, "--namespace", namespace, release=release)
    return [document for document in yaml.load_all(text, UniqueKeyLoader) if document]


def get_pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specifications of the pods, by the component's name."""
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("StatefulSet", "Deployment")]
    return {pod["containers"][0]["name"]: pod for pod in pods}


def find_object(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Return the object of a kind whose name ends with the given one."""
    (found,) = (one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(name))
    return found


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("values", VALUE_FILES, ids=lambda path: path.stem)
def test_kubernetes_accepts_the_objects_of_the_chart(values: Path, version: str) -> None:
    objects = render("--values", str(values), version=version)
    locations = [f"{SCHEMAS}/{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json" for folder in (version, "custom")]
    options = [word for location in locations for word in ("-schema-location", location)]
    words = ["-strict", "-summary", "-kubernetes-version", version, *options]
    result = run_program("kubeconform", *words, text=objects)
    assert result.returncode == 0, result.stdout
    assert f"Valid: {sum('kind' in one for one in yaml.safe_load_all(objects) if one)}," in result.stdout
    changed = objects.replace("enableServiceLinks", "enableServiceLink")
    assert run_program("kubeconform", *words, text=changed).returncode == 1


@pytest.mark.parametrize("values", VALUE_FILES, ids=lambda path: path.stem)
def test_helm_finds_no_fault_in_the_chart(values: Path) -> None:
    result = run_program("helm", "lint", "--strict", str(CHART), "--values", str(values))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("values", VALUE_FILES, ids=lambda path: path.stem)
def test_the_programs_accept_their_flags_and_the_configuration_file(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = load_objects("--values", str(values))
    (config,) = (
        one["data"]["deformer.toml"] for one in objects if one["kind"] == "ConfigMap" and "deformer.toml" in one["data"]
    )
    file = tmp_path / "deformer.toml"
    file.write_text(config)
    for name, pod in get_pods(objects).items():
        (container,) = pod["containers"]
        for variable in container["env"]:
            monkeypatch.setenv(variable["name"], "x")  # Kubernetes sets them, for example from Secrets
        command, *words = container["args"]
        assert command == {"delivery": "incidents"}.get(name, name)
        click_command = BUILD_BY_COMMAND[command]()
        flags, rest, _ = click_command.make_parser(click.Context(click_command)).parse_args(list(words))
        assert rest == []
        assert flags.pop("config") == "/etc/deformer/config/deformer.toml"
        settings = load_settings(SETTINGS_BY_COMMAND[command], flags, file, command)
        assert settings.http == f"0.0.0.0:{container['ports'][0]['containerPort']}"
        assert name == "bridge" or str(settings.model) == "/models/model"
        paths = [str(value) for value in settings.model_dump().values() if str(value).startswith("/etc/deformer/")]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        # The settings of `incidents` are shared by both of its pods, of which one has the secrets of receivers.
        assert {str(Path(path).parent) for path in paths} <= mounted
    assert ("evidence" in config) == any(name == "incidents" for name in get_pods(objects))


@pytest.mark.parametrize("values", VALUE_FILES, ids=lambda path: path.stem)
def test_pods_are_confined(values: Path) -> None:
    objects = load_objects("--values", str(values))
    for pod in get_pods(objects).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts - volumes <= {"model"}, "the claim of a StatefulSet's pod is no volume of its template"
        assert volumes <= mounts
    for one in objects:
        if one["kind"] == "ServiceAccount":
            assert one["automountServiceAccountToken"] is False


def test_probes_ask_for_health_and_for_the_restored_state() -> None:
    paths = {
        name: [pod["containers"][0][f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
        for name, pod in get_pods(load_objects(*MINIMAL, "--set", "incidents.replicas=2")).items()
    }
    assert paths == {
        "consume": ["/readyz", "/healthz", "/readyz"],
        "incidents": ["/healthz", "/healthz", "/readyz"],
        "serve": ["/healthz", "/healthz", "/readyz"],
    }


BRIDGE = ["--set", "bridge.enabled=true,bridge.source=mqtts://broker.plant.example/plant/#"]


def test_the_bridge_is_probed_and_reaches_its_source_and_the_brokers_only() -> None:
    fetched = "model.claim.existing=,model.fetch.enabled=true,model.fetch.source=store:plant/2026-11"
    policy = "networkPolicy.enabled=true,networkPolicy.sourcePorts={8883}"
    objects = load_objects(*MINIMAL, *BRIDGE, "--set", policy, "--set", fetched)
    pod = get_pods(objects)["bridge"]
    (container,) = pod["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
    assert {probe["port"] for probe in probes} == {"metrics"}
    assert container["ports"] == [{"name": "metrics", "containerPort": 9466}]
    assert "initContainers" not in pod, "it needs no model"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/etc/deformer/config", "/tmp"}
    spec = find_object(objects, "NetworkPolicy", "-bridge")["spec"]
    assert [[rule["port"] for rule in item["ports"]] for item in spec["egress"]] == [[53, 53], [9092], [8883]]
    assert spec["ingress"] == [{"ports": [{"port": "metrics"}]}]
    assert find_object(objects, "PodDisruptionBudget", "-bridge")["spec"]["maxUnavailable"] == 1
    others = get_pods(load_objects(*MINIMAL))
    assert "bridge" not in others


def test_the_session_of_a_bridge_stays_that_of_its_pod() -> None:
    """A Deployment would start the next pod before the last one has ended, and both would have the same session."""
    objects = load_objects(*MINIMAL, *BRIDGE)
    assert find_object(objects, "StatefulSet", "-bridge")["spec"]["replicas"] == 1
    assert "--client-id=plant-$(POD_NAME)" in get_pods(objects)["bridge"]["containers"][0]["args"]
    opcua = load_objects(*MINIMAL, "--set", "bridge.enabled=true,bridge.source=opc.tcp://plc.plant.example:4840")
    assert not any("--client-id" in word for word in get_pods(opcua)["bridge"]["containers"][0]["args"])


def test_the_login_of_the_bridge_is_in_its_pod_only(tmp_path: Path) -> None:
    login = "bridge.security.username=plant,bridge.security.existingSecret=broker"
    tls = "bridge.security.tls.existingSecret=broker-tls,bridge.security.tls.clientCertificate=true"
    objects = load_objects(*MINIMAL, *BRIDGE, "--set", f"{login},{tls}")
    file = tmp_path / "deformer.toml"
    file.write_text(find_object(objects, "ConfigMap", "deformer-stream")["data"]["deformer.toml"])
    settings = load_settings(SETTINGS_BY_COMMAND["bridge"], {}, file, "bridge")
    paths = (settings.source_password_file, settings.source_cafile, settings.source_certfile, settings.source_keyfile)
    pods = get_pods(objects)
    content = {
        f"{mount['mountPath']}/{item['path']}"
        for volume in pods["bridge"]["volumes"]
        for item in volume.get("secret", {}).get("items", ())
        for mount in pods["bridge"]["containers"][0]["volumeMounts"]
        if mount["name"] == volume["name"]
    }
    assert content == {str(path) for path in paths}
    assert settings.source_username == "plant"
    for name, pod in pods.items():
        names = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        assert (names >= {"broker", "broker-tls"}) == (name == "bridge")


def test_names_of_consumers_stay_the_same() -> None:
    objects = load_objects(*MINIMAL)
    for name in ("consume", "incidents"):
        assert "--instance=plant-$(POD_NAME)" in get_pods(objects)[name]["containers"][0]["args"]
        # Releases of one name in two namespaces may use one Kafka.
        other = get_pods(load_objects(*MINIMAL, namespace="spare"))[name]
        assert "--instance=spare-$(POD_NAME)" in other["containers"][0]["args"]
    assert find_object(objects, "StatefulSet", "-consume")["spec"]["replicas"] == 2


def test_receivers_are_notified_by_one_process() -> None:
    receivers = ["--set", "receivers.webhook={https://example.org/hook}"]
    for is_separate, name in (("false", "incidents"), ("true", "delivery")):
        pods = get_pods(load_objects(*MINIMAL, *receivers, "--set", f"delivery.enabled={is_separate}"))
        notifying = {
            name for name, pod in pods.items() if "--webhook=https://example.org/hook" in pod["containers"][0]["args"]
        }
        assert notifying == {name}


@pytest.mark.parametrize(("is_separate", "name"), [("false", "incidents"), ("true", "delivery")])
def test_the_address_of_a_webhook_can_be_a_secret(is_separate: str, name: str) -> None:
    secret = ["--set", f"receivers.secret.existing=hooks,receivers.secret.webhook=true,delivery.enabled={is_separate}"]
    for component, pod in get_pods(load_objects(*MINIMAL, *secret)).items():
        variables = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
        assert ("DEFORMER_WEBHOOK" in variables) == (component == name)
        if component == name:
            source = {"secretKeyRef": {"name": "hooks", "key": "webhook"}}
            assert variables["DEFORMER_WEBHOOK"]["valueFrom"] == source


@pytest.mark.parametrize(
    "receiver",
    [
        '{"extraEnv": [{"name": "DEFORMER_WEBHOOK", "valueFrom": {"secretKeyRef": {"name": "hooks", "key": "url"}}}]}',
        '{"extraEnvFrom": [{"secretRef": {"name": "hooks"}}]}',
        '{"extraArgs": ["--notify=json://hooks.example"]}',
    ],
)
def test_receivers_can_be_named_in_the_values_of_their_process(receiver: str) -> None:
    words = ["--set-json", f"delivery={receiver}", "--set", "delivery.enabled=true"]
    assert "delivery" in get_pods(load_objects(*MINIMAL, *words))


def test_labels_and_annotations_that_are_given_twice_come_once(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "commonLabels: {team: a, site: s, app.kubernetes.io/version: v7, release: x}\n"
        "consume: {podLabels: {team: b}, podAnnotations: {prometheus.io/scrape: 'false'}}\n"
        "monitoring: {podMonitor: {enabled: true, labels: {release: prometheus}}}\n"
    )
    objects = load_objects(*MINIMAL, "--values", str(values))
    found = find_object(objects, "StatefulSet", "-consume")
    pod = found["spec"]["template"]["metadata"]
    assert (pod["labels"]["team"], pod["labels"]["site"]) == ("b", "s")
    assert pod["annotations"]["prometheus.io/scrape"] == "false"
    assert found["metadata"]["labels"]["app.kubernetes.io/version"] == "v7"
    assert found["spec"]["selector"]["matchLabels"].items() <= pod["labels"].items()
    assert find_object(objects, "PodMonitor", "")["metadata"]["labels"]["release"] == "prometheus"


def test_passwords_are_in_secrets_only() -> None:
    words = ["--set", "kafka.security.protocol=SASL_SSL,kafka.security.mechanism=PLAIN"]
    login = [
        "--set",
        "kafka.security.username=plant,kafka.security.password=hunter2",
        "--set",
        "serve.auth.existingSecret=,serve.auth.token=geheim",
    ]
    objects = load_objects(*MINIMAL, *words, *login)
    holders = [one["kind"] for one in objects if "hunter2" in str(one) or "geheim" in str(one)]
    assert holders == ["Secret", "Secret"]
    pod = get_pods(objects)["consume"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "secret-kafka")
    assert volume["secret"]["secretName"] == find_object(objects, "Secret", "-kafka")["metadata"]["name"]
    changed = load_objects(*MINIMAL, *words, *login, "--set", "kafka.security.password=other")
    texts = [
        str(find_object(one, "StatefulSet", "-consume")["spec"]["template"]["metadata"]) for one in (objects, changed)
    ]
    assert texts[0] != texts[1], "a new password restarts the pods"


def test_logins_with_tokens_have_no_password(tmp_path: Path) -> None:
    shared = "kafka.security.protocol=SASL_SSL,kafka.security.existingSecret=login"
    endpoint = "options.sasl-oauth-token-endpoint=https://login.example/token,options.sasl-oauth-client-id=plant"
    for mechanism, options in (("OAUTHBEARER", endpoint), ("AWS_MSK_IAM", "options.sasl-aws-region=eu-central-1")):
        objects = load_objects(*MINIMAL, "--set", f"{shared},kafka.security.mechanism={mechanism},{options}")
        file = tmp_path / "deformer.toml"
        file.write_text(find_object(objects, "ConfigMap", "deformer-stream")["data"]["deformer.toml"])
        settings = load_settings(SETTINGS_BY_COMMAND["consume"], {}, file, "consume")
        assert settings.sasl_mechanism == mechanism
        pod = get_pods(objects)["consume"]
        assert [variable["name"] for variable in pod["containers"][0]["env"]] == ["POD_NAME"]
        keys = [volume["secret"]["items"][0]["key"] for volume in pod["volumes"] if "secret" in volume]
        assert keys == (["client-secret"] if mechanism == "OAUTHBEARER" else [])
        assert not any(one["kind"] == "Secret" for one in objects)


def test_an_option_restarts_the_pods() -> None:
    texts = [
        str(
            find_object(
                load_objects(*MINIMAL, "--set-string", f"consume.options.alpha={alpha}"), "StatefulSet", "-consume"
            )
        )
        for alpha in ("0.01", "0.02")
    ]
    assert texts[0] != texts[1]


def test_values_of_options_keep_their_types(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "options: {units: {flow: m³/h}}\n"
        "consume: {options: {max-open-records: 1000000, alpha: 0.001, debug-name: null, alerts: 'a\"b\\c'}}\n"
    )
    objects = load_objects(*MINIMAL, "--values", str(values))
    file = tmp_path / "deformer.toml"
    file.write_text(find_object(objects, "ConfigMap", "deformer-stream")["data"]["deformer.toml"])
    settings = load_settings(SETTINGS_BY_COMMAND["consume"], {}, file, "consume")
    assert settings.max_open_records == 1_000_000
    assert settings.alerts == 'a"b\\c'
    assert "flow" in str(settings.units)


def test_a_folder_of_models_takes_the_place_of_one_model(tmp_path: Path) -> None:
    several = ["--set", "model.several=true,model.folder=models/plant,model.pattern=^(?P<type>[a-z]+)-"]
    for by, receivers in (("type", ""), ("", "{https://example.org/hook}")):
        delivery = ["--set", f"delivery.enabled=true,receivers.webhook={receivers}"] if receivers else []
        objects = load_objects(*MINIMAL, *several, "--set", f"model.by={by}", *delivery)
        pods = get_pods(objects)
        file = tmp_path / "deformer.toml"
        file.write_text(find_object(objects, "ConfigMap", "deformer-stream")["data"]["deformer.toml"])
        consume, incidents, serve = (
            load_settings(SETTINGS_BY_COMMAND[command], {}, file, command)
            for command in ("consume", "incidents", "serve")
        )
        for settings in (consume, incidents):
            assert settings.model is None
            assert str(settings.models) == "/models/models/plant"
        assert serve.model is None
        assert consume.model_by == (by or None)
        assert consume.model_pattern.pattern == "^(?P<type>[a-z]+)-"
        for name, pod in pods.items():
            mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
            assert ("/models" in mounts) == (name != "delivery")
    fetched = ["--set", "model.claim.existing=,model.fetch.enabled=true,model.fetch.source=store:plant/2026-11"]
    (container,) = get_pods(load_objects(*MINIMAL, *several, *fetched))["consume"]["initContainers"]
    assert container["args"][-2:] == ["store:plant/2026-11", "/models/models/plant"]


def test_the_number_of_replicas_is_left_to_autoscaling() -> None:
    objects = load_objects("--values", str(DEPLOY / "helm" / "values-production.yaml"))
    assert "replicas" not in find_object(objects, "StatefulSet", "-consume")["spec"]
    scaled = find_object(objects, "ScaledObject", "-consume")["spec"]
    assert scaled["scaleTargetRef"]["name"] == find_object(objects, "StatefulSet", "-consume")["metadata"]["name"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["lagThreshold"] == "50000"
    assert trigger["metadata"]["sasl"] == "scram_sha512"
    authentication = find_object(objects, "TriggerAuthentication", "-kafka")["spec"]["secretTargetRef"]
    assert {one["parameter"] for one in authentication} == {"username", "password", "ca"}
    by_load = load_objects(*MINIMAL, "--set", "autoscaling.hpa.enabled=true")
    assert "replicas" not in find_object(by_load, "StatefulSet", "-consume")["spec"]
    assert not any(one["kind"] == "HorizontalPodAutoscaler" for one in load_objects(*MINIMAL))


def test_the_page_says_how_to_stop_consumers_that_are_scaled() -> None:
    """KEDA would start them again, and an HPA would leave them at 0."""
    section = (ROOT / "docs" / "how-to" / "deploy.md").read_text().partition("### Stop all consumers")[2]
    section = section.partition("\n### ")[0]
    for kind, scaler in (("ScaledObject", "keda"), ("HorizontalPodAutoscaler", "hpa")):
        objects = load_objects(*MINIMAL, "--set", f"autoscaling.{scaler}.enabled=true", release="deformer")
        scaled = find_object(objects, kind, "-consume")
        name = find_object(objects, "StatefulSet", "-consume")["metadata"]["name"]
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {scaler.upper()} |"))
        if scaler == "keda":
            named = f"kubectl annotate scaledobject/{scaled['metadata']['name']} autoscaling.keda.sh/paused-replicas"
            assert row.count(f"{named}=0`") == row.count(f"{named}-`") == 1
        else:
            assert f"kubectl scale statefulset/{name} --replicas=0" in row
            assert f"kubectl scale statefulset/{name} --replicas=2" in row
    labels = find_object(objects, "StatefulSet", "-consume")["spec"]["template"]["metadata"]["labels"]
    (selector,) = (line.split()[-1] for line in section.splitlines() if "--selector" in line)
    assert dict(pair.split("=") for pair in selector.split(",")).items() <= labels.items()


def test_the_notes_say_that_incidents_need_a_calibration(tmp_path: Path) -> None:
    # `helm template` does not print the notes, and `helm install` needs a cluster. So the notes become an object.
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text(f'{{{{- define "notes" -}}}}{notes}{{{{- end -}}}}')
    (chart / "templates" / "notes.yaml").write_text('text: {{ include "notes" . | toJson }}')
    for setting, is_shown in (
        ("incidents.enabled=true", True),
        ("incidents.options.records-per-day=86400", False),
        ("incidents.enabled=false", False),
    ):
        words = ("template", "plant", str(chart), "--kube-version", NEWEST, "--show-only", "templates/notes.yaml")
        result = run_program("helm", *words, *MINIMAL, "--set", setting)
        assert result.returncode == 0, result.stderr
        assert ("calibrate --incidents" in yaml.safe_load(result.stdout)["text"]) == is_shown


def test_network_policies_select_pods_of_the_chart() -> None:
    objects = load_objects("--values", str(DEPLOY / "helm" / "values-production.yaml"))
    labels = [
        one["spec"]["template"]["metadata"]["labels"] for one in objects if one["kind"] in ("StatefulSet", "Deployment")
    ]
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    budgets = [one["spec"]["selector"] for one in objects if one["kind"] == "PodDisruptionBudget"]
    assert len(policies) == len(budgets) == len(labels) == 4
    for selector in (*(policy["podSelector"] for policy in policies), *budgets):
        assert sum(selector["matchLabels"].items() <= one.items() for one in labels) == 1
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_alert_rules_of_the_chart_are_those_of_the_file() -> None:
    production = ["--values", str(DEPLOY / "helm" / "values-production.yaml")]
    rule = find_object(
        load_objects(*production, "--set", "monitoring.prometheusRule.runbookPrefix=https://docs.example/deploy"),
        "PrometheusRule",
        "",
    )
    expected = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    selected = 'job=~"deformer.*", namespace="plant", release="plant"'
    for group in expected:
        for one in group["rules"]:
            one["expr"] = one["expr"].replace('job=~"deformer.*"', selected)
            one["labels"]["team"] = "plant-7"
            one["annotations"]["runbook_url"] = f"https://docs.example/deploy#{one['alert'].lower()}"
    assert rule["spec"]["groups"] == expected


def test_two_releases_in_one_prometheus_do_not_share_alerts(tmp_path: Path) -> None:
    """The rules of each release see its own targets only, so the end of one release is found beside another one."""
    monitoring = ["--set", "monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true"]
    for release in ("plant", "spare"):
        team = ["--set", f"fullnameOverride={release},monitoring.prometheusRule.alertLabels.team={release}"]
        objects = load_objects(*MINIMAL, *monitoring, *team, release=release)
        rules = find_object(objects, "PrometheusRule", release)["spec"]
        (tmp_path / f"{release}.yaml").write_text(yaml.safe_dump(rules))
    for endpoint in find_object(objects, "PodMonitor", "spare")["spec"]["podMetricsEndpoints"]:
        assert [label["targetLabel"] for label in endpoint["relabelings"]] == ["job", "release"]
    target = '{namespace="plant", release="plant", job="deformer-consume", instance="10.0.0.1:9464"}'
    missing = {"alertname": "DeformerStreamDown", "namespace": "plant", "release": "spare", "team": "spare"}
    not_ready = {"alertname": "DeformerStreamNotReady", "namespace": "plant", "release": "plant", "team": "plant"}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f"up{target}", "values": "1x30"},
            {"series": f"deformer_events_total{target}", "values": "0+10x30"},
            {"series": f"deformer_ready{target}", "values": "0x30"},
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, namespace, release, team) (ALERTS{alertstate="firing"})',
                "eval_time": "20m",
                "exp_samples": [
                    {"labels": "{" + ", ".join(f'{name}="{value}"' for name, value in alert.items()) + "}", "value": 1}
                    for alert in (missing, not_ready)
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["plant.yaml", "spare.yaml"], "tests": [test]}))
    tested = run_program("promtool", "test", "rules", str(file))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_prometheus_reads_the_metrics_of_every_pod() -> None:
    words = [
        "--set",
        "monitoring.podMonitor.enabled=true,delivery.enabled=true,receivers.webhook={https://example.org}",
    ]
    policy = [
        "--set-json",
        'networkPolicy={"enabled": true, "metricsFrom": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}], '
        '"pageFrom": [{"podSelector": {"matchLabels": {"app": "ingress"}}}]}',
    ]
    objects = load_objects(*MINIMAL, *BRIDGE, *words, *policy)
    ports = {endpoint["port"] for endpoint in find_object(objects, "PodMonitor", "")["spec"]["podMetricsEndpoints"]}
    workloads = [one for one in objects if one["kind"] in ("StatefulSet", "Deployment")]
    assert len(workloads) == 5
    for one in workloads:
        template = one["spec"]["template"]
        ((port,),) = (container["ports"] for container in template["spec"]["containers"])
        assert port["name"] in ports
        assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "true"
        assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        (rule,) = find_object(objects, "NetworkPolicy", f"-{component}")["spec"]["ingress"]
        assert rule["ports"] == [{"port": port["name"]}]
        assert {"podSelector": {"matchLabels": {"app": "prometheus"}}} in rule["from"]


@pytest.mark.parametrize(
    "replicas", ["consume.replicas=0", "autoscaling.keda.enabled=true,autoscaling.keda.minReplicas=0"]
)
def test_a_release_that_may_have_no_consumers_does_not_alert_about_it(replicas: str) -> None:
    rules = ["--set", "monitoring.prometheusRule.enabled=true"]
    names = []
    for words in (rules, [*rules, "--set", replicas]):
        groups = find_object(load_objects(*MINIMAL, *words), "PrometheusRule", "")["spec"]["groups"]
        names.append({rule["alert"] for group in groups for rule in group["rules"]})
    assert names[0] - names[1] == {"DeformerStreamNoConsumers"}
    assert names[1] < names[0]


def test_a_packaged_chart_has_the_rules_and_the_dashboard(tmp_path: Path) -> None:
    assert run_program("helm", "package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (archive,) = tmp_path.glob("deformer-stream-*.tgz")
    listing = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True).stdout
    assert "deformer-stream/files/prometheus-rules.yaml" in listing
    assert "deformer-stream/files/grafana.json" in listing


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("consume.replica=3", "replica"),
        ("consume.replicas=-1", "replicas"),
        ("kafka.security.protocol=TLS", "protocol"),
        ("image.digest=latest", "digest"),
        ("autoscaling.keda.enabled=true,autoscaling.hpa.enabled=true", "either keda or hpa"),
        ("model.claim.existing=", "the model is missing"),
        ("model.claim.create=true", "model.claim.existing names a claim"),
        ("model.fetch.enabled=true", "model.claim.perPod"),
        ("model.claim.existing=,model.fetch.enabled=true", "model.fetch.source is required"),
        ("serve.auth.existingSecret=", "serve.auth"),
        ("kafka.security.protocol=SASL_SSL,kafka.security.mechanism=PLAIN", "existingSecret"),
        ("kafka.security.protocol=SASL_SSL,kafka.security.existingSecret=s", "mechanism is required"),
        ("kafka.security.existingSecret=s", "a login needs protocol SASL_SSL or SASL_PLAINTEXT, and it is PLAINTEXT"),
        ("kafka.security.protocol=SSL,kafka.security.mechanism=PLAIN", "a login needs protocol SASL_SSL"),
        ("kafka.security.tls.existingSecret=ca", "with PLAINTEXT, connections to the brokers are not encrypted"),
        (
            "kafka.security.protocol=SASL_PLAINTEXT,kafka.security.mechanism=PLAIN,kafka.security.existingSecret=s,"
            "kafka.security.tls.existingSecret=ca",
            "with SASL_PLAINTEXT, connections",
        ),
        ("kafka.security.protocol=SSL,kafka.security.tls.clientCertificate=true", "needs kafka.security.tls.existing"),
        ("receivers.secret.pagerdutyKey=true", "receivers.secret.existing"),
        ("receivers.secret.webhookSecret=true", "receivers.secret.existing"),
        ("receivers.secret.notify=true,delivery.enabled=true", "receivers.secret.existing"),
        ("receivers.secret.webhook=true", "receivers.secret.existing"),
        (
            "receivers.webhook={https://example.org/a},receivers.secret.webhook=true,receivers.secret.existing=s",
            "one would be ignored",
        ),
        ("commonLabels.app\\.kubernetes\\.io/component=x", "commonLabels: the chart finds its pods by the label"),
        ("serve.podLabels.app\\.kubernetes\\.io/name=x", "serve.podLabels: the chart finds its pods"),
        ("model.by=type", "set model.several=true"),
        ("model.several=yes", "several"),
        ("delivery.enabled=true", "delivery has no receiver"),
        ("delivery.enabled=true,incidents.enabled=false", "set incidents.enabled=true"),
        ("bridge.enabled=true", "bridge.source is required"),
        ("bridge.enabled=true,bridge.source=kafka://broker", "bridge/source"),
        ("bridge.enabled=true,bridge.source=mqtt://broker/plant/#,bridge.replicas=2", "shared subscription"),
        ("bridge.enabled=true,bridge.source=opc.tcp://plc,bridge.replicas=2", "shared subscription"),
        (
            "bridge.enabled=true,bridge.source=mqtts://broker/a,bridge.security.tls.clientCertificate=true",
            "bridge.security.tls.existingSecret",
        ),
        ("serve.ingress.enabled=true", "serve.ingress.host"),
        ("serve.replicas=2", "use one replica"),
        ("serviceAccount.create=false", "serviceAccount.name"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(setting: str, message: str) -> None:
    words = ["template", "plant", str(CHART), "--kube-version", NEWEST, *MINIMAL, "--set", setting]
    result = run_program("helm", *words)
    assert result.returncode != 0
    assert message in result.stderr


def test_alert_rules_fire_when_they_should_and_only_then() -> None:
    checked = run_program("promtool", "check", "rules", str(DEPLOY / "prometheus-rules.yaml"))
    assert checked.returncode == 0, checked.stderr
    tested = run_program("promtool", "test", "rules", "prometheus-rules.test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_hadolint_finds_no_fault_in_the_dockerfile() -> None:
    result = run_program("hadolint", str(DEPLOY / "Dockerfile"))
    assert result.returncode == 0, result.stdout
