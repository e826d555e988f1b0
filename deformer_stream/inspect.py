"""A model directory, for people: what it knows, how well it knows it, which alphas it can keep."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deformer_stream.artifact import Artifact
from deformer_stream.core.schema import Feature

ALPHAS = (0.05, 0.01, 0.001)


def describe(loaded: Artifact, console: Console | None = None) -> None:
    """Print the features, the calibration and the training summary of a model."""
    console = console or Console(width=None)
    config, calibration = loaded.model.config, loaded.calibration
    parameters = sum(p.numel() for p in loaded.model.parameters())
    console.print(f"[bold]{loaded.directory}[/bold]  fingerprint {loaded.fingerprint}, {parameters:,} parameters")
    console.print(f"d_model {config.d_model}, {config.layers} layers, {config.heads} heads, {config.mixtures} mixture components")
    table = Table("feature", "kind", "range or labels", "resolution", "why", title="Features", title_justify="left")
    for feature in loaded.schema.features:
        kind = feature.kind + (" (context)" if feature.context else "")
        table.add_row(feature.name, kind, _range(feature), "" if feature.quantum is None else f"{feature.quantum:g}", feature.reason)
    console.print(table)
    reach = Table("alpha", "alert when the score is above", title=f"Calibration: {len(calibration.scores)} normal records, {calibration.order} order", title_justify="left")  # fmt: skip
    for alpha in ALPHAS:
        out = alpha < calibration.smallest_p
        reach.add_row(f"{alpha:g}", "out of reach: too few calibration records" if out else f"{calibration.threshold(alpha):.3f}")
    console.print(reach)
    simple = {k: v for k, v in loaded.manifest["training"].items() if isinstance(v, str | int | float)}
    training = Table("training", "", title_justify="left")
    for key, value in simple.items():
        training.add_row(key.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(training)


def _range(feature: Feature) -> str:
    if feature.kind == "discrete":
        shown = ", ".join(feature.labels[:6])
        return shown + (f", … ({len(feature.labels)})" if len(feature.labels) > 6 else "")
    return "" if feature.low is None or feature.high is None else f"{feature.low:.6g} … {feature.high:.6g}"
