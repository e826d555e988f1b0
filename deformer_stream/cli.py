"""The composition root: reads settings, puts sources, sinks and the engine together, and lets the road run.

The only importer of connectors. Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.command import LazyGroup, debug_option, debugging, run

if TYPE_CHECKING:
    from deformer_stream.artifact import Artifact
    from deformer_stream.codec import Codec
    from deformer_stream.core.engine import Engine
    from deformer_stream.ports import EventSource, Sink
    from deformer_stream.settings import ConsumeSettings, ReplaySettings

HELP = {"help_option_names": ["-h", "--help"]}


def _device(name: str) -> str:
    import torch

    from deformer_stream.errors import ConfigError

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no usable GPU is there; use --device cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _open_model(settings: ConsumeSettings | ReplaySettings) -> tuple[Artifact, Engine]:
    """The model and an engine; says so when alpha is out of reach."""
    from deformer_stream import artifact, log
    from deformer_stream.core.engine import Engine, Limits

    loaded = artifact.read(settings.model, _device(settings.device))
    if settings.alpha < loaded.calibration.smallest_p:
        n = len(loaded.calibration.scores)
        log.get("model").warning(
            f"alpha {settings.alpha:g} is out of reach: with {n} calibration records the smallest p-value is "
            f"{loaded.calibration.smallest_p:.2g}, so no alert can be raised; calibrate on at least "
            f"{int(1 / settings.alpha)} records or raise --alpha"
        )
    timeout = settings.record_timeout
    limits = Limits(None if timeout is None else round(timeout * 1e6), settings.max_open_records, settings.cache_memory)
    return loaded, Engine(loaded.model, loaded.calibration, loaded.fingerprint, settings.alpha, limits)


def _codec(loaded: Artifact, settings: ConsumeSettings | ReplaySettings, **extra: Any) -> Codec:
    from deformer_stream.codec import Codec, Fields

    fields = Fields(
        record=settings.record_field,
        feature=settings.feature_field,
        value=settings.value_field,
        values=settings.values_field,
        time=settings.time_field,
    )
    return Codec(loaded.schema, fields, max_message_bytes=settings.max_message_bytes, **extra)


def _stop_on_signals() -> threading.Event:
    """SIGINT and SIGTERM ask for a graceful end; a second one ends at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


def _consume() -> click.Command:
    from deformer_stream.settings import ConsumeSettings, load, options

    @click.command("consume", context_settings=HELP)
    @options(ConsumeSettings)
    @debug_option
    def consume(config: Path | None, **flags: Any) -> None:
        """Score a stream of events and raise alerts while records are still open.

        Alerts go to the alerts topic and to standard output, refused events to the dead-letter topic; offsets are committed
        after both are safe. SIGINT and SIGTERM end it gracefully.
        """
        from deformer_stream import log, metrics
        from deformer_stream.runtime import Road, WallClock

        settings = load(ConsumeSettings, flags, config, "consume")
        log.configure(debugging())
        logger = log.get("consume")
        stop = _stop_on_signals()
        loaded, engine = _open_model(settings)
        codec = _codec(loaded, settings, order="arrival")
        measures = metrics.Metrics()
        source, sinks, finite = _live_edge(settings, codec)
        stop_http = metrics.serve(settings.http, measures) if settings.http else None
        logger.info("ready", model=loaded.fingerprint, alpha=settings.alpha, source=settings.topic or settings.source)
        road = Road(source, codec, engine, sinks, WallClock(), measures, finite, settings.max_wait, settings.commit_interval)
        try:
            totals = road.run(stop)
        finally:
            for end in (*sinks, source):
                end.close()
            if stop_http is not None:
                stop_http()
        logger.info("stopped", events=totals.events, alerts=totals.alerts, rejected=totals.rejected, open=len(engine.records))

    return consume


def _live_edge(settings: ConsumeSettings, codec: Codec) -> tuple[EventSource, list[Sink], bool]:
    """Source, sinks, and whether the input has an end."""
    from urllib.parse import urlsplit

    from deformer_stream.errors import ConfigError

    servers, topic, source = settings.bootstrap_servers, settings.topic, settings.source
    if source is not None and source.startswith("kafka://"):
        url = urlsplit(source)
        servers, topic = url.netloc, url.path.strip("/")
        if not servers or not topic:
            raise ConfigError(f"--source {source!r}: give kafka://HOST:PORT/TOPIC")
    from connectors.files import AlertLines

    sinks: list[Sink] = [AlertLines(settings.alerts if settings.alerts is not None else "-")] if settings.alerts != "" else []
    if topic is None:
        from connectors.files import open_source

        return open_source([str(source)], codec.schema), sinks, True
    from connectors.kafka import KafkaSink, KafkaSource

    security = settings.security()
    alerts = settings.alerts_topic or f"{topic}-alerts"
    dead = settings.dead_letter_topic or f"{topic}-dead-letter"
    kafka = KafkaSource(servers, topic, settings.group, settings.from_, security, max_poll_records=settings.max_poll_records)
    return kafka, [KafkaSink(servers, alerts, dead, codec, security, partitions=kafka.partitions), *sinks], False


