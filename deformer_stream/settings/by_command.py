"""The settings class of each command."""

from __future__ import annotations

from deformer_stream.settings.base import Settings
from deformer_stream.settings.bridge_commands import BridgeSettings
from deformer_stream.settings.commands import (
    CalibrateSettings,
    ConsumeSettings,
    DeadLettersSettings,
    DemoSettings,
    ImputeSettings,
    ProduceSettings,
    ReplaySettings,
    SampleSettings,
)
from deformer_stream.settings.incident_commands import (
    FeedbackSettings,
    IncidentsSettings,
    ProposeSettings,
    ServeSettings,
)

SETTINGS_BY_COMMAND: dict[str, type[Settings]] = {
    "consume": ConsumeSettings,
    "replay": ReplaySettings,
    "calibrate": CalibrateSettings,
    "incidents": IncidentsSettings,
    "serve": ServeSettings,
    "feedback": FeedbackSettings,
    "propose": ProposeSettings,
    "dead-letters": DeadLettersSettings,
    "bridge": BridgeSettings,
    "produce": ProduceSettings,
    "impute": ImputeSettings,
    "sample": SampleSettings,
    "demo": DemoSettings,
}
