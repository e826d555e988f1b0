"""The only uses of attributes of a client library that are not public, with the versions they were checked with.

Each of them is for an error of kafka-python 3.0 that no public function avoids:

- It stops joining its group if the reason was a new number of partitions and a poll ends before the join is complete.
  It then sends no heartbeats and is never a member again (`request_rejoin`).
- If a partition is paused after a part of its fetched messages was returned, it keeps the others aside. It requests
  nothing more of the partition until it has returned them. If it reads another partition meanwhile, it does not look at
  them after `resume`, so the partition delivers nothing any more (`drop_kept_messages`).

With another version nothing is called. The process then leaves the group and joins it anew after the time of a session.
If a partition delivers nothing, `liveness` ends the process. The next process begins at the committed offset.
"""

from __future__ import annotations

from typing import Any

CHECKED_VERSIONS = frozenset({"3.0.12"})
"""The versions of kafka-python whose attributes were checked. Also a patch of it may change what is not public."""


def request_rejoin(consumer: Any, version: str) -> bool:
    """Ask a consumer of kafka-python that is not a member of its group to continue to join.

    Args:
        consumer: A `KafkaConsumer` that has subscribed to a topic.
        version: The version of kafka-python.

    Returns:
        Whether it was asked. False with a version whose attribute was not checked.
    """
    if version not in CHECKED_VERSIONS:
        return False
    consumer._coordinator.request_rejoin()
    return True


def drop_kept_messages(consumer: Any, version: str) -> None:
    """Let a consumer of kafka-python drop the messages that it has kept aside of partitions that are not paused now.

    It has not returned them, so it fetches them again from its position.

    Args:
        consumer: A `KafkaConsumer`.
        version: The version of kafka-python. Nothing is dropped with a version whose attribute was not checked.
    """
    if version not in CHECKED_VERSIONS:
        return
    kept = consumer._fetcher._paused_partition_records
    if kept:
        for tp in kept.keys() - consumer.paused():
            del kept[tp]
