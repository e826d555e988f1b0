"""The connection of `consume` to Kafka: its topics, the source of its events, and the sinks of its messages.

The Kafka client is imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deformer_stream.cli import registry_clients
from deformer_stream.errors import ConfigError

if TYPE_CHECKING:
    import threading

    from connectors.kafka.topics import TopicSpec
    from connectors.schema_registry import SchemaRegistry
    from deformer_stream.codec.model_choice import ModelDecoder
    from deformer_stream.codec.output_formats import OutputSchema
    from deformer_stream.runtime.metrics import Metrics
    from deformer_stream.runtime.ports import EventSource, Sink
    from deformer_stream.settings import ConsumeSettings


@dataclass(frozen=True, slots=True)
class ConsumeTopics:
    """The Kafka topics of `consume`.

    Attributes:
        events: Topic of the events.
        alerts: Topic of the alerts.
        dead_letters: Topic of the rejected events.
        state: Topic of the state of open records.
        evidence: Topic of the evidence, None if none is written.
        next_readings: Topic of suspicious records with the readings to take next, None if none are written.
    """

    events: str
    alerts: str
    dead_letters: str
    state: str
    evidence: str | None
    next_readings: str | None

    @staticmethod
    def from_settings(settings: ConsumeSettings, topic: str) -> ConsumeTopics:
        """Return the topics that the options of `consume` name.

        Args:
            settings: The options.
            topic: The topic of the events.

        Raises:
            ConfigError: Two of them are the same.
        """
        from deformer_stream.settings.topics import name_topic

        has_evidence, has_next_readings = settings.evidence == "on", settings.next_reading > 0
        topics = ConsumeTopics(
            topic,
            alerts=name_topic(settings.alerts_topic, topic, "alerts"),
            dead_letters=name_topic(settings.dead_letter_topic, topic, "dead-letter"),
            state=settings.state_topic or f"{settings.group}-{topic}-state",
            evidence=name_topic(settings.evidence_topic, topic, "evidence") if has_evidence else None,
            next_readings=name_topic(settings.next_readings_topic, topic, "next-readings")
            if has_next_readings
            else None,
        )
        names = [topics.events, topics.dead_letters, topics.state, *topics.topic_by_schema.values()]
        if len(set(names)) < len(names):
            raise ConfigError(
                "--topic, --alerts-topic, --dead-letter-topic, --state-topic, --evidence-topic and "
                "--next-readings-topic must differ, because the command would otherwise read its own output as events; "
                "choose different topics"
            )
        return topics

    @property
    def topic_by_schema(self) -> dict[OutputSchema, str]:
        """The topics whose messages have a schema, by its name."""
        topics: dict[OutputSchema, str] = {"alerts": self.alerts}
        if self.evidence is not None:
            topics["evidence"] = self.evidence
        if self.next_readings is not None:
            topics["next-readings"] = self.next_readings
        return topics

    def describe(self, num_partitions: int) -> dict[str, TopicSpec]:
        """Return how the topics that `consume` writes are created, by name.

        Args:
            num_partitions: Number of partitions of the topic of events.
        """
        from connectors.kafka import describe_evidence_topic, describe_next_reading_topic, describe_output_topics

        specs = describe_output_topics(self.alerts, self.dead_letters, self.state, num_partitions)
        if self.evidence is not None:
            specs |= describe_evidence_topic(self.evidence)
        if self.next_readings is not None:
            specs |= describe_next_reading_topic(self.next_readings)
        return specs


def connect_to_kafka(
    settings: ConsumeSettings,
    servers: str,
    topic: str,
    codec: ModelDecoder,
    model: str,
    registry: SchemaRegistry | None,
    metrics: Metrics,
    stop: threading.Event,
    cleanup: ExitStack,
) -> tuple[EventSource, list[Sink]]:
    """Return a source that reads events from a topic, and sinks that write alerts and the like to other topics.

    A dead letter is a rejected event with the reason of the rejection. Source and sinks share a Kafka producer, so that
    alerts, dead letters, evidence, suspicious records and offsets can be committed in one transaction. Topics that do
    not exist are created if the options allow it.

    Args:
        settings: Options of `consume`.
        servers: Kafka brokers as host:port, comma-separated.
        topic: The topic with the events.
        codec: Encodes alerts.
        model: Fingerprint (hash) of the model, or of the set of models.
        registry: The schema registry, if the options name one.
        metrics: Records that the process makes progress while it waits for the brokers.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the functions that close the source and the sinks are added.

    Raises:
        ConfigError: Two of the topics are the same, or the schema registry refuses a schema.
        Unavailable: No broker responds, or the schema registry does not.
    """
    from functools import partial

    from connectors.kafka import KafkaEvidenceSink, KafkaNextReadingSink, KafkaSink, count_partitions
    from deformer_stream.cli.kafka_cluster import connect_with_retries, get_start_patience, join_group, make_cluster
    from deformer_stream.codec.state import check_state

    cluster = make_cluster(settings, servers)
    topics = ConsumeTopics.from_settings(settings, topic)
    format_by_schema = registry_clients.register_output_schemas(settings, registry, topics.topic_by_schema)

    def connect(attempt: ExitStack) -> tuple[EventSource, list[Sink]]:
        """Connect to the brokers; the connections are closed if that fails."""
        source, delivery = join_group(
            cluster,
            settings,
            topic,
            settings.group,
            spec_by_topic=topics.describe(count_partitions(cluster, topic)),
            state_topic=topics.state,
            verify_state=partial(check_state, has_one_model=settings.models is None),
            max_poll_messages=settings.poll_messages,
            attempt=attempt,
            model=model,
        )
        # The sinks have no connection of their own, so only the producer must be closed.
        sinks: list[Sink] = [
            KafkaSink(topics.alerts, topics.dead_letters, codec, delivery, topic, format_by_schema["alerts"])
        ]
        if topics.evidence is not None:
            sinks.append(KafkaEvidenceSink(topics.evidence, delivery, topic, format_by_schema["evidence"]))
        if topics.next_readings is not None:
            sinks.append(KafkaNextReadingSink(topics.next_readings, delivery, topic, format_by_schema["next-readings"]))
        return source, sinks

    return connect_with_retries(connect, get_start_patience(settings), stop, metrics.record_progress, cleanup)
