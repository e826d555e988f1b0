"""Run the experiment as `python -m experiments.binarized_mnist`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.command import main

if TYPE_CHECKING:
    from experiments.experiment import Experiment

SUMMARY = """Estimate the density of binarised digits, pixel by pixel in any order (arXiv 2106.06989, section 4.1).

Trains a model, scores the test images in several random orders, and writes a model directory with a report. The report
shows the negative log-likelihood (NLL) against time, samples sorted by NLL, images in which 100 missing pixels were
filled, and the NLL of letters, shapes and altered digits.

To run in parts, add --pause-after 9m, and --resume from the second part on, until results.json exists.
"""


def import_experiment() -> Experiment:
    """Return the experiment; the packages that it needs are imported here."""
    from experiments.binarized_mnist.experiment import EXPERIMENT

    return EXPERIMENT


if __name__ == "__main__":
    main("binarized_mnist", SUMMARY, import_experiment)
