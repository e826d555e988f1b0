"""What is special about the power table, put together."""

from __future__ import annotations

from typing import Any

from deformer_stream.model.deformer import PRESETS as MODELS
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.report import charts, html
from experiments.experiment import Experiment, Preset, Scored
from experiments.power.data import load
from trainer.fit import Recipe

PRESETS = {
    "paper": Preset(
        MODELS["paper"],
        Recipe(128, 1e-5, 300, optimizer="adam", weight_decay=0.0, warmup=1, clip=1e9, averaging=1e-9),
    ),
    "default": Preset(
        ModelConfig(d_model=256, layers=6, heads=4, feedforward=1024, mixtures=64, hidden=(256,)),
        Recipe(1024, 1e-3, 60, warmup=200),
    ),
    "small": Preset(
        ModelConfig(d_model=64, layers=3, heads=4, feedforward=256, mixtures=16, hidden=(64,)),
        Recipe(128, 2e-3, 40),
    ),
}

PUBLISHED = {
    "RealNVP": -0.17,
    "MAF": -0.30,
    "NAF": -0.62,
    "DEformer, single token, the authors' repository": -0.62,
    "NSF": -0.66,
    "DEformer (order-agnostic), the paper": -0.68,
    "TraDE (one fixed order)": -0.73,
}


def report(scored: Scored) -> tuple[list[str], dict[str, Any]]:
    """How the test rows' NLL is spread, over rows and over features."""
    names = scored.model.schema.names
    per_feature = {name: float(value) for name, value in zip(names, scored.per_feature, strict=True)}
    blocks = [
        html.heading("Where the nats are"),
        html.paragraph(
            "NLL in nats of a row in units of each reading's own deviation, mean over the orders; the fewer, the "
            "likelier. By reading: given the readings that came before it, mean over rows and orders."
        ),
        charts.histogram(scored.nll.mean(0), "Test rows", "NLL, nats"),
        charts.bar_chart(list(per_feature), list(per_feature.values()), "By reading", "nats"),
    ]
    return blocks, {"per_feature": per_feature}


EXPERIMENT = Experiment("power", "Household power", "rows", 2_049_280, PRESETS, PUBLISHED, load, report)
