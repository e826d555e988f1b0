"""Limits of the records with which a model can be trained."""

from __future__ import annotations

MAX_FEATURES = 4096
"""Largest number of features of a record. The time to score a record grows with the square of their number."""

MAX_SLOTS = 1000
"""Largest number of time slots of a window."""
