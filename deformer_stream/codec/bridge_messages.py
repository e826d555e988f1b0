"""Translation of messages of a plant, such as MQTT messages, to events as `consume` reads them.

A message has a topic and a payload. `ValueTranslator` finds the device and the feature in the topic, by a pattern such
as `plant/{device}/{feature}`. It finds the value in the payload: a number, a text or a JSON object. Translating never
raises, whatever the bytes are: what cannot be translated becomes a `BridgeRejection` with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson

from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, MAX_MICROS, MIN_MICROS, TimeFormat
from deformer_stream.codec.validation import (
    MAX_TEXT_CHARS,
    FieldNames,
    RejectionError,
    is_json_number,
    is_unicode,
    quote,
)
from deformer_stream.durations import TimeUnit
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError

MAX_READINGS = 4096
"""Largest number of readings of one message."""

MAX_EVENT_BYTES = 500_000
"""Largest event in bytes, which is below Kafka's limits by default."""

MAX_CACHED_TOPICS = 100_000
"""Number of topics whose device and feature are stored. A plant has fewer; the bound is for hostile senders."""

_PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_NUMBER_CHARS = 400
"""Longest text of a number; a longer one is a label."""


class BridgeMessage(NamedTuple):
    """A message as it was received.

    Attributes:
        topic: Its topic.
        payload: Its content.
        time: When it arrived, microseconds since 1970.
        is_repeated: Whether the broker has marked it as one that it may have delivered before.
        ticket: What the source needs to acknowledge it.
    """

    topic: str
    payload: bytes
    time: int
    is_repeated: bool = False
    ticket: Any = None


class BridgeEvent(NamedTuple):
    """An event for `consume`.

    Attributes:
        key: The device as UTF-8, so that the readings of a device are in one partition.
        value: The event as JSON.
        num_readings: Number of its readings.
    """

    key: bytes
    value: bytes
    num_readings: int


class BridgeRejection(NamedTuple):
    """A message, or a reading of it, that cannot be translated.

    Attributes:
        message: The message.
        reason: Why it is rejected.
        detail: One line that describes the problem.
    """

    message: BridgeMessage
    reason: RejectionReason
    detail: str


@dataclass(slots=True)
class Translation:
    """What follows from messages.

    Attributes:
        events: Events, in the order of the messages.
        rejections: What cannot be translated, at most one for each reason and message.
        requests: Messages to publish, as pairs of a topic and a payload.
        states: State that the translator saves, as pairs of a key and a value; the last value of a key counts.
    """

    events: list[BridgeEvent] = field(default_factory=list)
    rejections: list[BridgeRejection] = field(default_factory=list)
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    states: dict[str, bytes] = field(default_factory=dict)


class Translator(Protocol):
    """A translator of messages."""

    def translate(self, message: BridgeMessage, translation: Translation) -> None:
        """Add what follows from a message to a translation. It never raises."""


def make_event(device: str, values: dict[str, Any], time: int) -> BridgeEvent:
    """Return the event of readings of one device and one time.

    Args:
        device: The device.
        values: The values by feature, at least one.
        time: Microseconds since 1970.
    """
    # float64 holds the microseconds of the years 1700 to 2240 exactly.
    seconds = time / 1e6
    if len(values) == 1:
        ((feature, value),) = values.items()
        document = {"device": device, "feature": feature, "value": value, "time": seconds}
    else:
        document = {"device": device, "values": values, "time": seconds}
    return BridgeEvent(device.encode(), orjson.dumps(document), len(values))


def add_event(
    translation: Translation,
    device: str,
    values: dict[str, Any],
    time: int,
    reject: Callable[[RejectionReason, str], None],
    max_bytes: int = MAX_EVENT_BYTES,
) -> None:
    """Add the event of readings of one device and one time to a translation, in parts if it is too large.

    A part has at most `MAX_READINGS` readings, because `consume` refuses events with more.

    Args:
        translation: Receives the events.
        device: The device.
        values: The values by feature.
        time: Microseconds since 1970.
        reject: A function that adds a rejection, given its reason and its detail.
        max_bytes: Largest event in bytes.
    """
    if not values:
        return
    event = make_event(device, values, time)
    if len(event.key) + len(event.value) <= max_bytes and len(values) <= MAX_READINGS:
        translation.events.append(event)
    elif len(values) == 1:
        reject(RejectionReason.TOO_LARGE, f"the event has {len(event.value)} bytes; at most {max_bytes} are accepted")
    else:
        items = list(values.items())
        middle = len(items) // 2
        for part in (items[:middle], items[middle:]):
            add_event(translation, device, dict(part), time, reject, max_bytes)


