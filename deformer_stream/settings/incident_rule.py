"""The options that determine when incidents open and resolve, which several commands have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deformer_stream.settings.base import DEFAULT_MAX_AHEAD, Duration, Settings, TimeLimit, text_default

DEFAULT_BUDGET = "1 per 30d"
"""Default of --incident-budget. `calibrate --incidents` prints whether it is in reach."""


class IncidentRuleSettings(Settings):
    """The options that determine when incidents open and resolve. `replay --incidents` has them, too."""

    incident_budget: str = Field(
        DEFAULT_BUDGET,
        description='Largest number of false incidents of one device in a period, such as "1 per 30d". Units: s, m, h, '
        "d and w.",
    )
    incident_rule: Literal["auto", "segments", "e-detector"] = Field(
        "auto",
        description="Rule that keeps the budget. segments compares with segments of normal operation, which calibrate "
        "--incidents stores. e-detector needs no such segments, but assumes that successive records are independent. "
        "auto chooses segments if enough of them are stored.",
    )
    segment: Duration | None = Field(
        None,
        description="Length of a segment of normal operation of one device, such as 1d. Default: the longest of 1d, 8h "
        "and 1h that can keep the budget.",
    )
    quiet: Duration = text_default(
        "1m", description="An incident is resolved if its device has sent records for this time without new evidence."
    )
    silent_after: Duration = text_default(
        "1d",
        description="An incident is also resolved, as silent, if its device has sent nothing for this time while "
        "others have. 0 keeps it open until the device sends again.",
    )
    gap: Duration = text_default(
        "10m",
        description="An incident is reopened if evidence with the same suspects comes again within this time.",
    )
    fleet: str = Field(
        "auto",
        description="A fleet incident opens if this many devices of a group have incidents with the same suspects "
        'within this time, such as "3 within 10m". The group of hall-2/pump-07 is hall-2; devices without / are one '
        "group. auto is this rule for groups of ten devices or more. off opens none.",
    )
    device_by: str | None = Field(
        None,
        min_length=1,
        description="The device of a record is its id up to the last occurrence of this text. Default: up to the last "
        "@, else up to the last /.",
    )
    max_ahead: TimeLimit = text_default(
        DEFAULT_MAX_AHEAD,
        description="Evidence whose time is later than the timestamp of its message by more than this counts at that "
        "timestamp. Otherwise a device whose clock was ahead once could not be quiet until real time has caught up. "
        "off leaves all times as they are.",
    )
    records_per_day: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Number of records of one device in a day, for --incident-rule e-detector. Default: as in the "
        "segments of the model, else one record per window.",
    )
