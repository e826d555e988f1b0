"""Patterns of false alarms: kinds of false incidents that people have labelled, and p-values relative to them.

A pattern describes false incidents with the same suspects, such as those of every cleaning of a tank. A new record that
matches the pattern is compared with the past incidents of the pattern, in addition to the calibration records:

    p' = max(p, (1 + #{i : S_i ≥ s}) / (n + 1))

where s is the score of the record and S_i the largest score of past incident i of the pattern, i = 1 … n. This is a
Mondrian conformal p-value (Vovk, Gammerman and Shafer, 2005), whose category is the pattern. The pattern
has one score for each incident and not for each record, because the records of one incident resemble each other.

- p' ≥ p for every record. If the statistic of a detector falls when a p-value rises, it therefore raises no incident
  that it would not raise without patterns. So patterns cannot break a budget of false incidents.
- Let a new false incident of the pattern be exchangeable with the n past ones. Then the smallest second term over all
  its records is at most α with probability at most α, whatever the dependence among its records.
- A fault with the same suspects is still found if its scores are larger than those of the past incidents. It is found
  later, because no record then has a p-value below 1/(n + 1). A fault whose scores are as large as those of the pattern
  is not found. Patterns are therefore tried on kept evidence with confirmed faults before they are used
  (`runtime.propose`).

The past incidents of a pattern are all incidents that match it, except those that a person has confirmed as faults.
They include incidents without a label: people label what looks suspicious, so leaving the others out would bias the
comparison (Label-Trim, arXiv 2502.04807).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from deformer_stream.calibration.share_vectors import Shares, compute_cosine
from deformer_stream.feedback_labels import IncidentLabel

PatternState = dict[str, tuple[int, int, dict[str, float]]]
"""The state of a `PatternAdjuster` for each device: the time of the last alert, the number of records since then, and
the weighted sum of the shares of recent alerts."""

MAX_RECORDS_SINCE_ALERT = 10
"""A run of alerts goes on for this many records without an alert, however long they take. It is the number of quiet
records that `incidents.tracker` needs to resolve an incident."""

MIN_COSINE = 0.5
"""Smallest cosine between the suspects of a record or incident and a pattern that it matches.

Two incidents of a device have the same suspects for `incidents.tracker` at the same bound. The attribution of single
records errs, and it differs between devices, so a larger bound would miss many incidents of a kind.
"""

STRICTER_COSINES = (0.65, 0.8)
"""Bounds that are tried if a pattern would hide a confirmed fault."""

MIN_FALSE_LABELS = 3
"""Smallest number of incidents labelled as false alarms from which a pattern is made."""

MIN_INCIDENTS = 5
"""Smallest number of past incidents of a pattern. With fewer, no score could be large enough to open an incident: the
mean of the e-values of the p-value 1/(n + 1) would be near 1 or below."""

MIN_DEVICES_FOR_ALL = 3
"""A pattern holds for all devices if incidents of at least this many devices were labelled as false alarms; otherwise
only for these devices."""

MAX_PATTERNS, MAX_INCIDENTS, MAX_PATTERN_FEATURES, MAX_DEVICES, MAX_TEXT_CHARS = 100, 1_000, 32, 10_000, 1_024
"""Bounds of what a file may contain: patterns, incidents, features and devices of a pattern, and characters of a name.
"""

_RECENT_WEIGHT = 0.7
"""Factor of the earlier alerts' suspects in the running sum of a device's recent suspects, for each new alert.

