"""The state machine that opens, updates and resolves incidents, one closed record at a time.

    record ─► order by time ─► detector of its device ─► above the threshold?
                                                           open, or reopen an incident with the same suspects
                                                           resolve after a quiet time below the threshold

`IncidentTracker` is a pure function of the log of evidence. The messages depend only on the order of the rows in the
log, not on how the rows are divided into batches. So a restart, a replay and a live run give the same bytes.

- Order. Rows are handled in the order of `row_order`. A row that comes too late for it is handled at once, and counted
  (`num_late`).
- Detector. Each device has a detector (`calibration.incident_evidence`). With the segment rule it starts anew at the
  beginning of a segment, unless an incident is open.
- Patterns. The p-value of a record that matches a pattern of false alarms is raised before it enters the detector
  (`calibration.false_alarm_patterns`), so patterns can only prevent incidents.
- Opening. An incident opens at the record at which the statistic passes the threshold of the plan. If the device's last
  incident has the same suspects (`min_cosine`), and was resolved less than `gap` ago or began in the same segment, it
  is reopened instead. So a device has at most one false incident in a segment, unless the suspects change.
- Early opening. If the segments of the plan were calibrated for it (`BudgetPlan.opens_early`), an incident can open at
  the alert of a record that is still open. Such an alert also counts for an open incident at once. The statistic is
  then that of the closed records and of the open records that have alerted, each with its p-value at the alert. The
  detector itself advances when the record closes.
- Resolving. An incident is resolved if the statistic was below the threshold for `quiet` and for `min_quiet_records`
  records. While an incident is open, the statistic is at most e³ times the threshold, so that it falls soon after the
  end of a fault.
- Models. The first record of a device that a new model has scored resets its detector, because statistics of two
  models cannot be added. Records that an earlier model finishes after that (`--open-records finish`) are left out and
  counted (`num_other_model`). If they come without others between them, the earlier model is in use again.
- Silence. An incident is resolved as well if its device sends nothing for `silent_after` while other devices send. The
  time is that of the handled rows, so a replay gives the same result. A step of this time counts for at most a quarter
  of `silent_after`. So neither a pause of the whole stream nor one row with a wrong time resolves an incident.
- Messages. An incident is sent when it opens, when its severity or its first suspect changes, and when it is resolved.
  It is also sent at 1, 2, 4, 8, … records, and about once a minute of event time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from deformer_stream.calibration.false_alarm_patterns import (
    MAX_RECORDS_SINCE_ALERT,
    MIN_COSINE,
    PatternAdjuster,
    PatternState,
)
from deformer_stream.calibration.fault_classifier import UNKNOWN
from deformer_stream.calibration.incident_budget import BudgetPlan
from deformer_stream.calibration.incident_evidence import (
    INITIAL_STATE,
    LN_10,
    LogState,
    advance_detector,
    advance_with_alerts,
    compute_log_statistic,
)
from deformer_stream.calibration.incident_segments import add_open_alert
from deformer_stream.calibration.share_vectors import compute_cosine
from deformer_stream.durations import MICROS_PER_MINUTE
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL
from deformer_stream.incidents.device import extract_device, extract_device_group
from deformer_stream.incidents.events import (
    AlertRow,
    EvidenceBatch,
    Incident,
    IncidentState,
    OpenRecordReading,
)
from deformer_stream.incidents.fleet import FleetRule, FleetTracker, GroupState
from deformer_stream.incidents.row_order import OpenAlert, OrderState, Row, RowOrder
from deformer_stream.incidents.series import MAX_RESOLVED_POINTS, compute_message_interval, to_log10
from deformer_stream.incidents.suspects import SuspectTotals
from deformer_stream.incidents.tracked_incident import TrackedIncident

MAX_OPEN_LOG_EXCESS = 3.0
"""Largest difference between ln M_κ and ln of the threshold while an incident is open."""

MAX_EXCURSION_RECORDS = 32
"""Largest number of records before the opening whose evidence an incident shows."""

MAX_EXCURSION_ALERTS = 16
"""Largest number of alerts before the opening that are added to those of an incident."""

MAX_EXAMPLES = 20
"""Largest number of record ids and of alert ids of an incident: the first half of them, and the latest ones."""

MAX_DEVICES = 200_000
"""Largest number of devices whose state is kept, but for devices with an open incident. Beyond it, the device that has
sent nothing for the longest time is dropped. `consume` has the same limit for windows of devices."""

_MAX_CANDIDATES = 16
"""Largest number of devices that are examined, when a device is added, to find those that can be dropped."""

NUM_SILENT_STEPS = 4
"""Smallest number of steps of time in which `TrackerOptions.silent_after` can pass."""

MAX_EARLY_RECORDS = 256
"""Largest number of open records of an incident whose alerts have counted already; the oldest ones are dropped."""

NUM_RETURNED_RECORDS = 20
"""Number of records of a device in sequence after which an earlier model of its records is in use again."""

MAX_MODELS = 8
"""Largest number of models whose order is stored; the earliest ones are dropped."""

NEXT_READING_INTERVAL = 10_000_000
"""Shortest time between two messages that are sent only because the reading to take next has changed."""

NUM_SEVERITY_RECORDS = 10
"""Number of the latest records of which at least half must have alerted for severity 2."""

_EXCURSION_LOG_STATISTIC = LN_10
"""Smallest ln of the statistic at which a record belongs to the excursion: the records before a possible incident."""

_SEVERITY_MASK = (1 << NUM_SEVERITY_RECORDS) - 1
_SUSPECT_MARGIN = 1.1
"""The first suspect changes only if the new one's share is larger by this factor, so that messages do not alternate."""


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """The options of incident detection. Times are in microseconds.

    Attributes:
        quiet: Time below the threshold after which an incident is resolved.
        min_quiet_records: Number of records of the device below the threshold that are needed as well.
        silent_after: Time without records of its device after which an incident is resolved, 0 for never.
        gap: Time after its resolution within which an incident with the same suspects is reopened.
        reorder: Time for which rows wait for earlier ones; 0 handles rows in the order of the log.
        max_ahead: Longest time after the arrival of their message that times of evidence may have; later ones become
            the time of arrival. None leaves all times as they are.
        min_cosine: Two incidents have the same suspects if the cosine of their shares is at least this large.
        fleet: When a fleet incident opens, None for never.
        num_remembered_records: Number of the latest record ids of each device that are stored, so that duplicates of
            these records are ignored. 0 if the log has no duplicates.
        get_device: Returns the device of a record id.
        get_group: Returns the device group of a device.
    """

    quiet: int = MICROS_PER_MINUTE
    min_quiet_records: int = MAX_RECORDS_SINCE_ALERT
    silent_after: int = 0
    gap: int = 10 * MICROS_PER_MINUTE
    reorder: int = 0
    max_ahead: int | None = None
    min_cosine: float = MIN_COSINE
    fleet: FleetRule | None = None
    num_remembered_records: int = 0
    get_device: Callable[[str], str] = extract_device
    get_group: Callable[[str], str] = extract_device_group


