"""What the log of one partition tells: which of its records are open, which were closed, how far its devices are."""

from __future__ import annotations

from deformer_stream.core.remembered import Remembered
from deformer_stream.core.windows import Watermarks

REMEMBERED = 200_000
"""Ids of closed records that are remembered per partition, so that their late events are refused rather than opening
them anew; and devices whose watermarks are."""


class Partition:
    """One partition of the input. Whatever is in here follows from the partition's own log and decisions, in order;
    what other partitions do plays no part, so it can be rebuilt from them.

    slot_of: open records, in the order of their opening. closed: remembered ids.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.slot_of: dict[str, int] = {}
        self.closed = Remembered(remembered)
        self.watermarks = Watermarks(remembered)

    def arrive(self, record: str, device: str, deadline: int, time: int) -> tuple[bool, list[int]]:
        """An event of a window moves its device's watermark: whether the event is late, and the slots of the windows
        that are over now, whose ids are closed."""
        mark, over = self.watermarks.advance(device, time)
        ended = [self.close(name) for name in over]
        late = deadline <= mark or (record not in self.slot_of and record in self.closed)
        if not late:
            self.watermarks.open(device, record, deadline)
        return late, [slot for slot in ended if slot is not None]

    def close(self, record: str) -> int | None:
        """From now on the id is closed; its slot, if it was open."""
        slot = self.slot_of.pop(record, None)
        self.watermarks.close(record)
        if slot is not None or record not in self.closed:
            self.closed.add(record)
        return slot
