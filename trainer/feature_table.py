"""The table of features that `deformer-train` prints: which columns became features, which were left out, and why.

This module imports no PyTorch, so that `--dry-run` shows the table at once.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from deformer_stream.model.schema import Feature
from deformer_stream.model.time_slots import collapse_time_slots, describe_records
from trainer.data import TrainingTable

MAX_LISTED_LABELS = 6
"""Largest number of labels of a feature that are listed in the table of features."""

TABLE_WIDTH = 220
"""Characters in a line of the table of features if standard output is no terminal. Long names and reasons fit in."""


def print_features(data: TrainingTable) -> None:
    """Print to standard output which columns became features, which were left out, and why.

    Args:
        data: The training table.
    """
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    # All texts are printed with markup=False, because a name such as "flow[1]" would be read as a style of `rich`.
    for note in data.notes:
        console.print(note, markup=False, soft_wrap=True)
    table = Table("feature", "kind", "values in training", "resolution", "reason", "missing", box=None, pad_edge=False)
    # A sensor with one feature for each time slot of a window gets a single line.
    for feature in collapse_time_slots(data.schema).features:
        kind, values, resolution = describe_feature(feature)
        num_missing = data.missing_by_feature.get(feature.name, 0)
        missing = str(num_missing) if num_missing else ""
        table.add_row(feature.name, kind, values, resolution, feature.reason, missing)
    for column in data.excluded_columns:
        table.add_row(column.name, "left out", "", "", column.reason, "")
    console.print(table, markup=False)
    if description := describe_records(data.schema):  # empty unless records are windows of time
        console.print(description, markup=False, soft_wrap=True)
    for name, count in data.infinite_by_feature.items():
        console.print(f"{name}: {count} infinite readings are treated as missing", markup=False, soft_wrap=True)
    for name, (count, example) in data.texts_by_feature.items():
        texts = "1 text that is no number" if count == 1 else f"{count:,} texts that are no numbers, such as"
        console.print(f"{name}: {texts} {example!r}, treated as missing", markup=False, soft_wrap=True)
    for reason, count in data.skipped_by_reason.items():
        console.print(f"left out: {count} {reason}", markup=False, soft_wrap=True)


def describe_feature(feature: Feature) -> tuple[str, str, str]:
    """Describe a feature in words for a table.

    Returns:
        (kind, values, resolution), three texts. `kind` is such as "continuous context"; a context feature is only an
        input of predictions and is never scored. `values` describes the training data: mean ± standard deviation and
        range with the unit, or the labels. `resolution` is the smallest step between readings in raw units, empty if
        unknown.
    """
    kind = feature.kind + (" context" if feature.context else "")
    kind += f", a cycle of {feature.period:g}" if feature.period is not None else ""
    if feature.kind == "discrete":
        num_labels = len(feature.labels)
        labels = ", ".join(feature.labels[:MAX_LISTED_LABELS])
        return kind, labels + (f", … ({num_labels})" if num_labels > MAX_LISTED_LABELS else ""), ""
    values = f"{feature.location:.5g} ± {feature.scale:.3g}"
    if feature.low is not None:
        values += f" in [{feature.low:.5g}, {feature.high:.5g}]"
    if feature.unit is not None:
        values += f" {feature.unit}"
    return kind, values, f"{feature.quantum:g}" if feature.quantum is not None else ""
