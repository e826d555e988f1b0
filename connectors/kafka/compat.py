"""The only use of an attribute of a client library that is not public, with the version it was checked with.

kafka-python 3.0 stops joining its group if the reason was a new number of partitions and a poll ends before the join is
complete. It then sends no heartbeats and is never a member again. No public function asks it to continue. With another
version nothing is called; a longer poll then makes it likely that the join completes.
"""

from __future__ import annotations

from typing import Any

CHECKED_VERSION = "3.0."
"""Beginning of the versions of kafka-python whose attribute was checked."""


def request_rejoin(consumer: Any, version: str) -> bool:
    """Ask a consumer of kafka-python that is not a member of its group to continue to join.

    Args:
        consumer: A `KafkaConsumer` that has subscribed to a topic.
        version: The version of kafka-python.

    Returns:
        Whether it was asked. False with a version whose attribute was not checked.
    """
    if not version.startswith(CHECKED_VERSION):
        return False
    consumer._coordinator.request_rejoin()
    return True
