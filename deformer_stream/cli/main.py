"""The composition root: reads settings, puts sources, sinks and the engine together, and lets the road run.

Here are the commands that take the road, `consume` and `replay`; `tools` has the others. Everything heavy is imported
inside the command that needs it.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deformer_stream.cli import factory, tools
from deformer_stream.cli_utils import (
    HELP,
    LazyGroup,
    debug_option,
    debugging,
    frozen_gc,
    reload_on_hangup,
    reserve_core,
    run,
    shorten_switch_interval,
    stop_on_signals,
)
from deformer_stream.runtime import process

if TYPE_CHECKING:
    from connectors.files import AlertLines, ExplanationsParquet, RecordsParquet, RejectedLines, ScoresParquet
    from deformer_stream.codec import Codec
    from deformer_stream.runtime.ports import EventSource, Sink
    from deformer_stream.settings import ConsumeSettings

    FileSink = TypeVar("FileSink", ScoresParquet, RecordsParquet, ExplanationsParquet, AlertLines, RejectedLines)


def _consume() -> click.Command:
    from deformer_stream.settings import ConsumeSettings, load, options

    @click.command("consume", context_settings=HELP)
    @options(ConsumeSettings)
    @debug_option
    def consume(config: Path | None, **flags: Any) -> None:
        """Score a stream of events and raise alerts while records are still open.

        Alerts go to the alerts topic and to standard output, refused events to the dead-letter topic; offsets are
        committed after both are safe. SIGINT and SIGTERM end it gracefully.
        """
        stop, asked = stop_on_signals(), reload_on_hangup()  # before what takes seconds to load
        reserve_core()
        shorten_switch_interval()
        process.limit_malloc_arenas()
        from deformer_stream import log
        from deformer_stream.runtime import metrics
        from deformer_stream.runtime.pipeline import Pipeline, WallClock
        from deformer_stream.runtime.reload import ModelReloader

        settings = load(ConsumeSettings, flags, config, "consume")
        log.configure(debugging())
        logger = log.get("consume")
        loaded, engine = factory.model(settings, settings.drift or math.inf)
        codec = factory.codec(loaded, settings, order="arrival")
        measures = metrics.Metrics()
        with ExitStack() as ends:
            source, sinks, finite = _live_edge(settings, codec, loaded.fingerprint, ends)
            if settings.http:
                ends.callback(metrics.serve(settings.http, measures))
            logger.info(
                "ready",
                model=loaded.fingerprint,
                alpha=factory.shown(settings.alpha),
                source=settings.topic or settings.source,
            )
            road = Pipeline(
                source,
                codec,
                engine,
                sinks,
                WallClock(),
                measures,
                finite,
                settings.max_wait,
                settings.commit_interval,
                settings.snapshot_interval,
                settings.open_records,
                ModelReloader(loaded, settings.device, asked, settings.compiled == "auto").take,
                lambda found: factory.codec(found, settings, order="arrival"),
            )
            with frozen_gc():
                totals = road.run(stop)
        logger.info("stopped", **totals.shown(), open=len(engine.records))

    return consume


def _live_edge(
    settings: ConsumeSettings, codec: Codec, model: str, ends: ExitStack
) -> tuple[EventSource, list[Sink], bool]:
    """Source, sinks, and whether the input has an end. `ends` closes them, the source last."""
    from connectors.files import AlertLines, check_no_overwrite, open_source

    source: EventSource
    sinks: list[Sink] = []
    servers, topic = _kafka_address(settings)
    if topic is None:
        check_no_overwrite([str(settings.source)], {"--alerts": settings.alerts})
        source = open_source(
            [str(settings.source)],
            codec.schema,
            fields=factory.fields(settings),
            batch_events=settings.max_poll_records,
            max_message_bytes=settings.max_message_bytes,
            windows=factory.windows(codec.schema, settings),
        )
        ends.callback(source.close)
    else:
        source, sink = _kafka_edge(settings, servers, topic, codec, model, ends)
        sinks.append(sink)
    if settings.alerts:
        sinks.append(AlertLines(settings.alerts, append=True))
        ends.callback(sinks[-1].close)
    return source, sinks, topic is None


def _kafka_address(settings: ConsumeSettings) -> tuple[str, str | None]:
    """Brokers and topic; no topic where the source is a file."""
    from urllib.parse import urlsplit

    from deformer_stream.errors import ConfigError

    url = settings.source
    if url is None or not url.startswith("kafka://"):
        return settings.bootstrap_servers, settings.topic
    servers, topic = urlsplit(url).netloc, urlsplit(url).path.strip("/")
    if not servers or not topic or "/" in topic:
        raise ConfigError(f"--source {url!r}: give kafka://HOST:PORT/TOPIC")
    return servers, topic


def _kafka_edge(
    settings: ConsumeSettings, servers: str, topic: str, codec: Codec, model: str, ends: ExitStack
) -> tuple[EventSource, Sink]:
    """Events from a topic; alerts and dead letters to others, delivered together with the positions."""
    import uuid

    from connectors.kafka import (
        Bounds,
        Delivery,
        KafkaSink,
        KafkaSource,
        StateTopic,
        ensure_topics,
        partitions_of,
        topics_of,
    )
    from deformer_stream.codec.state import verify
    from deformer_stream.errors import ConfigError

    security = settings.security()
    alerts = settings.alerts_topic or f"{topic}-alerts"
    dead = settings.dead_letter_topic or f"{topic}-dead-letter"
    state = settings.state_topic or f"{settings.group}-{topic}-state"
    if len({topic, alerts, dead, state}) < 4:
        raise ConfigError(
            "--topic, --alerts-topic, --dead-letter-topic and --state-topic must differ, or events would feed on "
            "themselves"
        )
    partitions = partitions_of(servers, topic, security)
    create = settings.missing_topics == "create"
    limits = ensure_topics(servers, topics_of(alerts, dead, state, partitions), security, create)
    name = f"{settings.group}-{settings.instance or uuid.uuid4().hex[:12]}"
    delivery = Delivery(servers, security, limits, name if settings.delivery == "exactly-once" else None)
    sink = KafkaSink(alerts, dead, codec, delivery)
    ends.callback(sink.close)
    source = KafkaSource(
        servers,
        topic,
        settings.group,
        settings.from_,
        security,
        max_poll_records=settings.max_poll_records,
        session_seconds=settings.session_timeout,
        delivery=delivery,
        state=StateTopic(servers, state, security, limits[state], verify),
        lost=settings.lost_state,
        model=model,
        instance=settings.instance,
        patience=settings.patience,
        bounds=Bounds.of(settings.max_message_bytes),
    )
    ends.callback(source.close)
    return source, sink


def _replay() -> click.Command:
    from deformer_stream.settings import ReplaySettings, load, options

    @click.command("replay", context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
    @options(ReplaySettings)
    @debug_option
    def replay(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Score historical logs exactly as the stream would have been.

        INPUT is a Parquet, CSV or JSON lines file, a folder of such, or - for JSON lines on standard input.
        """
        from deformer_stream import log
        from deformer_stream.progress import Progress
        from deformer_stream.runtime import metrics
        from deformer_stream.runtime.pipeline import EventClock, Pipeline

        settings = load(ReplaySettings, flags, config, "replay")
        log.configure(debugging())
        stop = stop_on_signals()
        from connectors.files import (
            AlertLines,
            ExplanationsParquet,
            RecordsParquet,
            RejectedLines,
            ScoresParquet,
            check_no_overwrite,
        )

        check_no_overwrite(inputs, settings.outputs())
        loaded, engine = factory.model(settings, settings.drift)
        codec, source = factory.tables(inputs, loaded, settings)
        with ExitStack() as ends:
            sinks: list[Sink] = []
            if settings.output:
                sinks.append(_kept(ScoresParquet(settings.output, loaded.schema), ends))
            if settings.records:
                sinks.append(_kept(RecordsParquet(settings.records), ends))
            if settings.alerts:
                sinks.append(_kept(AlertLines(settings.alerts), ends))
            if settings.explain:
                sinks.append(_kept(ExplanationsParquet(settings.explain), ends))
            if settings.rejected:
                sinks.append(_kept(RejectedLines(settings.rejected), ends))
            if source.ignored:
                log.get("replay").info("columns that are no features of the model", columns=list(source.ignored))
            with Progress("replay", source.total, "rows") as progress:
                road = Pipeline(
                    source, codec, engine, sinks, EventClock(), metrics.Metrics(), True, progress=progress.advance
                )
                totals = road.run(stop)
            for end in (*sinks, source):
                end.close()
        refused = ", ".join(f"{n} {reason}" for reason, n in totals.rejected.most_common())
        click.echo(
            f"{totals.events} events accepted, {totals.rejected.total()} refused{f' ({refused})' if refused else ''}, "
            f"{totals.closed} records, {totals.alerts} alerts at alpha {factory.shown(settings.alpha)}"
            + (", interrupted" if stop.is_set() else ""),
            err=True,
        )
        return 130 if stop.is_set() else 0

    return replay