@dataclass(slots=True)
class DeviceState:
    """The state of a device.

    Attributes:
        model: Fingerprint of the model of its last record.
        log_state: ln M_κ for each exponent; empty if M_κ is 0.
        segment: Number of the segment of its last record, None without segments.
        last_time: Time of its last record.
        heard: `TrackerState.active_time` at its last record or alert.
        alerted_bits: Which of the latest `NUM_SEVERITY_RECORDS` records have alerted, the latest in the lowest bit.
        excursion_times: Times of the excursion: the latest records, in sequence, at which the statistic was large but
            did not reach the threshold. They become the beginning of an incident.
        excursion_evidence: log10 of the statistic after these records.
        excursion_p_values: p-values of these records.
        excursion_alerts: The latest alerts of these records.
        excursion_alert_times: Times of the records of these alerts.
        incident: The open incident, or the last resolved one, None if there was none.
        remembered_records: The latest record ids; see `TrackerOptions.num_remembered_records`.
        alert_p_by_record: p-values at their alerts of records that are still open, by their ids. They count for early
            opening, and are dropped when the detector starts anew.
        num_left_out: Number of records in sequence that were left out because an earlier model has scored them.
    """

    model: str
    log_state: LogState = ()
    segment: int | None = None
    last_time: int = NO_TIME
    heard: int = 0
    alerted_bits: int = 0
    excursion_times: list[int] = field(default_factory=list)
    excursion_evidence: list[float] = field(default_factory=list)
    excursion_p_values: list[float] = field(default_factory=list)
    excursion_alerts: list[AlertRow] = field(default_factory=list)
    excursion_alert_times: list[int] = field(default_factory=list)
    incident: TrackedIncident | None = None
    remembered_records: list[str] = field(default_factory=list)
    alert_p_by_record: dict[str, float] = field(default_factory=dict)
    num_left_out: int = 0


@dataclass(slots=True)
class TrackerState:
    """Everything that an `IncidentTracker` needs to continue. All values can be expressed as JSON.

    Attributes:
        state_by_device: The devices, in the order in which they have sent their latest records or alerts.
        state_by_group: The device groups with recent or fleet incidents.
        order: The rows that wait, and the alerts of open records.
        pattern_state: The state of the adjuster of p-values by patterns of false alarms.
        plan: Identity of the plan under which the state was reached (`runtime.incident_plan.DetectionPlan`); "" if it
            is unknown.
        segment_length: Length in microseconds of the segments to which the numbers of segments refer. None without
            segments, and in states of releases that did not store it.
        model: Fingerprint of the model of this plan, "" if it is unknown.
        models: Fingerprints of the models that have scored the rows, in the order in which they came into use. There
            are at most `MAX_MODELS`.
        latest_time: Largest time of a handled row.
        active_time: Sum of the steps of `latest_time`, each bounded, by which the silence of devices is measured.
        num_late: Number of rows that came too late to be handled in order of time.
        num_repeated: Number of rows that were dropped because they are duplicates.
        num_other_model: Number of rows that another model has scored than that of the plan, or an earlier model than
            that of their device.
        num_ahead: Number of rows whose time lay too far after the arrival of their message.
        num_dropped_devices: Number of devices that were dropped, each as often as it was.
        lost_by_id: The incidents that `reconcile` has resolved because they were not in the state, by id: the revision
            and the number of reopenings of their next message. It is sent if their first records are handled again.
    """

    state_by_device: dict[str, DeviceState] = field(default_factory=dict)
    state_by_group: dict[str, GroupState] = field(default_factory=dict)
    order: OrderState = field(default_factory=OrderState)
    pattern_state: PatternState = field(default_factory=dict)
    plan: str = ""
    segment_length: int | None = None
    model: str = ""
    models: list[str] = field(default_factory=list)
    latest_time: int = NO_TIME
    active_time: int = 0
    num_late: int = 0
    num_repeated: int = 0
    num_other_model: int = 0
    num_ahead: int = 0
    num_dropped_devices: int = 0
    lost_by_id: dict[str, tuple[int, int]] = field(default_factory=dict)


