"""The experiment on images from end to end, with one shape instead of ten digits."""

from __future__ import annotations

import re

import numpy as np
import pytest

import deformer_stream
from experiments import run as runner
from experiments.binarized_mnist.data import SIDE
from experiments.binarized_mnist.experiment import EXPERIMENT
from experiments.completion import fill_missing
from experiments.run import Outcome
from tests.experiments.worlds import TINY, corner, settings, write_images

pytestmark = [pytest.mark.slow, pytest.mark.charts]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("images")
    data = write_images(folder / "data", 500, 60, 40)
    given = {"preset": "small", "override": f"{TINY},batch=2,epochs=3", "orders": 2, "test_records": 30}
    return runner.run_experiment(EXPERIMENT, settings(folder / "out", data, **given))


def test_nll_is_below_that_of_independent_pixels(outcome: Outcome) -> None:
    known = np.concatenate([corner(500, 0), corner(60, 1)])
    p = np.clip(known.mean(0), 1e-3, 1 - 1e-3)
    independent = -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum()
    history = outcome.results["history"]
    assert history[-1]["validation"] < history[0]["validation"] / 2
    assert outcome.results["test"]["nll"] < 0.95 * independent


def test_other_images_are_less_likely(outcome: Outcome) -> None:
    separated = outcome.results["out_of_distribution"]
    assert separated["images"] == 30
    for name in ("letters", "large letters", "shapes", "rotated by 90°", "inverted", "permuted"):
        assert separated[name]["auroc"] > 0.99
        assert separated[name]["nll"] > 1.5 * outcome.results["test"]["nll"]


def test_missing_pixels_are_filled(outcome: Outcome) -> None:
    """Missing pixels inside the stroke are black, and missing pixels of the background are white."""
    model = deformer_stream.load(outcome.directory / "model").artifact.model
    image = np.zeros((1, SIDE, SIDE))
    image[:, 4:20, 4:8] = image[:, 4:8, 4:16] = 1.0
    holed = np.repeat(image.reshape(1, -1), 20, 0)
    stroke, paper = [r * SIDE + c for r in range(9, 17) for c in (5, 6)], [r * SIDE + 24 for r in range(8, 24)]
    holed[:, [*stroke, *paper]] = np.nan
    drawn = fill_missing(model, holed, 0)
    assert drawn[:, stroke].mean() > 0.8
    assert drawn[:, paper].mean() < 0.2


def test_report_has_the_figures_of_the_paper(outcome: Outcome) -> None:
    report = (outcome.directory / "model" / "report.html").read_text()
    titles = re.findall("<figcaption>(.*?)</figcaption>", report)
    assert titles == [
        "NLL while learning",
        "50 samples, the likeliest first",
        "30 test images, from the likeliest to the least likely",
        "Missing pixels, filled in",
        "Letters and shapes, each from the likeliest to the least likely",
        "NLL of digits and of images that are not digits",
    ]
    assert report.count("<g transform") == 50 + 30 + 5 * 9 + 3 * 20
    assert "30 of 40" in report
    assert "cannot be compared" in report
