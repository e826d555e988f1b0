"""The presets, published results and report of the household power table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deformer_stream.model.config import PRESETS as MODELS
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.report import charts, pages
from experiments.experiment import Experiment, Preset, ScoredRun
from experiments.power.data import load_table
from trainer.fit import Recipe

PRESETS = {
    "paper": Preset(
        MODELS["paper"],
        Recipe(
            128,
            1e-5,
            300,
            optimizer="adam",
            smoothing=0.0,
            weight_decay=0.0,
            warmup=1,
            clip=1e9,
            averaging=1e-9,
        ),
    ),
    "default": Preset(
        ModelConfig(d_model=256, layers=6, heads=4, feedforward=1024, mixtures=64, hidden=(256,)),
        Recipe(1024, 1e-3, 60, warmup=200, optimizer="muon", smoothing=0.0),
    ),
    "small": Preset(
        ModelConfig(d_model=64, layers=3, heads=4, feedforward=256, mixtures=16, hidden=(64,)),
        Recipe(128, 2e-3, 40, optimizer="muon", smoothing=0.0),
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


def make_report(scored: ScoredRun) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the parts of the report's page, and their numbers for results.json.

    They show how the negative log-likelihood (NLL) of the test rows is distributed over rows and over features.
    """
    names = scored.model.schema.names
    nll_by_feature = {name: float(value) for name, value in zip(names, scored.per_feature, strict=True)}
    blocks = [
        pages.render_heading("NLL by row and by feature"),
        pages.render_paragraph(
            "NLL of a row in nats, with each reading in units of its standard deviation, averaged over the orders; "
            "smaller is likelier. By feature: given the readings before it, averaged over rows and orders."
        ),
        charts.draw_histogram(scored.nll.mean(0), "Test rows", "NLL, nats"),
        charts.draw_bars(list(nll_by_feature), list(nll_by_feature.values()), "By feature", "nats"),
    ]
    return blocks, {"per_feature": nll_by_feature}


EXPERIMENT = Experiment(
    name="power",
    title="Household power",
    record_noun="rows",
    num_records=2_049_280,
    presets=PRESETS,
    published_nll_by_method=PUBLISHED,
    load_data=load_table,
    make_report=make_report,
)
