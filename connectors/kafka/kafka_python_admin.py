"""The admin client of kafka-python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import kafka.errors as errors
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaTopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, MemberToRemove, OffsetSpec

from connectors.kafka import client
from connectors.kafka.kafka_python_connection import UNKNOWN_TOPIC, connect, to_milliseconds, translate_errors
from connectors.kafka.ports import GroupMember, KafkaCluster, TopicDescription, TopicPartition
from deformer_stream.errors import ConfigError

Result = TypeVar("Result")


class KafkaPythonAdmin:
    """An admin client of `connectors.kafka.ports`.

    Args:
        cluster: The brokers.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        self._servers = cluster.servers
        request_ms = to_milliseconds(client.DELIVERY_SECONDS)
        self._admin: Any = connect(KafkaAdminClient, cluster, request_timeout_ms=request_ms)

    def _retry(self, call: Callable[[], Result], timeout: float, action: str) -> Result:
        """Return the result of a request; repeat it on errors that may pass, for up to `timeout` seconds.

        While brokers restart, requests fail until each partition has a leader again. An error that says that the topic
        does not exist is raised at once, although kafka-python counts it as retriable.
        """
        deadline = time.monotonic() + timeout
        with translate_errors(self._servers, action, ValueError, TypeError):
            while True:
                try:
                    return call()
                except errors.RetriableError as error:
                    if isinstance(error, UNKNOWN_TOPIC) or time.monotonic() > deadline:
                        raise
                    time.sleep(client.RETRY_SECONDS)

    def describe_topics(self, names: Iterable[str], timeout: float) -> dict[str, TopicDescription]:
        """Return descriptions of the topics that exist; the others are left out."""
        requested = list(names)
        if not requested:
            return {}

        def describe() -> list[dict[str, Any]]:
            """Request the descriptions, and raise the error of a topic that does exist."""
            topics: list[dict[str, Any]] = self._admin.describe_topics(requested)
            error_types = [errors.for_code(topic["error_code"]) for topic in topics]
            for error_type in error_types:
                if error_type is not errors.NoError and error_type not in UNKNOWN_TOPIC:
                    raise error_type()
            return [topic for topic, kind in zip(topics, error_types, strict=True) if kind is errors.NoError]

        action = f"describing topics {', '.join(requested)}"
        return {
            topic["name"]: TopicDescription(
                len(topic["partitions"]),
                frozenset(topic["authorized_operations"]) if topic.get("authorized_operations") else None,
            )
            for topic in self._retry(describe, timeout, action)
            if topic["partitions"]
        }

    def fetch_settings(self, names: Iterable[str], timeout: float) -> dict[str, dict[str, str]]:
        """Return the settings of topics, also those that have their default; empty for a topic that hides them."""
        settings_by_topic: dict[str, dict[str, str]] = {name: {} for name in names}
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in settings_by_topic]
        if not resources:
            return {}

        def describe() -> dict[str, Any]:
            """Request the settings; none if this user may not read them."""
            try:
                response: dict[str, Any] = self._admin.describe_configs(resources, config_filter="all")
            except errors.AuthorizationError:
                return {}
            return response

        response = self._retry(describe, timeout, "reading the topics' settings")
        for topic, settings in response.get("topic", {}).items():
            settings_by_topic[topic] = {name: setting["value"] for name, setting in settings.items()}
        return settings_by_topic

    def create_topic(self, name: str, num_partitions: int, settings: Mapping[str, str], timeout: float) -> bool:
        """Create a topic and wait until it can be used. Return False if it exists already."""
        specification = {name: {"num_partitions": num_partitions, "configs": dict(settings)}}

        def create() -> bool:
            """Request the topic."""
            try:
                self._admin.create_topics(specification)
            except errors.TopicAlreadyExistsError:
                return False
            except (errors.AuthorizationError, errors.PolicyViolationError) as error:
                raise ConfigError(
                    f"topic {name!r} does not exist on {self._servers} and this user may not create it "
                    f"({type(error).__name__}): create it, or grant the permission"
                ) from error
            return True

        is_new = self._retry(create, timeout, f"creating topic {name!r}")
        wait = partial(self._admin.wait_for_topics, [name], timeout_ms=to_milliseconds(timeout))
        self._retry(wait, timeout, f"waiting for topic {name!r}")
        return is_new

    def add_partitions(self, name: str, num_partitions: int, timeout: float) -> None:
        """Raise the number of partitions of a topic."""

        def add() -> None:
            """Request the partitions; another process may have added them already."""
            with suppress(errors.InvalidPartitionsError):
                self._admin.create_partitions({name: num_partitions})

        self._retry(add, timeout, f"adding partitions to topic {name!r}")

    def fetch_log_ends(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        """Return the offset after the last message of each partition, messages of open transactions included."""
        request = {KafkaTopicPartition(*tp): OffsetSpec.LATEST for tp in tps}
        if not request:
            return {}
        offsets = self._retry(
            lambda: self._admin.list_partition_offsets(request, timeout_ms=to_milliseconds(timeout)),
            timeout,
            "requesting the end offsets of partitions",
        )
        return {TopicPartition(*tp): int(found.offset) for tp, found in offsets.items()}

    def describe_group(self, group: str, timeout: float) -> list[GroupMember]:
        """Return the members of a consumer group; none if there is no such group."""

        def describe() -> dict[str, Any]:
            """Request the description of the group."""
            description: dict[str, Any] = self._admin.describe_groups([group])[group]
            return description

        description = self._retry(describe, timeout, f"describing group {group!r}")
        return [
            GroupMember(
                member["member_id"],
                member.get("group_instance_id") or None,
                frozenset(
                    TopicPartition(topic["topic"], number)
                    for topic in (member["member_assignment"] or {}).get("assigned_partitions", ())
                    for number in topic["partitions"]
                ),
            )
            for member in description["members"]
        ]

    def remove_member(self, group: str, instance: str, timeout: float) -> None:
        """Remove the member with an instance name from a consumer group, if there is one.

        kafka-python itself never lets such a member leave its group.
        """

        def remove() -> None:
            """Request the removal, and raise its error unless there is no such member."""
            member = MemberToRemove(group_instance_id=instance)
            (error_type,) = self._admin.remove_group_members(group, [member]).values()
            if error_type not in (errors.NoError, errors.UnknownMemberIdError):
                raise error_type()

        self._retry(remove, timeout, f"removing instance {instance!r} from group {group!r}")

    def close(self) -> None:
        """Close the connections."""
        with suppress(errors.KafkaError, OSError):
            self._admin.close()
