"""Household power, the second experiment of the paper: `python -m experiments.power --help`."""
