"""CloudEvents attributes of messages, by which a receiver recognises the kind of a message without parsing it.

Messages are in binary mode: the value is the event's data, unchanged, and its attributes are headers (CloudEvents 1.0,
Kafka protocol binding, section 3.2; HTTP protocol binding, section 3.1). The type is `io.deformer.KIND.v1`. The source
is `/TOPIC/PARTITION` of the events from which the message follows. Source and id together name a message: a message
that is sent again after a restart has the same source and id.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import quote

from deformer_stream.codec.timestamps import format_rfc3339

SPEC_VERSION = "1.0"
JSON_CONTENT_TYPE = "application/json"

EventKind = Literal["alert", "drift", "storm", "dead-letter", "evidence", "incident", "feedback", "next-reading"]
"""The kind of a message."""


def make_attributes(kind: EventKind, event_id: str, source: str, time: int | None = None) -> dict[str, str]:
    """Return the CloudEvents attributes of a message, without the type of its content.

    Args:
        kind: Kind of the message.
        event_id: Id of the message, unique among those of its source.
        source: The source as `make_source` returns it.
        time: Event time in microseconds since 1970. The attribute is left out if it is None or outside of the years 1
            to 9999.
    """
    attributes = {
        "specversion": SPEC_VERSION,
        "id": event_id,
        "source": source,
        "type": f"io.deformer.{kind}.v1",
    }
    text = None if time is None else format_rfc3339(time)
    return attributes if text is None else attributes | {"time": text}


def make_headers(
    kind: EventKind, event_id: str, source: str, time: int | None = None, content_type: str | None = JSON_CONTENT_TYPE
) -> list[tuple[str, bytes]]:
    """Return the headers of a Kafka message.

    Args:
        kind: Kind of the message.
        event_id: Id of the message, unique among those of its source.
        source: The source as `make_source` returns it.
        time: Event time in microseconds since 1970, None if there is none.
        content_type: Type of the value, None if it is not known.
    """
    attributes = make_attributes(kind, event_id, source, time)
    headers = [(f"ce_{name}", value.encode("utf-8", "backslashreplace")) for name, value in attributes.items()]
    return headers if content_type is None else [*headers, ("content-type", content_type.encode())]


def make_source(topic: str, partition: int | None = None) -> str:
    """Return the source of events as a URI reference.

    Args:
        topic: The topic of the events, or the file.
        partition: The partition, None for a message that follows from several partitions.
    """
    path = quote(topic.lstrip("/"), errors="backslashreplace")
    return f"/{path}" if partition is None else f"/{path}/{partition}"
