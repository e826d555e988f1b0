"""The questions of `deformer-stream init`, with their defaults.

An option answers its question in advance. All answers are checked in the same way, whether they come from an option,
from the user or from a default.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import click
from pydantic import TypeAdapter, ValidationError

from deformer_stream.cli.init.config_file import Answers, RecordKind
from deformer_stream.cli.init.label_columns import choose_normal_value, describe_values, match_value
from deformer_stream.cli.init.table_view import TableView
from deformer_stream.durations import format_duration
from deformer_stream.errors import ConfigError
from deformer_stream.model.windows import PerSlot, Window
from deformer_stream.record_limits import MAX_SLOTS
from deformer_stream.runtime.repeated_readings import MIN_SHARE
from deformer_stream.settings import InitSettings, MinorityShare, Share, Timeout, WindowWidth, explain_error
from deformer_stream.settings.tables import check_timezone

DEFAULT_ALPHA, DEFAULT_MAX_TIME = "1%", "5m"
"""The answers that are proposed if the input suggests no others."""

MAX_FEATURES_PER_RECORD = 60
"""Number of sensors times time slots up to which the proposed number of slots grows."""

MAX_PROPOSED_SLOTS = 12
"""Largest number of time slots that is proposed."""

PER_SLOT_DEFAULT: PerSlot = "first"
"""Which reading of a time slot counts if nothing is asked: the default of the training."""

NONE = "-"
"""What a user answers if no column is meant."""

MAX_OFFERED_COLUMNS = 8
"""Number of columns that are listed as possible labels."""

READINGS_PER_SENSOR = 60
"""Number of readings of a usual sensor up to which the proposed window grows if readings are irregular."""

ENOUGH_WINDOWS, MIN_READINGS_PER_SENSOR = 1000, 4
"""The proposed window grows only as long as the table has this number of windows, unless a usual sensor would have
fewer readings in a window. A fifth of the windows calibrates. If these are 99, and alpha is 1%, the false-alarm rate of
99% of all models lies between 0.005% and 5.2% (a Beta distribution)."""

_ROUND_SECONDS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
"""Lengths of windows, in seconds, of which one is proposed."""

Value = TypeVar("Value")


def ask_questions(view: TableView, settings: InitSettings, asks: bool) -> Answers:
    """Return the answers to all questions: from an option, else from the user, else the default.

    Args:
        view: What the input shows.
        settings: Options of `init`.
        asks: Whether the user is asked. If not, each question is answered by its option or its default.

    Raises:
        ConfigError: An option does not fit the input.
    """
    record = _choose_record(view, settings, asks)
    is_irregular = _choose_irregular(view, settings, record, asks)
    window, slots = _choose_window(view, settings, is_irregular, asks) if record == "window" else (None, 1)
    per_slot, repeated_share = PER_SLOT_DEFAULT, 0.0
    if not is_irregular:
        per_slot, repeated_share = _choose_per_slot(view, settings, window, slots, asks)
    label, normal = _choose_label(view, settings, asks)
    if label is not None and settings.contamination:
        raise ConfigError("--contamination is for tables without a label: leave it out, or add --label ''")
    contamination = settings.contamination
    if is_irregular:
        if contamination:
            raise ConfigError("--contamination cannot be combined with irregular readings: leave one of them out")
        contamination = 0.0
    if contamination is None:
        question = "Largest share of these records that may be anomalies"
        contamination = 0.0 if label is not None else _ask(question, "0%", _make_parser(MinorityShare), asks)
    exclude = _choose_exclusions(view, settings, label, asks)
    timezone = settings.timezone
    if timezone is None and needs_timezone(view, record):
        question = "Time zone of the times, which state none, such as Europe/Berlin (UTC = the hours are those of UTC)"
        timezone = _ask(question, "UTC", check_timezone, asks)
    alpha, max_time = settings.alpha, settings.max_time
    if alpha is None:
        alpha = _ask("Largest share of normal records that raise an alert", DEFAULT_ALPHA, _make_parser(Share), asks)
    if max_time is None:
        max_time = _ask("Time limit of the training", DEFAULT_MAX_TIME, _make_parser(Timeout), asks)
    reading: dict[str, Any] = {name: getattr(settings, name) for name in ("where", "delimiter", "decimal", "encoding")}
    reading |= {"header": settings.header, "no_header": settings.no_header or None, "time_column": view.time_option}
    # The column `device` is used without an option.
    if record == "window" and view.device_column not in (None, "device"):
        reading["device_column"] = view.device_column
    return Answers(
        record=record,
        alpha=alpha,
        max_time=max_time,
        window=window,
        irregular=is_irregular,
        slots=slots,
        per_slot=per_slot,
        repeated_share=repeated_share,
        label=label,
        normal=normal,
        exclude=exclude,
        contamination=contamination,
        timezone=timezone,
        time_unit=view.time_unit,
        id_column=view.id_column if record == "row" and view.id_column != label else None,
        table_options={name: value for name, value in reading.items() if value is not None},
    )


def needs_timezone(view: TableView, record: RecordKind) -> bool:
    """Return whether the times of readings are texts without a time zone, which training and scoring then need."""
    return view.has_local_times and (record == "window" or view.layout == "long")


def list_assumptions(view: TableView, settings: InitSettings, answers: Answers, asks: bool) -> list[str]:
    """Return what the user should check in the answers, each as a sentence.

    Args:
        view: What the input shows.
        settings: Options of `init`.
        answers: The answers to the questions.
        asks: Whether the user was asked.
    """
    notes = []
    if not asks and settings.timezone is None and needs_timezone(view, answers.record):
        notes.append("the times have no zone and are taken as UTC; set --timezone, such as Europe/Berlin")
    if not asks and answers.label is None and settings.label is None:
        for name, column in view.label_columns.items():
            if column.evidence == "weak":
                normal = choose_normal_value(name, column.count_by_value)
                notes.append(
                    f"the column {name} may say whether a row is normal ({describe_values(column.count_by_value)}): "
                    f"if so, add --label {shlex.quote(name)} --normal {shlex.quote(normal)}"
                )
    if answers.normal is not None and answers.label is not None:
        chosen = view.label_columns.get(answers.label)
        if chosen is not None and match_value(answers.normal, chosen.count_by_value) is None:
            notes.append(
                f"none of the first {view.num_rows_read:,} rows has {answers.label} = {answers.normal}; they have "
                f"{describe_values(chosen.count_by_value)}"
            )
    if view.quality_column is not None and settings.where is None:
        name, usual, share = view.quality_column
        notes.append(
            f"the column {name} is not {usual} for {share:.1%} of the readings; to leave these readings out, add "
            f'--where "{format_equality(name, usual)}"'
        )
    return notes


def format_equality(column: str, text: str) -> str:
    """Return the condition of `--where` that a column has a text, for a shell between double quotes."""
    name = column if column.isidentifier() else f'\\"{column}\\"'
    return f"{name} = '" + text.replace("'", "''") + "'"


def _ask(question: str, default: str, parse: Callable[[str], Value], asks: bool) -> Value:
    """Return the answer of the user to a question, which is repeated until the answer is valid, or the default.

    Args:
        question: The question, without the default.
        default: The default as the user would write it.
        parse: Returns the value of an answer, and raises `ValueError` with a reason if it is not valid.
        asks: Whether the user is asked.
    """

    def parse_for_click(text: str) -> Value:
        """Return the value of an answer; an error of this type makes click ask again."""
        try:
            return parse(text.strip())
        except ValueError as error:
            raise click.UsageError(str(error)) from None

    answer: Value = click.prompt(question, default, value_proc=parse_for_click) if asks else parse(default)
    return answer


def _make_parser(kind: Any) -> Callable[[str], Any]:
    """Return a function that converts a text as an option of this type does, and raises `ValueError` with a reason.

    Args:
        kind: The type of the option's field, such as `Share`.
    """
    adapter = TypeAdapter(kind)

    def parse(text: str) -> Any:
        """Return the value of the text."""
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            raise ValueError(explain_error(error.errors()[0])) from None

    return parse


def _make_choice(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a function that returns one of several texts unchanged, and raises `ValueError` for any other text."""

    def parse(text: str) -> str:
        """Return the text if it is one of the choices."""
        if text not in choices:
            raise ValueError(f"{text!r} is not a choice; answer one of: {', '.join(choices)}")
        return text

    return parse