def _calibrate() -> click.Command:
    from deformer_stream.settings import CalibrateSettings, load, options

    @click.command("calibrate", context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
    @options(CalibrateSettings)
    @debug_option
    def calibrate(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Calibrate a model anew on normal records, without training.

        INPUT is as for replay: tables or logs of records that are normal, and that training has not seen.
        """
        from deformer_stream import log, model_store, recalibration
        from deformer_stream.cli.config_report import aligned
        from deformer_stream.progress import Progress
        from deformer_stream.runtime import metrics
        from deformer_stream.runtime.pipeline import EventClock, Pipeline

        settings = load(CalibrateSettings, flags, config, "calibrate")
        log.configure(debugging())
        target = settings.out or settings.model
        model_store.check_target(target)
        stop = stop_on_signals()
        loaded = model_store.read(settings.model, settings.device, settings.compiled == "auto")
        engine = factory.engine(loaded, settings, (), settings.record_timeout)
        codec, source = factory.tables(inputs, loaded, settings)
        peaks, clock = recalibration.MaxStatisticSink(), EventClock()
        with Progress("calibrate", source.total, "rows") as progress:
            road = Pipeline(source, codec, engine, [peaks], clock, metrics.Metrics(), True, progress=progress.advance)
            totals = road.run(stop)
        source.close()
        if stop.is_set():
            click.echo("interrupted: nothing was written", err=True)
            return 130
        order = peaks.order(factory.order_of_rows(loaded, settings), settings.order)
        ties = settings.ties or loaded.calibration.tie_policy
        asked = settings.alpha, settings.group_by, settings.trim, settings.seed, ties
        found = recalibration.recalibrate(loaded, peaks, order, *asked)
        fingerprint = recalibration.written(found, loaded, target, settings.alpha)
        click.echo(aligned([("alpha", "before", "now", "in reach?"), *found.rows(settings.alpha)]))
        for line in found.groups():
            click.echo(line)
        refused = f", {totals.rejected.total()} readings refused" if totals.rejected else ""
        held = ", ties held" if ties == "hold" else ""
        click.echo(f"{found.records} records in {order} order{held}{refused}: {target} ({fingerprint})", err=True)
        return 0

    return calibrate


def _kept(sink: FileSink, ends: ExitStack) -> FileSink:
    """A failure discards what `close` has not made whole."""
    ends.callback(sink.discard)
    return sink


SUMMARIES = {
    "consume": "Score a live stream and raise alerts while records are open.",
    "replay": "Score historical logs through the same road.",
    "calibrate": "Calibrate a model anew on normal records, without training.",
    "produce": "Turn a table into an asynchronous stream of readings.",
    "impute": "Fill the gaps of a table, with intervals.",
    "sample": "Draw records that the model holds for normal.",
    "inspect": "Verify a model directory and show what is in it.",
    "config": "Print the options in force, secrets masked.",
    "demo": "A fleet of pumps, a minute of training, early alerts.",
}
BUILDERS = {
    "consume": _consume,
    "replay": _replay,
    "calibrate": _calibrate,
    "produce": tools.produce,
    "impute": tools.impute,
    "sample": tools.sample,
    "inspect": tools.inspect,
    "config": tools.config,
    "demo": tools.demo,
}


def _group() -> click.Group:
    from deformer_stream import __version__

    text = "Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete."
    group = LazyGroup(BUILDERS, SUMMARIES, name="deformer-stream", help=text, context_settings=HELP)
    click.version_option(__version__, prog_name="deformer-stream")(group)
    return group


def main() -> None:
    run(_group(), "deformer-stream")


def replay_main() -> None:
    """`deformer-replay` is `deformer-stream replay`."""
    run(_replay(), "deformer-replay")


if __name__ == "__main__":
    main()
