"""The commands beside the road: produce, impute, sample, inspect, config, demo.

Each function builds one command. Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli_utils import HELP, debug_option, debugging, interrupted_by_termination, stop_on_signals

if TYPE_CHECKING:
    from deformer_stream.codec.encode_events import Packing

SECTIONS = ["consume", "replay", "calibrate", "produce", "impute", "sample", "demo"]
"""The commands with options of `settings`; named here too, since importing them takes time."""


def produce() -> click.Command:
    from deformer_stream.settings import ProduceSettings, load, options

    @click.command("produce", context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
    @options(ProduceSettings)
    @debug_option
    def command(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Turn a table into an asynchronous stream of readings."""
        from connectors.files import check_no_overwrite, events_of
        from deformer_stream import log, model_store
        from deformer_stream.progress import Progress

        settings = load(ProduceSettings, flags, config, "produce")
        log.configure(debugging())
        stop = stop_on_signals()
        check_no_overwrite(inputs, {"--output": settings.output})
        features = None
        if settings.model is not None:
            rows = model_store.read_manifest(settings.model)["features"]
            features = [str(row.get("sensor") or row["name"]) for row in rows]
        events = events_of(
            list(inputs),
            shuffle_within=settings.shuffle_within,
            seed=settings.seed,
            layout=settings.layout,
            record_column=settings.record_column,
            time_column=settings.time_column,
            exclude=[name.strip() for name in settings.exclude.split(",") if name.strip()],
            features=features,
            prefix=settings.record_prefix,
        )
        going = itertools.takewhile(lambda _: not stop.is_set(), events)
        with Progress("produce", None, "events") as progress:
            if settings.topic is None:
                sent = _write_lines(str(settings.output), going, settings.rate, progress.advance, settings.payload)
            else:
                from connectors.kafka import produce as send

                # Readings keep their own time in the message; the broker's timestamp is that of sending.
                keyed = ((key or None, value, None) for key, value, _ in going)
                sent = send(
                    settings.bootstrap_servers,
                    settings.topic,
                    keyed,
                    settings.rate,
                    settings.partitions,
                    settings.security(),
                    progress.reach,
                    settings.payload,
                )
        click.echo(f"{sent} events sent to {settings.topic or settings.output}", err=True)
        return 130 if stop.is_set() else 0

    return command


def _write_lines(
    path: str,
    events: Iterable[tuple[bytes, bytes, int]],
    rate: float | None,
    advance: Callable[[int], None],
    packing: Packing,
) -> int:
    """Events as lines of a file, or of standard output for "-"; returns how many. rate: per second."""
    from connectors.files import LinesSink
    from deformer_stream.codec.encode_events import packed, together
    from deformer_stream.runtime.timing import limit_rate

    lines, sent = LinesSink(path), 0
    keyed = ((key or None, value) for key, value, _ in limit_rate(events, rate, lines.flush))
    try:
        for message in packed(keyed, packing, together(rate)):
            lines.lines([message.value])
            sent += message.readings
            advance(message.readings)
    finally:
        lines.close()
    return sent


def impute() -> click.Command:
    from deformer_stream.settings import ImputeSettings, load, options

    @click.command("impute", context_settings=HELP)
    @click.argument("table", metavar="INPUT", type=click.Path(path_type=Path))
    @options(ImputeSettings)
    @debug_option
    def command(table: Path, config: Path | None, **flags: Any) -> None:
        """Fill the nulls of a wide table (Parquet, CSV) given what is there, with intervals or joint draws."""
        interrupted_by_termination()
        from connectors.files import queries
        from deformer_stream import log, model_store
        from deformer_stream.progress import Progress

        settings = load(ImputeSettings, flags, config, "impute")
        log.configure(debugging())
        model = model_store.read(settings.model, settings.device).model
        with Progress("impute", None, "rows") as progress:
            how = queries.Filling(
                settings.interval, settings.estimate, settings.quantiles or (), settings.draws, settings.seed
            )
            cells = queries.impute(table, settings.output, model, how, progress.advance)
        times = f", {settings.draws} times each" if settings.draws else ""
        click.echo(f"{cells} missing values filled in {progress.done} rows{times}: {settings.output}", err=True)

    return command


def sample() -> click.Command:
    from deformer_stream.settings import SampleSettings, load, options

    @click.command("sample", context_settings=HELP)
    @options(SampleSettings)
    @debug_option
    def command(config: Path | None, **flags: Any) -> None:
        """Draw records that the model holds for normal, in raw units."""
        interrupted_by_termination()
        from connectors.files import queries
        from deformer_stream import log, model_store
        from deformer_stream.progress import Progress

        settings = load(SampleSettings, flags, config, "sample")
        log.configure(debugging())
        model = model_store.read(settings.model, settings.device).model
        with Progress("sample", settings.count, "records") as progress:
            queries.sample(settings.output, model, settings.count, settings.seed, progress.advance)
        click.echo(f"{settings.count} records drawn: {settings.output}", err=True)

    return command


def inspect() -> click.Command:
    @click.command("inspect", context_settings=HELP)
    @click.argument("directory", type=click.Path(path_type=Path))
    @click.option("--json", "as_json", is_flag=True, help="Print the whole manifest.")
    @debug_option
    def command(directory: Path, as_json: bool) -> None:
        """Verify a model directory and show what is in it."""
        import json

        from deformer_stream import model_store
        from deformer_stream.cli.model_summary import describe

        loaded = model_store.read(directory)
        if as_json:
            click.echo(json.dumps(loaded.manifest, indent=1))
        else:
            describe(loaded)

    return command


def config() -> click.Command:
    @click.command("config", context_settings=HELP)
    @click.argument(
        "name",
        metavar="[COMMAND]",
        required=False,
        type=click.Choice(SECTIONS),
    )
    @click.option(
        "--config", "path", type=click.Path(path_type=Path), envvar="DEFORMER_CONFIG", help="TOML file with options."
    )
    @click.option("--markdown", is_flag=True, help="Print the table of all options instead.")
    @debug_option
    def command(name: str | None, path: Path | None, markdown: bool) -> None:
        """Print the options in force and where each comes from; secrets are masked."""
        from deformer_stream.cli.config_report import as_markdown, in_force
        from deformer_stream.settings import COMMANDS

        if markdown:
            click.echo(as_markdown())
            return
        for section in [name] if name else COMMANDS:
            lines = in_force(COMMANDS[section], path, section)
            click.echo("\n".join([f"[{section}]", *lines, ""]))

    return command


def demo() -> click.Command:
    from deformer_stream.settings import DemoSettings, load, options

    @click.command("demo", context_settings=HELP)
    @options(DemoSettings)
    @debug_option
    def command(config: Path | None, **flags: Any) -> int:
        """Simulate a fleet of pumps, train for a minute, and watch alerts fall before records are complete."""
        settings = load(DemoSettings, flags, config, "demo")
        from deformer_stream.demo import demo as show

        return show.run(settings.output, settings.seed, f"{settings.train_time:.12g}s")

    return command
