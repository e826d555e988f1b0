"""The default names of Kafka topics, which all commands must derive alike from the topic of the events."""

from __future__ import annotations

from typing import Literal

TopicKind = Literal["alerts", "dead-letter", "evidence", "next-readings", "incidents", "feedback"]
"""What a topic contains, which is also how its default name ends."""


def name_topic(chosen: str | None, events_topic: str | None, kind: TopicKind) -> str:
    """Return the name of a topic: the one that an option has set, else the default, such as sensors-evidence.

    Args:
        chosen: Value of the option for this topic, such as --evidence-topic; None or "" if it is not set.
        events_topic: The topic of the events.
        kind: What the topic contains.
    """
    return chosen or f"{events_topic}-{kind}"
