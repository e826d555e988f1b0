"""One partition of the input: its open records, the ids of its closed ones, and the windows that are over."""

from __future__ import annotations

from deformer_stream.engine.events import RejectionReason
from deformer_stream.engine.id_set import BoundedIdSet
from deformer_stream.engine.slot_readings import SlotReading, SlotReadings
from deformer_stream.engine.watermarks import Watermarks

MAX_CLOSED_IDS = 200_000
"""Largest number of ids of closed records that a partition keeps, so that late events of these records are rejected
instead of opening the records again. A partition keeps the watermarks (latest event times) of the same number of
devices."""


class Partition:
    """The open records, the ids of closed records, and the watermarks of one Kafka partition.

    They follow from the partition's own log and from recorded decisions (such as timeouts). Other partitions have no
    influence, so a partition can be restored on another consumer.

    Args:
        max_closed_ids: Largest number of ids of closed records to keep, and of devices whose watermark is kept.

    Attributes:
        record_index_by_id: By record id, the row of each open record in the record table. The order of the mapping is
            the order in which the records were opened.
        closed_ids: Ids of the records that were closed last, so that late events of these records are rejected.
        watermarks: The latest event time of each device. They decide when a window (a record that collects the readings
            of one device within an interval of time) closes.
        slot_readings: The readings of open records that wait for the end of their time slot (a part of a window).
    """

    def __init__(self, max_closed_ids: int = MAX_CLOSED_IDS) -> None:
        self.record_index_by_id: dict[str, int] = {}
        self.closed_ids = BoundedIdSet(max_closed_ids)
        self.watermarks = Watermarks(max_closed_ids)
        self.slot_readings = SlotReadings()

    def advance_watermark(
        self, record_id: str, device: str, deadline: int, time: int
    ) -> tuple[RejectionReason | None, list[int]]:
        """Advance the watermark (latest event time) of a device, and close the windows whose deadline it reaches.

        A window is a record that collects the readings of one device within an interval of time. If the event is not
        rejected, its window is registered as open. Times are microseconds since 1970.

        Args:
            record_id: Id of the window that the event belongs to.
            device: The device that sent the event.
            deadline: Event time at which that window closes.
            time: Time of the event.

        Returns:
            First why the event is rejected, None if it is not. It is late if its window is over or was closed by a
            timeout or a limit. It is repeated if its window is not over, but complete. Second the rows, in the record
            table, of the records that were closed.
        """
        watermark, ended_windows = self.watermarks.advance(device, time)
        ended_indices = [self.close(window) for window in ended_windows]
        reason: RejectionReason | None = None
        if deadline <= watermark:
            reason = RejectionReason.LATE
        elif record_id not in self.record_index_by_id and self.watermarks.is_complete(record_id):
            reason = RejectionReason.REPEATED
        elif record_id not in self.record_index_by_id and record_id in self.closed_ids:
            reason = RejectionReason.LATE  # the window was closed before its deadline, for example by a timeout
        else:
            self.watermarks.open_window(device, record_id, deadline)
        # `close` returns None for windows without an open record.
        return reason, [record_index for record_index in ended_indices if record_index is not None]

    def pop_finished_slots(self, device: str, time: int) -> list[tuple[str, SlotReading]]:
        """Remove and return the readings of a device whose time slots (parts of a window) are over.

        It must be called before `advance_watermark`, which closes the records to which the readings belong.

        Args:
            device: The device that has sent an event.
            time: Event time of the event, microseconds since 1970.

        Returns:
            Pairs of the record id and the reading, in the order of the latest times of the readings.
        """
        watermark = max(time, self.watermarks.watermark_by_device.get(device, time))
        return self.slot_readings.pop_finished(device, self.watermarks.windows_of(device), watermark)

    def close(self, record_id: str, is_complete_window: bool = False) -> int | None:
        """Mark a record id as closed, so that its later events are rejected.

        Its readings that wait for the end of their time slot are dropped.

        Args:
            record_id: Id of the record.
            is_complete_window: Whether the record is closed because it is complete. If it is a window, readings of it
                are then repeated readings until the window is over. Otherwise they are late.

        Returns:
            The row of the record in the record table, or None if the record was not open.
        """
        record_index = self.record_index_by_id.pop(record_id, None)
        device = self.watermarks.device_of(record_id)
        if is_complete_window:
            self.watermarks.complete_window(record_id)
        else:
            self.watermarks.close_window(record_id)
        if device is not None:
            self.slot_readings.pop_record(record_id)
            if not self.watermarks.windows_of(device):
                self.slot_readings.drop_device(device)
        # An id must not be added twice. The id of an open record is never among the closed ids.
        if record_index is not None or record_id not in self.closed_ids:
            self.closed_ids.add(record_id)
        return record_index
