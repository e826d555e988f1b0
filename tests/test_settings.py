"""Precedence (flag, environment, file, default) of every option of every command, error messages, and secrets."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import click
import pytest
from click.testing import CliRunner

from deformer_stream.cli.config_report import format_options_in_force
from deformer_stream.engine.next_reading import DEFAULT_SUSPICIOUS
from deformer_stream.errors import ConfigError
from deformer_stream.settings import (
    SETTINGS_BY_COMMAND,
    CalibrateSettings,
    ConsumeSettings,
    ImputeSettings,
    InitSettings,
    ProduceSettings,
    ReplaySettings,
    SampleSettings,
    Settings,
    add_options,
    load_settings,
    to_flag,
    to_variable,
)
from deformer_stream.settings.commands import ShardSettings
from deformer_stream.settings.incident_commands import ServeSettings
from deformer_stream.settings.plant_source import PlantSourceSettings

SECRET = "hunter2-äöü"
REQUIRED: dict[str, dict[str, str]] = {
    "consume": {"model": "m", "topic": "t"},
    "replay": {"model": "m"},
    "calibrate": {"model": "m"},
    "incidents": {"model": "m", "topic": "t"},
    "serve": {"topic": "t"},
    "feedback": {"topic": "t"},
    "propose": {"model": "m"},
    "produce": {"topic": "t"},
    "dead-letters": {"topic": "t"},
    "bridge": {"topic": "t", "source": "mqtts://broker/plant/#"},
    "impute": {"model": "m", "output": "o.parquet"},
    "sample": {"model": "m", "output": "o.parquet"},
    "demo": {},
}
REGISTRY = {"format": "avro", "schema_registry": "https://registry:8081"}
REGISTRY_LOGIN = {**REGISTRY, "schema_registry_username": "me", "schema_registry_password": SECRET}
LOGIN = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "me"}
OAUTH = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "OAUTHBEARER",
    "sasl_oauth_token_endpoint": "https://login.example/token",
    "sasl_oauth_client_id": "plant",
    "sasl_oauth_client_secret_file": "secret",
}
LOGIN_FIELDS = tuple(name for name in ConsumeSettings.model_fields if name.startswith("sasl_"))
FIELDS_WITH_CONDITIONS = ("source", "output", "topic", "model", "models", *LOGIN, *LOGIN_FIELDS, *REGISTRY_LOGIN)
SOURCE_LOGIN = {"source_username": "me", "source_password_file": "f", "source_certfile": "c"}
FIELDS_WITH_CONDITIONS += ("schema_registry_password_file", "output_format", *SOURCE_LOGIN, "source_password", "nodes")
MQTT = {"source": "mqtts://broker/plant/#", "state_dir": "d"}
MQTT_FIELDS = (*PlantSourceSettings.model_fields, "alerts_to", "state_dir")
FIELDS_WITH_CONDITIONS += ("state_dir", "opcua_policy")
SECRETS = ("sasl_password", "schema_registry_password", "source_password")
ALL_OPTIONS = [(command, field) for command, cls in SETTINGS_BY_COMMAND.items() for field in cls.model_fields]


def get_example_values(cls: type[Settings], field: str) -> list[Any]:
    """Return three values of an option as texts; they differ unless the option has fewer get_example_values."""
    annotation = cls.model_fields[field].annotation
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            texts = [str(a) for a in get_args(kind)]
            texts = [t for t in texts if t.startswith("SASL") or field != "security_protocol"]
            texts = [t for t in texts if t != "None" or field != "opcua_policy"]
            return ([t for t in texts if t != "json" or not field.endswith("format")] * 3)[:3]
    if field in ("alpha", "interval", "trim", "suspicious", "quantiles"):
        return ["0.2", "0.3", "0.4"]
    if bool in (annotation, *get_args(annotation)):
        return ["true", "false", "true"]
    if field == "timezone":
        return ["UTC", "Europe/Berlin", "Asia/Tokyo"]
    if field == "trusted_proxy":
        return ["10.0.0.5", "10.244.0.0/16", "::1"]
    if field == "delimiter":
        return [";", ",", "|"]
    if field == "encoding":
        return ["utf-8", "cp1252", "utf-16"]
    if field in ("units", "client_option"):
        return ["a=1", "b=2", "c=3"]
    if field == "source" and "nodes" in cls.model_fields:
        return ["mqtts://a/plant/#", "mqtt://b:1884/x/+/y", "opc.tcp://c:4840/path"]
    if field == "schema_registry":
        return ["https://a", "https://b:8081/path", "http://registry"]
    if field == "sasl_oauth_token_endpoint":
        return ["https://a/token", "https://b/token", "http://localhost/token"]
    if field == "sampling_interval" or field == "session_expiry":
        return ["1500ms", "2m", "3h"]
    if field in ("record_timeout", "max_wait", "commit_interval", "shuffle_within", "window", "grace"):
        return ["1500ms", "2m", "3h"]
    if field in ("cache_memory", "max_message_bytes"):
        return ["1KiB", "2MiB", "3000"]
    return ["11", "12", "13"]


def get_login(field: str) -> dict[str, str]:
    """Return the options of a login or a registry that a field belongs to, or that it needs; none for other fields."""
    if field in ("schema_registry_password", "schema_registry_username"):
        return REGISTRY_LOGIN
    if field == "schema_registry_password_file":
        return {**REGISTRY, "schema_registry_username": "me"}
    if field.endswith("format") or field.startswith("schema_registry"):
        return REGISTRY
    if field == "source_password":
        return {"source_username": "me"}
    if field.startswith("source_"):
        return SOURCE_LOGIN
    if field in ("opcua_policy", "opcua_mode"):
        return {"source": "opc.tcp://server", "source_certfile": "c", "source_cafile": "a"} | (
            {"opcua_policy": "Basic256Sha256"} if field == "opcua_mode" else {}
        )
    if field == "nodes":
        return {"source": "opc.tcp://server"}
    if field == "sasl_oauth_token_file":
        return {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    if field.startswith("sasl_oauth"):
        return OAUTH
    if field == "sasl_aws_region":
        return {"security_protocol": "SASL_SSL", "sasl_mechanism": "AWS_MSK_IAM"}
    if field == "sasl_kerberos_service_name":
        return {"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI"}
    if field.startswith(("sasl", "ssl", "security")):
        return LOGIN if field == "sasl_password" else {**LOGIN, "sasl_password_file": "f"}
    return {}


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all `DEFORMER_` variables from the environment."""
    import os

    for name in [name for name in os.environ if name.startswith("DEFORMER_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_flag_replaces_its_alternative_in_the_file(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('topic = "sensors"\nmodel = "m"\n')
    settings = load_settings(ConsumeSettings, {"source": "-"}, config, "consume")
    assert (settings.topic, settings.source) == (None, "-")
    assert load_settings(ConsumeSettings, {}, config, "consume").topic == "sensors"
    with pytest.raises(ConfigError, match="exactly one"):
        load_settings(ConsumeSettings, {"source": "-", "topic": "sensors"}, config, "consume")


def test_models_replace_the_model_of_the_file(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('topic = "sensors"\nmodel = "m"\n')
    settings = load_settings(ConsumeSettings, {"models": "folder"}, config, "consume")
    assert (settings.model, settings.models) == (None, Path("folder"))
    with pytest.raises(ConfigError, match="exactly one option, --model or --models"):
        load_settings(ConsumeSettings, {"models": "folder", "model": "m"}, config, "consume")


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ({"topic": "sensors"}, 3_600_000_000),
        ({"source": "kafka://localhost:9092/sensors"}, 3_600_000_000),
        ({"source": "mqtt://localhost/plant/#", "state_dir": "state"}, 3_600_000_000),
        ({"source": "events.jsonl"}, None),  # its times may be simulated
        ({"source": "-"}, None),
        ({"source": "-", "max_ahead": "90s"}, 90_000_000),
        ({"topic": "sensors", "max_ahead": "off"}, None),
        ({"topic": "sensors", "max_ahead": "0"}, 0),
    ],
)
def test_times_that_lie_ahead_are_limited_where_messages_have_an_arrival(
    flags: dict[str, str], limit: int | None
) -> None:
    settings = load_settings(ConsumeSettings, {"model": "m", **flags}, None, "consume")
    assert settings.get_max_ahead_micros(has_windows=True) == limit
    is_set = "max_ahead" in flags
    assert settings.get_max_ahead_micros(has_windows=False) == (limit if is_set else None)
    replay = load_settings(ReplaySettings, {"model": "m"}, None, "replay")
    assert replay.get_max_ahead_micros(has_windows=True) is None
    with pytest.raises(ConfigError, match=r"--max-ahead soon .*this is not a duration"):
        load_settings(ConsumeSettings, {"model": "m", **flags, "max_ahead": "soon"}, None, "consume")


@pytest.mark.parametrize("proxies", ["*", "plant.example", "10.0.0.1/8", "10.0.0.1,10.0.0.0/33"])
def test_a_proxy_that_is_trusted_is_an_address_or_a_network(proxies: str) -> None:
    """Any other text would trust nobody, or everybody."""
    allowed = load_settings(ServeSettings, {"topic": "t", "trusted_proxy": "10.0.0.1, ::1,10.0.0.0/8"}, None, "serve")
    assert allowed.trusted_proxy == ("10.0.0.1", "::1", "10.0.0.0/8")
    with pytest.raises(ConfigError, match=r"--trusted-proxy .*write addresses such as 10\.0\.0\.5 or networks"):
        load_settings(ServeSettings, {"topic": "t", "trusted_proxy": proxies}, None, "serve")


def test_a_flag_turns_off_a_switch_of_the_file(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("irregular = true\nyes = true\n")
    given: list[InitSettings] = []

    @click.command()
    @add_options(InitSettings)
    def command(config: Path | None, **flags: Any) -> None:
        given.append(load_settings(InitSettings, flags, config, "init"))

    for flags in ([], ["--no-irregular"], ["--no-irregular", "--no-yes"]):
        assert CliRunner().invoke(command, ["--config", str(config), *flags]).exit_code == 0
    assert [(settings.irregular, settings.yes) for settings in given] == [(True, True), (False, True), (False, False)]


@pytest.mark.parametrize("cls", [CalibrateSettings, ConsumeSettings, ReplaySettings])
def test_streams_and_calibrations_choose_readings_at_the_same_p_value(cls: type[Settings]) -> None:
    assert cls.model_fields["suspicious"].default == DEFAULT_SUSPICIOUS


@pytest.mark.parametrize(("command", "field"), ALL_OPTIONS)
def test_flag_precedes_environment_precedes_file_precedes_default(
    command: str, field: str, clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the file, an option is at the top or in the table of the command."""
    cls = SETTINGS_BY_COMMAND[command]
    others: dict[str, Any] = dict(REQUIRED[command])
    # Commands that only read what this program has written have no option --format.
    others |= {name: value for name, value in get_login(field).items() if name in cls.model_fields}
    others |= {"ssl_certfile": "c"} if field.startswith("ssl") else {}
    others |= {"next_reading": 8} if field == "suspicious_records" else {}
    others |= {"output_dir": "d"} if command == "replay" and field in ShardSettings.model_fields else {}
    has_condition = field in FIELDS_WITH_CONDITIONS
    if command in ("calibrate", "replay") and field in ("label", "normal"):
        others |= {"label": "state", "normal": "ok"}
        has_condition = True  # each needs the other one
    if field in ("models", "model_by", "model_pattern"):
        others.pop("model", None)  # produce needs no model
        others["models"] = "d"
    others.pop(field, None)
    if field in ("source", "output") and command in ("consume", "produce"):
        others.pop("topic")
    if field in MQTT_FIELDS and command == "consume":
        others.pop("topic")
        others |= {name: value for name, value in MQTT.items() if name != field}
    flag, variable, file = get_example_values(cls, field)
    config = tmp_path / "config.toml"
    number = cls.model_fields[field].annotation in (int, float) and file.replace(".", "").isdigit()

    def value(**flags: Any) -> Any:
        loaded = getattr(load_settings(cls, {**others, **flags}, config, command), field)
        return loaded.get_secret_value() if field in SECRETS else loaded

    def expected(text: str) -> Any:
        parsed = getattr(load_settings(cls, {**others, field: text}, None, command), field)
        return parsed.get_secret_value() if field in SECRETS else parsed

    of_file, of_variable, of_flag = map(expected, (file, variable, flag))
    for header in ("", f"[{command}]\n"):
        config.write_text(f"{header}{to_flag(field)[2:]} = {file if number else json.dumps(file)}\n")
        assert value() == of_file
        clean_environment.setenv(to_variable(field), variable)
        assert value() == of_variable
        assert value(**{field: flag}) == of_flag
        clean_environment.delenv(to_variable(field))
    info = cls.model_fields[field]
    if not info.is_required() and field not in others and not has_condition:
        assert getattr(load_settings(cls, others, None, command), field) == expected_default(
            cls, others, command, field
        )


def expected_default(cls: type[Settings], others: dict[str, Any], command: str, field: str) -> Any:
    default = cls.model_fields[field].default
    if default is None:
        return None
    return getattr(load_settings(cls, {**others, field: str(default)}, None, command), field)


@pytest.mark.parametrize("command", SETTINGS_BY_COMMAND)
def test_every_field_is_a_flag(command: str) -> None:
    seen: dict[str, Any] = {}

    @click.command()
    @add_options(SETTINGS_BY_COMMAND[command])
    def run(**given: Any) -> None:
        seen.update(given)

    fields = SETTINGS_BY_COMMAND[command].model_fields
    value_by_field = {field: get_example_values(SETTINGS_BY_COMMAND[command], field)[0] for field in fields}
    switches = {
        field for field, info in fields.items() if bool in (info.annotation, *get_args(info.annotation))
    }  # flags without a value
    words = [
        word
        for field, value in value_by_field.items()
        for word in ([to_flag(field)] if field in switches else [to_flag(field), value])
    ]
    assert CliRunner().invoke(run, words).exit_code == 0
    repeated = {"client_option": (value_by_field["client_option"],)} if "client_option" in fields else {}
    assert seen == value_by_field | dict.fromkeys(switches, True) | repeated | {"config": None}
    text = CliRunner().invoke(run, ["--help"]).output
    assert all(to_flag(field) in text for field in fields)
    assert CliRunner().invoke(run, []).exit_code == 0


def test_help_shows_placeholders_of_values() -> None:
    @click.command()
    @add_options(ConsumeSettings)
    def run(**given: Any) -> None: ...

    text = " ".join(CliRunner().invoke(run, ["--help"]).output.split())
    for words in (
        *("--model PATH", "--alpha SHARE[,…]", "--cache-memory SIZE", "--record-timeout TIME", "--grace TIME"),
        *("--max-poll-records N", "--drift X", "--topic TEXT", "--from [earliest|latest]"),
    ):
        assert words in text


def test_defaults_are_stable(clean_environment: pytest.MonkeyPatch) -> None:
    consume = load_settings(ConsumeSettings, REQUIRED["consume"], None, "consume")
    assert (consume.bootstrap_servers, consume.alpha, consume.from_) == ("localhost:9092", (0.01,), "earliest")
    assert (consume.record_timeout, consume.alerts, consume.http) == (30.0, "-", None)
    assert (consume.window, consume.grace, consume.device_field) == (None, 0.0, "device")
    assert (consume.cache_memory, consume.max_message_bytes) == (512 * 2**20, 2**20)
    assert load_settings(ReplaySettings, {"model": "m"}, None, "replay").alpha == (0.01,)
    assert load_settings(ImputeSettings, REQUIRED["impute"], None, "impute").interval == 0.9
    assert load_settings(SampleSettings, REQUIRED["sample"], None, "sample").seed == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1.5", 1.5),
        ("1h30m", 5400.0),
        (" 1 h 30 m ", 5400.0),
        ("1d2h3m4s5ms", 93784.005),
        ("2w", 1_209_600.0),
        ("1w1d", 691_200.0),
    ],
)
def test_durations_are_parsed(clean_environment: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    assert load_settings(ConsumeSettings, {**REQUIRED["consume"], "record_timeout": text}).record_timeout == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "-1s",
        "1y",
        "1d1w",
        "30 seconds",
        "1e3s",
        "nan",
        "inf",
        "9" * 400,
        "9" * 400 + "d",
        "0",
        "0s",
        "1s1s",
        "30m1h",
        "1h30",
        "٣s",
    ],
)
def test_invalid_durations_are_rejected(clean_environment: pytest.MonkeyPatch, text: str) -> None:
    assert_one_line_error(ConsumeSettings, {"record_timeout": text}, "--record-timeout", "DEFORMER_RECORD_TIMEOUT")


@pytest.mark.parametrize(
    ("text", "shares"),
    [("1%", (0.01,)), ("0.5 %", (0.005,)), ("5%,1%", (0.05, 0.01)), ("0.1%, 0.05", (0.05, 0.001)), ("1e-3", (0.001,))],
)
def test_shares_may_be_percentages(clean_environment: pytest.MonkeyPatch, text: str, shares: tuple[float, ...]) -> None:
    assert load_settings(ConsumeSettings, {**REQUIRED["consume"], "alpha": text}).alpha == shares


def test_a_single_share_may_be_a_percentage(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load_settings(ImputeSettings, {**REQUIRED["impute"], "interval": "95%"}).interval == 0.95
    config = tmp_path / "config.toml"
    config.write_text('interval = "90%"\n')
    assert load_settings(ImputeSettings, dict(REQUIRED["impute"]), config, "impute").interval == 0.9


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("0,01", "it has a decimal comma; write 0.01 or 1%"),
        ("0,5%", "write 0.005 or 0.5%"),
        ("1,5%", "write 0.015 or 1.5%"),
        ("1,5", "it has a decimal comma; write 0.015 or 1.5%"),
        ("90", "it should be less than 1; write 0.9 or 90%"),
        ("2.5", "it should be less than 1; write 0.025 or 2.5%"),
        ("0,05,0,01", "write shares like 0.05,0.01 or 5%,1%"),
        ("1%%", "write a share like 0.01, or a percentage like 1%"),
        ("100%", "it should be less than 1"),
        ("0%", "it should be greater than or equal to 0.000000001"),
        ("1e-320", "it should be greater than or equal to 0.000000001"),
    ],
)
def test_invalid_shares_are_rejected_with_a_remedy(
    clean_environment: pytest.MonkeyPatch, text: str, remedy: str
) -> None:
    assert_one_line_error(ConsumeSettings, {"alpha": text}, "--alpha", remedy)


def test_a_percentage_without_its_sign_is_explained(clean_environment: pytest.MonkeyPatch) -> None:
    for interval in ("90", 90):
        with pytest.raises(ConfigError, match=r"it should be less than 1; write 0.9 or 90%"):
            load_settings(ImputeSettings, {**REQUIRED["impute"], "interval": interval}, None, "impute")


def test_a_path_that_is_no_text_is_explained(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("records = 5\n")
    with pytest.raises(ConfigError, match=r'--records 5 .*: it should be a path, written as text such as "records'):
        load_settings(ReplaySettings, dict(REQUIRED["replay"]), config, "replay")


def test_a_single_share_with_a_decimal_comma_is_rejected(clean_environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"it has a decimal comma; write 0.9 or 90%"):
        load_settings(ImputeSettings, {**REQUIRED["impute"], "interval": "0,9"}, None, "impute")


@pytest.mark.parametrize(("text", "size"), [("512MiB", 2**29), ("1gb", 10**9), ("7", 7), ("1.5KiB", 1536), ("8 b", 8)])
def test_sizes_are_parsed(clean_environment: pytest.MonkeyPatch, text: str, size: int) -> None:
    assert load_settings(ConsumeSettings, {**REQUIRED["consume"], "cache_memory": text}).cache_memory == size


def test_polls_are_larger_with_several_models(clean_environment: pytest.MonkeyPatch) -> None:
    for flags, expected in (({"model": "m"}, 8192), ({"models": "folder"}, 32_768)):
        assert load_settings(ConsumeSettings, {"topic": "t", **flags}, None, "consume").poll_messages == expected
        of_file = load_settings(ConsumeSettings, {"source": "-", **flags}, None, "consume")
        assert of_file.poll_messages == 8192
        chosen = load_settings(ConsumeSettings, {"topic": "t", "max_poll_records": "7", **flags}, None, "consume")
        assert chosen.poll_messages == 7


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1XiB", "1e9", "nan", "inf", "9" * 400, "9" * 18 + "GiB", "1 2"])
def test_invalid_sizes_are_rejected(clean_environment: pytest.MonkeyPatch, text: str) -> None:
    assert_one_line_error(ConsumeSettings, {"cache_memory": text}, "--cache-memory")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"alpha": "0"}, "--alpha"),
        ({"alpha": "1"}, "--alpha"),
        ({"alpha": "nan"}, "--alpha"),
        ({"alpha": "much"}, "--alpha"),
        ({"alpha": "0.01,"}, "--alpha"),
        ({"alpha": "0.01,2"}, "--alpha"),
        ({"alpha": "0.01,0.01"}, "--alpha"),
        ({"from_": "middle"}, "--from"),
        ({"max_poll_records": "0"}, "--max-poll-records"),
        ({"format": "xml"}, "--format"),
        ({"format": "avro"}, "--schema-registry"),
        ({"schema_registry": "http://localhost:8081"}, "--format json"),
        ({"output_format": "avro"}, "--schema-registry"),
        ({"output_format": "protobuf"}, "--output-format"),
        ({"schema_registry_username": "me"}, "--schema-registry-username"),
        ({**REGISTRY, "schema_registry": "localhost:8081"}, "no address"),
        ({**REGISTRY, "schema_registry": "https://me:" + SECRET + "@host"}, "must not contain a login"),
        ({**REGISTRY, "schema_registry_username": "me"}, "--schema-registry-password-file"),
        ({**REGISTRY, "schema_registry_password": SECRET}, "--schema-registry-username"),
        ({**REGISTRY_LOGIN, "schema_registry_password_file": "f"}, "give one"),
        ({**REGISTRY_LOGIN, "schema_registry": "http://registry:8081"}, "without encryption"),
        ({"max_open_records": "1.5"}, "--max-open-records"),
        ({"device": "tpu"}, "--device"),
        ({"source": "-"}, "--topic or --source"),
        ({"topic": None}, "--topic or --source"),
        ({"topic": ""}, "--topic or --source"),
        ({"model": None}, "--model"),
        ({"topic": None, "source": "kafka://me:" + SECRET + "@host:9092/t"}, "--sasl-username"),
        ({"security_protocol": "SASL_SSL"}, "--sasl-mechanism"),
        ({**LOGIN, "sasl_password": SECRET, "sasl_username": ""}, "are missing: --sasl-username"),
        (LOGIN, "are missing: --sasl-password-file"),
        ({"ssl_cafile": "ca.pem"}, "--security-protocol"),
        ({**LOGIN, "security_protocol": "SASL_PLAINTEXT", "sasl_password": SECRET, "ssl_cafile": "f"}, "--ssl-"),
        ({"security_protocol": "SSL", "ssl_keyfile": "key.pem"}, "--ssl-certfile"),
        ({"security_protocol": "SSL", "ssl_password_file": "f"}, "--ssl-certfile"),
        ({"sasl_password": SECRET}, "--security-protocol"),
        ({"sasl_username": "me"}, "--security-protocol"),
        ({**LOGIN, "sasl_password": SECRET, "sasl_password_file": "f"}, "one of them"),
        ({"grace": "-2s", "window": "10s"}, "--grace"),
        ({"window": "0s"}, "--window"),
        ({"window": "0.5ms"}, "--window"),
        ({"window": "ten seconds"}, "--window ten seconds ("),
        ({"alpha": "2"}, "--alpha 2 (DEFORMER_ALPHA in the environment, alpha in the file): it should be less than 1"),
        ({"max_poll_records": "many"}, "it should be a valid integer;"),
        ({"group": ""}, "--group ("),
    ],
)
def test_impossible_options_are_rejected_in_one_line(
    clean_environment: pytest.MonkeyPatch, flags: dict[str, Any], word: str
) -> None:
    assert_one_line_error(ConsumeSettings, flags, word)


def assert_one_line_error(cls: type[Settings], flags: dict[str, Any], *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(cls, {**REQUIRED["consume"], **flags}, None, "consume")
    line = str(caught.value)
    assert "\n" not in line
    assert SECRET not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_invalid_rates_are_rejected(clean_environment: pytest.MonkeyPatch, rate: str) -> None:
    with pytest.raises(ConfigError, match="--rate"):
        load_settings(ProduceSettings, {"topic": "t", "rate": rate}, None, "produce")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alfa = 0.1", ["unknown key 'alfa'"]),
        ("[consume]\nalfa = 0.1", ["unknown key 'alfa'"]),
        ("[consume]\noutput = 'x'", ["unknown key 'output'"]),
        ("[consum]\nalpha = 0.1", ["unknown table [consum]"]),
        ("consume = 5", ["[consume]"]),
        ("alpha = 'much'", ["--alpha", "alpha in the file"]),
        ("alpha = [0.1]", ["--alpha"]),
        ("topic = 5", ["--topic"]),
        ("alpha = ", ["cannot be read", "end of document"]),
        ("\x00", ["cannot be read"]),
        ("[[consume]]\nalpha = 0.1", ["[consume]"]),
        ("sasl-password = 12345678", ["--sasl-password"]),
        ("schema-registry-password = 12345678", ["--schema-registry-password"]),
        ("source-password = 12345678", ["--source-password"]),
        ("device = 'x://me:12345678@host'", ["--device x://host"]),
    ],
)
def test_invalid_configuration_files_are_rejected(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path, text: str, words: list[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(text)
    flags = {k: v for k, v in REQUIRED["consume"].items() if not text.startswith(k)}
    with pytest.raises(ConfigError) as caught:
        load_settings(ConsumeSettings, flags, config, "consume")
    line = str(caught.value)
    assert "\n" not in line
    assert "12345678" not in line
    for word in words:
        assert word in line


def test_unreadable_configuration_file_is_reported(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_settings(ConsumeSettings, REQUIRED["consume"], path, "consume")
    (tmp_path / "latin.toml").write_bytes("group = 'é'".encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(ConsumeSettings, REQUIRED["consume"], tmp_path / "latin.toml", "consume")


def test_one_file_configures_all_commands(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('model = "m"\nalpha = 0.2\nrate = 5\n[consume]\nalpha = 0.3\ntopic = "t"\n[train]\nepochs = 3\n')
    assert load_settings(ConsumeSettings, {}, config, "consume").alpha == (0.3,)
    assert load_settings(ReplaySettings, {}, config, "replay").alpha == (0.2,)
    assert load_settings(ProduceSettings, {"topic": "t"}, config, "produce").rate == 5.0


@pytest.mark.parametrize(
    ("field", "argument"), [("sasl_password_file", "sasl_plain_password"), ("ssl_password_file", "ssl_password")]
)
def test_passwords_are_read_from_files(
    field: str, argument: str, clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "password"
    certificate = {"security_protocol": "SSL", "ssl_certfile": "c"}
    flags = {**REQUIRED["consume"], **(LOGIN if field.startswith("sasl") else certificate), field: str(path)}
    for text in (SECRET, SECRET + "\nsecond line\n", SECRET + "\r\n"):
        path.write_bytes(text.encode())
        assert load_settings(ConsumeSettings, flags).make_security_arguments()[argument] == SECRET
    for content, why in [
        (b"\xff\xfe\xfa", "cannot be read (it is not UTF-8 text)"),
        (b"", "has an empty first line"),
        (b"\nx", "has an empty first line"),
        (None, "cannot be read"),
    ]:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_settings(ConsumeSettings, flags).make_security_arguments()
        assert str(caught.value).startswith(f"{to_flag(field)} {path}")
        assert why in str(caught.value)
    path.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load_settings(ConsumeSettings, flags).make_security_arguments()


def test_security_arguments_of_the_client(clean_environment: pytest.MonkeyPatch) -> None:
    files = {"ssl_cafile": "ca", "ssl_certfile": "cert", "ssl_keyfile": "key"}
    flags = {**REQUIRED["consume"], **LOGIN, "sasl_password": SECRET, **files}
    assert load_settings(ConsumeSettings, flags).make_security_arguments() == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "me",
        "sasl_plain_password": SECRET,
        **files,
    }
    assert load_settings(ConsumeSettings, REQUIRED["consume"]).make_security_arguments() == {
        "security_protocol": "PLAINTEXT"
    }


def test_settings_never_show_the_password(clean_environment: pytest.MonkeyPatch) -> None:
    settings = load_settings(ConsumeSettings, {**REQUIRED["consume"], **LOGIN, "sasl_password": SECRET})
    assert SECRET not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.make_security_arguments()["sasl_plain_password"] == SECRET


def test_config_prints_options_in_force(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path, cli: Callable[..., SimpleNamespace]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'alpha = 0.2\ngroup = "plant 7"\nsasl-password = "{SECRET}"\n[consume]\nrecord-timeout = "5m"\n')
    clean_environment.setenv("DEFORMER_GROUP", "plant é")
    clean_environment.setenv("DEFORMER_SOURCE", f"kafka://me:{SECRET}@host/t")
    result = cli("config", "--config", path)
    assert result.code == 0
    assert result.err == ""
    assert SECRET not in result.out
    printed = tomllib.loads(result.out)
    assert printed.keys() == SETTINGS_BY_COMMAND.keys()
    assert printed["consume"]["group"] == "plant é"
    assert printed["consume"]["alpha"] == printed["replay"]["alpha"] == 0.2
    assert printed["consume"]["record-timeout"] == "5m"
    assert "record-timeout" not in printed["replay"]
    assert 'group = "plant é"   # from DEFORMER_GROUP' in result.out
    assert f'# sasl-password = "**********"   (from {path})' in result.out
    assert "# model =   (required)" in result.out
    clean_environment.setenv("DEFORMER_SASL_PASSWORD", SECRET)
    result = cli("config", "consume", "--config", path)
    assert result.out.startswith("[consume]\n")
    assert "(from DEFORMER_SASL_PASSWORD)" in result.out
    assert "[replay]" not in result.out
    assert SECRET not in result.out
    clean_environment.setenv("DEFORMER_ALPHA", SECRET)
    result = cli("config", "consume")
    assert (result.code, result.out, len(result.lines)) == (2, "", 1)
    assert "--alpha" in result.lines[0]


def test_printed_configuration_can_be_loaded(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    for command, cls in SETTINGS_BY_COMMAND.items():
        config.write_text(f"[{command}]\n" + "\n".join(format_options_in_force(cls, None, command)))
        assert load_settings(cls, REQUIRED[command], config, command) == load_settings(
            cls, REQUIRED[command], None, command
        )


def test_option_table_has_every_option(cli: Callable[..., SimpleNamespace]) -> None:
    result = cli("config", "--markdown")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert all(line.count("|") == 5 for line in lines)
    for command, field in ALL_OPTIONS:
        assert any(line.startswith(f"| `{to_flag(field)}` |") and command in line.split("|")[4] for line in lines)
    assert (
        "| `--alpha` | `0.01` | Largest share of normal records that raise an alert. Several shares, comma-separated, "
        "raise alerts of their own; a smaller share means a more severe alert. | consume, replay, calibrate |" in lines
    )


@pytest.mark.parametrize("text", ["flow = m³/h, a=b = 1/s,", "flow=m³/h,a=b=1/s"])
def test_units_are_given_as_text_or_as_a_table(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    expected = {"flow": "m³/h", "a=b": "1/s"}
    flags = dict(REQUIRED["consume"])
    assert load_settings(ConsumeSettings, {**flags, "units": text}, None, "consume").units == expected
    assert load_settings(ConsumeSettings, flags, None, "consume").units == {}
    config = tmp_path / "deformer.toml"
    config.write_text('[units]\nflow = "m³/h"\n"a=b" = "1/s"\n[consume]\nalpha = "5%"\n')
    assert load_settings(ConsumeSettings, flags, config, "consume").units == expected
    assert load_settings(SampleSettings, dict(REQUIRED["sample"]), config, "sample").count == 1000
    clean_environment.setenv("DEFORMER_UNITS", "flow=l/s")
    assert load_settings(ConsumeSettings, flags, config, "consume").units == {"flow": "l/s"}


@pytest.mark.parametrize("text", ["flow", "=bar", "flow=m³/h,bar"])
def test_invalid_units_are_rejected(clean_environment: pytest.MonkeyPatch, text: str) -> None:
    assert_one_line_error(ConsumeSettings, {"units": text}, "--units", "write feature=unit, such as flow=m³/h")


def test_printed_units_can_be_loaded(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "deformer.toml"
    config.write_text('[units]\nflow = "m³/h"\n')
    (line,) = (line for line in format_options_in_force(ReplaySettings, config, "replay") if line.startswith("units"))
    printed = tmp_path / "printed.toml"
    printed.write_text(line)
    assert load_settings(ReplaySettings, dict(REQUIRED["replay"]), printed, "replay").units == {"flow": "m³/h"}


def test_printed_lists_can_be_loaded(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "deformer.toml"
    config.write_text('exclude = ["a,b", "c"]\n')
    (line,) = (line for line in format_options_in_force(ProduceSettings, config, "produce") if "exclude" in line)
    assert line == f'exclude = ["a,b", "c"]   # from {config}'
    printed = tmp_path / "printed.toml"
    printed.write_text(line)
    assert load_settings(ProduceSettings, {"topic": "t"}, printed, "produce").exclude == ("a,b", "c")
    assert load_settings(ProduceSettings, {"topic": "t", "exclude": "a, b"}, printed, "produce").exclude == ("a", "b")


def test_a_flag_about_the_header_replaces_the_other_one_in_the_file(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("no-header = true\n")
    settings = load_settings(ProduceSettings, {"topic": "t", "header": True}, config, "produce")
    assert (settings.header, settings.no_header) == (True, False)
    assert load_settings(ProduceSettings, {"topic": "t"}, config, "produce").no_header
    with pytest.raises(ConfigError, match="--header and --no-header contradict each other"):
        load_settings(ProduceSettings, {"topic": "t", "header": True, "no_header": True}, None, "produce")


@pytest.mark.parametrize(
    ("variable", "value", "secrets", "shown"),
    [
        ("DEFORMER_NOTIFY", "slack://T0ken/B0t", ("T0ken", "B0t"), '# notify = "**********"'),
        (
            "DEFORMER_WEBHOOK",
            "https://u:pa55@hooks.example/services/T0ken,http://plain.example:80",
            ("pa55", "T0ken"),
            '# webhook = "https://hooks.example/**********,http://plain.example:80"',
        ),
        ("DEFORMER_WEBHOOK", "http://a.example/?key=T0ken", ("T0ken",), '# webhook = "http://a.example/**********"'),
        ("DEFORMER_ALERTMANAGER", "http://u:pa55@a.example", ("pa55",), 'alertmanager = "http://**********@a.example"'),
    ],
)
def test_config_masks_the_secrets_of_receivers(
    clean_environment: pytest.MonkeyPatch,
    cli: Callable[..., SimpleNamespace],
    variable: str,
    value: str,
    secrets: tuple[str, ...],
    shown: str,
) -> None:
    clean_environment.setenv(variable, value)
    output = cli("config", "incidents").out
    assert shown in output
    assert all(secret not in output for secret in secrets)


def test_client_options_come_from_flags_the_environment_or_a_table(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        '[client-option]\n"client.rack" = "a"\nfetch.max.bytes = 5\n[consume.client-option]\nstatistics = true\n'
    )
    for command, expected in [
        ("produce", {"client.rack": "a", "fetch.max.bytes": "5"}),
        ("consume", {"statistics": "true"}),
    ]:
        cls = SETTINGS_BY_COMMAND[command]
        flags = {**REQUIRED[command]}
        assert load_settings(cls, flags, config, command).get_client_options() == expected  # type: ignore[attr-defined]
    clean_environment.setenv("DEFORMER_CLIENT_OPTION", "a=1\n\n b = x=y,z \n")
    assert load_settings(ConsumeSettings, REQUIRED["consume"], config, "consume").get_client_options() == {
        "a": "1",
        "b": "x=y,z",
    }
    flags = {**REQUIRED["consume"], "client_option": ("c=3", "d=")}
    assert load_settings(ConsumeSettings, flags, config, "consume").get_client_options() == {"c": "3", "d": ""}


def test_flags_of_client_options_are_repeatable(
    clean_environment: pytest.MonkeyPatch, cli: Callable[..., SimpleNamespace]
) -> None:
    clean_environment.setenv("DEFORMER_CLIENT_OPTION", "e=5")
    seen: list[dict[str, str]] = []

    @click.command()
    @add_options(ProduceSettings)
    def command(config: Path | None, **flags: Any) -> None:
        seen.append(load_settings(ProduceSettings, {**flags, "topic": "t"}).get_client_options())

    command.main(["--client-option", "a=1", "--client-option", "b=2"], standalone_mode=False)
    command.main([], standalone_mode=False)  # without the flag, the environment counts
    assert seen == [{"a": "1", "b": "2"}, {"e": "5"}]


def test_a_malformed_client_option_is_not_quoted(clean_environment: pytest.MonkeyPatch) -> None:
    for text in (SECRET, f"={SECRET}"):
        with pytest.raises(ConfigError) as caught:
            load_settings(ConsumeSettings, {**REQUIRED["consume"], "client_option": (text,)})
        assert str(caught.value).startswith("--client-option (DEFORMER_CLIENT_OPTION in the environment")
        assert "write KEY=VALUE" in str(caught.value)
        assert SECRET not in str(caught.value)


def test_values_of_client_options_are_masked(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path, cli: Callable[..., SimpleNamespace]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[client-option]\nssl.key.password = "{SECRET}"\n')
    result = cli("config", "--config", path)
    assert result.code == 0, result.err
    assert SECRET not in result.out + result.err
    assert "ssl.key.password=*****" in result.out
    settings = load_settings(ConsumeSettings, REQUIRED["consume"], path, "consume")
    assert SECRET not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.get_client_options() == {"ssl.key.password": SECRET}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sasl_oauth_client_id": None}, "missing: --sasl-oauth-client-id"),
        ({"sasl_oauth_client_secret_file": None}, "missing: --sasl-oauth-client-secret-file"),
        ({"sasl_username": "me"}, "OAUTHBEARER does not use --sasl-username"),
        ({"sasl_oauth_token_file": "t"}, "contains the token, so leave --sasl-oauth-token-endpoint, "),
        ({"sasl_oauth_token_endpoint": "login.example"}, "is no address"),
        ({"sasl_oauth_token_endpoint": f"https://me:{SECRET}@login.example/token"}, "must not contain a login"),
        ({"sasl_oauth_token_endpoint": "http://login.example/token"}, "without encryption"),
        ({"security_protocol": "SSL"}, "requires --security-protocol SASL_SSL"),
        ({"sasl_mechanism": "PLAIN"}, "missing: --sasl-username, --sasl-password-file"),
        ({"sasl_mechanism": "AWS_MSK_IAM"}, "AWS_MSK_IAM does not use --sasl-oauth-token-endpoint"),
        ({"sasl_mechanism": "GSSAPI"}, "GSSAPI does not use --sasl-oauth-token-endpoint"),
        ({"sasl_mechanism": None}, "missing: --sasl-mechanism"),
    ],
)
def test_logins_with_tokens_are_checked(
    changes: dict[str, str], message: str, clean_environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(ConsumeSettings, {**REQUIRED["consume"], **OAUTH, **changes}, command="consume")
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_amazon_login_needs_encryption(clean_environment: pytest.MonkeyPatch) -> None:
    flags = {**REQUIRED["consume"], "sasl_mechanism": "AWS_MSK_IAM", "security_protocol": "SASL_PLAINTEXT"}
    with pytest.raises(ConfigError, match="AWS_MSK_IAM requires --security-protocol SASL_SSL"):
        load_settings(ConsumeSettings, flags)


def test_security_arguments_of_logins_with_tokens(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    secret_file = {"sasl_oauth_client_secret_file": str(tmp_path / "secret")}

    def make_arguments(**flags: str) -> dict[str, Any]:
        return load_settings(ConsumeSettings, {**REQUIRED["consume"], **flags}).make_security_arguments()

    assert make_arguments(**{**OAUTH, **secret_file}, sasl_oauth_scope="kafka") == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_endpoint": "https://login.example/token",
        "sasl_oauth_client_id": "plant",
        "sasl_oauth_client_secret": SECRET,
        "sasl_oauth_scope": "kafka",
    }
    assert make_arguments(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER", sasl_oauth_token_file="token"
    ) == {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_file": "token"}
    assert make_arguments(security_protocol="SASL_SSL", sasl_mechanism="AWS_MSK_IAM", sasl_aws_region="eu-west-1") == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "AWS_MSK_IAM",
        "sasl_aws_region": "eu-west-1",
    }
    assert make_arguments(
        security_protocol="SASL_SSL", sasl_mechanism="GSSAPI", sasl_kerberos_service_name="kafka"
    ) == {"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI", "sasl_kerberos_service_name": "kafka"}
