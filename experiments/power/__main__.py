"""Entry point of `python -m experiments.power`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.command import main

if TYPE_CHECKING:
    from experiments.experiment import Experiment

SUMMARY = """The density of household power readings, six a minute in any order (section 4.2 of arXiv 2106.06989).

--data is household_power_consumption.txt of UCI data set 235, the zip it comes in, or a folder with one of them. The
table is prepared as by Papamakarios and others (2017): missing rows dropped, uniform noise, the last tenth tests.

To be run in pieces: add --pause-after 9m, and --resume from the second piece on, until results.json is there.
"""


def experiment() -> Experiment:
    from experiments.power.experiment import EXPERIMENT

    return EXPERIMENT


if __name__ == "__main__":
    main("power", SUMMARY, experiment)