def _replay() -> click.Command:
    from deformer_stream.settings import ReplaySettings, load, options

    @click.command("replay", context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
    @options(ReplaySettings)
    @debug_option
    def replay(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> None:
        """Score historical logs (Parquet, JSON lines, CSV; - is standard input) exactly as the stream would have been."""
        from deformer_stream import log, metrics
        from deformer_stream.progress import Progress
        from deformer_stream.runtime import EventClock, Road

        settings = load(ReplaySettings, flags, config, "replay")
        log.configure(debugging())
        stop = _stop_on_signals()
        loaded, engine = _open_model(settings)
        from connectors.files import AlertLines, RecordsParquet, RejectedLines, ScoresParquet, open_source

        order = settings.order or (loaded.calibration.order if loaded.calibration.order in ("random", "schema") else "arrival")
        source = open_source(
            list(inputs), loaded.schema, layout=settings.layout, order=settings.order or "arrival", seed=settings.seed,
            record_column=settings.record_column,
        )  # fmt: skip
        codec = _codec(loaded, settings, order=order, seed=settings.seed)
        sinks: list[Sink] = []
        if settings.output:
            sinks.append(ScoresParquet(settings.output, loaded.schema))
        if settings.records:
            sinks.append(RecordsParquet(settings.records))
        if settings.alerts:
            sinks.append(AlertLines(settings.alerts))
        if settings.rejected:
            sinks.append(RejectedLines(settings.rejected))
        with Progress("replay", source.total, "rows") as progress:
            road = Road(source, codec, engine, sinks, EventClock(), metrics.Metrics(), True, progress=progress.advance)
            totals = road.run(stop)
        for end in (*sinks, source):
            end.close()
        click.echo(
            f"{totals.events} events accepted, {totals.rejected} refused, {totals.closed} records, {totals.alerts} alerts"
            f" at alpha {settings.alpha:g}" + (" (interrupted)" if stop.is_set() else ""),
            err=True,
        )

    return replay


def _produce() -> click.Command:
    from deformer_stream.settings import ProduceSettings, load, options

    @click.command("produce", context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
    @options(ProduceSettings)
    @debug_option
    def produce(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> None:
        """Turn a table into an asynchronous stream of single readings."""
        from connectors.produce import send

        settings = load(ProduceSettings, flags, config, "produce")
        sent = send(list(inputs), settings, _stop_on_signals())
        click.echo(f"{sent} events sent to {settings.topic or settings.output}", err=True)

    return produce


def _inspect() -> click.Command:
    @click.command("inspect", context_settings=HELP)
    @click.argument("directory", type=click.Path(path_type=Path))
    @click.option("--json", "as_json", is_flag=True, help="Print the whole manifest.")
    @debug_option
    def inspect(directory: Path, as_json: bool) -> None:
        """Verify a model directory and show what is in it."""
        import json

        from deformer_stream import artifact
        from deformer_stream.inspect import describe

        loaded = artifact.read(directory)
        if as_json:
            click.echo(json.dumps(loaded.manifest, indent=1))
        else:
            describe(loaded)

    return inspect


def _config() -> click.Command:
    @click.command("config", context_settings=HELP)
    @click.argument("command", required=False, type=click.Choice(["consume", "replay", "produce"]))
    @click.option("--config", "path", type=click.Path(path_type=Path), envvar="DEFORMER_CONFIG", help="TOML file with options.")
    @debug_option
    def config(command: str | None, path: Path | None) -> None:
        """Print the options in force and where each comes from; secrets are masked."""
        from deformer_stream.settings import COMMANDS, in_force

        for name in [command] if command else COMMANDS:
            click.echo(f"[{name}]")
            for line in in_force(COMMANDS[name], path, name):
                click.echo(line)
            click.echo()

    return config


def _demo() -> click.Command:
    @click.command("demo", context_settings=HELP)
    @click.option("--output", type=click.Path(path_type=Path), default=Path("demo-output"), show_default=True, help="Where to write.")
    @click.option("--seed", type=int, default=0, show_default=True)
    @click.option("--train-time", default="60s", show_default=True, help="Time to train.")
    @debug_option
    def demo(output: Path, seed: int, train_time: str) -> int:
        """Simulate a fleet of pumps, train for a minute, and watch alerts fall before records are complete."""
        from deformer_stream import demo as show

        return show.run(output, seed, train_time)

    return demo


SUMMARIES = {
    "consume": "Score a live stream and raise alerts while records are open.",
    "replay": "Score historical logs through the same road.",
    "produce": "Turn a table into an asynchronous stream of readings.",
    "inspect": "Verify a model directory and show what is in it.",
    "config": "Print the options in force, secrets masked.",
    "demo": "A fleet of pumps, a minute of training, early alerts.",
}
BUILDERS = {
    "consume": _consume,
    "replay": _replay,
    "produce": _produce,
    "inspect": _inspect,
    "config": _config,
    "demo": _demo,
}


def _group() -> click.Group:
    from deformer_stream import __version__

    group = LazyGroup(BUILDERS, SUMMARIES, name="deformer-stream", help=__import__("deformer_stream").__doc__, context_settings=HELP)
    click.version_option(__version__, prog_name="deformer-stream")(group)
    return group


def main() -> None:
    run(_group(), "deformer-stream")


def replay_main() -> None:
    """`deformer-replay` is `deformer-stream replay`."""
    run(_replay(), "deformer-replay")


if __name__ == "__main__":
    sys.exit(main())
