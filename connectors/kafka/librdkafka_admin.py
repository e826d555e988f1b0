"""The admin client of librdkafka."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, OffsetSpec, ResourceType

from connectors.kafka import client
from connectors.kafka.librdkafka_connection import (
    NO_TOPIC_CODES,
    NOT_AUTHORIZED_CODES,
    PROBE_SECONDS,
    connect,
    from_client_partitions,
    to_client_partition,
)
from connectors.kafka.ports import GroupMember, KafkaCluster, TopicDescription, TopicPartition
from deformer_stream.errors import Unavailable


class _ExpectedError(Exception):
    """A request failed with an error that its caller handles."""


_OUTDATED_CODES = frozenset({KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH})
"""Errors after a restart of a broker: the admin client of librdkafka uses metadata of before for minutes."""


class LibrdkafkaAdmin:
    """A client for topics and groups; see `connectors.kafka.ports.Admin`."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._connect()

    def _connect(self) -> None:
        """Connect to the brokers, with a client that has no metadata of topics."""
        self._client: Any  # confluent-kafka declares no types for it
        self._client, self._events = connect(AdminClient, self._cluster, {})

    def describe_topics(self, names: Iterable[str], timeout: float) -> dict[str, TopicDescription]:
        """Return descriptions of the topics that exist."""
        deadline = time.monotonic() + timeout
        description_by_topic = {}
        for name in names:
            with suppress(_ExpectedError):
                (topic,) = self._request(
                    f"describing topic {name!r}",
                    deadline,
                    self._client.describe_topics,
                    TopicCollection([name]),
                    expected_codes=NO_TOPIC_CODES,
                    include_authorized_operations=True,
                )
                operations = topic.authorized_operations
                allowed = frozenset(operation.name for operation in operations) if operations else None
                description_by_topic[name] = TopicDescription(len(topic.partitions), allowed)
        return description_by_topic

    def fetch_settings(self, names: Iterable[str], timeout: float) -> dict[str, dict[str, str]]:
        """Return the settings of topics; empty for a topic that hides them."""
        deadline = time.monotonic() + timeout
        settings_by_topic: dict[str, dict[str, str]] = {name: {} for name in names}
        for name, settings in settings_by_topic.items():
            resource = ConfigResource(ResourceType.TOPIC, name)
            with suppress(_ExpectedError):
                (entries,) = self._request(
                    f"reading the settings of topic {name!r}",
                    deadline,
                    self._client.describe_configs,
                    [resource],
                    expected_codes=NOT_AUTHORIZED_CODES,
                )
                settings.update({key: entry.value for key, entry in entries.items() if entry.value is not None})
        return settings_by_topic

    def create_topic(self, name: str, num_partitions: int, settings: Mapping[str, str], timeout: float) -> bool:
        """Create a topic and wait until it can be used. Return False if it exists already."""
        deadline = time.monotonic() + timeout
        topic = NewTopic(name, num_partitions, -1, config=dict(settings))  # -1: the broker's default of replicas
        try:
            self._request(
                f"creating topic {name!r}",
                deadline,
                self._client.create_topics,
                [topic],
                expected_codes={KafkaError.TOPIC_ALREADY_EXISTS},
            )
        except _ExpectedError:
            return False
        self._wait_for_partitions(name, num_partitions, deadline)
        return True

    def add_partitions(self, name: str, num_partitions: int, timeout: float) -> None:
        """Raise the number of partitions of a topic to `num_partitions`."""
        deadline = time.monotonic() + timeout
        topics = self.describe_topics([name], timeout)
        if name in topics and topics[name].num_partitions >= num_partitions:
            return
        action = f"adding partitions to topic {name!r}"
        self._request(action, deadline, self._client.create_partitions, [NewPartitions(name, num_partitions)])
        self._wait_for_partitions(name, num_partitions, deadline)

    def _wait_for_partitions(self, name: str, num_partitions: int, deadline: float) -> None:
        """Wait until the brokers list as many partitions of a topic, each with a leader.

        Args:
            name: Name of the topic.
            num_partitions: Number of partitions, or -1 if it is the broker's default.
            deadline: A time of `time.monotonic()`.
        """
        while True:
            with self._events.translate_errors(f"looking up topic {name!r}"):
                topic = self._client.list_topics(name, max(1.0, deadline - time.monotonic())).topics[name]
            leaders = [partition.leader for partition in topic.partitions.values()]
            if leaders and len(leaders) >= num_partitions and min(leaders) >= 0:
                return
            if time.monotonic() > deadline:
                raise self._events.make_timeout_error(f"waiting for topic {name!r}")
            time.sleep(PROBE_SECONDS)

    def fetch_log_ends(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset after the last message of each partition, messages of open transactions included."""
        return self.fetch_offsets(tps, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED, timeout)

    def fetch_offsets(
        self, tps: Iterable[TopicPartition], spec: OffsetSpec, isolation: IsolationLevel, timeout: float
    ) -> dict[TopicPartition, int]:
        """Return the first or the end offset of each partition.

        Args:
            tps: The partitions.
            spec: Which offset to return.
            isolation: Whether the end is that of all messages, or of those that are not in open transactions.
            timeout: Seconds after which `Unavailable` is raised.
        """
        spec_by_partition = {to_client_partition(tp): spec for tp in tps}
        if not spec_by_partition:
            return {}
        action = "requesting the offsets of partitions"
        try:
            results = self._request(
                action,
                time.monotonic() + timeout,
                self._client.list_offsets,
                spec_by_partition,
                expected_codes={KafkaError._NOENT},
                isolation_level=isolation,
            )
        except _ExpectedError as error:
            # librdkafka knows no leader: the topic does not exist, or no broker can be reached, as this request shows.
            with self._events.translate_errors(action):
                self._client.list_topics(next(iter(spec_by_partition)).topic, timeout)
            raise self._events.translate(KafkaError(KafkaError._NOENT), action) from error
        offsets = {
            TopicPartition(tp.topic, tp.partition): int(result.offset)
            for tp, result in zip(spec_by_partition, results, strict=True)
        }
        # If a broker hangs, librdkafka returns invalid offsets, which are negative, after the time limit.
        if any(offset < 0 for offset in offsets.values()):
            raise self._events.make_timeout_error(action)
        return offsets

    def describe_group(self, group: str, timeout: float) -> list[GroupMember]:
        """Return the members of a consumer group; none if there is no such group."""
        deadline = time.monotonic() + timeout
        try:
            (description,) = self._request(
                f"describing group {group!r}",
                deadline,
                self._client.describe_consumer_groups,
                [group],
                expected_codes={KafkaError.GROUP_ID_NOT_FOUND},
            )
        except _ExpectedError:
            return []
        return [
            GroupMember(
                member.member_id,
                member.group_instance_id,
                from_client_partitions(member.assignment.topic_partitions if member.assignment else ()),
            )
            for member in description.members
        ]

    def _request(
        self,
        action: str,
        deadline: float,
        function: Callable[..., Any],
        argument: Any,
        expected_codes: Set[int] = frozenset(),
        **options: Any,
    ) -> list[Any]:
        """Return the results of a request.

        It is repeated until a deadline if it fails while brokers restart.

        Args:
            action: What the request does, for the message of an error.
            deadline: A time of `time.monotonic()`.
            function: A function of the admin client, which returns a mapping with a future for each result.
            argument: Its argument.
            expected_codes: Codes of errors that the caller handles.
            **options: Options of the function.

        Raises:
            _ExpectedError: The request fails with one of `expected_codes`.
            DeformerError: The request fails for another reason.
        """
        while True:
            seconds = max(1.0, deadline - time.monotonic())
            try:
                futures = function(argument, request_timeout=seconds, **options).values()
                return [future.result() for future in futures]
            except KafkaException as exception:
                code = exception.args[0].code()
                if code in expected_codes:
                    raise _ExpectedError from exception
                if code in _OUTDATED_CODES:
                    self._connect()
                    raise self._events.translate(exception.args[0], action) from exception
                error = self._events.translate(exception.args[0], action)
                if not isinstance(error, Unavailable) or time.monotonic() + client.RETRY_SECONDS > deadline:
                    raise error from exception
            time.sleep(client.RETRY_SECONDS)

    def close(self) -> None:
        """Close the connections."""
        self._client = None  # confluent-kafka closes them when the object is deleted
