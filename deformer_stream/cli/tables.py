"""The commands for tables: produce (send a table as a stream), impute (fill missing values), sample (draw records).

Each `build_…` function returns a command. Heavy packages are imported inside the command, so that `--help` is printed
without delay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli.input_files import check_paths
from deformer_stream.cli_utils import (
    HELP,
    INTERRUPTED_EXIT_CODE,
    HelpCommand,
    add_debug_option,
    interrupt_on_termination,
    is_debugging,
    stop_on_signals,
)

if TYPE_CHECKING:
    from connectors.files.table_events import SendOptions
    from deformer_stream.codec.encode_events import Packing
    from deformer_stream.progress import Progress
    from deformer_stream.settings import ProduceSettings


def build_produce() -> click.Command:
    """Return the command `produce`, which sends a table as a stream."""
    from deformer_stream.settings import PathText, ProduceSettings, add_options, load_settings

    @click.command("produce", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["produce"], context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=PathText())
    @add_options(ProduceSettings)
    @add_debug_option
    def command(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> int:
        """Send the cells of a table one by one, as a stream of readings.

        INPUT is a Parquet or CSV table, a JSON lines file, a folder of such files, or a quoted pattern such as
        'logs/*.csv'.
        """
        settings = load_settings(ProduceSettings, flags, config, "produce")
        missing_model = None
        is_model_flag = flags["model"] is not None or flags["models"] is not None
        model_path = settings.models or (settings.model and settings.model / "manifest.json")
        if model_path is not None and not is_model_flag and not model_path.exists():
            # A file of options for several commands may name a model that was not trained yet. Nothing is scored here.
            missing_model = settings.models or settings.model
            settings = settings.model_copy(update={"model": None, "models": None})
        check_paths(inputs, settings.model, {"--output": settings.output}, settings.models)
        from connectors.files import iterate_events
        from connectors.files.table_events import SkippedRows
        from deformer_stream import log
        from deformer_stream.progress import Progress

        log.configure(is_debugging())
        if missing_model is not None:
            log.get_logger("produce").info(
                "model_not_found", model=str(missing_model), remedy="all columns are sent; --exclude leaves columns out"
            )
        stop = stop_on_signals()
        skipped_rows = SkippedRows()
        # A signal sets `stop`; then no further event is read, and the events so far are sent completely.
        options = _choose_send_options(settings)
        events = itertools.takewhile(lambda _: not stop.is_set(), iterate_events(inputs, options, skipped_rows))
        model_field = options.form.model_field
        with Progress("produce", None, "events") as progress:
            if settings.topic is None:
                num_sent = _write_lines(
                    str(settings.output), events, settings.rate, progress.advance, settings.payload, model_field
                )
            else:
                num_sent = _send_to_kafka(events, settings, settings.topic, progress, model_field)
        skipped = f"; {skipped_rows.describe()}"
        click.echo(
            f"{num_sent} events sent to {settings.topic or settings.output}{skipped if skipped_rows.num_rows else ''}",
            err=True,
        )
        return INTERRUPTED_EXIT_CODE if stop.is_set() else 0

    return command


def _choose_send_options(settings: ProduceSettings) -> SendOptions:
    """Return what is sent of the tables, and how.

    If models are set, only their features are sent.

    Raises:
        ArtifactError: A model directory cannot be read, or the folder of models has none.
        ConfigError: The field that determines the model is part of a reading.
    """
    from connectors.files import MessageForm, SendOptions
    from deformer_stream.incidents.device import extract_device
    from deformer_stream.model_set import find_models
    from deformer_stream.model_store import read_manifest
    from deformer_stream.tables.table import TableOptions

    field, path_by_model = settings.model_by, {} if settings.model is None else {"": settings.model}
    if settings.models is not None:
        default_field, path_by_model = find_models(settings.models)
        field = field or default_field
    manifest_by_model = {name: read_manifest(path) for name, path in path_by_model.items()}
    # A model of windows has several features per sensor (one per time slot). The input has the sensor's column.
    features_by_model = {
        name: frozenset(str(entry.get("sensor") or entry["name"]) for entry in manifest["features"])
        for name, manifest in manifest_by_model.items()
    }
    has_model_windows = any("window" in manifest for manifest in manifest_by_model.values())
    return SendOptions(
        shuffle_within=settings.shuffle_within,
        seed=settings.seed,
        layout=settings.layout,
        record_column=settings.record_column,
        time_column=settings.time_column,
        exclude=settings.exclude,
        features=frozenset().union(*features_by_model.values()) if features_by_model else None,
        prefix=settings.record_prefix,
        table_options=TableOptions.from_settings(settings),
        device_column=settings.device_column,
        has_windows=settings.device_column is not None or has_model_windows,
        form=MessageForm(
            partial(extract_device, separator=settings.device_by) if settings.key == "device" else None,
            field,
            features_by_model if settings.models is not None and field is not None else None,
        ),
    )


def _send_to_kafka(
    events: Iterable[tuple[bytes, bytes, int]],
    settings: ProduceSettings,
    topic: str,
    progress: Progress,
    model_field: str | None,
) -> int:
    """Send events to a Kafka topic and return their number.

    Args:
        events: For each reading, the message key, the JSON message, and the event time in microseconds
            since 1970.
        settings: Options of `produce`: brokers, rate, and how readings are packed into messages.
        topic: The topic, which is created if it does not exist.
        progress: The progress bar.
        model_field: The field of messages that determines their model, None if there is none.
    """
    from connectors.kafka import produce
    from deformer_stream.cli.kafka_cluster import make_cluster

    # An empty key means no key. The message itself contains the event time of the reading, so the timestamp of the
    # message is None: the broker then sets the time of sending.
    messages = ((key or None, value, None) for key, value, _ in events)
    return produce(
        make_cluster(settings),
        topic,
        messages,
        settings.rate,
        settings.partitions,
        progress.set_done,
        settings.payload,
        model_field,
    )


def _write_lines(
    path: str,
    events: Iterable[tuple[bytes, bytes, int]],
    rate: float | None,
    advance: Callable[[int], None],
    packing: Packing,
    model_field: str | None,
) -> int:
    """Write events as lines of a file and return their number.

    Args:
        path: The file, or `-` for standard output.
        events: For each reading, the message key, the JSON message, and the event time in microseconds
            since 1970.
        rate: Events per second; None for no limit.
        advance: A function that is called with the number of readings in each line, to advance a progress bar.
        packing: What a line contains: one reading ("json"), or several readings of a record ("json-many").
        model_field: The field of messages that determines their model, None if there is none.
    """
    from connectors.files import LinesSink
    from deformer_stream.codec.encode_events import choose_group_size, pack_readings
    from deformer_stream.runtime.timing import limit_rate

    lines, num_sent = LinesSink(path, is_live=True), 0
    # `limit_rate` flushes before it waits, so that a reader of the file receives the lines on time.
    keyed_readings = ((key or None, value) for key, value, _ in limit_rate(events, rate, lines.flush))
    try:
        for message in pack_readings(keyed_readings, packing, choose_group_size(rate), model_field=model_field):
            lines.write_lines([message.value])
            num_sent += message.num_readings
            advance(message.num_readings)
    finally:
        lines.close()
    return num_sent


def build_impute() -> click.Command:
    """Return the command `impute`, which fills the missing values of a table."""
    from deformer_stream.settings import ImputeSettings, PathText, add_options, load_settings

    @click.command("impute", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["impute"], context_settings=HELP)
    @click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=PathText())
    @add_options(ImputeSettings)
    @add_debug_option
    def command(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> None:
        """Fill the missing values of a table, given the other values of each row.

        Each missing value is replaced by an estimate with an interval, or each row by several random completions
        (--draws). INPUT is a Parquet or CSV table in which each row is a record, a folder of such files, or a quoted
        pattern such as 'logs/*.csv'. Several tables must have the same columns; the output is one table.

        If the model is for irregular readings, a row is a reading with a time. A row without a value requests the value
        of its sensor at its time, given the other readings of its record.
        """
        interrupt_on_termination()
        settings = load_settings(ImputeSettings, flags, config, "impute")
        check_paths(inputs, settings.model)  # a table may be filled in place
        # These imports take seconds.
        from connectors.files import imputation, reading_imputation
        from connectors.files.imputed_tables import ImputeOptions
        from deformer_stream import log, model_store
        from deformer_stream.counts import format_count
        from deformer_stream.progress import Progress
        from deformer_stream.tables.table import TableOptions

        log.configure(is_debugging())
        model = model_store.read(settings.model, settings.device).model
        with Progress("impute", None, "rows") as progress:
            options = ImputeOptions(
                settings.interval, settings.estimate, settings.quantiles or (), settings.draws, settings.seed
            )
            table_options = TableOptions.from_settings(settings)
            if model.schema.reading_times is None:
                num_filled = imputation.impute_tables(
                    inputs, settings.output, model, options, progress.advance, table_options
                )
            else:
                num_filled = reading_imputation.impute_reading_tables(
                    inputs, settings.output, model, options, progress.advance, table_options, settings.time_column
                )
        times = f" ({settings.draws} times each)" if settings.draws else ""
        click.echo(
            f"{format_count(num_filled, 'missing value')} filled in {format_count(progress.num_done, 'row')}{times}; "
            f"the table was written to {settings.output}",
            err=True,
        )

    return command


def build_sample() -> click.Command:
    """Return the command `sample`, which draws normal records from a model."""
    from deformer_stream.settings import SampleSettings, add_options, load_settings

    @click.command("sample", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["sample"], context_settings=HELP)
    @add_options(SampleSettings)
    @add_debug_option
    def command(config: Path | None, **flags: Any) -> None:
        """Draw random normal records from the distribution that the model has learned, in the units of its data."""
        interrupt_on_termination()
        from connectors.files import imputation
        from deformer_stream import log, model_store
        from deformer_stream.progress import Progress

        settings = load_settings(SampleSettings, flags, config, "sample")
        log.configure(is_debugging())
        model = model_store.read(settings.model, settings.device).model
        with Progress("sample", settings.count, "records") as progress:
            imputation.write_samples(settings.output, model, settings.count, settings.seed, progress.advance)
        click.echo(f"{settings.count} records drawn and written to {settings.output}", err=True)

    return command
