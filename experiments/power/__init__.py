"""Household power, the second experiment of the paper: `python -m experiments.power --help`.

`data` reads and splits the table. `experiment` has the presets, the published results and the report.
"""
