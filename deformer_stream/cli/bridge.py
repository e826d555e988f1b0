"""The command `bridge`, which passes readings from MQTT or OPC UA on to a topic of Kafka.

Heavy packages are imported inside the command, so that `--help` is printed without delay. It needs neither PyTorch nor
a model.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import mqtt
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, stop_on_signals
from deformer_stream.extras import format_remedy, is_installed

if TYPE_CHECKING:
    from deformer_stream.codec.bridge_messages import TopicPattern
    from deformer_stream.runtime.bridge import BridgePipeline, BridgeSource
    from deformer_stream.runtime.bridge_metrics import BridgeMetrics
    from deformer_stream.settings.bridge_commands import BridgeSettings


def build_bridge() -> click.Command:
    """Return the command `bridge`, which passes readings from MQTT or OPC UA on to Kafka."""
    from deformer_stream.settings import add_options, load_settings
    from deformer_stream.settings.bridge_commands import BridgeSettings

    @click.command("bridge", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["bridge"], context_settings=HELP)
    @add_options(BridgeSettings)
    @add_debug_option
    def bridge(config: Path | None, **flags: Any) -> None:
        """Pass readings from MQTT, Sparkplug B or OPC UA on to a Kafka topic, as events that `consume` reads.

        A message of MQTT is acknowledged after Kafka has acknowledged its events. So none is lost if the command ends
        at any moment; some events can then be written twice. SIGINT and SIGTERM end it.
        """
        stop = stop_on_signals()
        settings = load_settings(BridgeSettings, flags, config, "bridge")
        from deformer_stream import log
        from deformer_stream.runtime.bridge_metrics import BridgeMetrics
        from deformer_stream.runtime.http_server import start_http_server

        log.configure(is_debugging())
        metrics = BridgeMetrics()
        with ExitStack() as cleanup:
            if settings.http:  # before a connection is made, which can wait for the end of an outage
                cleanup.callback(start_http_server(settings.http, metrics))
            pipeline = _connect(settings, metrics, stop, cleanup)
            log.get_logger("bridge").info("ready", source=settings.source, topic=settings.topic)
            pipeline.run(stop)
        log.get_logger("bridge").info("stopped")

    return bridge


def _connect(
    settings: BridgeSettings, metrics: BridgeMetrics, stop: threading.Event, cleanup: ExitStack
) -> BridgePipeline:
    """Return the loop of the bridge, connected to its source and its topics.

    Args:
        settings: Options of the command.
        metrics: Receives counts and timings.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the functions that close the connections are added.

    Raises:
        ConfigError: An option is wrong, a package is missing, or the source or a broker refuses the connection.
        Unavailable: The source or the brokers do not respond.
    """
    from connectors.kafka import ensure_topics
    from connectors.kafka.bridge_sink import (
        EVENT_OVERHEAD_BYTES,
        KafkaBridgeSink,
        describe_bridge_topics,
        restore_births,
    )
    from deformer_stream.cli.kafka_cluster import connect_with_retries, get_start_patience, make_cluster
    from deformer_stream.codec.bridge_messages import PrefixTranslator, TopicPattern, TranslationOptions, Translator
    from deformer_stream.codec.sparkplug import PREFIX, SparkplugTranslator
    from deformer_stream.errors import ConfigError
    from deformer_stream.runtime.bridge import BridgePipeline
    from deformer_stream.runtime.bridge_metrics import SourceMetrics

    pattern, options = TopicPattern(settings.pattern), TranslationOptions(**settings.get_translation())
    topic = settings.topic
    dead_letters = settings.dead_letter_topic or f"{topic}-bridge-dead-letter"
    is_mqtt = settings.address.scheme != "opc.tcp"
    births = (settings.births_topic or f"{topic}-sparkplug-births") if is_mqtt else None
    if len({topic, dead_letters, births}) < 3:
        raise ConfigError("--topic, --dead-letter-topic and --births-topic must differ: choose three different topics")
    if is_mqtt:
        mqtt.check_packages()
    elif not is_installed("asyncua"):
        raise ConfigError(f"this source needs packages that are not installed: {format_remedy('opcua')}")
    cluster = make_cluster(settings)
    specs = describe_bridge_topics(topic, dead_letters, births, settings.partitions)

    def connect(attempt: ExitStack) -> tuple[KafkaBridgeSink, Translator, SparkplugTranslator | None]:
        """Connect to the brokers, and read the births of Sparkplug; the connections are closed if that fails."""
        limits = ensure_topics(cluster, specs, settings.missing_topics == "create")
        max_event_bytes = limits[topic] - EVENT_OVERHEAD_BYTES
        translator: Translator = options.make_translator(max_event_bytes)
        sink = KafkaBridgeSink(
            cluster,
            topic,
            dead_letter_topic=dead_letters,
            births_topic=births,
            max_bytes_by_topic=limits,
            source=settings.source,
            patience=settings.patience,
            options=options,
        )
        attempt.callback(sink.close)
        if births is None:
            return sink, translator, None
        sparkplug = SparkplugTranslator(settings.max_message_bytes, max_event_bytes)
        restore_births(cluster, births, sparkplug)
        return sink, PrefixTranslator({PREFIX: sparkplug}, translator), sparkplug

    patience = get_start_patience(settings)
    sink, translator, sparkplug = connect_with_retries(connect, patience, stop, metrics.record_progress, cleanup)

    def open_source(attempt: ExitStack) -> BridgeSource:
        """Connect to the source; the connection is closed if that fails."""
        source = _connect_mqtt(settings, pattern) if is_mqtt else _connect_opcua(settings)
        attempt.callback(source.close)
        return source

    component = "mqtt" if is_mqtt else "opcua"
    source = connect_with_retries(open_source, patience, stop, metrics.record_progress, cleanup, component)
    return BridgePipeline(source, translator, sink, metrics, SourceMetrics(metrics, sparkplug))


def _connect_mqtt(settings: BridgeSettings, pattern: TopicPattern) -> BridgeSource:
    """Return a source that subscribes to the topics of the settings."""
    from connectors.mqtt import MqttSource

    return MqttSource(
        mqtt.make_options(settings, settings.address, pattern, settings.patience, default_id=settings.topic)
    )


def _connect_opcua(settings: BridgeSettings) -> BridgeSource:
    """Return a source that is subscribed to the nodes of the settings."""
    from connectors.opcua import OpcuaOptions, OpcuaSource

    return OpcuaSource(
        OpcuaOptions(
            url=settings.source,
            nodes=settings.nodes,
            sampling_interval=settings.sampling_interval,
            username=settings.source_username,
            password=settings.read_source_password(),
            value_field=settings.value_field,
            time_field=settings.time_field,
            time_unit=settings.time_unit,
            patience=settings.patience,
            policy=settings.opcua_policy,
            mode=settings.opcua_mode,
            cafile=settings.source_cafile,
            certfile=settings.source_certfile,
            keyfile=settings.source_keyfile or settings.source_certfile,
            key_password=settings.read_source_key_password(),
        )
    )
