"""The commands that score events and raise alerts: consume (live) and replay (historical).

Each `build_…` function returns a command. The command reads its settings, connects a source of events, the engine and
sinks (outputs) to a pipeline, and runs the pipeline. Heavy packages are imported inside the command, so that `--help`
is printed without delay.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli import (
    codecs,
    file_runs,
    incident_files,
    input_files,
    label_report,
    mqtt,
    registry_clients,
    served_models,
)
from deformer_stream.cli.consume_topics import connect_to_kafka
from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import (
    HELP,
    INTERRUPTED_EXIT_CODE,
    HelpCommand,
    add_debug_option,
    is_debugging,
    reload_on_hangup,
    stop_on_signals,
)
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.runtime import process

if TYPE_CHECKING:
    import threading

    from connectors.schema_registry import SchemaRegistry
    from deformer_stream.cli.served_models import ServedModels
    from deformer_stream.codec import Codec
    from deformer_stream.codec.model_choice import ModelDecoder
    from deformer_stream.engine.engine_set import EngineSet
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.incident_sink import IncidentSink
    from deformer_stream.runtime.metrics import Metrics
    from deformer_stream.runtime.pipeline import Pipeline
    from deformer_stream.runtime.ports import EventSource, Sink
    from deformer_stream.runtime.record_labels import RecordLabels
    from deformer_stream.runtime.reload import ModelReload
    from deformer_stream.settings import ConsumeSettings, ReplaySettings


def build_consume() -> click.Command:
    """Return the command `consume`, which scores a live stream."""
    from deformer_stream.settings import ConsumeSettings, add_options, load_settings

    @click.command("consume", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["consume"], context_settings=HELP)
    @add_options(ConsumeSettings)
    @add_debug_option
    def consume(config: Path | None, **flags: Any) -> None:
        """Score a stream of events and raise alerts while records are still open.

        Alerts are written to the alerts topic and to standard output. Rejected events are written to the dead-letter
        topic. Offsets are committed after both are written. SIGINT and SIGTERM end the command after the current batch;
        a second signal, a second or more after the first one, ends it immediately.

        With --source mqtt://… it needs no Kafka: alerts are published to the MQTT broker, and messages are acknowledged
        after that.
        """
        # The handlers are set before the imports below, because these take seconds.
        stop, reload_requested = stop_on_signals(), reload_on_hangup()
        # Settings of the process that must precede these imports. The thread of the Kafka client needs a core and quick
        # access to the GIL, and threads must share memory that was freed.
        process.reserve_core()
        process.shorten_switch_interval()
        process.limit_malloc_arenas()
        settings = load_settings(ConsumeSettings, flags, config, "consume")
        mqtt.refuse_flags(flags, settings.mqtt_address is not None)
        is_file = _reads_file(settings)
        for flag, value in (("--format", settings.format), ("--output-format", settings.output_format)):
            if is_file and value != "json":
                raise ConfigError(f"{flag} {value} is for a Kafka topic, but --source is a file: leave it out")
        sources = [str(settings.source)] if is_file else []
        outputs = {"--alerts": settings.alerts, "--rejected": settings.rejected} if is_file else {}
        input_files.check_paths(sources, settings.model, outputs, settings.models)
        _score_stream(settings, stop, reload_requested)

    return consume


def _reads_file(settings: ConsumeSettings) -> bool:
    """Return whether `consume` reads a file or standard input, and not a broker."""
    return settings.mqtt_address is None and _find_kafka_topic(settings)[1] is None


def _score_stream(settings: ConsumeSettings, stop: threading.Event, reload_requested: threading.Event) -> None:
    """Connect the source, the engines and the sinks of `consume`, and score events until `stop` is set.

    Args:
        settings: Options of `consume`.
        stop: Set when the command must end.
        reload_requested: Set when the model directory must be read again.

    Raises:
        DeformerError: An option, the model or the source cannot be used.
    """
    # These imports take seconds.
    from deformer_stream import log
    from deformer_stream.runtime.http_server import start_http_server
    from deformer_stream.runtime.metrics import Metrics
    from deformer_stream.runtime.reload import ModelReload

    log.configure(is_debugging())
    logger = log.get_logger("consume")
    is_mqtt = settings.mqtt_address is not None
    has_kafka = _find_kafka_topic(settings)[1] is not None
    # With --drift off, drift is tracked for its metric, but not reported.
    drift_odds = math.inf if settings.drift == "off" else settings.drift or served_models.DEFAULT_DRIFT_ODDS
    decoding = mqtt.separate_field_names(settings) if is_mqtt else settings
    models = served_models.load_models(decoding, drift_odds, states_suspicious=has_kafka)
    engines, choice = models.make_engines(), models.choice
    metrics = Metrics()
    reloader = served_models.make_reloader(models, settings, reload_requested)
    with ExitStack() as cleanup:
        if settings.http:  # before a connection is made, which can wait for the end of an outage
            cleanup.callback(start_http_server(settings.http, metrics))
        registry = registry_clients.open_registry(settings, settings.patience, cleanup, metrics.record_progress, stop)
        translator = registry_clients.make_translator(settings, registry, settings.max_message_bytes)

        def make_codec(model: Artifact) -> Codec:
            """Return the codec for a model, whose units of features are replaced first."""
            served_models.replace_units(model, settings)
            if is_mqtt:  # also of a model that replaces another one
                mqtt.check_windows(settings, model.schema)
            if choice is not None:  # the codecs of several models share the translator
                return codecs.make_codec(model, decoding, order="arrival", model_field=choice.field)
            return codecs.make_codec(model, decoding, order="arrival", translator=translator)

        codec = models.combine_codecs(make_codec, decoding, translator)
        source, sinks = _connect(settings, models, codec, registry, metrics, stop, cleanup)
        logger.info(
            "ready",
            model=models.fingerprint,
            **({} if choice is None else {"models": len(models.artifact_by_name), "model_by": choice.field}),
            alpha=file_runs.format_alphas(settings.alpha),
            source=settings.topic or settings.source,
        )
        pipeline = _make_pipeline(
            settings,
            source,
            codec,
            engines,
            sinks,
            metrics,
            ModelReload(reloader.take_new_model, make_codec, models.make_engine),
        )
        # Garbage collection of the loaded modules and the model would only delay alerts.
        with process.frozen_gc():
            totals = pipeline.run(stop)
    logger.info("stopped", **totals.to_log_fields(), open=pipeline.num_open_records)


def _make_pipeline(
    settings: ConsumeSettings,
    source: EventSource,
    codec: ModelDecoder,
    engines: EngineSet,
    sinks: Sequence[Sink],
    metrics: Metrics,
    model_reload: ModelReload,
) -> Pipeline:
    """Return the pipeline of `consume`. The arguments are those of `Pipeline`, which the options complete."""
    from deformer_stream.runtime.pipeline import Pipeline
    from deformer_stream.runtime.timing import SystemTimeSink, WallClock

    clock = WallClock()
    is_file = _reads_file(settings)
    # A file is read as fast as possible, so the number of alerts per second says nothing.
    is_unlimited = is_file or settings.max_alert_rate in ("off", 0)
    return Pipeline(
        source,
        codec,
        engines,
        sinks=[SystemTimeSink(sink, clock) for sink in sinks],
        clock=clock,
        metrics=metrics,
        is_finite=is_file,
        max_wait=settings.max_wait,
        commit_interval=settings.commit_interval,
        snapshot_interval=settings.snapshot_interval,
        open_records=settings.open_records,
        model_reload=model_reload,
        # The terminal shows each alert once: as a line of `TerminalAlerts`.
        log_alerts=not (_is_terminal(settings.alerts) and sys.stderr.isatty()),
        send_drift_notices=settings.drift is not None,
        max_alert_rate=None if is_unlimited else float(settings.max_alert_rate),
        saves_event_times=settings.evidence == "on",
    )


def _connect(
    settings: ConsumeSettings,
    models: ServedModels,
    codec: ModelDecoder,
    registry: SchemaRegistry | None,
    metrics: Metrics,
    stop: threading.Event,
    cleanup: ExitStack,
) -> tuple[EventSource, list[Sink]]:
    """Open the source of events and the sinks of `consume`.

    Events come from a Kafka topic, an MQTT broker or a file. With Kafka, alerts and rejected events are written to
    other topics; with MQTT, alerts are published. With `--alerts`, alerts are also written to that file or to standard
    output, and with `--rejected`, rejected events to that file.

    Args:
        settings: Options of `consume`.
        models: The models.
        codec: Encodes alerts.
        registry: The schema registry, if the options name one.
        metrics: Receives what the source reports.
        stop: Set when the command must end.
        cleanup: An exit stack, to which the functions that close the source and the sinks are added.

    Raises:
        ConfigError: The options contradict each other.
        InputError: The file of `--source` cannot be read.
    """
    from connectors.files import AlertLines, ReadOptions, RejectedLines, TerminalAlerts, open_source
    from deformer_stream.tables.discovery import TABLES, has_ending
    from deformer_stream.tables.table import TableOptions

    source: EventSource
    sinks: list[Sink] = []
    servers, topic = _find_kafka_topic(settings)
    if settings.mqtt_address is not None:
        source, sinks = mqtt.connect_to_mqtt(settings, models, metrics, stop, cleanup)
    elif topic is None:  # `--source` names a file or standard input
        if settings.evidence == "on":
            raise ConfigError(
                "--evidence on writes to a Kafka topic, but --source is a file: use deformer-stream replay --evidence "
                "FILE"
            )
        models.check_same_form(settings)
        options = ReadOptions(
            field_names=codecs.get_field_names(settings),
            batch_events=settings.poll_messages,
            max_message_bytes=settings.max_message_bytes,
            window_assigner=codecs.make_window_assigner(next(iter(models.schema_by_name.values())), settings),
            model_column=None if models.choice is None else models.choice.field,
            table_options=TableOptions(time_format=codecs.make_time_format(settings)),
        )
        try:
            source = open_source([str(settings.source)], list(models.schema_by_name.values()), options)
        except InputError as error:
            if not has_ending(str(settings.source), TABLES):
                raise
            raise InputError(f"{error} (consume has no options for tables; deformer-stream replay has them)") from error
        cleanup.callback(source.close)
    else:
        source, sinks = connect_to_kafka(
            settings,
            servers,
            topic,
            codec=codec,
            model=models.fingerprint,
            registry=registry,
            metrics=metrics,
            stop=stop,
            cleanup=cleanup,
        )
    if settings.alerts:
        # A file keeps the alerts of earlier runs.
        alerts = TerminalAlerts() if _is_terminal(settings.alerts) else AlertLines(settings.alerts, append=True)
        sinks.append(alerts)
        cleanup.callback(alerts.close)
    if settings.rejected:
        rejected = RejectedLines(settings.rejected, append=True)
        sinks.append(rejected)
        cleanup.callback(rejected.close)
    return source, sinks


def _is_terminal(alerts: str) -> bool:
    """Return whether alerts are written to standard output and a person sees it, not a file or another program.

    Args:
        alerts: Value of the option `--alerts`.
    """
    return alerts == "-" and sys.stdout.isatty()


def _find_kafka_topic(settings: ConsumeSettings) -> tuple[str, str | None]:
    """Return the Kafka brokers and the topic from which `consume` reads events.

    Both come from `--source` if it is a kafka:// URL, otherwise from `--bootstrap-servers` and `--topic`.

    Returns:
        A pair. First, the brokers as host:port, comma-separated. Second, the topic. It is None if `--source` is a file
        or an MQTT broker; the brokers of Kafka are then not used.

    Raises:
        ConfigError: The kafka:// URL of `--source` does not name a broker and exactly one topic.
    """
    from urllib.parse import urlsplit

    url = settings.source
    if url is None or not url.startswith("kafka://"):
        # The settings permit only one of --source and --topic, so the topic is None if --source is something else.
        return settings.bootstrap_servers, settings.topic
    # In kafka://HOST:PORT/TOPIC the topic is the path of the URL.
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an unclosed bracket
        parts = urlsplit("")
    servers, topic = parts.netloc, parts.path.strip("/")
    # A name of a topic contains no slash.
    if not servers or not topic or "/" in topic or parts.query or parts.fragment:
        raise ConfigError(f"--source {url!r} does not name a broker and one topic; write kafka://HOST:PORT/TOPIC")
    return servers, topic


def build_replay() -> click.Command:
    """Return the command `replay`, which scores historical logs."""
    from deformer_stream.settings import PathText, ReplaySettings, add_options, load_settings, to_flag

    @click.command("replay", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["replay"], context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=PathText())
    @add_options(ReplaySettings)
    @add_debug_option
    def replay(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Score historical logs exactly as a stream of the same events would have been scored.

        INPUT is a Parquet, CSV or JSON lines file, a folder of such files, a quoted pattern such as 'logs/*.csv', or -
        for JSON lines on standard input. With --incidents, INPUT can also be a file that --evidence wrote; its records
        are not scored again.

        An output file gets its name when it is complete. Until then its name ends in .part. Ctrl-C leaves the results
        so far under that name, and keeps the file of an earlier run.

        With --output-dir, the input is divided into shards, which --workers processes score. The same command continues
        a run that was interrupted.
        """
        settings = load_settings(ReplaySettings, flags, config, "replay")
        outputs = settings.get_output_by_flag() if settings.output_dir is None else {}
        input_files.check_paths(inputs, settings.model, outputs, settings.models)
        stop = stop_on_signals()  # before the imports below, because these take seconds
        from deformer_stream import log

        log.configure(is_debugging())
        if incident_files.has_evidence(inputs):
            given_flags = {to_flag(field) for field, value in flags.items() if value is not None}
            return incident_files.replay_evidence(inputs, settings, given_flags, stop)
        if settings.output_dir is not None:
            from deformer_stream.cli.shards.replay import replay_in_shards

            return replay_in_shards(inputs, settings, settings.output_dir, flags["label"] is not None, stop)
        return _replay_files(inputs, settings, flags["label"] is not None, stop)

    return replay


