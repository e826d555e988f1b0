"""Events of records whose devices have incidents."""

from __future__ import annotations

import json

from deformer_stream.incidents.events import Incident
from tests.models import SCHEMA, draw_rows

NUM_RECORDS = 400
RULE = ("--incident-budget", "20 per d", "--records-per-day", "100", "--fleet", "off")


def make_events() -> list[tuple[bytes, bytes, None]]:
    """Return the events of complete records of three devices. The readings of a device's records do not interleave.

    The key is the device, so that its records are in one partition.
    """
    rows = draw_rows(SCHEMA, NUM_RECORDS, 4)
    messages: list[tuple[bytes, bytes, None]] = []
    for number, row in enumerate(rows):
        record = f"pump-{number % 3}/{number}"
        values = {name: row.get(name) for name in SCHEMA.names}
        document = {"record": record, "time": 1_583_750_073 + number, "values": values}
        messages.append((record.partition("/")[0].encode(), json.dumps(document).encode(), None))
    return messages


def group_by_id(incidents: list[Incident]) -> dict[str, list[Incident]]:
    messages: dict[str, list[Incident]] = {}
    for incident in incidents:
        messages.setdefault(incident.id, []).append(incident)
    return messages
