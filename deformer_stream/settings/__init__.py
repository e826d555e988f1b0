"""The options of all commands: their types, defaults and help texts, and where their values come from.

The value of an option is taken from the first of these places that has one: a flag, a `DEFORMER_…` environment
variable, a TOML file, the default. Each option is defined once, as a field of a settings class. The command-line
options (`add_options`), the output of `deformer-stream config` and the table of all options are generated from these
classes. Hyperparameters of a model are not settings: they are stored in the model's manifest.
The modules are:

    base            the base class, the types of values, and the names of flags and variables
    by_command      the settings class of each command
    commands, incident_commands, bridge_commands   the options of each command
    tables, kafka, group_member, registry, plant_source, incident_rule, logins   options that several commands share
    topics          the default names of Kafka topics
    loading, option_files   values from flags, variables and files
    option_groups   the headings of the options in `--help`
"""

from __future__ import annotations

from deformer_stream.settings.base import (
    VARIABLE_PREFIX,
    Device,
    Duration,
    MinorityShare,
    Settings,
    SettingsType,
    Share,
    Size,
    Timeout,
    Units,
    WindowWidth,
    text_default,
    to_flag,
    to_variable,
)
from deformer_stream.settings.by_command import SETTINGS_BY_COMMAND
from deformer_stream.settings.commands import (
    CalibrateSettings,
    ConsumeSettings,
    DemoSettings,
    ImputeSettings,
    InitSettings,
    InputSettings,
    ProduceSettings,
    ReplaySettings,
    SampleSettings,
    ScoringSettings,
)
from deformer_stream.settings.loading import (
    TRAIN_TABLE,
    PathText,
    add_options,
    explain_error,
    find_default_config,
    find_value,
    format_default,
    is_secret,
    load_settings,
)
from deformer_stream.settings.option_groups import OptionGroups
from deformer_stream.settings.tables import TableSettings, WindowedTableSettings

__all__ = [
    "SETTINGS_BY_COMMAND",
    "TRAIN_TABLE",
    "VARIABLE_PREFIX",
    "CalibrateSettings",
    "ConsumeSettings",
    "DemoSettings",
    "Device",
    "Duration",
    "ImputeSettings",
    "InitSettings",
    "InputSettings",
    "MinorityShare",
    "OptionGroups",
    "PathText",
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
    "Units",
    "WindowWidth",
    "WindowedTableSettings",
    "add_options",
    "explain_error",
    "find_default_config",
    "find_value",
    "format_default",
    "is_secret",
    "load_settings",
    "text_default",
    "to_flag",
    "to_variable",
]