def _replay_files(inputs: Sequence[str], settings: ReplaySettings, is_label_flag: bool, stop: threading.Event) -> int:
    """Score files in this process, and print what became of them.

    Args:
        inputs: Files, folders and patterns of files; `-` is standard input.
        settings: Options of `replay`.
        is_label_flag: Whether the label was given on the command line.
        stop: Set when the command must end.

    Returns:
        The exit code of the command.

    Raises:
        DeformerError: An option, a file or the model cannot be used.
    """
    drift_odds = None if settings.drift == "off" else settings.drift or served_models.DEFAULT_DRIFT_ODDS
    models = served_models.load_models(settings, drift_odds, settings.suspicious_records is not None)
    engines = models.make_engines()
    given, settings = settings, label_report.adopt_training_label(settings, models)
    codec, source = input_files.open_inputs(inputs, models, settings)
    settings = label_report.drop_missing_label(settings, given, source, is_label_flag)
    labels = file_runs.make_record_labels(settings)
    with ExitStack() as cleanup:
        outputs = _ReplayOutputs(settings, models, labels, cleanup)
        file_runs.log_columns(source.ignored_columns, source.missing_columns)
        send_drift_notices = settings.drift is not None
        totals, num_rows = file_runs.run_on_files(
            "replay", source, codec, engines, outputs.sinks, stop, send_drift_notices, labels
        )
        is_interrupted = stop.is_set()
        outputs.close(is_interrupted)
        source.close()
    warnings = totals.describe_warnings()
    if not (totals.events or totals.rejected or is_interrupted):
        warnings.append(file_runs.describe_empty_input(settings.where, num_rows))
    label_warnings, error = outputs.print_label_report(given)
    summary = file_runs.summarize_totals(totals, settings.alpha, is_interrupted, [*warnings, *label_warnings])
    for line in (summary, *outputs.summarize()):
        click.echo(line, err=True)
    if is_interrupted:
        return INTERRUPTED_EXIT_CODE
    if error is not None:
        raise error
    return file_runs.choose_exit_code(totals.events, totals.rejected.total())