def _choose_record(view: TableView, settings: InitSettings, asks: bool) -> RecordKind:
    """Return what a record is.

    Raises:
        ConfigError: The input does not have what records of the chosen kind need.
    """
    choices: list[RecordKind] = []
    if view.layout == "wide":
        choices.append("row")
    if view.layout == "long" and view.record_column is not None:
        choices.append("id")
    if view.time_column is not None and (view.layout == "wide" or view.device_column is not None):
        choices.append("window")
    if settings.record is None and (settings.window is not None or settings.slots is not None):
        chosen: RecordKind = "window"
    elif settings.record is not None:
        chosen = settings.record
    elif not choices:
        raise ConfigError(
            "a row of this table is one reading, but nothing says to which record it belongs: add a column record, "
            "or columns device and time"
        )
    elif len(choices) == 1:
        return choices[0]
    else:
        meanings = {"row": "a row", "window": "a time window of a device", "id": "all readings with one id"}
        listed = ", ".join(f"{choice} = {meanings[choice]}" for choice in choices)
        answer = _ask(f"What is a record? {listed}", choices[0], _make_choice(choices), asks)
        return next(choice for choice in choices if choice == answer)
    if chosen not in choices:
        needs = {
            "row": "a table in which each row holds the values of several columns",
            "window": "a column of times, and a column device if a row is one reading",
            "id": "columns record, feature and value",
        }
        raise ConfigError(f"--record {chosen} needs {needs[chosen]}: choose one of: {', '.join(choices) or 'none'}")
    return chosen


