"""The only use of an attribute of a client library that is not public, with the versions it was checked with.

kafka-python 3.0 stops joining its group if the reason was a new number of partitions and a poll ends before the join is
complete. It then sends no heartbeats and is never a member again. No public function asks it to continue. With another
version nothing is called. The process then leaves the group and joins it anew after the time of a session.
"""

from __future__ import annotations

from typing import Any

CHECKED_VERSIONS = frozenset({"3.0.12"})
"""The versions of kafka-python whose attribute was checked. Also a patch of it may change what is not public."""


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