class _ReplayOutputs:
    """The sinks and the output files of `replay`, and what is printed about them.

    Args:
        settings: Options of `replay`.
        models: The models.
        labels: Finds the labels of records, None if labels are not read.
        cleanup: An exit stack, to which the functions that discard the files after an error are added.

    Attributes:
        sinks: All sinks of the pipeline.
    """

    def __init__(
        self, settings: ReplaySettings, models: ServedModels, labels: RecordLabels | None, cleanup: ExitStack
    ) -> None:
        self._settings = settings
        file_sinks = file_runs.open_replay_sinks(settings, models.schema_by_name, cleanup, models.has_faults, labels)
        self.sinks: list[Sink] = [*file_sinks]
        self._files: list[file_runs.OutputFile] = [*file_sinks]
        self._partial_paths: list[Path] = []
        self._outcome_sink = None if labels is None else label_report.open_outcome_sink(settings, labels)
        if self._outcome_sink is not None:
            self.sinks.append(self._outcome_sink)
        self._incident_sink: IncidentSink | None = None
        if settings.incidents:
            self._incident_sink, incident_lines = incident_files.open_incident_sink(settings, cleanup)
            self.sinks.append(self._incident_sink)
            self._files.append(incident_lines)

    def close(self, is_interrupted: bool) -> None:
        """Complete the output files, or leave them under temporary names if the run was interrupted.

        After an error this method is not called, and the exit stack discards the files.
        """
        for sink in (self._outcome_sink, self._incident_sink):
            if sink is not None:
                sink.close()
        self._partial_paths = file_runs.close_outputs(self._files, is_interrupted)

    def print_label_report(self, given: ReplaySettings) -> tuple[list[str], InputError | None]:
        """Print what became of the records of each label, if labels are read.

        Args:
            given: The options without the label of the training.

        Returns:
            What `label_report.check_normal_label` returns: warnings, and the error with which the command ends.
        """
        if self._outcome_sink is None:
            return [], None
        report = self._outcome_sink.outcomes.summarize()
        click.echo(label_report.format_label_report(report, self._settings.alpha), err=True)
        return label_report.check_normal_label(report, self._settings, given)

    def summarize(self) -> list[str]:
        """Return lines about the incidents, and about files under temporary names."""
        lines = []
        if self._incident_sink is not None:
            lines.append(incident_files.summarize_incidents(self._incident_sink))
        if self._partial_paths:
            lines.append(file_runs.describe_partial_files(self._partial_paths))
        return lines
