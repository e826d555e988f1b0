"""Whether a pipeline is ready, and whether it is behind, according to its source."""

from __future__ import annotations

from collections.abc import Set

from deformer_stream.runtime.ports import ConnectedSource, GroupSource, PartitionedSource


def is_ready(source: PartitionedSource | None, restored_partitions: Set[int]) -> bool:
    """Return whether all assigned partitions are restored, and the source is connected.

    A member of a group that has no partitions, because the others have them all, is ready to take over.

    Args:
        source: The source; None for one without partitions, such as a file, which is always ready.
        restored_partitions: The partitions that are restored. They may include partitions that are not assigned.
    """
    if source is None:
        return True
    if isinstance(source, ConnectedSource) and not source.is_connected:
        return False
    assigned = source.assigned_partitions
    if not assigned:
        return isinstance(source, GroupSource) and source.has_joined
    return assigned <= restored_partitions


def is_behind(source: PartitionedSource | None, max_messages: int) -> bool:
    """Return whether more than `max_messages` messages are unread. A source without partitions is never behind."""
    return source is not None and sum(source.get_lag().values()) > max_messages
