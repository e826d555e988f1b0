"""Dead letters: what their topic holds, and sending the messages again that they contain.

`consume` and `bridge` write them. Those of the bridge hold messages of another system, which no topic of Kafka had.
They are translated again, to events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from connectors.kafka.ports import KafkaCluster, OutgoingMessage, ReceivedMessage
from connectors.kafka.produce import open_sender
from connectors.kafka.sink import MAX_DEAD_LETTER_BYTES
from connectors.kafka.topic_reader import TopicReader
from connectors.kafka.topics import count_partitions
from deformer_stream.codec.bridge_messages import (
    BridgeMessage,
    Translation,
    TranslationOptions,
    ValueTranslator,
    translate_all,
)
from deformer_stream.codec.sparkplug import PREFIX
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.runtime.existing_messages import read_existing

MAX_OFFSET = 2**63 - 1
"""Largest offset of Kafka. Larger numbers in headers are rejected."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that `consume` or `bridge` has rejected, as the dead-letter topic holds it.

    Attributes:
        time: When it was rejected: the timestamp of the dead letter, microseconds since 1970.
        reason: Why it was rejected, such as "not_json".
        detail: One line that describes the problem.
        topic: The topic from which it was read, for the bridge the topic of MQTT or the node of OPC UA.
        partition: The partition from which it was read, None for a letter of the bridge.
        offset: Its offset there, None for a letter of the bridge. Topic, partition and offset together name the
            rejected message.
        sent_at: Its timestamp, milliseconds since 1970; None if it has none, or if an earlier release has rejected it.
            For the bridge, when the message arrived.
        key: Its key, or None.
        value: Its value, None for a tombstone.
        is_complete: Whether the letter holds the complete message. A message that was too large for the dead-letter
            topic lacks its value, or also its key.
        source: Address of the source of the bridge, None for a message of Kafka.
        translation: How the bridge has translated it, as the JSON of `TranslationOptions`; empty if it is unknown.
        arrived_at: When it arrived at the bridge, microseconds since 1970. None for a message of Kafka, or if an
            earlier release has rejected it.
    """

    time: int
    reason: str
    detail: str
    topic: str
    partition: int | None
    offset: int | None
    sent_at: int | None
    key: bytes | None
    value: bytes | None
    is_complete: bool
    source: str | None = None
    translation: bytes = b""
    arrived_at: int | None = None


def decode_dead_letter(message: ReceivedMessage) -> DeadLetter:
    """Return the dead letter of a message of the dead-letter topic.

    Raises:
        InputError: A header is missing or is no number.
    """
    headers = {name: value for name, value in message.headers if value is not None}
    is_of_bridge = "source_topic" in headers
    place = ("source", "source_topic") if is_of_bridge else ("topic", "partition", "offset")
    missing = [name for name in ("reason", *place) if name not in headers]
    if missing:
        raise InputError(f"it is no dead letter, because it has no header {missing[0]!r}")

    def read_number(name: str) -> int:
        text = headers[name]
        if not text.isdigit() or len(text) > len(str(MAX_OFFSET)) or int(text) > MAX_OFFSET:
            raise InputError(f"its header {name!r} is no number")
        return int(text)

    def read_text(name: str) -> str:
        return headers.get(name, b"").decode("utf-8", "backslashreplace")

    return DeadLetter(
        time=message.time * 1000,
        reason=read_text("reason"),
        detail=read_text("detail"),
        topic=read_text("source_topic" if is_of_bridge else "topic"),
        partition=None if is_of_bridge else read_number("partition"),
        offset=None if is_of_bridge else read_number("offset"),
        sent_at=read_number("timestamp") if "timestamp" in headers else None,
        key=message.key,
        value=message.value,
        is_complete=not headers.keys() & {"payload_bytes", "key_bytes"},
        source=read_text("source") if is_of_bridge else None,
        translation=headers.get("translation", b""),
        arrived_at=read_number("timestamp_us") if "timestamp_us" in headers else None,
    )


def read_dead_letters(cluster: KafkaCluster, topic: str) -> Iterator[DeadLetter]:
    """Yield the dead letters that a topic holds now, in order within each partition.

    Messages that are no dead letters are skipped; the first one is logged.

    Args:
        cluster: The brokers.
        topic: The dead-letter topic.

    Raises:
        Unavailable: The topic does not exist, or no broker responds.
        ConfigError: This user may not read the topic.
    """
    reader = TopicReader(cluster, topic, decode_dead_letter)
    try:
        yield from read_existing(reader)
    finally:
        reader.close()


SkipReason = Literal["foreign", "incomplete", "sparkplug", "repeated"]
"""Why nothing is sent for a dead letter; see the attributes of `ReplayCounts`."""


@dataclass(slots=True)
class ReplayCounts:
    """What `send_again` has done with dead letters.

    Attributes:
        sent: Messages that were sent and acknowledged.
        repeated: Letters about a message that another letter contains, too. It was sent once.
        incomplete: Letters that do not hold their message completely. Nothing was sent for them.
        untranslated: Letters of the bridge whose message, or a reading of it, was rejected again, or whose options are
            not valid. Their other readings were sent.
        example: Why the first of these was rejected, "" if there is none.
        sparkplug: Letters of the bridge with messages of Sparkplug. Nothing was sent for them.
        foreign: Letters that name another topic than that of the events. Nothing was sent for them.
        foreign_topic: The topic that the first of these names, "" if there is none.
    """

    sent: int = 0
    repeated: int = 0
    incomplete: int = 0
    untranslated: int = 0
    example: str = ""
    sparkplug: int = 0
    foreign: int = 0
    foreign_topic: str = ""

    def add_skipped(self, letter: DeadLetter, reason: SkipReason) -> None:
        """Count a letter for which nothing is sent."""
        match reason:
            case "foreign":
                self.foreign += 1
                self.foreign_topic = self.foreign_topic or letter.topic
            case "incomplete":
                self.incomplete += 1
            case "sparkplug":
                self.sparkplug += 1
            case "repeated":
                self.repeated += 1

    def add_untranslated(self, problem: str) -> None:
        """Count a letter of the bridge that was rejected again; the problem of the first one is the example."""
        self.untranslated += 1
        self.example = self.example or problem


class LetterTranslator:
    """Translates the messages of dead letters of the bridge to events.

    Args:
        topic: The topic of the events.
        options: Values of `TranslationOptions` that replace those of the bridge.

    Raises:
        ConfigError: The pattern of `options` is not one.
    """

    def __init__(self, topic: str, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.topic, self._options = topic, options
        self._translator_by_text: dict[bytes, ValueTranslator] = {}
        self._find_translator(b"")  # reports a wrong pattern before anything is sent

    def translate(self, letter: DeadLetter) -> Translation:
        """Return what follows from the message of a letter.

        Raises:
            InputError: The letter states no valid options.
        """
        time = letter.arrived_at
        if time is None:  # an earlier release has rejected it
            time = letter.time if letter.sent_at is None else letter.sent_at * 1000
        message = BridgeMessage(letter.topic, letter.value or b"", time)
        return translate_all(self._find_translator(letter.translation), [message])

    def _find_translator(self, text: bytes) -> ValueTranslator:
        """Return the translator for a letter whose options are this JSON. Letters of a bridge share one.

        Raises:
            InputError: The options are not valid.
            ConfigError: Without JSON: the pattern of the options that replace those of the bridge is not one.
        """
        translator = self._translator_by_text.get(text)
        if translator is None:
            try:
                stated = msgspec.json.decode(text, type=TranslationOptions) if text else TranslationOptions()
                translator = msgspec.structs.replace(stated, **self._options).make_translator()
            except (msgspec.DecodeError, ConfigError) as error:
                if not text:
                    raise
                raise InputError(f"the header 'translation' of the dead letter is not valid ({error})") from None
            self._translator_by_text[text] = translator
        return translator


def send_again(
    cluster: KafkaCluster,
    letters: Iterable[DeadLetter],
    translator: LetterTranslator,
    topic: str | None = None,
    is_dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ReplayCounts:
    """Send the messages of dead letters again, each once, with their keys and timestamps.

    A message returns to the partition from which it was read, so that the readings of a record stay in one partition.
    It is sent only to the topic of the events, because anybody who can write a dead letter can name any topic in it.
    A message of the bridge is translated, and its events have the device as the key, as those of the bridge.
    The function returns when the brokers have acknowledged all messages.

    Args:
        cluster: The brokers.
        letters: The dead letters.
        translator: Translates the messages of the bridge. Its topic is that of the events.
        topic: The topic to which all messages are sent; the client then chooses the partitions by the keys. None for
            the topic of the events. Messages of other topics are then left out.
        is_dry_run: Whether the messages are only counted.
        progress: A function that is called about once a second with the number of messages sent so far.

    Raises:
        Unavailable: A topic does not exist, no broker responds, or a message is not acknowledged in time.
        ConfigError: The brokers refuse a message.
    """
    counts = ReplayCounts()
    messages = _list_messages(letters, counts, translator, topic)
    if is_dry_run:
        counts.sent = sum(1 for _ in messages)
        return counts
    num_partitions: dict[str, int] = {}
    # A message is not larger than its dead letter. The brokers refuse it if its topic accepts only smaller ones.
    with open_sender(cluster, MAX_DEAD_LETTER_BYTES) as send:
        for message in messages:
            target, partition = message.topic, message.partition
            if target not in num_partitions:
                num_partitions[target] = count_partitions(cluster, target)
            is_known = partition is None or partition < num_partitions[target]
            is_acknowledged = send(message if is_known else message._replace(partition=None))
            counts.sent += 1
            if is_acknowledged and progress is not None:
                progress(counts.sent)
    return counts


def _list_messages(
    letters: Iterable[DeadLetter], counts: ReplayCounts, translator: LetterTranslator, topic: str | None
) -> Iterator[OutgoingMessage]:
    """Yield what is sent for dead letters, once for each rejected message that is complete, and count the others.

    A message has several letters if several of its readings were rejected.
    """
    seen: set[tuple[object, ...]] = set()
    for letter in letters:
        origin = _get_origin(letter)
        reason = _find_reason_to_skip(letter, translator.topic if topic is None else None, origin in seen)
        if reason is not None:
            counts.add_skipped(letter, reason)
            continue
        seen.add(origin)
        if letter.source is None:
            partition = letter.partition if topic is None else None
            yield OutgoingMessage(0, topic or letter.topic, letter.key, letter.value, (), partition, letter.sent_at)
        else:
            yield from _translate(letter, counts, translator, topic)


def _get_origin(letter: DeadLetter) -> tuple[object, ...]:
    """Return what identifies the rejected message of a letter: where it came from, and a digest of its value.

    A topic that was deleted and created again has the same offsets for other messages.
    """
    digest = hashlib.sha256(letter.value or b"").digest()
    if letter.source is None:
        return letter.topic, letter.partition, letter.offset, digest
    arrived_at = letter.sent_at if letter.arrived_at is None else letter.arrived_at
    return letter.source, letter.topic, arrived_at, digest


def _find_reason_to_skip(letter: DeadLetter, known_topic: str | None, is_repeated: bool) -> SkipReason | None:
    """Return why nothing is sent for a letter, None if its message is sent.

    Args:
        letter: The letter.
        known_topic: The only topic to which messages may return. None if all are sent to another one.
        is_repeated: Whether a previous letter contains the same message.
    """
    if known_topic is not None and letter.source is None and letter.topic != known_topic:
        return "foreign"
    if not letter.is_complete:
        return "incomplete"
    if letter.source is not None and is_sparkplug(letter.source, letter.topic):
        return "sparkplug"
    return "repeated" if is_repeated else None


def _translate(
    letter: DeadLetter, counts: ReplayCounts, translator: LetterTranslator, topic: str | None
) -> Iterator[OutgoingMessage]:
    """Yield the events that follow from a letter of the bridge, and count it if it is rejected again."""
    try:
        translation = translator.translate(letter)
    except InputError as error:
        counts.add_untranslated(str(error))
        return
    if translation.rejections:
        first = translation.rejections[0]
        counts.add_untranslated(f"{first.reason.value}: {first.detail}")
    for event in translation.events:
        yield OutgoingMessage(0, topic or translator.topic, event.key, event.value)


def is_sparkplug(source: str, topic: str) -> bool:
    """Return whether a message of the bridge is one of Sparkplug B, by the address of its source and its topic."""
    return source.startswith("mqtt") and topic.startswith(PREFIX)