def _choose_irregular(view: TableView, settings: InitSettings, record: RecordKind, asks: bool) -> bool:
    """Return whether each reading keeps its own time, so that a sensor may report any number of times in a record.

    It is asked, with the default "yes", if the table suits it: a row is one reading, and either records are windows and
    the times of readings are irregular, or records have ids and sensors report several times in a record.

    Raises:
        ConfigError: The option `--irregular` does not fit the table or another option.
    """
    has_slots = settings.slots is not None or settings.per_slot is not None
    if settings.irregular:
        if has_slots:
            raise ConfigError("--irregular cannot be combined with --slots and --per-slot: leave one of them out")
        if record == "row" or view.time_column is None:
            raise ConfigError(
                "--irregular needs a time for each reading: add a column of times, or add --record window if each row "
                "has a time"
            )
        return True
    if has_slots or view.layout != "long" or view.time_column is None or view.reading_times is None:
        return False
    if record == "id" and view.repeated_in_record >= MIN_SHARE:
        reason = f"{view.repeated_in_record:.0%} of the readings repeat a sensor of their record"
    elif record == "window" and view.reading_times.is_irregular:
        reason = "The times of the readings are irregular"
    else:
        return False
    question = f"{reason}. Learn each reading with its own time (irregular)? yes, no"
    return _ask(question, "yes", _make_choice(("yes", "no")), asks) == "yes"