After several alerts of a pattern, one or two alerts with other suspects still match, because the attribution of single
records can err. A third one in succession does not match; it may be the beginning of a fault.
"""


def keep_valid_shares(shares: Shares) -> dict[str, float]:
    """Return the positive finite shares, at most the `MAX_PATTERN_FEATURES` largest ones, in a fixed order.

    Evidence may come from a forged message, whose shares must not make a direction undefined or large.
    """
    valid = [(feature, float(share)) for feature, share in shares.items() if 0 < share < 1e9]
    return dict(sorted(valid, key=lambda entry: (-entry[1], entry[0]))[:MAX_PATTERN_FEATURES])


@dataclass(frozen=True, slots=True)
class FalseAlarmPattern:
    """A kind of false incidents, to which the records of new incidents are compared.

    Attributes:
        direction: Mean share of the attribution by feature, with the Euclidean norm 1.
        score_by_incident: The largest score of the records of each past incident of the pattern, by the incident's id.
        labelled: Ids of those past incidents that people have labelled as false alarms.
        devices: The devices to which the pattern applies; None for all.
        min_cosine: Smallest cosine between the suspects of a record and `direction` with which the record matches.
    """

    direction: Shares
    score_by_incident: Mapping[str, float]
    labelled: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    min_cosine: float = MIN_COSINE
    _scores: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        direction = keep_valid_shares(self.direction)
        norm = math.hypot(*direction.values())
        if not direction:
            raise ValueError("a pattern of false alarms has no feature with a positive share: remove the pattern")
        if len(direction) != len(self.direction):
            raise ValueError(
                f"a pattern of false alarms has {len(self.direction)} features, of which {len(direction)} can be used: "
                f"give at most {MAX_PATTERN_FEATURES} features, with positive finite shares"
            )
        if not 0 < self.min_cosine <= 1:
            raise ValueError(
                f"the smallest cosine of a pattern of false alarms is {self.min_cosine}: give a number above 0, at "
                "most 1"
            )
        if not self.score_by_incident or len(self.score_by_incident) > MAX_INCIDENTS:
            raise ValueError(
                f"a pattern of false alarms has {len(self.score_by_incident)} past incidents: give 1 to {MAX_INCIDENTS}"
            )
        if not all(math.isfinite(score) for score in self.score_by_incident.values()):
            raise ValueError("a score of a pattern of false alarms is not finite: remove the pattern")
        object.__setattr__(self, "direction", {name: share / norm for name, share in direction.items()})
        object.__setattr__(self, "_scores", tuple(sorted(self.score_by_incident.values())))

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that identify the features of the pattern and its devices, for reports."""
        text = "\0".join([*sorted(self.direction), "", *(self.devices or ())])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]

    @property
    def min_p_value(self) -> float:
        """The smallest p-value that the pattern gives, 1/(n + 1) for n past incidents."""
        return 1.0 / (len(self._scores) + 1)

    def includes_device(self, device: str) -> bool:
        """Return whether the pattern applies to a device."""
        return self.devices is None or device in self.devices

    def compute_p_value(self, score: float, left_out: str | None = None) -> float:
        """Return the p-value of a record relative to the past incidents of the pattern, (1 + #{S_i ≥ s}) / (n + 1).

        Args:
            score: The score of the record; larger is more anomalous.
            left_out: Id of the past incident to which the record belongs, which is left out; None if there is none.
        """
        num_past = len(self._scores)
        num_at_least = num_past - bisect_left(self._scores, score)
        left_out_score = None if left_out is None else self.score_by_incident.get(left_out)
        if left_out_score is not None:
            num_past -= 1
            num_at_least -= left_out_score >= score
        return (1.0 + num_at_least) / (num_past + 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the pattern as a JSON object; the keys are part of the format of incidents.json."""
        return {
            "direction": dict(self.direction),
            "cosine": self.min_cosine,
            "devices": None if self.devices is None else list(self.devices),
            "scores": dict(self.score_by_incident),
            "labelled": list(self.labelled),
        }

    @staticmethod
    def from_json(document: Any) -> FalseAlarmPattern:
        """Return the pattern that a JSON object from `to_json` describes.

        Raises:
            ValueError: The object is not such a pattern.
        """
        try:
            devices, labelled = document["devices"], document["labelled"]
            if not isinstance(devices, list | None) or not isinstance(labelled, list):
                raise ValueError("the devices and labelled incidents of a pattern of false alarms must be lists")
            if len(devices or ()) > MAX_DEVICES or len(labelled) > MAX_INCIDENTS:
                raise ValueError(
                    f"a pattern of false alarms has {len(devices or ())} devices and {len(labelled)} labelled "
                    f"incidents: give at most {MAX_DEVICES} and {MAX_INCIDENTS}"
                )
            pattern = FalseAlarmPattern(
                direction={_check_text(name): _check_number(share) for name, share in document["direction"].items()},
                score_by_incident={
                    _check_text(incident): _check_number(score) for incident, score in document["scores"].items()
                },
                labelled=tuple(_check_text(incident) for incident in labelled),
                devices=None if devices is None else tuple(_check_text(device) for device in devices),
                min_cosine=_check_number(document["cosine"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"a pattern of false alarms is incomplete or has a wrong type ({type(error).__name__}: {error}): "
                "remove the pattern"
            ) from None
        return pattern


def _check_text(value: Any) -> str:
    """Return a value that must be a short text.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise ValueError(f"a name in a pattern of false alarms is {value!r:.60}: give at most {MAX_TEXT_CHARS} chars")
    return value


def _check_number(value: Any) -> float:
    """Return a value that must be a number, as a float.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a number in a pattern of false alarms is {value!r:.60}: give a JSON number")
    return float(value)


def read_patterns(document: Any) -> tuple[FalseAlarmPattern, ...]:
    """Return the patterns of a JSON list, the entry `patterns` of incidents.json.

    Raises:
        ValueError: The entry is not such a list.
    """
    if not isinstance(document, list) or len(document) > MAX_PATTERNS:
        raise ValueError(f"the patterns of false alarms are not a list of at most {MAX_PATTERNS} entries: remove them")
    return tuple(FalseAlarmPattern.from_json(entry) for entry in document)


class PatternAdjuster:
    """Raises the p-values of records that match a pattern of false alarms, record by record, for any number of devices.

    An alerted record matches by its own suspects, or by those of the recent alerts of its device. A record without an
    alert has no suspects; it matches by the recent alerts of its device. The recent alerts are those of the last run: a
    series in which each alert follows the one before within `gap`, or within `MAX_RECORDS_SINCE_ALERT` records. Later
    alerts have more weight.

    The result depends on the earlier records, so the order of the calls matters. Without patterns, p-values are
    returned unchanged and no state is kept.

    Args:
        patterns: The patterns.
        gap: Largest time between two alerts of a run in microseconds, however many records lie between them.
        model: Fingerprint of the model whose scores the patterns hold; "" if all records come from it.
        find_own_incident: Returns the past incident to which a record of a device at a time belongs, None if there is
            none. This incident is left out of the comparison, so that past incidents are treated like new ones. None if
            no record belongs to a past incident, as in a live stream.
    """

    def __init__(
        self,
        patterns: Sequence[FalseAlarmPattern],
        gap: int,
        model: str = "",
        find_own_incident: Callable[[str, int], str | None] | None = None,
    ) -> None:
        self._patterns = tuple(patterns)
        self._gap = gap
        self._model = model
        self._find_own_incident = find_own_incident
        self._recent_by_device: PatternState = {}

    def applies_to(self, model: str) -> bool:
        """Return whether the scores of a model (its fingerprint) can be compared with those of the patterns."""
        return self._model in ("", model)

    def adjust(self, device: str, time: int, p_value: float, score: float, shares: Shares | None) -> float:
        """Return the p-value p' of a closed record, which is at least `p_value`.

        Args:
            device: The device of the record.
            time: Event time of the record, in microseconds.
            p_value: The p-value of the record relative to the calibration records.
            score: The score of the record; larger is more anomalous. If it is NaN, the p-value is unchanged.
            shares: The share of the attribution by feature of the record's alert, None if it has not alerted.
        """
        if not self._patterns or math.isnan(score):
            return p_value
        suspect_shares = keep_valid_shares(shares) if shares else {}
        recent = self._get_recent(device, time)
        if suspect_shares:
            recent = self._add_alert(device, time, recent, suspect_shares)
        if not recent:
            return p_value
        matching = [
            pattern
            for pattern in self._patterns
            if pattern.includes_device(device) and _matches(pattern, suspect_shares, recent)
        ]
        if not matching:
            return p_value
        left_out = None if self._find_own_incident is None else self._find_own_incident(device, time)
        return max(p_value, *(pattern.compute_p_value(score, left_out) for pattern in matching))

    def preview(self, device: str, time: int, p_value: float, score: float, shares: Shares | None) -> float:
        """Return what `adjust` would return for a record, without counting the record."""
        recent = self._recent_by_device.get(device)
        adjusted = self.adjust(device, time, p_value, score, shares)
        if recent is None:
            self._recent_by_device.pop(device, None)
        else:
            self._recent_by_device[device] = recent
        return adjusted

    def drop_device(self, device: str) -> None:
        """Drop the recent alerts of a device."""
        self._recent_by_device.pop(device, None)

    def _get_recent(self, device: str, time: int) -> dict[str, float]:
        """Return the weighted shares of the device's recent alerts, and count a record; empty if the run has ended."""
        if device not in self._recent_by_device:
            return {}
        last, num_records, shares = self._recent_by_device[device]
        if time - last > self._gap and num_records >= MAX_RECORDS_SINCE_ALERT:
            del self._recent_by_device[device]
            return {}
        self._recent_by_device[device] = (last, num_records + 1, shares)
        return shares

    def _add_alert(
        self, device: str, time: int, recent: dict[str, float], suspect_shares: dict[str, float]
    ) -> dict[str, float]:
        """Add an alert to the recent ones of a device, and return their weighted shares."""
        merged = {feature: _RECENT_WEIGHT * share for feature, share in recent.items()}
        for feature, share in suspect_shares.items():
            merged[feature] = merged.get(feature, 0.0) + share
        merged = keep_valid_shares(merged)
        last = self._recent_by_device[device][0] if device in self._recent_by_device else time
        self._recent_by_device[device] = (max(last, time), 0, merged)
        return merged

    def export_state(self) -> PatternState:
        """Return the state, from which `import_state` continues. It can be expressed as JSON."""
        return {
            device: (last, num_records, dict(shares))
            for device, (last, num_records, shares) in self._recent_by_device.items()
        }

    def import_state(self, state: PatternState) -> None:
        """Restore the state from `export_state`. Without patterns, the state is dropped."""
        if self._patterns:
            self._recent_by_device = {
                device: (last, num_records, keep_valid_shares(shares))
                for device, (last, num_records, shares) in state.items()
            }


def _matches(pattern: FalseAlarmPattern, suspect_shares: Shares, recent: Shares) -> bool:
    """Return whether a record with its own suspects, none if it has not alerted, matches a pattern.

    Args:
        pattern: The pattern.
        suspect_shares: Shares of the record's own suspects.
        recent: Weighted shares of the recent alerts of the device, which include those of the record.
    """
    if suspect_shares and compute_cosine(suspect_shares, pattern.direction, if_empty=0.0) >= pattern.min_cosine:
        return True
    return compute_cosine(recent, pattern.direction, if_empty=0.0) >= pattern.min_cosine


@dataclass(frozen=True, slots=True)
class PastIncident:
    """An incident from which patterns are made.

    Attributes:
        id: Id of the incident.
        device: Its device.
        shares: Mean share of the attribution by feature over the alerts of the incident.
        score: The largest score of the records of the incident.
        label: The label that a person has given to it, None if it has none.
    """

    id: str
    device: str
    shares: Shares
    score: float
    label: IncidentLabel | None


@dataclass(frozen=True, slots=True)
class PatternCandidate:
    """A kind of false incidents: labelled false alarms with the same suspects, and the pattern that is made from them.

    Attributes:
        direction: Mean share of the attribution by feature.
        labelled: The incidents that people have labelled as false alarms.
        unlabelled: Further incidents with these suspects that nobody has labelled. They are past incidents of the
            pattern, and a person should look at them before the pattern is used.
        confirmed: Incidents with these suspects that people have confirmed as faults.
        pattern: The pattern; None if there are too few incidents.
        remedy: What is missing for a pattern; "" if there is one.
    """

    direction: Shares
    labelled: tuple[PastIncident, ...]
    unlabelled: tuple[PastIncident, ...]
    confirmed: tuple[PastIncident, ...]
    pattern: FalseAlarmPattern | None
    remedy: str = ""


def tighten(candidate: PatternCandidate) -> PatternCandidate | None:
    """Return a candidate whose suspects must match more closely, by the next of `STRICTER_COSINES`.

    Returns:
        The candidate; None if there is no stricter bound, or if too few past incidents match then.
    """
    pattern = candidate.pattern
    stricter = [cosine for cosine in STRICTER_COSINES if pattern is not None and cosine > pattern.min_cosine]
    if pattern is None or not stricter:
        return None

    direction = pattern.direction

    def is_similar(incident: PastIncident) -> bool:
        return compute_cosine(keep_valid_shares(incident.shares), direction, if_empty=0.0) >= stricter[0]

    unlabelled = tuple(filter(is_similar, candidate.unlabelled))
    left_out = {incident.id for incident in candidate.unlabelled} - {incident.id for incident in unlabelled}
    scores = {name: score for name, score in pattern.score_by_incident.items() if name not in left_out}
    if len(scores) < MIN_INCIDENTS:
        return None
    pattern = replace(pattern, score_by_incident=scores, min_cosine=stricter[0])
    confirmed = tuple(filter(is_similar, candidate.confirmed))
    return replace(candidate, pattern=pattern, unlabelled=unlabelled, confirmed=confirmed)


def make_patterns(
    incidents: Sequence[PastIncident],
    earlier: Sequence[FalseAlarmPattern] = (),
    label_by_incident: Mapping[str, str] = MappingProxyType({}),
) -> list[PatternCandidate]:
    """Group the incidents that were labelled as false alarms by their suspects, and make a pattern of each group.

    Args:
        incidents: All incidents that the detector raises without patterns, with their labels, in order of time.
        earlier: Patterns in use. If the evidence of their incidents is no longer kept, they are not among `incidents`.
            They then become past incidents of the group with the same suspects. A label that was taken back, or
            replaced, removes an incident from its pattern. If it was taken back and the evidence is no longer kept, the
            incident stays a past incident of the pattern, as those that nobody has labelled.
        label_by_incident: The last labels of the incidents of `earlier` by id, "cleared" if it was taken back. The
            label of one that is not in it has not changed.

    Returns:
        The groups, in the order of their first incidents. Groups of earlier patterns whose incidents are not among
        `incidents` come first.
    """
    known = {incident.id for incident in incidents}
    groups: list[_Group] = []
    for pattern in earlier:
        kept = {
            name: score
            for name, score in pattern.score_by_incident.items()
            if name not in known and label_by_incident.get(name) not in ("true", "maintenance")
        }
        if kept:
            labelled = [
                name
                for name in pattern.labelled
                if name in kept and label_by_incident.get(name, "false-alarm") == "false-alarm"
            ]
            groups.append(_Group(dict(pattern.direction), kept, labelled, pattern.devices))
    for incident in incidents:
        shares = keep_valid_shares(incident.shares)
        if incident.label != "false-alarm" or not shares:
            continue
        cosines = [compute_cosine(shares, group.shares, if_empty=0.0) for group in groups]
        best = max(range(len(groups)), key=cosines.__getitem__, default=-1)
        if best < 0 or cosines[best] < MIN_COSINE:
            groups.append(_Group({}, {}, [], ()))
            best = len(groups) - 1
        groups[best].add(incident, shares)
    groups = [group for group in groups if group.earlier_labelled or group.labelled]
    return [_make_candidate(group, incidents) for group in groups][:MAX_PATTERNS]


@dataclass(slots=True)
class _Group:
    """Incidents with the same suspects that were labelled as false alarms.

    Attributes:
        shares: Sum of the unit vectors of the incidents' shares.
        earlier_scores: By id, the scores of incidents of an earlier pattern whose evidence is not stored any more.
        earlier_labelled: Ids of those of them that were labelled.
        earlier_devices: The devices of the earlier pattern, None if it held for all devices.
        labelled: The incidents whose evidence is kept.
    """

    shares: dict[str, float]
    earlier_scores: dict[str, float]
    earlier_labelled: list[str]
    earlier_devices: tuple[str, ...] | None
    labelled: list[PastIncident] = field(default_factory=list)

    def add(self, incident: PastIncident, shares: Shares) -> None:
        """Add a labelled incident with these shares."""
        norm = math.hypot(*shares.values())
        for feature, share in shares.items():
            self.shares[feature] = self.shares.get(feature, 0.0) + share / norm
        self.labelled.append(incident)


def _make_candidate(group: _Group, incidents: Sequence[PastIncident]) -> PatternCandidate:
    """Return the pattern of a group, or what is missing for one."""
    direction = keep_valid_shares(group.shares)
    labelled_devices = sorted({*(incident.device for incident in group.labelled), *(group.earlier_devices or ())})
    is_for_all = group.earlier_devices is None or len(labelled_devices) >= MIN_DEVICES_FOR_ALL
    devices = None if is_for_all else tuple(labelled_devices)
    labelled_ids = {incident.id for incident in group.labelled}
    similar = [
        incident
        for incident in incidents
        if (devices is None or incident.device in devices)
        and compute_cosine(keep_valid_shares(incident.shares), direction, if_empty=0.0) >= MIN_COSINE
    ]
    unlabelled = tuple(incident for incident in similar if incident.label is None)
    confirmed = tuple(incident for incident in similar if incident.label == "true")
    scores = group.earlier_scores | {
        incident.id: incident.score for incident in (*group.labelled, *unlabelled) if math.isfinite(incident.score)
    }
    labelled = (*group.earlier_labelled, *(incident.id for incident in group.labelled))
    remedy = ""
    if len(labelled) < MIN_FALSE_LABELS:
        remedy = f"label {MIN_FALSE_LABELS - len(labelled)} more of these incidents as false alarms"
    elif len(scores) < MIN_INCIDENTS:
        remedy = f"wait for {MIN_INCIDENTS - len(scores)} more of these incidents"
    pattern = None
    if not remedy:
        # If there are too many, those with a label and the latest ones are kept.
        order = sorted(scores, key=lambda name: name in labelled_ids)[-MAX_INCIDENTS:]
        labelled = labelled[-MAX_INCIDENTS:]
        pattern = FalseAlarmPattern(direction, {name: scores[name] for name in order}, labelled, devices)
    return PatternCandidate(direction, tuple(group.labelled), unlabelled, confirmed, pattern, remedy)
