"""Labels of operators: how they are made and checked, and their JSON, the messages of `TOPIC-feedback`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Annotated, Any, get_args

import msgspec
import orjson

from deformer_stream.codec.json_types import MessageId
from deformer_stream.codec.timestamps import format_rfc3339, parse_rfc3339
from deformer_stream.codec.validation import MAX_TEXT_CHARS, RejectionError, is_unicode, quote
from deformer_stream.errors import InputError
from deformer_stream.feedback_labels import Label
from deformer_stream.incidents.events import FeedbackLabel

MAX_NAME_CHARS, MAX_NOTE_CHARS = 200, 2000
"""Maximum number of characters of the name of a fault or a person, and of a note."""

MAX_LABEL_BYTES = 2**16
"""Maximum size of a message that is decoded."""

_ID_LENGTH = 32

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Note = Annotated[str, msgspec.Meta(max_length=MAX_NOTE_CHARS)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


def add_id(label: FeedbackLabel) -> FeedbackLabel:
    """Check a label that a person gives, and return it with its id.

    Args:
        label: The label, without an id. It is about an incident, a maintenance window of a device, or a record. The
            empty name of a fault counts as None, and the empty name of a device is the whole stream.

    Raises:
        InputError: A text is too long or is not Unicode, or a time is outside the years 1 to 9999. Or the label is not
            about exactly one of an incident, a device and a record.
    """
    for text in (label.by, label.incident, label.name, label.note, label.device, label.record):
        if text is not None and not is_unicode(text):
            raise InputError(f"the text {quote(text)} of a label is not valid Unicode: enter it again")
    for moment in (label.time, label.start, label.end):
        if moment is not None and format_rfc3339(moment) is None:
            raise InputError("a time of a label lies outside the years 1 to 9999: enter it again")
    document = _to_document(label)
    del document["id"]
    checked = _from_message(_parse(orjson.dumps({"id": "0", **document})))
    return replace(checked, id=hashlib.sha256(orjson.dumps(document)).hexdigest()[:_ID_LENGTH])


def encode_label(label: FeedbackLabel) -> bytes:
    """Return a label as a JSON object. Keys without a value are left out."""
    return orjson.dumps(_to_document(label))


def decode_label(payload: bytes) -> FeedbackLabel:
    """Return the label of a JSON object. Keys that are unknown are ignored.

    Raises:
        InputError: The payload is not a label.
    """
    if len(payload) > MAX_LABEL_BYTES:
        raise InputError(
            f"the message has {len(payload)} bytes, a label has at most {MAX_LABEL_BYTES}: check that the topic or "
            "file holds labels"
        )
    return _from_message(_parse(payload))


def get_label_key(label: FeedbackLabel) -> bytes:
    """Return the key of the message of a label: what the label is about, so that its labels are in one partition."""
    subject = label.incident if label.incident is not None else label.record
    return (subject if subject is not None else label.device or "").encode()


class _LabelJson(msgspec.Struct, frozen=True):
    """A label as JSON."""

    id: MessageId
    label: Label
    time: str
    by: _Name = ""
    incident: MessageId | None = None
    name: _Name | None = None
    note: _Note = ""
    device: _Text | None = None
    start: str | None = msgspec.field(default=None, name="from")
    end: str | None = msgspec.field(default=None, name="to")
    record: _Text | None = None
    severity: _Count | None = None
    reopened: _Count | None = None
    members: tuple[MessageId, ...] | None = None


_DECODER = msgspec.json.Decoder(_LabelJson)


def _to_document(label: FeedbackLabel) -> dict[str, Any]:
    """Return a label as the JSON object of the public format."""
    document = {
        "id": label.id,
        "incident": label.incident,
        "device": label.device,
        "from": None if label.start is None else format_rfc3339(label.start),
        "to": None if label.end is None else format_rfc3339(label.end),
        "record": label.record,
        "severity": label.severity,
        "reopened": label.num_reopened,
        "members": None if label.members is None else list(label.members),
        "label": label.label,
        "name": label.name or None,
        "by": label.by,
        "time": format_rfc3339(label.time),
        "note": label.note or None,
    }
    return {name: value for name, value in document.items() if value is not None}


def _parse(payload: bytes) -> _LabelJson:
    """Return the parsed message of a label.

    Raises:
        InputError: The payload is not the JSON of a label.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and str(error).endswith("- at `$.label`"):
            raise InputError(
                f"the label is not valid ({quote(str(error), 200)}): write one of {', '.join(get_args(Label))}"
            ) from None
        raise InputError(f"a field of the label is not valid ({quote(str(error), 200)}): correct it") from None


def _from_message(message: _LabelJson) -> FeedbackLabel:
    """Return the label of a parsed message.

    Raises:
        InputError: A time is not RFC 3339, the maintenance window is empty, or the label is not about exactly one of an
            incident, a device and a record.
    """
    try:
        time = parse_rfc3339(message.time)
        start = None if message.start is None else parse_rfc3339(message.start)
        end = None if message.end is None else parse_rfc3339(message.end)
    except RejectionError as error:
        raise InputError(f"a time of the label is not valid ({error.detail}): correct it") from None
    if sum(subject is not None for subject in (message.incident, message.device, message.record)) != 1:
        raise InputError("a label is about exactly one of an incident, a device and a record: name one of them")
    if message.device is not None:
        if start is None or end is None or start >= end:
            raise InputError("a maintenance window needs a beginning and a later end: state both")
        if message.label not in ("maintenance", "cleared"):
            raise InputError(f'a device has the label "maintenance" or "cleared", not "{message.label}"')
    elif start is not None or end is not None:
        raise InputError("only a maintenance window of a device has a beginning and an end: name the device")
    return FeedbackLabel(
        id=message.id,
        label=message.label,
        time=time,
        by=message.by,
        incident=message.incident,
        name=message.name or None,
        note=message.note,
        device=message.device,
        start=start,
        end=end,
        record=message.record,
        severity=message.severity,
        num_reopened=message.reopened,
        members=message.members,
    )
