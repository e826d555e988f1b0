"""Deployment choices: one typed home for every option of every command.

Precedence: flag, `DEFORMER_…` environment variable, TOML file, default. The classes below make the command-line options
(`options`), the configuration print-out and the README's table, so an option exists once. Hyperparameters are not
settings: they live in the model's manifest.
"""

from __future__ import annotations

from deformer_stream.settings.base import (
    PREFIX,
    Device,
    Duration,
    Minority,
    Settings,
    SettingsType,
    Share,
    Size,
    Timeout,
    Width,
    flag_of,
    variable_of,
)
from deformer_stream.settings.commands import (
    COMMANDS,
    CalibrateSettings,
    ConsumeSettings,
    DemoSettings,
    ImputeSettings,
    ProduceSettings,
    ReplaySettings,
    SampleSettings,
    ScoringSettings,
    TableSettings,
)
from deformer_stream.settings.loading import TRAINING, input_name, load, options, read_file, reason, shown_default

__all__ = [
    "COMMANDS",
    "PREFIX",
    "TRAINING",
    "CalibrateSettings",
    "ConsumeSettings",
    "DemoSettings",
    "Device",
    "Duration",
    "ImputeSettings",
    "Minority",
    "ProduceSettings",
    "ReplaySettings",
    "SampleSettings",
    "ScoringSettings",
    "Settings",
    "SettingsType",
    "Share",
    "Size",
    "TableSettings",
    "Timeout",
    "Width",
    "flag_of",
    "input_name",
    "load",
    "options",
    "read_file",
    "reason",
    "shown_default",
    "variable_of",
]
