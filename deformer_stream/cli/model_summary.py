"""Print the summary of a model directory: its features, its calibration and its training."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS
from deformer_stream.durations import format_rough_duration
from deformer_stream.model.schema import Feature
from deformer_stream.model.time_slots import collapse_time_slots, describe_records
from deformer_stream.model_store import Artifact

WIDTH = 160
"""Characters per line if standard output is not a terminal. Lines are wide so that no name is truncated, because a
truncated name cannot be searched."""

MAX_LISTED_LABELS = 6
"""Largest number of labels of a feature that are shown."""


def print_model(loaded: Artifact, console: Console | None = None) -> None:
    """Print the features, the calibration and the training summary of a model.

    Args:
        loaded: The model, read from its directory.
        console: The rich console that prints the text; standard output by default.
    """
    # A width of None is the width of the terminal.
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    config, calibration = loaded.scoring_model.config, loaded.calibration
    num_parameters = loaded.scoring_model.extract_parameters().num_learned_values
    console.print(f"[bold]{_escape(str(loaded.directory))}[/bold]")
    console.print(f"fingerprint {loaded.fingerprint}, {num_parameters:,} parameters")
    size = f"d_model {config.d_model}, {config.layers} layers, {config.heads} heads"
    console.print(f"{size}, {config.mixtures} mixture components")
    # A sensor with a feature for each time slot of a window gets a single row in the table.
    console.print(_make_feature_table(collapse_time_slots(loaded.schema).features))
    # Windows of event time are described by a sentence; for records with ids of their own, the text is empty.
    if description := describe_records(loaded.schema):
        console.print(_escape(description))
    times, limit = loaded.schema.reading_times, config.context_limit
    if times is not None:
        blocks = (
            "" if limit is None else f" It is predicted from up to {limit.recent} recent readings, the last reading "
        )
        blocks += "" if limit is None else f"of each sensor, and its block of {limit.block}."
        console.print(
            "Readings are irregular: a sensor reports any number of times in a record, and each reading keeps its own "
            f"time. A record usually lasts {format_rough_duration(times.duration)}.{blocks}"
        )
    console.print(f"Calibration: {len(calibration.scores)} normal records, {_escape(calibration.arrival_order)} order")
    console.print(_make_alpha_table(loaded))
    if (classifier := loaded.fault_classifier) is not None:
        counts = ", ".join(f"{_escape(name)} ({count})" for name, count in classifier.num_records_by_fault.items())
        console.print(f"Names of faults, at the level {classifier.level:g}, from labelled records: {counts}")
    table = Table("training", "", title_justify="left")
    for key, value in loaded.manifest["training"].items():
        if isinstance(value, str | int | float):  # lists and nested tables are too long for a cell
            # The key "fingerprint" is that of the training data. The model's own fingerprint is printed above.
            name = "data fingerprint" if key == "fingerprint" else key.replace("_", " ")
            table.add_row(_escape(name), _escape(_format_value(value)))
    console.print(table)
    for name, group in calibration.calibration_by_group.items():
        # A record id begins with the name of its group and a separator.
        prefix = _escape(name + calibration.separator)
        console.print(f"records {prefix}… are compared with {len(group.scores)} calibration records of their own group")
    if loaded.schema.is_context.any():
        console.print("A context feature influences the scores of the other features and is never scored itself.")
    if calibration.tie_policy == "hold":
        console.print("Ties are held: readings of one record with the same event time wait and are scored together.")
    if calibration.arrival_order == "random":
        console.print(
            "Calibrated in random orders: alpha is guaranteed if readings arrive in random order, with all orders "
            "equally likely."
        )


def _format_value(value: str | float) -> str:
    """Return an entry of the training summary as text: yes or no for a boolean, four significant digits for a float."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _make_feature_table(features: tuple[Feature, ...]) -> Table:
    """Return a table with the name, kind, range or labels, resolution and reason of each feature.

    The kind is continuous or discrete, and the reason says why the training chose this kind. A context feature
    conditions the others and is never scored. The values of a feature with a period are positions on a cycle, such as
    times of day. The resolution is the smallest difference between two values of the sensor.
    """
    table = Table("feature", "kind", "range or labels", "resolution", "reason", title="Features", title_justify="left")
    for feature in features:
        kind = feature.kind + (" (context)" if feature.context else "")
        kind += f", a cycle of {feature.period:g}" if feature.period is not None else ""
        kind += f", no reading if {' or '.join(feature.fill_values)}" if feature.fill_values else ""
        quantum = "" if feature.quantum is None else f"{feature.quantum:g}"
        table.add_row(
            _escape(feature.name), _escape(kind), _escape(_format_values(feature)), quantum, _escape(feature.reason)
        )
    return table


def _make_alpha_table(loaded: Artifact) -> Table:
    """Return a table of the default alphas (false-alarm rates) and the anomaly scores above which they raise alerts.

    If the calibration has too few records for an alpha, the table says so instead.
    """
    calibration = loaded.calibration
    table = Table("alpha", "alert when the score is above")
    for alpha in DEFAULT_ALPHAS:
        is_unreachable = bool(calibration.find_unreachable_alphas([alpha]))
        threshold = calibration.compute_threshold(alpha)
        text = "out of reach: too few calibration records" if is_unreachable else f"{threshold:.3f}"
        table.add_row(f"{alpha:g}", text)
    return table


def _escape(text: str) -> str:
    """Return a text with rich's markup and control characters escaped, so that rich prints it literally.

    Texts from a model directory, such as feature names, could otherwise change what the terminal shows.
    """
    return escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def _format_values(feature: Feature) -> str:
    """Return the values of a feature in the training data as text: the first labels, or the range with its unit.

    If not all labels are listed, their number is appended. If the model does not store the range, the text is empty.
    """
    if feature.kind == "discrete":
        listed = ", ".join(feature.labels[:MAX_LISTED_LABELS])
        return listed + (f", … ({len(feature.labels)})" if len(feature.labels) > MAX_LISTED_LABELS else "")
    unit = "" if feature.unit is None else f" {feature.unit}"
    return "" if feature.low is None or feature.high is None else f"{feature.low:.6g} … {feature.high:.6g}{unit}"
