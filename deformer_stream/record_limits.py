"""Limits of the records with which a model can be trained."""

from __future__ import annotations

MAX_FEATURES = 4096
"""Largest number of features of a record. The time to score a record grows with the square of their number."""

MAX_SLOTS = 1000
"""Largest number of time slots of a window."""

MAX_NAME_CHARS = 1024
"""Largest number of characters in the name of a feature, in a label or in a unit.

Input messages with longer names or labels are refused, so a model with such a name could never be used.
"""
