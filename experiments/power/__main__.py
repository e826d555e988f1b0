"""Run the experiment as `python -m experiments.power`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.command import main

if TYPE_CHECKING:
    from experiments.experiment import Experiment

SUMMARY = """Estimate the density of household power readings, in any order (arXiv 2106.06989, section 4.2).

--data is household_power_consumption.txt of UCI data set 235, its zip file, or a folder that contains one of them. The
table is prepared like that of Papamakarios et al. (2017): rows with missing readings are dropped, uniform noise is
added, and the last tenth is the test set.

To run in parts, add --pause-after 9m, and --resume from the second part on, until results.json exists.
"""


def import_experiment() -> Experiment:
    """Return the experiment; the packages that it needs are imported here."""
    from experiments.power.experiment import EXPERIMENT

    return EXPERIMENT


if __name__ == "__main__":
    main("power", SUMMARY, import_experiment)