def compute_incident_id(device: str, model: str, first_record: str) -> str:
    """Return the id of an incident, 32 hexadecimal digits: a hash of its device, its model and its first record."""
    # An id that was read from JSON can contain an unpaired surrogate, which UTF-8 alone cannot encode.
    text = f"{device}\0{model}\0{first_record}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class IncidentTracker:
    """Opens, updates and resolves incidents from the log of evidence.

    Args:
        plan: The rule that keeps the budget.
        options: The options of detection.
        adjuster: Raises the p-values of records that match patterns of false alarms, None without patterns.
        model_name: Name of the model among several ones, which messages state; `ONLY_MODEL` if there is one model.
        model: Fingerprint of the model that the plan is for; "" for that of the plan.
    """

    def __init__(
        self,
        plan: BudgetPlan,
        options: TrackerOptions | None = None,
        adjuster: PatternAdjuster | None = None,
        model_name: str = ONLY_MODEL,
        model: str = "",
    ) -> None:
        self._plan, self._model_name, self._model = plan, model_name, model or plan.model
        self._options = options or TrackerOptions()
        self._adjuster = adjuster
        self._budget = str(plan.budget)
        self._state = TrackerState()
        self._order = RowOrder(self._options.reorder)
        self._messages: list[Incident] = []
        self._next_silence = 0  # no incident can be resolved as silent before `active_time` reaches this
        self._fleets: FleetTracker | None = None
        if self._options.fleet is not None:
            self._fleets = FleetTracker(
                self._options.fleet,
                self._options.get_group,
                self._budget,
                plan.rule,
                self._find_incident,
                lambda message: self._messages.append(replace(message, model_name=model_name)),
                self._send,
                self._take_first_counts,
            )

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of rows, alerts and incidents that were not handled as usual, by kind.

        late: Rows that came too late to be handled in order of time.
        untimed: Rows that were dropped because they have no time.
        repeated: Rows that were dropped because they are duplicates.
        other_model: Rows that another model has scored than that of the plan, or an earlier model than that of their
            device.
        ahead: Rows whose time lay too far after the arrival of their message, and became that time.
        dropped_devices: Devices that were dropped because there are more than `MAX_DEVICES`.
        dropped_alerts: Alerts that were dropped because too many records had not closed.
        unlisted_members: Members of fleet incidents beyond the largest number that a fleet incident lists.
        """
        state = self._state
        return {
            "late": state.num_late,
            "untimed": self._order.num_untimed,
            "repeated": state.num_repeated,
            "other_model": state.num_other_model,
            "ahead": state.num_ahead,
            "dropped_devices": state.num_dropped_devices,
            "dropped_alerts": self._order.num_dropped_alerts,
            "unlisted_members": 0 if self._fleets is None else self._fleets.num_unlisted,
        }

    @property
    def num_devices(self) -> int:
        """The number of devices whose evidence is stored."""
        return len(self._state.state_by_device)

    @property
    def num_open(self) -> int:
        """The number of open incidents of devices."""
        devices = self._state.state_by_device.values()
        return sum(device.incident is not None and device.incident.resolved is None for device in devices)

    def handle(self, batch: EvidenceBatch) -> list[Incident]:
        """Handle a batch of the log and return the messages that it causes, in order."""
        if self._options.max_ahead is not None:
            batch, num_ahead = batch.bound_times(self._options.max_ahead)
            self._state.num_ahead += num_ahead
        uses_alerts = self._plan.opens_early or any(alert.next_reading is not None for alert in batch.alerts)
        rows: Iterable[Row | OpenAlert] = self._order.add_with_alerts(batch) if uses_alerts else self._order.add(batch)
        for row in rows:
            if isinstance(row, Row):
                self._handle_row(row)
            else:
                self._handle_alert(row.model, row.alert)
        return self._take_messages()

    def finish(self) -> list[Incident]:
        """Handle the rows that still wait, at the end of finite input, and return the messages. Nothing is resolved."""
        for row in self._order.finish():
            self._handle_row(row)
        return self._take_messages()

    def export_state(self) -> TrackerState:
        """Return the state, from which another tracker continues. It must not be used after the next `handle`."""
        self._state.order = self._order.export_state()
        self._state.segment_length, self._state.model = self._plan.segment, self._model
        self._state.pattern_state = {} if self._adjuster is None else self._adjuster.export_state()
        if self._fleets is not None:
            self._state.state_by_group = self._fleets.export_state()
        return self._state

    def import_state(self, state: TrackerState) -> None:
        """Continue from a state.

        The plan and the options may differ from those with which it was made. `reconcile` is then called, too.
        """
        self._state = state
        self._next_silence = 0
        if self._plan.segment is not None and state.segment_length != self._plan.segment:
            _renumber_segments(state, self._plan.segment)
        if state.model not in ("", self._model) and self._model in state.models:
            self._bring_into_use(self._model)  # the plan is that of an earlier model again
        self._order.import_state(state.order)
        if self._adjuster is not None:
            self._adjuster.import_state(state.pattern_state)
        if self._fleets is not None:
            self._fleets.import_state(state.state_by_group, state.state_by_device)
        else:
            state.state_by_group = {}  # nothing would resolve these fleet incidents later

    @property
    def incident_ids(self) -> set[str]:
        """The ids of the incidents in the state: of each device the latest one, and the latest fleet incidents."""
        devices = self._state.state_by_device.values()
        ids = {device.incident.id for device in devices if device.incident is not None}
        return ids if self._fleets is None else ids | self._fleets.incident_ids

    def reconcile(self, sent_by_id: Mapping[str, Incident], resolution: str) -> list[Incident]:
        """Return the messages after which the log of incidents agrees with the state.

        They are needed if the state was not reached by the plan that has written the log. An incident that is open in
        the log, but not in the state, is resolved. An incident that the log does not have is sent as opened.

        If a record opens an incident that was resolved so, because evidence is handled again, it counts as reopened.

        Args:
            sent_by_id: The last messages about the incidents of the log: about all that are open, about those of
                `incident_ids`, and about those that this method has resolved in another run.
            resolution: Why incidents that are not in the state are resolved.
        """
        known_fleets: set[str] = set() if self._fleets is None else self._fleets.incident_ids
        for name, device in self._state.state_by_device.items():
            if device.incident is not None:
                self._reconcile_incident(name, device.incident, sent_by_id.get(device.incident.id), known_fleets)
        if self._fleets is not None:
            self._fleets.reconcile(sent_by_id)
        known_ids, latest_time = self.incident_ids, self._state.latest_time
        self._state.lost_by_id = {}
        for sent in sent_by_id.values():
            if sent.id in known_ids:
                continue
            last = sent
            if sent.state != "resolved":
                last = replace(
                    sent,
                    state="resolved",
                    resolved=max(sent.last, latest_time),
                    resolution=resolution,
                    revision=sent.revision + 1,
                    next_reading=None,
                )
                self._messages.append(last)
            self._state.lost_by_id[last.id] = (last.revision + 1, last.num_reopened + 1)
        return self._take_messages()

    def _take_first_counts(self, id_: str) -> tuple[int, int]:
        """Return the revision and the number of reopenings with which an incident begins, once for each id."""
        return self._state.lost_by_id.pop(id_, (0, 0))

    def _reconcile_incident(
        self, name: str, incident: TrackedIncident, sent: Incident | None, known_fleets: set[str]
    ) -> None:
        """Send the incident of a device if its last message in the log does not agree with it.

        Args:
            name: The device.
            incident: Its incident.
            sent: Its last message in the log, None if the log has none.
            known_fleets: Ids of the fleet incidents in the state.
        """
        if incident.parent is not None and incident.parent not in known_fleets:
            incident.former_parent, incident.parent = incident.parent, None
        is_open = incident.resolved is None
        if sent is None:
            incident.revision = 0
            if is_open:
                self._send(name, incident, "open", incident.last)
            return
        if sent.parent != incident.parent:
            incident.former_parent = sent.parent or incident.former_parent
        incident.former_parent = incident.former_parent or sent.former_parent
        incident.revision = max(incident.revision, sent.revision + 1)
        incident.severity = max(incident.severity, sent.severity)
        was_open = sent.state != "resolved"
        incident.num_reopened = max(incident.num_reopened, sent.num_reopened + (is_open and not was_open))
        if is_open != was_open or (is_open and incident.parent != sent.parent):
            self._send(name, incident, "updated" if is_open else "resolved", incident.resolved or incident.last)

    def _take_messages(self) -> list[Incident]:
        """Return the messages since the last call."""
        messages = self._messages.copy()
        self._messages.clear()
        return messages

    def _handle_row(self, row: Row) -> None:
        """Advance the detector of a record's device, and open, update or resolve its incident."""
        state = self._state
        name = self._options.get_device(row.record)
        device = self._touch_device(name) or self._add_device(name, row.model)
        if self._options.num_remembered_records and self._is_repeated(device, row.record):
            state.num_repeated += 1
            return
        self._advance_time(row.time, device)
        if self._is_of_earlier_model(device, row.model):
            state.num_other_model += 1
            return
        time = row.time
        if time < device.last_time:
            state.num_late += 1
            time = device.last_time  # so that times of an incident never fall
        device.last_time = time
        if row.model != device.model:
            self._change_model(name, device, row.model, time)
        plan = self._plan
        if plan.model and row.model != plan.model:
            state.num_other_model += 1
            if plan.fallback is None:
                return
            plan = plan.fallback
        incident = _get_open(device)
        self._begin_segment(device, plan, time)
        device.alert_p_by_record.pop(row.record, None)
        # The e-detector needs exact p-values. The segment rule uses the p-value of the whole record, which detects
        # more.
        extended_p = row.extend_p_value(plan.tail) if plan.rule == "segments" else row.p_value
        if self._adjuster is not None and self._adjuster.applies_to(row.model):
            extended_p = self._adjuster.adjust(name, time, extended_p, row.score, _get_shares(row.alert))
        log_state = advance_detector(device.log_state or INITIAL_STATE, extended_p, plan.kind, plan.log_normalisers)
        log_statistic = compute_log_statistic(log_state)
        device.alerted_bits = (device.alerted_bits << 1 | row.is_alerted) & _SEVERITY_MASK
        if incident is not None:
            log_evidence = incident.log_evidence or INITIAL_STATE
            incident.log_evidence = advance_detector(log_evidence, extended_p, plan.kind, plan.log_normalisers)
            self._update_incident(name, device, incident, log_state, time, row)
            return
        device.log_state = log_state
        if log_statistic < _EXCURSION_LOG_STATISTIC:
            if device.excursion_times:
                self._clear_excursion(device)
            if not plan.is_reached(log_statistic):
                return
        self._extend_excursion(device, time, log_statistic, row.p_value, row.alert)
        if plan.is_reached(log_statistic):
            incident, is_reopened = self._open_incident(
                name, device, plan, log_statistic, time, row.record, row.is_alerted
            )
            incident.log_evidence = log_state
            self._bound_detector(device, incident, log_state)
            self._announce(name, device, incident, row.record, is_reopened)

    def _advance_time(self, time: int, device: DeviceState) -> None:
        """Advance the time by which silence is measured to that of a row of a device; resolve silent incidents."""
        state, silent_after = self._state, self._options.silent_after
        if time > state.latest_time:
            if state.latest_time != NO_TIME:
                state.active_time += min(time - state.latest_time, silent_after // NUM_SILENT_STEPS)
            state.latest_time = time
        device.heard = state.active_time
        if not silent_after or state.active_time < self._next_silence:
            return
        self._next_silence = state.active_time + silent_after
        for name, other in state.state_by_device.items():
            incident = _get_open(other)
            if incident is None:
                continue
            if state.active_time >= other.heard + silent_after:
                self._resolve(name, other, incident, other.last_time + silent_after, "silent")
            else:
                self._next_silence = min(self._next_silence, other.heard + silent_after)

    def _touch_device(self, name: str) -> DeviceState | None:
        """Make a device the last one that is dropped, and return its state; None if it is unknown."""
        devices = self._state.state_by_device
        device = devices.pop(name, None)
        if device is not None:
            devices[name] = device
        return device

    def _find_incident(self, name: str) -> TrackedIncident | None:
        """Return the open or the last incident of a device, None if it has none or is dropped."""
        device = self._state.state_by_device.get(name)
        return None if device is None else device.incident

    def _add_device(self, name: str, model: str) -> DeviceState:
        """Return the state of a device that has sent nothing yet, or is dropped."""
        self._make_space()
        device = self._state.state_by_device[name] = DeviceState(model)
        if self._fleets is not None:
            self._fleets.add_device(name)
        return device

    def _make_space(self) -> None:
        """Drop devices that have sent nothing for the longest time, if there are too many for a further one.

        A device with an open incident is kept, and then counts as if it had sent something now.
        """
        devices = self._state.state_by_device
        for _ in range(_MAX_CANDIDATES):
            if len(devices) < MAX_DEVICES:
                return
            name = next(iter(devices))
            device = devices.pop(name)
            if _get_open(device) is not None:
                devices[name] = device
                continue
            self._state.num_dropped_devices += 1
            if self._adjuster is not None:
                self._adjuster.drop_device(name)
            if self._fleets is not None:
                self._fleets.drop_device(name)

    def _begin_segment(self, device: DeviceState, plan: BudgetPlan, time: int) -> None:
        """Let the detector of a device start anew if a time is in a new segment, unless an incident is open.

        It starts anew as well if the rule of its last record was another one, because the threshold of a rule applies
        to the statistic of that rule only.
        """
        segment = None if plan.segment is None else time // plan.segment
        if segment == device.segment:
            return
        # An alert can begin a segment before the last record of the segment before it has closed.
        if segment is None or device.segment is None or segment > device.segment:
            device.segment = segment
            if _get_open(device) is None:
                self._reset_detector(device)

    def _handle_alert(self, model: str, alert: AlertRow) -> None:
        """Count an alert of a record that may be open for long: open or update the incident of its device."""
        name = self._options.get_device(alert.record)
        device = self._touch_device(name)
        opens_early = self._plan.may_open_at(alert.alpha) and self._plan.model in ("", model)
        if device is None:
            if not opens_early:
                return
            device = self._add_device(name, model)
        if device.model != model or alert.record in device.remembered_records:
            return  # the record that closes next changes the model; an alert of a closed record is a duplicate
        time = max(alert.time, device.last_time)
        device.heard = self._state.active_time
        incident = _get_open(device)
        if incident is not None and alert.next_reading is not None:
            incident.next_reading = OpenRecordReading(alert.next_reading, alert.record, time)
        if opens_early:
            self._count_alert(name, device, time, alert)
        incident = _get_open(device)
        if incident is not None and self._is_message_due(incident, time):
            self._send(name, incident, "updated", time)
            self._update_fleet(name, incident, time)

    def _count_alert(self, name: str, device: DeviceState, time: int, alert: AlertRow) -> None:
        """Add the alert of an open record to the statistic of its device, and open or update the incident.

        Args:
            name: The device.
            device: Its state.
            time: Time of the alert, not before that of the device's last record.
            alert: The alert.
        """
        plan = self._plan
        self._begin_segment(device, plan, time)
        p_value = alert.p_value if plan.tail is None else plan.tail.extend(alert.p_value, alert.score)
        if self._adjuster is not None and self._adjuster.applies_to(device.model):
            if alert.score is None:
                return  # without a score, no pattern of false alarms could match
            p_value = self._adjuster.preview(name, time, p_value, alert.score, _get_shares(alert))
        add_open_alert(device.alert_p_by_record, alert.record, p_value)
        log_statistic = self._compute_early_statistic(device, device.log_state or INITIAL_STATE)
        incident = _get_open(device)
        if incident is None:
            if plan.is_reached(log_statistic):
                self._extend_excursion(device, time, log_statistic, alert.p_value, alert)
                log_state = device.log_state  # of closed records; the record of the alert is still open
                incident, is_reopened = self._open_incident(name, device, plan, log_statistic, time, alert.record, True)
                incident.log_evidence = device.log_state = log_state
                incident.early_records.append(alert.record)
                if alert.next_reading is not None:
                    incident.next_reading = OpenRecordReading(alert.next_reading, alert.record, time)
                self._announce(name, device, incident, alert.record, is_reopened)
            return
        unbounded = self._compute_early_statistic(device, incident.log_evidence or INITIAL_STATE)
        incident.max_log_evidence = max(incident.max_log_evidence, unbounded)
        incident.timeline.add(time, to_log10(log_statistic), alert.p_value)
        if alert.record not in incident.early_records:
            incident.early_records.append(alert.record)
            del incident.early_records[:-MAX_EARLY_RECORDS]
            incident.totals.add(alert, time)
            _add_example(incident, alert)
            incident.num_pending += 1
            incident.num_pending_alerted += 1
        if log_statistic >= incident.log_threshold:
            self._count_pending(device, incident, time)

    def _compute_early_statistic(self, device: DeviceState, log_state: LogState) -> float:
        """Return ln of the statistic if the open records of a device that have alerted closed now.

        Args:
            device: The state of the device.
            log_state: ln M_κ of its closed records.
        """
        p_values = device.alert_p_by_record.values()
        return compute_log_statistic(
            advance_with_alerts(log_state, p_values, self._plan.kind, self._plan.log_normalisers)
        )

    def _is_repeated(self, device: DeviceState, record: str) -> bool:
        """Return whether a record id is among the latest ones of a device. If not, store it."""
        if record in device.remembered_records:
            return True
        device.remembered_records.append(record)
        if len(device.remembered_records) > self._options.num_remembered_records:
            del device.remembered_records[0]
        return False

    def _is_of_earlier_model(self, device: DeviceState, model: str) -> bool:
        """Return whether a record is left out, because an earlier model has scored it than that of its device.

        The consumer lets the earlier model finish the records that were open when the model changed. After many of them
        in sequence, this model is in use again: the consumer has gone back to it.

        Args:
            device: The device of the record.
            model: Fingerprint of the model that has scored the record.
        """
        models = self._state.models
        if model == device.model or model not in models:
            self._register_model(device.model, model)
        elif device.model in models and models.index(model) < models.index(device.model):
            device.num_left_out += 1
            if device.num_left_out < NUM_RETURNED_RECORDS:
                return True
            self._bring_into_use(model)
        device.num_left_out = 0
        return False

    def _register_model(self, before: str, model: str) -> None:
        """Store that a model is in use, after the model of a device before, if it was not known.

        Args:
            before: Fingerprint of the model of the device.
            model: Fingerprint of the model that has scored its record.
        """
        models = self._state.models
        if model in models:
            return
        if before not in models:
            models.append(before)
        if model not in models:
            models.append(model)
        del models[:-MAX_MODELS]

    def _bring_into_use(self, model: str) -> None:
        """Make a known model the latest one that has come into use."""
        self._state.models.remove(model)
        self._state.models.append(model)

    def _change_model(self, name: str, device: DeviceState, model: str, time: int) -> None:
        """Reset the detector of a device and resolve its incident, because another model scores its records now."""
        device.model = model
        self._reset_detector(device)
        if device.incident is not None and device.incident.resolved is None:
            self._resolve(name, device, device.incident, time, "model-changed")

    def _reset_detector(self, device: DeviceState) -> None:
        """Set M_κ of a device to 0."""
        device.log_state = ()
        device.alert_p_by_record.clear()
        self._clear_excursion(device)

    def _clear_excursion(self, device: DeviceState) -> None:
        """Drop the records of the excursion."""
        device.excursion_times.clear()
        device.excursion_evidence.clear()
        device.excursion_p_values.clear()
        device.excursion_alerts.clear()
        device.excursion_alert_times.clear()

    def _extend_excursion(
        self, device: DeviceState, time: int, log_statistic: float, p_value: float, alert: AlertRow | None
    ) -> None:
        """Add a record to the excursion."""
        device.excursion_times.append(time)
        device.excursion_evidence.append(to_log10(log_statistic))
        device.excursion_p_values.append(p_value)
        if len(device.excursion_times) > MAX_EXCURSION_RECORDS:
            del device.excursion_times[0], device.excursion_evidence[0], device.excursion_p_values[0]
        if alert is not None:
            device.excursion_alerts.append(alert)
            device.excursion_alert_times.append(time)
            if len(device.excursion_alerts) > MAX_EXCURSION_ALERTS:
                del device.excursion_alerts[0], device.excursion_alert_times[0]

    def _open_incident(
        self,
        name: str,
        device: DeviceState,
        plan: BudgetPlan,
        log_statistic: float,
        time: int,
        record: str,
        is_alerted: bool,
    ) -> tuple[TrackedIncident, bool]:
        """Open an incident at a record, or reopen the last one if it has the same suspects.

        Returns:
            The incident, and whether it was reopened. It is not sent yet.
        """
        new_totals = SuspectTotals()
        for alert, alert_time in zip(device.excursion_alerts, device.excursion_alert_times, strict=True):
            new_totals.add(alert, alert_time)
        id_ = compute_incident_id(name, device.model, record)
        last, is_reopened = device.incident, False
        if last is not None and self._is_same_fault(last, device, id_, time, new_totals.compute_shares()):
            incident, is_reopened = last, True
            incident.resolved = incident.resolution = None
            incident.num_reopened += 1
            # Records between the resolution and now do not belong to the incident.
            incident.num_pending = incident.num_pending_alerted = 0
        else:
            incident = device.incident = TrackedIncident(
                id_,
                device.model,
                plan.rule,
                log_threshold=plan.log_threshold,
                opened=time,
                first_record=record,
                segment=device.segment,
                last=time,
            )
            incident.revision, incident.num_reopened = self._take_first_counts(id_)
        for alert, alert_time in zip(device.excursion_alerts, device.excursion_alert_times, strict=True):
            if alert.record not in incident.early_records:
                incident.totals.add(alert, alert_time)
                _add_example(incident, alert)
        points = zip(device.excursion_times, device.excursion_evidence, device.excursion_p_values, strict=True)
        for point_time, evidence, point_p_value in points:
            incident.timeline.add(point_time, evidence, point_p_value)
        self._clear_excursion(device)
        incident.max_log_evidence = max(incident.max_log_evidence, log_statistic)
        incident.below_since = None
        incident.last = time
        if record in incident.early_records:  # it was counted at its alert, before the incident was resolved
            incident.early_records.remove(record)
        else:
            incident.num_records += 1
            incident.num_alerted += is_alerted
        incident.next_num_records = 2 * incident.num_records
        return incident, is_reopened

    def _announce(
        self, name: str, device: DeviceState, incident: TrackedIncident, record: str, is_reopened: bool
    ) -> None:
        """Send an incident that has just opened, and add it to a fleet incident."""
        self._raise_severity(device, incident)
        self._send(name, incident, "updated" if is_reopened or incident.revision else "open", incident.last)
        if self._fleets is not None:
            self._fleets.join(name, incident, record, is_reopened)

    def _is_same_fault(
        self, last: TrackedIncident, device: DeviceState, id_: str, time: int, shares: dict[str, float]
    ) -> bool:
        """Return whether the last incident of a device is reopened: it is near in time, and has the same suspects.

        Args:
            last: The last incident of the device, which is resolved.
            device: The state of the device.
            id_: The id that a new incident would have. If the last incident has this id, the record is a duplicate.
            time: Time of the record at which the statistic has passed the threshold.
            shares: Mean shares of the suspects of the latest alerts.
        """
        if last.id == id_:
            return True
        is_near = last.resolved is not None and time - last.resolved <= self._options.gap
        is_same_segment = last.segment is not None and last.segment == device.segment
        if not (is_near or is_same_segment):
            return False
        return compute_cosine(shares, last.totals.compute_shares(), if_empty=1.0) >= self._options.min_cosine

    def _update_incident(
        self, name: str, device: DeviceState, incident: TrackedIncident, log_state: LogState, time: int, row: Row
    ) -> None:
        """Add a closed record to the open incident of a device, and resolve the incident if it is quiet."""
        incident.max_log_evidence = max(incident.max_log_evidence, compute_log_statistic(incident.log_evidence))
        self._bound_detector(device, incident, log_state)
        log_statistic = compute_log_statistic(device.log_state)
        incident.timeline.add(time, to_log10(log_statistic), row.p_value)
        if incident.next_reading is not None and incident.next_reading.record == row.record:
            incident.next_reading = None
        if row.record in incident.early_records:
            incident.early_records.remove(row.record)
        else:
            if row.alert is not None:
                incident.totals.add(row.alert, time)
                _add_example(incident, row.alert)
            incident.num_pending += 1
            incident.num_pending_alerted += row.is_alerted
        if log_statistic >= incident.log_threshold:
            self._count_pending(device, incident, time)
        elif incident.below_since is None:
            incident.below_since = time
        elif (
            time - incident.below_since >= self._options.quiet
            and incident.num_pending >= self._options.min_quiet_records
        ):
            self._resolve(name, device, incident, time, "quiet")
            return
        if self._is_message_due(incident, time):
            self._send(name, incident, "updated", time)
            self._update_fleet(name, incident, time)

    def _count_pending(self, device: DeviceState, incident: TrackedIncident, time: int) -> None:
        """Add the records since the last evidence to an incident, because there is new evidence."""
        incident.num_records += incident.num_pending
        incident.num_alerted += incident.num_pending_alerted
        incident.num_pending = incident.num_pending_alerted = 0
        incident.below_since = None
        incident.last = time
        self._raise_severity(device, incident)

    def _update_fleet(self, name: str, incident: TrackedIncident, time: int) -> None:
        """Update the fleet incident of an incident, if it has one."""
        if self._fleets is not None:
            self._fleets.update(name, incident, time)

    def _bound_detector(self, device: DeviceState, incident: TrackedIncident, log_state: LogState) -> None:
        """Store the state of the detector of an open incident, bounded so that the end of a fault shows soon."""
        bound = incident.log_threshold + MAX_OPEN_LOG_EXCESS
        device.log_state = tuple([min(log_m, bound) for log_m in log_state])

    def _raise_severity(self, device: DeviceState, incident: TrackedIncident) -> None:
        """Set the severity of an incident to 2 if at least half of the latest records have alerted."""
        if incident.severity < 2 and 2 * device.alerted_bits.bit_count() >= NUM_SEVERITY_RECORDS:
            incident.severity = 2

    def _is_message_due(self, incident: TrackedIncident, time: int) -> bool:
        """Return whether an open incident has changed enough for a message."""
        if incident.num_records >= incident.next_num_records:
            return True
        if incident.severity != incident.sent_severity:
            return True
        elapsed = time - incident.last_message
        if elapsed >= compute_message_interval(time - incident.opened):
            return True
        feature = None if incident.next_reading is None else incident.next_reading.suggestion.feature
        if feature != incident.sent_feature and elapsed >= NEXT_READING_INTERVAL:
            return True
        if incident.first_suspect is None:
            return bool(incident.totals.total_by_feature)
        total = incident.totals.total_by_feature.get(incident.first_suspect)
        share = 0.0 if total is None else total.share
        return any(
            other.share > _SUSPECT_MARGIN * share
            for name, other in incident.totals.total_by_feature.items()
            if name != incident.first_suspect
        )

    def _resolve(self, name: str, device: DeviceState, incident: TrackedIncident, time: int, resolution: str) -> None:
        """Resolve the open incident of a device, and reset its detector."""
        incident.resolved = time
        incident.resolution = resolution
        incident.log_evidence = ()
        incident.next_reading = None
        self._reset_detector(device)
        incident.timeline.shorten(MAX_RESOLVED_POINTS)
        incident.totals.shorten(MAX_RESOLVED_POINTS)
        self._send(name, incident, "resolved", time)
        self._update_fleet(name, incident, time)

    def _send(self, name: str, incident: TrackedIncident, state: IncidentState, time: int) -> None:
        """Add a message about an incident of a device. The first one says that it has opened."""
        if not incident.revision:
            if state == "resolved":
                return  # a previous run with another plan has not sent it
            state = "open"
        suspects = incident.totals.make_suspects()
        while incident.next_num_records <= incident.num_records:
            incident.next_num_records *= 2
        incident.last_message = time
        incident.sent_severity = incident.severity
        incident.first_suspect = suspects[0].feature if suspects else None
        incident.sent_feature = None if incident.next_reading is None else incident.next_reading.suggestion.feature
        self._messages.append(
            Incident(
                incident.id,
                device=name,
                state=state,
                opened=incident.opened,
                last=incident.last,
                resolved=incident.resolved,
                num_records=incident.num_records,
                num_alerted=incident.num_alerted,
                evidence=to_log10(incident.max_log_evidence),
                rule=incident.rule,
                budget=self._budget,
                severity=incident.severity,
                suspects=suspects,
                model=incident.model,
                first_record=incident.first_record,
                group=self._options.get_group(name),
                parent=incident.parent,
                former_parent=incident.former_parent,
                revision=incident.revision,
                num_reopened=incident.num_reopened,
                resolution=incident.resolution,
                threshold=to_log10(incident.log_threshold),
                record_ids=tuple(incident.record_ids),
                alert_ids=tuple(incident.alert_ids),
                silenced_by=incident.totals.find_silencing_set(),
                timeline=incident.timeline.to_timeline(),
                readings=incident.totals.make_readings(),
                next_reading=incident.next_reading,
                fault=incident.fault,
                model_name=self._model_name,
            )
        )
        incident.revision += 1


def _renumber_segments(state: TrackerState, length: int) -> None:
    """Number the segments of a state anew, because those of the plan have another length than those of the state.

    The numbers follow from the times of records, so a state whose numbers are wrong is corrected as well: earlier
    releases kept them if the length changed.

    Args:
        state: The state, which is changed.
        length: Length of the segments of the plan in microseconds.
    """
    for device in state.state_by_device.values():
        if device.segment is not None:
            device.segment = None if device.last_time == NO_TIME else device.last_time // length
        if device.incident is not None:
            device.incident.segment = device.incident.opened // length


def _get_open(device: DeviceState) -> TrackedIncident | None:
    """Return the open incident of a device, None if it has none."""
    return device.incident if device.incident is not None and device.incident.resolved is None else None


def _get_shares(alert: AlertRow | None) -> dict[str, float] | None:
    """Return the shares of the suspects of an alert by feature, None without an alert."""
    return None if alert is None else {suspect.feature: suspect.share for suspect in alert.suspects}


def _add_example(incident: TrackedIncident, alert: AlertRow) -> None:
    """Add the ids of an alert and of its record to the examples: the first half stays, the latest ones follow.

    The known faults that the record looks like replace those of earlier alerts. There are none if its fault is unknown,
    although the prediction set may have faults with too few labelled records to be excluded. The named one is first.
    """
    if alert.fault is not None:
        name = alert.fault.name
        found = [] if name == UNKNOWN else [one for one in alert.fault.candidates if one.in_set]
        incident.fault = tuple((one.name, one.probability) for one in sorted(found, key=lambda one: one.name != name))
    for ids, id_ in ((incident.record_ids, alert.record), (incident.alert_ids, alert.id)):
        if len(ids) >= MAX_EXAMPLES:
            del ids[MAX_EXAMPLES // 2]
        ids.append(id_)
