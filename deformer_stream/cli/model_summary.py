"""A model directory, for people: what it knows, how well it knows it, which alphas it can keep."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deformer_stream.calibration.conformal import DEFAULT_ALPHAS
from deformer_stream.model.schema import Feature
from deformer_stream.model.time_slots import in_words, single
from deformer_stream.model_store import Artifact

WIDTH = 160
"""Columns of text where nobody says how wide a line may be: names are for searching, so they stay whole."""

LABELS = 6
"""Labels of a feature that are shown."""


def describe(loaded: Artifact, console: Console | None = None) -> None:
    """Print the features, the calibration and the training summary of a model."""
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    config, calibration = loaded.model.config, loaded.calibration
    parameters = sum(p.numel() for p in loaded.model.parameters())
    console.print(f"[bold]{_plain(str(loaded.directory))}[/bold]")
    console.print(f"fingerprint {loaded.fingerprint}, {parameters:,} parameters")
    size = f"d_model {config.d_model}, {config.layers} layers, {config.heads} heads"
    console.print(f"{size}, {config.mixtures} mixture components")
    console.print(_features(single(loaded.schema).features))
    if said := in_words(loaded.schema):
        console.print(_plain(said))
    console.print(f"Calibration: {len(calibration.scores)} normal records, {_plain(calibration.arrival_order)} order")
    console.print(_calibration(loaded))
    table = Table("training", "", title_justify="left")
    for key, value in loaded.manifest["training"].items():
        if isinstance(value, str | int | float):
            name = "data fingerprint" if key == "fingerprint" else key.replace("_", " ")  # the model has its own
            table.add_row(_plain(name), _plain(_shown(value)))
    console.print(table)
    for name, own in calibration.calibration_by_group.items():
        console.print(f"records {_plain(name + calibration.separator)}… are judged by {len(own.scores)} of their own")
    if loaded.schema.context.any():
        console.print("A context feature conditions the others and is never scored.")
    if calibration.tie_policy == "hold":
        console.print("Ties are held: readings of one record and one time are judged together.")
    if calibration.arrival_order == "random":
        console.print("Calibrated in random orders: alpha holds where readings arrive in any order, each as likely.")


def _shown(value: str | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _features(features: tuple[Feature, ...]) -> Table:
    table = Table("feature", "kind", "range or labels", "resolution", "why", title="Features", title_justify="left")
    for feature in features:
        kind = feature.kind + (" (context)" if feature.context else "")
        kind += f", a cycle of {feature.period:g}" if feature.period is not None else ""
        quantum = "" if feature.quantum is None else f"{feature.quantum:g}"
        table.add_row(_plain(feature.name), kind, _plain(_range(feature)), quantum, _plain(feature.reason))
    return table


def _calibration(loaded: Artifact) -> Table:
    calibration = loaded.calibration
    table = Table("alpha", "alert when the score is above")
    for alpha in DEFAULT_ALPHAS:
        out = calibration.find_unreachable_alphas([alpha])
        text = "out of reach: too few calibration records" if out else f"{calibration.compute_threshold(alpha):.3f}"
        table.add_row(f"{alpha:g}", text)
    return table


def _plain(text: str) -> str:
    """Foreign text: neither markup nor a control sequence of the terminal."""
    return escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def _range(feature: Feature) -> str:
    if feature.kind == "discrete":
        shown = ", ".join(feature.labels[:LABELS])
        return shown + (f", … ({len(feature.labels)})" if len(feature.labels) > LABELS else "")
    return "" if feature.low is None or feature.high is None else f"{feature.low:.6g} … {feature.high:.6g}"
