"""The labels that a person gives to incidents and records. The types have no dependency, so that `--help` is quick."""

from __future__ import annotations

from typing import Literal, get_args

IncidentLabel = Literal["true", "false-alarm", "maintenance"]
"""What a person says about an incident. "true" is a real fault."""

Label = Literal[IncidentLabel, "cleared"]
"""The label of a message of `TOPIC-feedback`; "cleared" takes an earlier label back."""

LABELS: tuple[Label, ...] = get_args(Label)

TAKE_BACK: Label = "cleared"
"""The label that takes an earlier label back."""
