"""Entry point of `python -m experiments.binarized_mnist`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.command import main

if TYPE_CHECKING:
    from experiments.experiment import Experiment

SUMMARY = """The density of 28 × 28 binarised digits, pixel by pixel in any order (section 4.1 of arXiv 2106.06989).

Trains, scores the test images in several random orders, and writes a model directory that streams, with a report: NLL
against time, samples sorted by NLL, images with 100 missing pixels filled in, and the NLL of what is no digit.

To be run in pieces: add --pause-after 9m, and --resume from the second piece on, until results.json is there.
"""


def experiment() -> Experiment:
    from experiments.binarized_mnist.experiment import EXPERIMENT

    return EXPERIMENT


if __name__ == "__main__":
    main("binarized_mnist", SUMMARY, experiment)
