"""The command `init`: look at a table or a topic, ask what cannot be known, and write a configuration to start with.

Each question has a default in brackets and an option. PyTorch is not imported, so that the command answers in a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deformer_stream.cli.examples import EXAMPLES_BY_COMMAND
from deformer_stream.cli_utils import HELP, HelpCommand, add_debug_option

if TYPE_CHECKING:
    import pyarrow as pa

    from deformer_stream.cli.init.config_file import Answers, Subject
    from deformer_stream.cli.init.messages import Message
    from deformer_stream.cli.init.table_view import TableView
    from deformer_stream.settings import InitSettings

MAX_LISTED_COLUMNS = 100
"""Number of columns that are shown."""

SECONDS_PER_DAY = 86_400.0

MAX_LINE_BYTES = 1_048_576
"""Longest JSON line that is read."""

TOPIC_MESSAGES = 500
"""Number of messages of a topic that are looked at."""


def build_init() -> click.Command:
    """Return the command `init`, which writes a configuration for a table or a topic."""
    from deformer_stream.settings import InitSettings, PathText, add_options, load_settings

    @click.command("init", cls=HelpCommand, examples=EXAMPLES_BY_COMMAND["init"], context_settings=HELP)
    @click.argument("inputs", metavar="[TABLE...]", nargs=-1, type=PathText())
    @add_options(InitSettings, reads_default_config=False)
    @add_debug_option
    def command(inputs: tuple[str, ...], config: Path | None, **flags: Any) -> None:
        """Look at a table or a topic, ask what a record is, and write a configuration file to start with.

        TABLE is a Parquet or CSV file, a folder or a quoted pattern. The file is deformer.toml, which all commands that
        run in the same folder read. Without a terminal, and with --yes, each question is answered by its default.

        A file of JSON lines is converted to a table to train on, which --save names.
        """
        settings = load_settings(InitSettings, flags, config, "init")
        run_init(inputs, settings)

    return command


def run_init(inputs: tuple[str, ...], settings: InitSettings) -> None:
    """Look at the input, show it, ask the questions, write the configuration file, and print the next commands.

    Args:
        inputs: Files, folders and patterns; empty if the options name a topic.
        settings: Options of `init`.

    Raises:
        ConfigError: The options contradict each other or the input, or the file to write exists.
        InputError: The input cannot be read.
        Unavailable: The brokers cannot be reached.
    """
    from deformer_stream.errors import ConfigError, map_write_errors
    from deformer_stream.tables.discovery import check_no_overwrite

    if bool(inputs) == bool(settings.topic):
        raise ConfigError("init: give either tables or --topic, such as: deformer-stream init plant.csv")
    saved_table = _choose_saved_table(inputs, settings)
    check_no_overwrite(inputs, {"--output": settings.output, "--save": saved_table})
    if settings.output.exists() and not settings.force:
        raise ConfigError(
            f"{settings.output} exists and is not replaced: add --force to replace it, or --output to write another"
        )
    from deformer_stream.cli.init.config_file import describe_reach, format_config, list_next_commands
    from deformer_stream.cli.init.questions import ask_questions, list_assumptions
    from deformer_stream.durations import format_duration

    look = _look_at_topic(settings, settings.topic) if settings.topic else _look_at_files(inputs, saved_table, settings)
    view = look.view
    click.echo(format_view(view))
    asks = sys.stdin.isatty() and not settings.yes
    if asks:
        click.echo("\nPress Enter to take the answer in brackets.")
    answers = ask_questions(view, settings, asks)
    subject = _describe_subject(look, inputs, settings, answers)
    if not settings.topic:
        look.save_readings()
    with map_write_errors(settings.output):
        settings.output.write_text(format_config(subject, answers), encoding="utf-8")
    if answers.record == "row" and len(view.devices) > 1 and view.interval is not None:
        length = format_duration(round(1e6 * view.interval))
        click.echo(
            "\nnote: alerts and incidents of rows do not name the device; with --record window "
            f"--window {length} --slots 1 each row is a record of its device"
        )
    for note in list_assumptions(view, settings, answers, asks):
        click.echo(f"\nnote: {note}")
    if reach := describe_reach(subject, answers):
        click.echo(f"\nwarning: {reach}")
    click.echo(f"\n{settings.output} was written; all commands in its folder read it. Next:\n")
    config = "" if settings.output == Path("deformer.toml") else f" --config {settings.output}"
    for line in list_next_commands(subject):
        click.echo(f"    {line}{config}")
    if settings.topic and settings.save is None:
        click.echo(
            "\nTrain on a table of normal readings. To record one from this topic: "
            f"deformer-stream init --topic {settings.topic} --listen 1h --save normal.parquet --force"
        )


def format_view(view: TableView) -> str:
    """Return what the first look at the data has shown, as text for the terminal."""
    from deformer_stream.cli.config_report import align_columns
    from deformer_stream.cli.init.label_columns import describe_values
    from deformer_stream.durations import format_rough_duration
    from trainer.fill_values import describe_fill_values

    about = "" if view.is_exact else "about "
    files = "" if view.num_files == 1 else f" in {view.num_files:,} files"
    name = ", ".join(view.inputs)
    lines = [view.dialect] if view.dialect else []
    meaning = "a row is one reading" if view.layout == "long" else f"{len(view.columns)} columns"
    lines.append(f"{name}: {about}{view.num_rows:,} rows{files}, {meaning}")
    if view.num_rows_read < view.num_rows:
        lines.append(f"The first {view.num_rows_read:,} rows show:")
    lines.append("")
    rows = [("sensor" if view.layout == "long" else "column", "kind", "values", "reason")]
    for column in view.columns[:MAX_LISTED_COLUMNS]:
        values = f"{column.values} {column.unit}".strip()
        rows.append((column.name, column.kind, values, column.reason))
    lines.append(align_columns(rows))
    if len(view.columns) > MAX_LISTED_COLUMNS:
        lines.append(f"… and {len(view.columns) - MAX_LISTED_COLUMNS} more")
    lines.append("")
    if view.interval is not None:
        what = "a reading of each sensor" if view.layout == "long" else "a row"
        if view.layout == "long" and view.reading_times is not None and view.reading_times.is_irregular:
            what = "at irregular times, usually a reading of a sensor"
        span = "" if view.span is None else f", over {format_rough_duration(1e6 * view.span)}"
        lines.append(f"time     {what} every {format_rough_duration(1e6 * view.interval)}{span}")
    if view.is_newest_first:
        lines.append("warning  most rows are earlier than the row before: sort the table by time before it is scored")
    if view.time_error is not None:
        lines.append(f"warning  not all times in the column {view.time_column} can be read: {view.time_error}")
    fill_values = describe_fill_values(view.fill_values, view.layout)
    if fill_values is not None:
        lines.append(f"warning  {fill_values}")
    if view.device_column is not None:
        shown = ", ".join(view.devices[:5]) + (", …" if len(view.devices) > 5 else "")
        lines.append(f"devices  {len(view.devices)} in the column {view.device_column}: {shown}")
    for column_name, counts in view.label_counts.items():
        shown = ", ".join(f"{value} ({count:,} rows)" for value, count in counts.items())
        lines.append(f"labels   {column_name}: {shown}")
    for column_name, candidate in view.label_columns.items():
        if candidate.evidence == "weak":
            lines.append(f"labels?  {column_name}: {describe_values(candidate.count_by_value)}")
    return "\n".join(lines).rstrip()


@dataclass(frozen=True, slots=True)
class _Look:
    """What the input shows.

    Attributes:
        view: What its first rows or readings show.
        tables: The tables to train on; empty if no readings of a topic were saved.
        stream_options: Options of Kafka and of JSON fields that are needed to read the input, by name.
        readings: The readings of messages that are to be written to the only table; None if there is nothing to write.
    """

    view: TableView
    tables: tuple[str, ...]
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    readings: pa.Table | None = None

    def save_readings(self) -> None:
        """Write the readings of messages to their table.

        Raises:
            ConfigError: The file cannot be created.
            Unavailable: Writing fails.
        """
        if self.readings is None:
            return
        from connectors.files.sinks import write_rows

        (path,) = map(Path, self.tables)
        with write_rows(path, self.readings.schema) as sink:
            for batch in self.readings.to_batches():
                sink.append(batch)


def _describe_subject(look: _Look, inputs: Sequence[str], settings: InitSettings, answers: Answers) -> Subject:
    """Return what the configuration is about: the input, and the number of its records in all and a day.

    Args:
        look: What the input shows.
        inputs: Files, folders and patterns; empty if the options name a topic.
        settings: Options of `init`.
        answers: The answers to the questions.
    """
    from deformer_stream.cli.init.config_file import Subject
    from trainer.fill_values import format_number

    view = look.view
    num_devices = max(1, len(view.devices))
    records_per_day = num_records = None
    if answers.record == "row":
        num_records = view.num_rows
        if view.span:
            records_per_day = view.num_rows / view.span * SECONDS_PER_DAY
    elif answers.record == "window" and answers.window is not None:
        records_per_day = num_devices * SECONDS_PER_DAY / answers.window
        if view.span is not None and not settings.topic:
            num_records = round(num_devices * view.span / answers.window)
    if num_records is not None and answers.label is not None:
        column = view.label_columns.get(answers.label)
        counts = {} if column is None else column.count_by_value
        num_rows = sum(counts.values())
        if num_rows:
            num_records = round(num_records * counts.get(answers.normal or "", 0) / num_rows)
    about = "" if view.is_exact else "about "
    if settings.topic:
        description = f"The topic {settings.topic}, of which {view.num_rows:,} readings were looked at."
    else:
        others = {answers.label, *answers.exclude, view.device_column if answers.record == "window" else None}
        num_features = len([name for name in view.feature_names if name not in others])
        description = f"{', '.join(view.inputs)}: {about}{view.num_rows:,} rows, {num_features} features."
    return Subject(
        description,
        look.tables or ("normal.parquet",),
        num_records,
        records_per_day,
        settings.topic,
        look.stream_options,
        logs=tuple(inputs),
        fill_values=tuple(format_number(fill.value) for fill in view.fill_values),
    )


def _look_at_topic(settings: InitSettings, topic: str) -> _Look:
    """Return what the messages of a topic show, and the options that are needed to read them.

    The readings are written to a table if `--save` names one.

    Args:
        settings: Options of `init`.
        topic: The topic.

    Raises:
        ConfigError: The brokers refuse the login, or an option is invalid.
        InputError: The topic has no messages that are readings as JSON.
        Unavailable: The brokers cannot be reached, or the topic does not exist.
    """
    from connectors.kafka.sample import read_messages
    from deformer_stream.cli.kafka_cluster import make_cluster
    from deformer_stream.errors import InputError
    from deformer_stream.settings.kafka import KafkaSettings

    limit = None if settings.save is not None else TOPIC_MESSAGES
    click.echo(f"reading {topic} on {settings.bootstrap_servers} for up to {settings.listen:g} s …", err=True)
    messages = read_messages(make_cluster(settings), topic, limit, settings.listen)
    if not messages:
        raise InputError(f"topic {topic}: no message has arrived within {settings.listen:g} s; add --listen 1m")
    look = _look_at_messages(messages, f"topic {topic}", settings.save, settings)
    look.save_readings()  # before the questions, because the messages may be gone afterwards
    kafka: dict[str, Any] = {}
    if settings.bootstrap_servers != "localhost:9092":
        kafka["bootstrap_servers"] = settings.bootstrap_servers
    for name, info in KafkaSettings.model_fields.items():
        # Passwords and options of the client library, which may be secrets, are never written.
        is_written = name == "client" or name.startswith(("security_", "ssl_", "sasl_"))
        value = getattr(settings, name)
        if is_written and name != "sasl_password" and value != info.default:
            kafka[name] = str(value)
    return replace(look, stream_options=kafka | dict(look.stream_options))


def _choose_saved_table(inputs: Sequence[str], settings: InitSettings) -> Path | None:
    """Return the table to which readings of a topic or of JSON lines are written; None if none is.

    Args:
        inputs: Files, folders and patterns; empty if the options name a topic.
        settings: Options of `init`.

    Raises:
        InputError: An input does not exist.
    """
    from deformer_stream.tables.discovery import JSON_LINES, find_data_files, get_stem, has_ending

    files = find_data_files(inputs) if inputs else []
    if not files:
        return settings.save
    if not all(has_ending(file, JSON_LINES) for file in files):
        return None
    name = f"{get_stem(files[0].name)}.parquet" if len(files) == 1 else "readings.parquet"
    return settings.save or settings.output.with_name(name)


def _look_at_files(inputs: Sequence[str], table: Path | None, settings: InitSettings) -> _Look:
    """Return what tables show, or files of JSON lines, whose readings are written to a table.

    Args:
        inputs: Files, folders and patterns.
        table: The table for the readings of JSON lines; None if the inputs are tables.
        settings: Options of `init`.

    Raises:
        ConfigError: The table to write exists.
        InputError: The files cannot be read, or have no readings.
    """
    from deformer_stream.cli.init.table_view import look_at_tables
    from deformer_stream.errors import ConfigError
    from deformer_stream.tables.discovery import find_data_files
    from deformer_stream.tables.table import TableOptions

    if table is None:
        options = TableOptions.from_settings(settings)
        return _Look(
            look_at_tables(inputs, options, settings.time_column, settings.device_column, settings.label), tuple(inputs)
        )
    from connectors.files.lines import read_lines

    files = find_data_files(inputs)
    if table.exists() and not settings.force:
        raise ConfigError(f"{table} exists and is not replaced: add --force to replace it, or --save to write another")
    lines = (line for file in files for block in read_lines(file, MAX_LINE_BYTES) for line in block if line.strip())
    return _look_at_messages(((line, None) for line in lines), ", ".join(inputs), table, settings)


def _look_at_messages(messages: Iterable[Message], origin: str, table: Path | None, settings: InitSettings) -> _Look:
    """Return what messages with readings show.

    Args:
        messages: The messages.
        origin: The topic or the files, for messages to the user.
        table: The Parquet file for the readings, None for none. It is not written yet.
        settings: Options of `init`.

    Raises:
        ConfigError: Messages are to be chosen by a condition.
        InputError: No message is a reading as JSON.
    """
    from deformer_stream.cli.init.messages import convert_to_table
    from deformer_stream.cli.init.table_view import look_at_table
    from deformer_stream.codec import TimeFormat
    from deformer_stream.errors import ConfigError
    from deformer_stream.tables.table import Table, TableOptions

    if settings.where is not None:
        raise ConfigError("--where chooses rows of tables, not messages or JSON lines: leave it out")
    converted = convert_to_table(messages, origin, settings.time_unit)
    if converted.num_left_out:
        click.echo(
            f"{converted.num_left_out:,} of {converted.num_messages:,} messages of {origin} are left out, because they "
            "are no readings",
            err=True,
        )
    options = TableOptions(time_format=TimeFormat(converted.time_unit))
    view = look_at_table(Table.from_arrow(converted.table, origin, options), (origin,))
    tables = () if table is None else (str(table),)
    return _Look(view, tables, converted.field_by_option, None if table is None else converted.table)
