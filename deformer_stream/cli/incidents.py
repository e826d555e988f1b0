"""The command `incidents`, which makes incidents of the evidence of `consume`, and notifies receivers of them.

Heavy packages are imported inside the command, so that `--help` is printed without delay. PyTorch is not needed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import incident_delivery, input_files, registry_clients
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option, is_debugging, stop_on_signals

if TYPE_CHECKING:
    from connectors.kafka import KafkaCluster
    from deformer_stream.codec.output_formats import OutputFormat, OutputReader
    from deformer_stream.runtime.detection_metrics import DetectionMetrics
    from deformer_stream.runtime.incident_pipeline import IncidentPipeline
    from deformer_stream.settings.incident_commands import IncidentsSettings


MAX_POLL_MESSAGES = 256
"""Largest number of messages of evidence in one poll. Each can have thousands of records, and the loop must not take
seconds for a poll."""


@dataclass(frozen=True, slots=True)
class IncidentTopics:
    """The topics of the processes around incidents.

    Attributes:
        events: Topic of the events.
        evidence: Topic of the evidence.
        incidents: Topic of the incidents.
        feedback: Topic of the labels.
        state: Topic of the state of the process that makes incidents.
    """

    events: str
    evidence: str
    incidents: str
    feedback: str
    state: str

    @staticmethod
    def from_settings(settings: IncidentsSettings) -> IncidentTopics:
        """Return the topics that the options of `incidents` name.

        Raises:
            ConfigError: Two of them are the same.
        """
        from deformer_stream.errors import ConfigError
        from deformer_stream.settings.topics import name_topic

        topic = settings.topic
        topics = IncidentTopics(
            topic,
            name_topic(settings.evidence_topic, topic, "evidence"),
            name_topic(settings.incidents_topic, topic, "incidents"),
            name_topic(settings.feedback_topic, topic, "feedback"),
            settings.state_topic or f"{settings.group}-{topic}-incidents-state",
        )
        names = (topics.events, topics.evidence, topics.incidents, topics.feedback, topics.state)
        if len(set(names)) < len(names):
            raise ConfigError(
                "--topic, --evidence-topic, --incidents-topic, --feedback-topic and --state-topic must differ: choose "
                "five different topics"
            )
        return topics


def build_incidents() -> click.Command:
    """Return the command `incidents`, which makes incidents of the evidence of a live stream."""
    from deformer_stream.settings import add_options, load_settings
    from deformer_stream.settings.incident_commands import IncidentsSettings

    @click.command("incidents", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["incidents"], context_settings=HELP)
    @add_options(IncidentsSettings)
    @add_debug_option
    def incidents(config: Path | None, **flags: Any) -> None:
        """Make one incident of each fault, and notify Alertmanager, PagerDuty, webhooks, chat or mail.

        The command reads the evidence that `consume --evidence on` writes, and writes TOPIC-incidents. SIGINT and
        SIGTERM end it. A second process of the same group waits, and takes over if the first one does not respond.
        """
        stop = stop_on_signals()
        settings = load_settings(IncidentsSettings, flags, config, "incidents")
        _check_models(settings)
        from deformer_stream import log
        from deformer_stream.runtime.detection_metrics import DetectionMetrics
        from deformer_stream.runtime.http_server import start_http_server
        from deformer_stream.runtime.process_metrics import ProcessMetrics

        log.configure(is_debugging())
        topics = IncidentTopics.from_settings(settings)
        # A process that only delivers commits nothing, so it must not have the metrics of commits.
        detection_metrics = None if settings.deliver_only else DetectionMetrics()
        metrics = detection_metrics or ProcessMetrics()
        receivers = incident_delivery.create_receivers(settings)
        if settings.deliver_only and settings.output_format != "json":
            log.get_logger("incidents").warning(
                "option_without_effect",
                option="--output-format",
                message="--deliver-only writes no incidents, so their format has no effect: leave --output-format out",
            )
        with ExitStack() as cleanup:
            if settings.http:  # before a connection is made, which can wait for the end of an outage
                cleanup.callback(start_http_server(settings.http, metrics))
            registry = registry_clients.open_registry(
                settings, settings.patience, cleanup, metrics.record_progress, stop
            )
            reader = registry_clients.make_output_reader(registry)
            formats = registry_clients.register_output_schemas(
                settings, registry, {} if settings.deliver_only else {"incidents": topics.incidents}
            )
            pipeline = None
            if detection_metrics is not None:
                pipeline = _connect(settings, topics, detection_metrics, reader, formats["incidents"], stop, cleanup)
            incident_delivery.start_notifier(
                settings,
                receivers,
                incidents_topic=topics.incidents,
                feedback_topic=topics.feedback,
                metrics=metrics,
                read_value=reader,
                stop=stop,
                cleanup=cleanup,
            )
            log.get_logger("incidents").info("ready", topic=topics.evidence, budget=settings.incident_budget)
            if pipeline is not None:
                pipeline.run(stop)
            else:
                metrics.is_ready = True
                while not stop.wait(1.0):
                    metrics.record_progress()
        log.get_logger("incidents").info("stopped")

    return incidents


def _check_models(settings: IncidentsSettings) -> None:
    """Check that the model directory or the folder of models is given and exists, if incidents are made.

    Raises:
        ConfigError: Neither or both are given.
        ArtifactError: The directory or the folder does not exist or is not one.
    """
    from deformer_stream.errors import ConfigError

    if settings.deliver_only:
        return
    if settings.model is None and settings.models is None:
        raise ConfigError(
            "--model is missing: give the directory that deformer-train wrote, or --models, or --deliver-only"
        )
    if settings.model is not None and settings.models is not None:
        raise ConfigError("--model and --models exclude each other: give the one that consume uses")
    input_files.check_paths([], settings.model, models=settings.models)


def _connect(
    settings: IncidentsSettings,
    topics: IncidentTopics,
    metrics: DetectionMetrics,
    read_value: OutputReader,
    output_format: OutputFormat,
    stop: threading.Event,
    cleanup: ExitStack,
) -> IncidentPipeline:
    """Return the loop that makes incidents, connected to its topics, and log how the budget is kept.

    Args:
        settings: Options of the command.
        topics: The topics.
        metrics: Receives counts and timings.
        read_value: Converts values of messages to JSON.
        output_format: The format of the messages about incidents.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the functions that close the connections are added.

    Raises:
        ConfigError: The budget cannot be kept, or a topic is missing or unsuitable.
        Unavailable: No broker responds, or the topic of evidence does not exist and is not created.
    """
    from connectors.kafka import KafkaIncidentHistory, KafkaIncidentWriter, describe_incident_topics
    from connectors.kafka.state import STATE_TOPIC_SETTINGS
    from deformer_stream import log
    from deformer_stream.cli.kafka_cluster import connect_with_retries, get_start_patience, join_group, make_cluster
    from deformer_stream.codec.incident_state import check_incident_state
    from deformer_stream.runtime.incident_pipeline import IncidentPipeline
    from deformer_stream.runtime.incident_plan import PlanLoader, describe_plans

    cluster = make_cluster(settings)
    loader = PlanLoader(settings, settings.model, settings.models, can_repeat=settings.delivery != "exactly-once")
    plan_by_name = loader.load_all()
    for line in describe_plans(plan_by_name):
        log.get_logger("incidents").info("budget", kept=line)

    def connect(attempt: ExitStack) -> IncidentPipeline:
        """Connect to the brokers; the connections are closed if that fails."""
        num_partitions = _count_evidence_partitions(cluster, topics, settings.missing_topics == "create")
        spec_by_topic = describe_incident_topics(topics.incidents, topics.feedback)
        spec_by_topic[topics.state] = {"num_partitions": num_partitions, "configs": dict(STATE_TOPIC_SETTINGS)}
        source, delivery = join_group(
            cluster,
            settings,
            topics.evidence,
            f"{settings.group}-{topics.events}-incidents",
            spec_by_topic=spec_by_topic,
            state_topic=topics.state,
            verify_state=check_incident_state,
            max_poll_messages=MAX_POLL_MESSAGES,
            attempt=attempt,
        )
        return IncidentPipeline(
            source,
            KafkaIncidentWriter(topics.incidents, delivery, topics.events, output_format),
            plan_by_name,
            loader.load,
            metrics,
            KafkaIncidentHistory(cluster, topics.incidents, read_value),
            commit_interval=settings.commit_interval,
            snapshot_interval=settings.snapshot_interval,
            read_value=read_value,
        )

    return connect_with_retries(connect, get_start_patience(settings), stop, metrics.record_progress, cleanup)


def _count_evidence_partitions(cluster: KafkaCluster, topics: IncidentTopics, creates_missing: bool) -> int:
    """Return the number of partitions of the topic of evidence, which is created if it does not exist.

    `consume --evidence on` creates it as well. Which of the two processes starts first must not matter. It is created
    only if the topic of events exists, so that a mistyped --topic is reported.

    Args:
        cluster: The brokers.
        topics: The topics.
        creates_missing: Whether missing topics are created.

    Raises:
        MissingTopic: The topic does not exist, and is not created.
        Unavailable: No broker responds.
        ConfigError: This user may not read the topic.
    """
    from connectors.kafka import count_partitions, describe_evidence_topic, ensure_topics
    from connectors.kafka.ports import MissingTopic
    from connectors.kafka.topics import has_topic
    from deformer_stream import log
    from deformer_stream.errors import ConfigError

    try:
        return count_partitions(cluster, topics.evidence)
    except MissingTopic as error:
        missing = error
    failure = str(missing)
    if creates_missing and has_topic(cluster, topics.events):
        try:
            ensure_topics(cluster, describe_evidence_topic(topics.evidence), operation="READ")
        except ConfigError as error:
            failure = str(error)
        else:
            log.get_logger("incidents").info(
                "evidence_expected",
                topic=topics.evidence,
                message="the topic is new and holds no evidence yet: `deformer-stream consume --evidence on` writes it",
            )
            return count_partitions(cluster, topics.evidence)
    raise MissingTopic(f"{failure}; `deformer-stream consume --evidence on` creates it")