def _choose_window(view: TableView, settings: InitSettings, is_irregular: bool, asks: bool) -> tuple[float, int]:
    """Return the length of a window in seconds and the number of its time slots, 1 if readings are irregular.

    The proposed window holds several readings of each sensor, one in each slot.
    """
    interval = view.interval or 60.0
    most_slots = max(1, min(MAX_PROPOSED_SLOTS, MAX_FEATURES_PER_RECORD // max(1, len(view.feature_names))))
    if is_irregular:
        most_slots = READINGS_PER_SENSOR
    window = settings.window
    if window is None:
        wanted = interval * (settings.slots or most_slots)
        if is_irregular and view.span is not None:
            num_devices = max(1, len(view.devices))
            enough = view.span * view.num_rows / max(1, view.num_rows_read) * num_devices / ENOUGH_WINDOWS
            wanted = min(wanted, max(enough, MIN_READINGS_PER_SENSOR * interval))
        # The longest usual length in which no sensor reports more often than that.
        proposed = max((length for length in _ROUND_SECONDS if interval <= length <= wanted), default=interval)
        question = "Length of a window"
        window = _ask(question, format_duration(round(proposed * 1e6)), _make_parser(WindowWidth), asks)
    if is_irregular:
        return window, 1
    slots = settings.slots
    if slots is None:
        proposed_slots = min(MAX_SLOTS, max(1, round(window / interval)))
        question = "Readings of a sensor in a window (time slots)"
        slots = _ask(question, str(proposed_slots), _parse_slots, asks)
    return window, slots


def _choose_per_slot(
    view: TableView, settings: InitSettings, window: float | None, slots: int, asks: bool
) -> tuple[PerSlot, float]:
    """Return which value counts if a sensor has several readings in a time slot, and the share of such readings.

    Args:
        view: What the input shows.
        settings: Options of `init`.
        window: Length of a window in seconds, None if records are not windows.
        slots: Number of its time slots.
        asks: Whether the user is asked. If not, the default is that of the training, "first".

    Returns:
        (rule, share). The share of the readings, from 0 to 1, have an earlier reading of their sensor in their slot. It
        is 0 if it is below `MIN_SHARE`; nothing is asked then.

    Raises:
        ConfigError: The option `--per-slot` is set, and records are not windows.
    """
    if window is None:
        if settings.per_slot is not None:
            raise ConfigError("--per-slot combines readings of one window; add --record window, or remove --per-slot")
        return "first", 0.0
    share = 0.0
    if view.reading_times is not None:
        share = view.reading_times.compute_repeated_share(Window(round(window * 1e6), slots))
    share = share if share >= MIN_SHARE else 0.0
    if settings.per_slot is not None or not share:
        return settings.per_slot or "first", share
    rules: tuple[PerSlot, ...] = get_args(PerSlot)
    place = "time slot" if slots > 1 else "window"
    question = (
        f"{share:.0%} of the readings share a {place} with an earlier reading of their sensor. Which value counts? "
        f"{', '.join(rules)}"
    )
    answer = _ask(question, "first", _make_choice(rules), asks)
    return next(rule for rule in rules if rule == answer), share


def _parse_slots(text: str) -> int:
    """Return a number of time slots; raise `ValueError` if the text is not a number from 1 to `MAX_SLOTS`."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SLOTS:
        raise ValueError(f"write a whole number from 1 to {MAX_SLOTS}")
    return int(text)


def _choose_label(view: TableView, settings: InitSettings, asks: bool) -> tuple[str | None, str | None]:
    """Return the column that says whether a row is normal and its value in normal rows; (None, None) if there is none.

    Raises:
        ConfigError: The chosen column or value does not exist.
    """
    label, normal = settings.label, settings.normal
    candidates = list(view.label_columns)
    if label is None and candidates:
        default = next(iter(view.label_counts), NONE)
        listed = ", ".join(candidates[:MAX_OFFERED_COLUMNS])
        question = f"Column that says whether a row is normal, such as {listed} ({NONE} for none)"
        label = _ask(question, default, _make_choice([*candidates, NONE]), asks)
    if label in (None, "", NONE):
        if normal is not None:
            raise ConfigError("--normal needs --label, the column that has this value in normal rows; add --label")
        return None, None
    names = [*candidates, *(column.name for column in view.columns)]
    if label not in names:
        raise ConfigError(f"--label {label}: there is no such column; give one of: {', '.join(dict.fromkeys(names))}")
    column = view.label_columns.get(label)
    if normal is None and column is None:
        raise ConfigError(f"--label {label} needs --normal, the value of this column in normal rows; add --normal")
    if column is None:  # it has more values than were counted
        return label, normal
    counts = column.count_by_value
    if normal is None:
        question = f"Value of {label} in normal rows"
        return label, _ask(question, choose_normal_value(label, counts), _make_choice(list(counts)), asks)
    value = match_value(normal, counts)
    if value is None and view.are_all_rows_read:
        raise ConfigError(
            f"--normal {normal}: no row has {label} = {normal}; the column contains {describe_values(counts)}: give "
            "one of these values to --normal"
        )
    return label, value or normal


def _choose_exclusions(view: TableView, settings: InitSettings, label: str | None, asks: bool) -> tuple[str, ...]:
    """Return the columns that are left out.

    Raises:
        ConfigError: The option names a column that does not exist.
    """
    columns = {column.name for column in view.columns} - {label}

    def parse(text: str) -> tuple[str, ...]:
        """Return the names that a text lists; raise `ValueError` if one of them is no column."""
        chosen = tuple(name.strip() for name in text.split(",") if name.strip() not in ("", NONE))
        for name in chosen:
            if name not in columns:
                raise ValueError(f"there is no column {name!r}; write names of columns, separated by commas")
        return chosen

    if settings.exclude is not None:
        try:
            return parse(settings.exclude)
        except ValueError as error:
            raise ConfigError(f"--exclude {settings.exclude}: {error}") from None
    other_labels = [name for name in view.label_counts if name in columns]
    proposed = [name for name in dict.fromkeys([*other_labels, *view.suggested_exclusions]) if name != label]
    question = f"Columns to leave out, separated by commas ({NONE} for none)"
    return _ask(question, ",".join(proposed) or NONE, parse, asks)