def check_value(name: str, value: object) -> object:
    """Return a value of a reading, after checking that an event can hold it.

    Raises:
        RejectionError: It is no number, text, boolean or null, is not finite, or is too long.
    """
    if isinstance(value, float) and not isfinite(value):
        raise RejectionError(RejectionReason.NOT_FINITE, f"the value of {quote(name)} is not finite ({value})")
    if isinstance(value, str):
        if len(value) > MAX_TEXT_CHARS:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the value of {quote(name)} has {len(value)} characters; at most {MAX_TEXT_CHARS} are accepted",
            )
        if not is_unicode(value):
            raise RejectionError(RejectionReason.WRONG_TYPE, f"the value of {quote(name)} is not Unicode text")
    elif value is not None and not isinstance(value, bool | int | float):
        raise RejectionError(
            RejectionReason.WRONG_TYPE, f"the value of {quote(name)} is no number, text, boolean or null"
        )
    return value


def check_name(field_name: str, value: object) -> str:
    """Return the name of a device or a feature, after checking it.

    Args:
        field_name: What has the name, for the message.
        value: The name; a whole number is converted to text.

    Raises:
        RejectionError: It is no text, is empty, or is too long.
    """
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not is_unicode(value):
        raise RejectionError(RejectionReason.WRONG_TYPE, f"{field_name} is neither text nor a whole number")
    if not value:
        raise RejectionError(RejectionReason.MISSING_FIELD, f"{field_name} is empty")
    if len(value) > MAX_TEXT_CHARS:
        raise RejectionError(
            RejectionReason.TOO_LARGE,
            f"{field_name} has {len(value)} characters; at most {MAX_TEXT_CHARS} are accepted",
        )
    return value


class TopicPattern:
    """A pattern of topics with the places of the device and the feature, such as `plant/{device}/{feature}`.

    Each level is a text, `+` (any text), `{device}` or `{feature}`; `#` at the end stands for any further levels. If a
    place occurs several times, its texts are joined with "/".

    Args:
        text: The pattern. None stands for topics whose last level is the feature, and the levels before it the device.

    Attributes:
        filter: The topic filter of MQTT that fits the same topics.

    Raises:
        ConfigError: The text is not a pattern.
    """

    def __init__(self, text: str | None) -> None:
        self._levels = None if text is None else text.split("/")
        levels = self._levels or ["#"]
        for index, level in enumerate(levels):
            is_place = level in ("{device}", "{feature}", "+") or (level == "#" and index == len(levels) - 1)
            if not is_place and (not level or re.search(r"[{}+#\0]", level)):
                raise ConfigError(
                    f"--pattern {text!r}: {level!r} is not a level of a topic; write text, {{device}}, {{feature}} or "
                    "+, and # only at the end"
                )
        self.filter = "/".join("+" if level.startswith("{") else level for level in levels)

    def find(self, topic: str) -> tuple[str | None, str | None]:
        """Return the device and the feature that a topic names, None for one that the pattern does not contain.

        Raises:
            RejectionError: The topic does not fit the pattern, or a name is too long.
        """
        found = topic.split("/")
        if self._levels is None:
            if len(found) < 2:
                raise RejectionError(
                    RejectionReason.UNKNOWN_TOPIC,
                    f"the topic {quote(topic)} has one level; at least two are expected, the device and the feature",
                )
            return check_name("the device of the topic", "/".join(found[:-1])), check_name("the feature", found[-1])
        levels = self._levels
        has_rest = levels[-1] == "#"
        if has_rest:
            levels = levels[:-1]
        if len(found) < len(levels) or (len(found) > len(levels) and not has_rest):
            raise _make_pattern_error(topic)
        texts_by_place: dict[str, list[str]] = {}
        for level, text in zip(levels, found, strict=False):
            if level.startswith("{"):
                texts_by_place.setdefault(level, []).append(text)
            elif level not in ("+", text):
                raise _make_pattern_error(topic)
        device, feature = (
            check_name(f"the {place} of the topic", "/".join(texts_by_place[f"{{{place}}}"]))
            if f"{{{place}}}" in texts_by_place
            else None
            for place in ("device", "feature")
        )
        return device, feature


