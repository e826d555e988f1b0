"""Household power, the paper's second experiment: `python -m trainer.experiments.power --help`."""
