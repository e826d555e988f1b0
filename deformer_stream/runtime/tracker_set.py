"""The trackers of incidents of several models, which read one log of evidence.

Each tracker has one model, and receives only the evidence of this model. So its incidents are those of a process that
has no other model. A process with one model has a `TrackerSet` with one tracker, whose name is `ONLY_MODEL`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.incidents.events import EvidenceBatch, Incident
from deformer_stream.incidents.fleet import GroupState
from deformer_stream.incidents.row_order import OrderState
from deformer_stream.incidents.tracker import TrackerState
from deformer_stream.runtime.incident_plan import DetectionPlan


def find_model_name(plan_by_name: Mapping[str, DetectionPlan], batch: EvidenceBatch) -> str | None:
    """Return the name of the model whose tracker handles a batch of evidence.

    Args:
        plan_by_name: The plan of each model, that of the only one under the name `ONLY_MODEL`.
        batch: The batch. The only model handles all batches. If a batch names no model, because an earlier release has
            written it, its fingerprint determines the model.

    Returns:
        The name, for which there may be no plan; None if the batch names no model, and has the fingerprint of none.
    """
    if plan_by_name.keys() == {ONLY_MODEL}:
        return ONLY_MODEL
    if batch.model_name != ONLY_MODEL:
        return batch.model_name
    return next((name for name, plan in plan_by_name.items() if plan.model == batch.model), None)


class TrackerSet:
    """The trackers of a log of evidence, each with a name and a plan of its own.

    Args:
        plan_by_name: The plan of each model, that of the only one under the name `ONLY_MODEL`.
    """

    def __init__(self, plan_by_name: Mapping[str, DetectionPlan]) -> None:
        self._plan_by_name = dict(plan_by_name)
        self._tracker_by_name = {name: plan.make_tracker() for name, plan in plan_by_name.items()}
        self._num_unknown = 0

    @property
    def counts(self) -> dict[str, int]:
        """The sums of `IncidentTracker.counts`. `other_model` includes records of models without a tracker."""
        counts = Counter(other_model=self._num_unknown)
        for tracker in self._tracker_by_name.values():
            counts.update(tracker.counts)
        return dict(counts)

    @property
    def num_open(self) -> int:
        """The number of open incidents of devices."""
        return sum(tracker.num_open for tracker in self._tracker_by_name.values())

    @property
    def accepted_per_day(self) -> float:
        """The number of false incidents in a day that the budgets of all devices accept together."""
        return sum(
            tracker.num_devices * self._plan_by_name[name].plan.budget.count_per_day
            for name, tracker in self._tracker_by_name.items()
        )

    @property
    def incident_ids(self) -> set[str]:
        """The ids of the incidents in the state, as `IncidentTracker.incident_ids`."""
        return set().union(*(tracker.incident_ids for tracker in self._tracker_by_name.values()))

    def handle(self, batch: EvidenceBatch) -> list[Incident]:
        """Handle a batch of the log and return the messages that it causes, in order; none if it has no tracker."""
        name = find_model_name(self._plan_by_name, batch)
        tracker = None if name is None else self._tracker_by_name.get(name)
        if tracker is None:
            self._num_unknown += len(batch.closed)
            return []
        return tracker.handle(batch)

    def finish(self) -> list[Incident]:
        """Handle the rows that still wait, at the end of finite input, as `IncidentTracker.finish`."""
        return [message for tracker in self._tracker_by_name.values() for message in tracker.finish()]

    def set_plan(self, name: str, plan: DetectionPlan) -> None:
        """Replace the plan of a model, whose tracker keeps its state, or add a model without state."""
        before = self._tracker_by_name.get(name)
        self._plan_by_name[name] = plan
        tracker = self._tracker_by_name[name] = plan.make_tracker()
        if before is not None:
            tracker.import_state(before.export_state())

    def export_state(self) -> dict[str, TrackerState]:
        """Return the state of each model, which names its plan. It must not be used after the next `handle`."""
        state_by_name = {name: tracker.export_state() for name, tracker in self._tracker_by_name.items()}
        for name, state in state_by_name.items():
            state.plan = self._plan_by_name[name].identity
        return state_by_name

    def import_state(self, state_by_name: Mapping[str, TrackerState]) -> bool:
        """Continue from the state of each model. Models without a plan are dropped.

        If the state is that of a process with one model, each of several models gets the part that it has scored.

        Returns:
            Whether the state was reached by the plans of all models. If not, `reconcile` must be called.
        """
        is_same_plan = {name: state.plan for name, state in state_by_name.items()} == {
            name: plan.identity for name, plan in self._plan_by_name.items()
        }
        if state_by_name.keys() == {ONLY_MODEL} != self._plan_by_name.keys():
            plans = self._plan_by_name
            get_device = next(iter(plans.values())).options.get_device  # all plans have the same
            name_by_model = {plan.model: name for name, plan in plans.items()}
            state_by_name = _divide_state(state_by_name[ONLY_MODEL], name_by_model, get_device)
        for name, tracker in self._tracker_by_name.items():
            if name in state_by_name:
                tracker.import_state(state_by_name[name])
        return is_same_plan

    def reconcile(self, sent_by_id: Mapping[str, Incident], resolution: str) -> list[Incident]:
        """Return the messages after which the log of incidents agrees with the state, as `IncidentTracker.reconcile`.

        Args:
            sent_by_id: The last messages about the incidents of the log.
            resolution: Why incidents that are not in the state are resolved.
        """
        name_by_id = {id_: name for name, tracker in self._tracker_by_name.items() for id_ in tracker.incident_ids}
        parts: dict[str, dict[str, Incident]] = {name: {} for name in self._tracker_by_name}
        for id_, sent in sent_by_id.items():
            name = name_by_id.get(id_, sent.model_name)
            # Any tracker can resolve the incident of a model that does not exist any more.
            parts[name if name in parts else next(iter(parts))][id_] = sent
        return [
            message
            for name, tracker in self._tracker_by_name.items()
            for message in tracker.reconcile(parts[name], resolution)
        ]


def _divide_state(
    state: TrackerState, name_by_model: Mapping[str, str], get_device: Callable[[str], str]
) -> dict[str, TrackerState]:
    """Return the parts of a state from which the trackers of several models continue.

    A device and its alerts belong to the model that has scored its last record. If none of its records has been
    handled, each model that has scored other records gets its alerts. Only the tracker in which the record closes uses
    them. What belongs to none of the models is dropped, as are fleet incidents with devices of several models.
    `IncidentTracker.reconcile` must then be called.

    Args:
        state: The state of a tracker of all models. It must not be used any more.
        name_by_model: The name of each model by its fingerprint.
        get_device: Returns the device of a record id.
    """
    parts = {
        name: TrackerState(
            order=OrderState(stream_time=state.order.stream_time, sequence=state.order.sequence),
            latest_time=state.latest_time,
            active_time=state.active_time,
            models=list(state.models),
        )
        for name in name_by_model.values()
    }
    part_by_device: dict[str, TrackerState] = {}
    for name, device in state.state_by_device.items():
        if device.model in name_by_model:
            part = part_by_device[name] = parts[name_by_model[device.model]]
            part.state_by_device[name] = device
            if name in state.pattern_state:
                part.pattern_state[name] = state.pattern_state[name]
    for row in state.order.waiting:
        if row.model in name_by_model:
            parts[name_by_model[row.model]].order.waiting.append(row)
    # Usually one. An alert stays for long in a part in which its record does not close.
    likely_parts = [part for part in parts.values() if part.state_by_device or part.order.waiting] or parts.values()
    for record, alert in state.order.alert_by_record.items():
        name = get_device(record)
        if name in part_by_device:
            part_by_device[name].order.alert_by_record[record] = alert
        elif name not in state.state_by_device:
            for part in likely_parts:
                part.order.alert_by_record[record] = alert
    for name, group in state.state_by_group.items():
        for part in parts.values():
            recent = [one for one in group.recent if one.device in part.state_by_device]
            fleets = [
                fleet
                for fleet in group.fleets
                if all(member.device in part.state_by_device for member in fleet.member_by_id.values())
            ]
            if recent or fleets:
                part.state_by_group[name] = GroupState(recent, fleets)
    return parts