def _make_pattern_error(topic: str) -> RejectionError:
    return RejectionError(RejectionReason.UNKNOWN_TOPIC, f"the topic {quote(topic)} does not fit --pattern")


class ValueTranslator:
    """Translates messages whose payload is a value, or a JSON object with values.

    Args:
        pattern: Finds the device and the feature in the topic.
        field_names: The names of the fields of an object: `device`, `feature`, `value`, `values` and `time`.
        time_format: The unit of times that are numbers, and the zone of texts without one.
        max_bytes: Largest payload in bytes.
        max_event_bytes: Largest event in bytes.
    """

    def __init__(
        self,
        pattern: TopicPattern,
        field_names: FieldNames,
        time_format: TimeFormat = DEFAULT_TIME_FORMAT,
        max_bytes: int = 2**20,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self._pattern, self._names = pattern, field_names
        self._max_bytes, self._max_event_bytes = max_bytes, max_event_bytes
        self._time_format = time_format
        self._found_by_topic: dict[str, tuple[str | None, str | None]] = {}

    def translate(self, message: BridgeMessage, translation: Translation) -> None:
        """Add the event of a message, or its rejection, to a translation."""
        reject = make_rejecter(message, translation)
        try:
            device, feature = self._find(message.topic)
            document = self._parse(message.payload)
            if not isinstance(document, dict):
                if feature is None:
                    raise RejectionError(
                        RejectionReason.MISSING_FIELD,
                        "the payload is a value, but the topic names no feature; add {feature} to --pattern",
                    )
                values, time = {feature: document}, message.time
            else:
                values, time = self._read_object(document, feature), self._read_time(document, message.time)
            if device is None:
                if not isinstance(document, dict) or document.get(self._names.device) is None:
                    raise RejectionError(
                        RejectionReason.MISSING_FIELD,
                        f"neither the topic nor the field {self._names.device!r} names the device",
                    )
                device = check_name(f"the field {self._names.device!r}", document[self._names.device])
        except RejectionError as error:
            reject(error.reason, error.detail)
            return
        accepted: dict[str, Any] = {}
        for name, value in values.items():
            try:
                accepted[check_name("the name of a feature", name)] = check_value(name, value)
            except RejectionError as error:
                reject(error.reason, error.detail)
        add_event(translation, device, accepted, time, reject, self._max_event_bytes)

    def _find(self, topic: str) -> tuple[str | None, str | None]:
        """Return the device and the feature of a topic; raise `RejectionError` if it does not fit the pattern."""
        found = self._found_by_topic.get(topic)
        if found is None:
            found = self._pattern.find(topic)
            if len(self._found_by_topic) >= MAX_CACHED_TOPICS:
                self._found_by_topic.clear()
            self._found_by_topic[topic] = found
        return found

    def _parse(self, payload: bytes) -> Any:
        """Return the value of a payload, which is JSON, or a number or a label as text.

        Raises:
            RejectionError: The payload is empty, too large, or neither JSON nor text.
        """
        if len(payload) > self._max_bytes:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the payload has {len(payload)} bytes; at most {self._max_bytes} are accepted; raise "
                "--max-message-bytes, or send smaller messages",
            )
        try:
            return orjson.loads(payload)
        except orjson.JSONDecodeError:
            pass
        try:
            text = payload.decode().strip()
        except UnicodeDecodeError:
            raise RejectionError(
                RejectionReason.NOT_JSON, "the payload is neither JSON nor UTF-8 text; send a number, a text or JSON"
            ) from None
        if not text:
            raise RejectionError(RejectionReason.MISSING_FIELD, "the payload is empty; send a value")
        if text[0] in '{["':
            raise RejectionError(
                RejectionReason.NOT_JSON, "the payload begins as JSON and is not valid JSON; correct the sender"
            )
        if len(text) <= _NUMBER_CHARS and _PLAIN_NUMBER.fullmatch(text):  # such as +5 or .5, which are not JSON
            return float(text)
        return text

    def _read_object(self, document: dict[str, Any], feature: str | None) -> dict[Any, Any]:
        """Return the values of an object by feature, which are not checked yet.

        Raises:
            RejectionError: A field is missing or has another type than expected.
        """
        names = self._names
        if names.values in document:
            values = document[names.values]
            if not isinstance(values, dict):
                raise RejectionError(
                    RejectionReason.WRONG_TYPE, f"the field {names.values!r} is no object of values by feature"
                )
        elif names.value in document:
            name = document.get(names.feature) if feature is None else feature
            if name is None:
                raise RejectionError(
                    RejectionReason.MISSING_FIELD,
                    f"neither the topic nor the field {names.feature!r} names the feature",
                )
            values = {check_name(f"the field {names.feature!r}", name): document[names.value]}
        elif feature is not None:
            raise RejectionError(
                RejectionReason.MISSING_FIELD, f"the fields {names.value!r} and {names.values!r} are both missing"
            )
        else:  # the features are fields of the object itself
            others = (names.device, names.time)
            values = {name: value for name, value in document.items() if name not in others}
        if not values:
            raise RejectionError(RejectionReason.MISSING_FIELD, "the payload has no reading; send at least one")
        if len(values) > MAX_READINGS:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the payload has {len(values)} readings; at most {MAX_READINGS} are accepted; split it",
            )
        return values

    def _read_time(self, document: dict[str, Any], arrival: int) -> int:
        """Return the time of an object in microseconds since 1970, that of its arrival if it has none.

        Raises:
            RejectionError: The time is malformed, outside of the years 1 to 9999, or neither a number nor text.
        """
        time = document.get(self._names.time)
        if time is None:
            return arrival
        if not isinstance(time, str) and not is_json_number(time):
            raise RejectionError(
                RejectionReason.WRONG_TYPE, f"the field {self._names.time!r} is neither a number nor text"
            )
        return self._time_format.parse(time)


class TranslationOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How messages are translated. A dead letter of the bridge states them as JSON, without those that are defaults.

    Attributes:
        pattern: The pattern of topics, as in `TopicPattern`.
        time_unit: Unit of times that are numbers.
        timezone: The zone of times that are written without one, such as "Europe/Berlin". None if it is not known.
        device_field: Field of an object with the device.
        feature_field: Field of an object with the feature.
        value_field: Field of an object with a value.
        values_field: Field of an object with several values by feature.
        time_field: Field of an object with the time.
        max_message_bytes: Largest payload in bytes.
    """

    pattern: str | None = None
    time_unit: TimeUnit = "s"
    timezone: str | None = None
    device_field: str = "device"
    feature_field: str = "feature"
    value_field: str = "value"
    values_field: str = "values"
    time_field: str = "time"
    max_message_bytes: int = 2**20

    def make_translator(self, max_event_bytes: int = MAX_EVENT_BYTES) -> ValueTranslator:
        """Return a translator with these options.

        Args:
            max_event_bytes: Largest event in bytes.

        Raises:
            ConfigError: The pattern is not one, or the time zone is unknown.
        """
        names = FieldNames(
            feature=self.feature_field,
            value=self.value_field,
            values=self.values_field,
            time=self.time_field,
            device=self.device_field,
        )
        pattern, time_format = TopicPattern(self.pattern), TimeFormat.from_names(self.time_unit, self.timezone)
        return ValueTranslator(pattern, names, time_format, self.max_message_bytes, max_event_bytes)


def make_rejecter(message: BridgeMessage, translation: Translation) -> Callable[[RejectionReason, str], None]:
    """Return a function that adds the rejection of a message to a translation, once for each reason.

    Args:
        message: The message.
        translation: Receives the rejections.
    """
    reasons: set[RejectionReason] = set()

    def reject(reason: RejectionReason, detail: str) -> None:
        if reason not in reasons:
            reasons.add(reason)
            translation.rejections.append(BridgeRejection(message, reason, detail))

    return reject


def is_possible_time(micros: int) -> bool:
    """Return whether a time in microseconds since 1970 is in the years 1 to 9999."""
    return MIN_MICROS <= micros <= MAX_MICROS


class PrefixTranslator:
    """Passes each message to the translator of its topic.

    Args:
        translator_by_prefix: Translators by the beginning of the topic.
        default: The translator of all other messages.
    """

    def __init__(self, translator_by_prefix: dict[str, Translator], default: Translator) -> None:
        self._translators = tuple(translator_by_prefix.items())
        self._default = default

    def translate(self, message: BridgeMessage, translation: Translation) -> None:
        """Add what follows from a message to a translation."""
        for prefix, translator in self._translators:
            if message.topic.startswith(prefix):
                translator.translate(message, translation)
                return
        self._default.translate(message, translation)


def translate_all(translator: Translator, messages: Sequence[BridgeMessage]) -> Translation:
    """Return what follows from messages."""
    translation = Translation()
    for message in messages:
        translator.translate(message, translation)
    return translation
