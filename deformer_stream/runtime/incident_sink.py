"""A sink that makes incidents of the effects of the engine in the same process, for `replay` and the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import EvidenceBatch, Incident
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.tracker_set import TrackerSet, find_model_name


class IncidentSink:
    """A sink that passes incidents to a function. They equal those of `deformer-stream incidents` for the same log.

    Each of several models has incidents of its own, as if there were no other model.

    Args:
        plan_by_name: The plan of each model by its name, that of the only one under the name `ONLY_MODEL`. The only
            model also handles evidence of others.
        add: Receives each message about an incident, in order.
        flush: Makes the messages so far visible to readers.
        close: Releases what receives the messages.

    Attributes:
        num_opened: Number of incidents of devices that have opened.
        num_other_model: Number of records that another model has scored than that of their plan.
    """

    def __init__(
        self,
        plan_by_name: Mapping[str, DetectionPlan],
        add: Callable[[Incident], None],
        flush: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan_by_name, self._trackers = plan_by_name, TrackerSet(plan_by_name)
        self._add, self._flush, self._close = add, flush, close
        self.num_opened = self.num_other_model = 0
        self._is_open = True

    @property
    def num_late(self) -> int:
        """Number of records that came too late to be handled in order of time."""
        return self._trackers.counts["late"]

    @property
    def num_open(self) -> int:
        """Number of incidents of devices that are open."""
        return self._trackers.num_open

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Make incidents of the evidence of one batch.

        Args:
            effects: The results of the engine.
            data: The messages or rows of the batch, which are not used.

        Raises:
            InputError: A record has no time.
        """
        batches, untimed_records = make_evidence(effects)
        if untimed_records:
            raise InputError(
                f"record {untimed_records[0]!r} has no time, but incidents need times: name the column of times with "
                "--time-column, or send events with times"
            )
        self.write_evidence(batches)

    def write_evidence(self, batches: Iterable[EvidenceBatch]) -> None:
        """Make incidents of batches of evidence.

        Raises:
            InputError: There are several models, and none of them has written a batch.
        """
        for batch in batches:
            name = find_model_name(self._plan_by_name, batch)
            plan = None if name is None else self._plan_by_name.get(name)
            if plan is None:
                raise InputError(
                    f"the evidence was written by the model {batch.model_name or batch.model!r:.80}, which is none of "
                    "--models: give the folder of models that has scored the records"
                )
            if plan.model != batch.model:
                self.num_other_model += len(batch.closed)
            self._pass_on(self._trackers.handle(batch))

    def flush(self) -> None:
        """Make the messages so far visible to readers."""
        self._flush()

    def close(self) -> None:
        """Handle the records that wait for earlier ones, because the input has ended."""
        if self._is_open:
            self._is_open = False
            self._pass_on(self._trackers.finish())
        self._close()

    def _pass_on(self, messages: Iterable[Incident]) -> None:
        """Pass messages on, and count those that say that an incident of a device has opened."""
        for message in messages:
            self.num_opened += message.state == "open" and message.kind == "device"
            self._add(message)
