"""The parts of the commands that read MQTT: connections, translators, and what `consume` does without Kafka.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deformer_stream.extras import format_remedy, is_installed

if TYPE_CHECKING:
    import threading

    from connectors.mqtt import MqttOptions
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.codec.bridge_messages import TopicPattern
    from deformer_stream.model.schema import Schema
    from deformer_stream.runtime.metrics import Metrics
    from deformer_stream.runtime.ports import EventSource, Sink
    from deformer_stream.settings import ConsumeSettings
    from deformer_stream.settings.plant_source import PlantSourceSettings, SourceAddress


def check_packages() -> None:
    """Raise `ConfigError` if the packages for MQTT and Sparkplug are not installed."""
    from deformer_stream.errors import ConfigError

    if not all(map(is_installed, ("paho", "google.protobuf"))):
        raise ConfigError(f"this source needs packages that are not installed: {format_remedy('mqtt')}")


def make_options(
    settings: PlantSourceSettings, address: SourceAddress, pattern: TopicPattern, patience: float, default_id: str = ""
) -> MqttOptions:
    """Return how to connect to an MQTT broker.

    Args:
        settings: Options of the command.
        address: The address of the broker.
        pattern: Where topics name devices and features.
        patience: Seconds to retry while the broker cannot be reached.
        default_id: What follows `deformer-stream-` in the id of the session by default; "" for the topic filter.

    Raises:
        ConfigError: A file with a secret cannot be read.
    """
    from connectors.mqtt import MqttOptions

    def to_text(path: Path | None) -> str | None:
        return None if path is None else str(path)

    topic_filter = address.path or pattern.filter
    # Brokers may refuse wildcards in ids, because rules of access can contain ids.
    default_id = default_id or re.sub(r"[^\w.-]+", "-", topic_filter)
    return MqttOptions(
        host=address.host,
        port=address.port,
        filter=topic_filter,
        client_id=settings.client_id or f"deformer-stream-{default_id}",
        session_seconds=min(int(settings.session_expiry), 2**32 - 2),
        uses_tls=address.scheme == "mqtts",
        username=settings.source_username,
        password=settings.read_source_password(),
        cafile=to_text(settings.source_cafile),
        certfile=to_text(settings.source_certfile),
        keyfile=to_text(settings.source_keyfile),
        key_password=settings.read_source_key_password(),
        patience=patience,
    )


def refuse_flags(flags: Mapping[str, Any], is_mqtt: bool) -> None:
    """Raise `ConfigError` if a flag has no meaning with the source of `consume`.

    Args:
        flags: The flags of the command, None or empty for those that were not given.
        is_mqtt: Whether the source is an MQTT broker.
    """
    from deformer_stream.errors import ConfigError
    from deformer_stream.settings import commands, to_flag

    fields = commands.SHARED_KAFKA_OPTIONS if is_mqtt else commands.SHARED_MQTT_OPTIONS
    given = [field for field in fields if flags.get(field)]
    if given:
        requirement = commands.NEEDS_KAFKA if is_mqtt else commands.NEEDS_MQTT
        raise ConfigError(f"{to_flag(given[0])} requires {requirement}; leave it out")


def separate_field_names(settings: ConsumeSettings) -> ConsumeSettings:
    """Return the options with which events are decoded that were translated from MQTT messages.

    The names of fields and the form of times that the options give are those of the messages. Events have the defaults.
    """
    names = ("record", "device", "feature", "value", "values", "time")
    fields = [*(f"{name}_field" for name in names), "time_unit", "timezone"]
    return settings.model_copy(update={field: type(settings).model_fields[field].default for field in fields})


def connect_to_mqtt(
    settings: ConsumeSettings, models: ServedModels, metrics: Metrics, stop: threading.Event, cleanup: ExitStack
) -> tuple[EventSource, list[Sink]]:
    """Return a source that reads events from an MQTT broker, and the sink that publishes alerts to it.

    Args:
        settings: Options of `consume`, whose source is an MQTT broker.
        models: The models.
        metrics: Receives what the source reports.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the functions that close the source and the sink are added.

    Raises:
        ConfigError: An option is wrong, a package is missing, the broker refuses the connection, or the records of a
            model are not windows.
        StateError: The saved state is damaged.
        Unavailable: The broker does not respond.
    """
    from connectors.files import StateFolder
    from connectors.mqtt import AlertTopic, MqttAlertSink, MqttSource
    from deformer_stream.cli import codecs
    from deformer_stream.cli.kafka_cluster import connect_with_retries, get_start_patience
    from deformer_stream.codec.bridge_messages import PrefixTranslator, TopicPattern, ValueTranslator
    from deformer_stream.codec.sparkplug import PREFIX, SparkplugTranslator
    from deformer_stream.errors import InvariantViolated
    from deformer_stream.runtime.bridge_metrics import SourceMetrics
    from deformer_stream.runtime.plant_source import PlantSource

    address = settings.mqtt_address
    if address is None or settings.state_dir is None:
        raise InvariantViolated("the options name no MQTT broker or no folder for the state: report this bug")
    check_packages()
    _check_choice(settings, models)
    pattern = TopicPattern(settings.pattern)
    options = make_options(settings, address, pattern, settings.patience)
    alert_topic = AlertTopic(settings.alerts_to, options.filter)
    max_bytes = settings.max_message_bytes
    values = ValueTranslator(pattern, codecs.get_field_names(settings), codecs.make_time_format(settings), max_bytes)
    sparkplug = SparkplugTranslator(max_bytes)
    store = StateFolder(settings.state_dir)
    cleanup.callback(store.close)

    def connect(attempt: ExitStack) -> tuple[MqttAlertSink, MqttSource]:
        """Connect to the broker; the connections are closed if that fails."""
        sink = MqttAlertSink(options, alert_topic, metrics.record_progress, stop)
        attempt.callback(sink.close)
        source = MqttSource(options)
        attempt.callback(source.close)
        return sink, source

    sink, mqtt = connect_with_retries(
        connect, get_start_patience(settings), stop, metrics.record_progress, cleanup, "mqtt"
    )
    translator = PrefixTranslator({PREFIX: sparkplug}, values)
    source = PlantSource(mqtt, translator, sparkplug, store, options.filter, SourceMetrics(metrics, sparkplug))
    return source, [sink]


def check_windows(settings: ConsumeSettings, schema: Schema) -> None:
    """Raise `ConfigError` if a model does not divide the readings of devices into windows of time."""
    from deformer_stream.cli import codecs
    from deformer_stream.errors import ConfigError

    if codecs.make_window_assigner(schema, settings) is None:
        raise ConfigError(
            "messages of MQTT name a device and no record, so records must be windows of time: add --window, or train "
            "a model with one"
        )


def _check_choice(settings: ConsumeSettings, models: ServedModels) -> None:
    """Raise `ConfigError` if messages of MQTT, which name nothing but a device, cannot be divided among the models."""
    from deformer_stream.errors import ConfigError

    if models.choice is not None and settings.model_pattern is None:
        raise ConfigError(
            "messages of MQTT name a device and no model: find the model in the device with --model-pattern"
        )
    device_field = type(settings).model_fields["device_field"].default
    if models.choice is not None and models.choice.field != device_field:
        raise ConfigError(
            f"messages of MQTT have no field {models.choice.field!r} that chooses a model: leave --model-by out, so "
            "that --model-pattern finds the model in the device"
        )
