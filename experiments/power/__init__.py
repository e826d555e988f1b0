"""Household power, the paper's second experiment: `python -m experiments.power --help`."""
