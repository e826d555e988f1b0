"""Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete."""

__version__ = "0.1.0"
