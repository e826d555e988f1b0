"""Create topics and check the settings and permissions of existing ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from connectors.kafka.client import DELIVERY_SECONDS, load_client
from connectors.kafka.ports import Admin, KafkaCluster, MissingTopic, TopicDescription
from deformer_stream import log
from deformer_stream.errors import ConfigError

DEFAULT_MAX_MESSAGE_BYTES = 2**20 + 12
"""Kafka's default of a topic's max.message.bytes."""


class TopicSpec(TypedDict, total=False):
    """How a topic is created. The replication factor is the broker's default.

    Attributes:
        num_partitions: Number of partitions; required.
        configs: Kafka's settings of the topic by name; those that are left out have the broker's default.
    """

    num_partitions: int
    configs: dict[str, str]


def count_partitions(cluster: KafkaCluster, topic: str) -> int:
    """Return how many partitions a topic has, after checking that this user may read it.

    Args:
        cluster: The brokers.
        topic: Name of the topic.

    Raises:
        MissingTopic: The topic does not exist.
        Unavailable: No broker responds.
        ConfigError: This user may not read the topic.
    """
    admin = load_client(cluster).open_admin(cluster)
    try:
        description = admin.describe_topics([topic], DELIVERY_SECONDS).get(topic)
    finally:
        admin.close()
    if description is None:
        raise MissingTopic(f"topic {topic!r} does not exist on {cluster.servers}: create it or check --topic")
    _check_permission(cluster, topic, description, "READ")
    return description.num_partitions


def has_topic(cluster: KafkaCluster, topic: str) -> bool:
    """Return whether a topic exists that this user may describe.

    Args:
        cluster: The brokers.
        topic: Name of the topic.

    Raises:
        Unavailable: No broker responds.
    """
    admin = load_client(cluster).open_admin(cluster)
    try:
        return topic in admin.describe_topics([topic], DELIVERY_SECONDS)
    finally:
        admin.close()


def ensure_topics(
    cluster: KafkaCluster, topics: Mapping[str, TopicSpec], create: bool = True, operation: str = "WRITE"
) -> dict[str, int]:
    """Create missing topics, and check that this process can write to the existing ones, or read them.

    Args:
        cluster: The brokers.
        topics: How each topic is created, by name. If `configs` has a `cleanup.policy`, an existing topic must be
            compacted and have at least `num_partitions` partitions; missing partitions are added to it. The broker may
            delete its old messages only if the policy here says so.
        create: Whether missing topics and partitions are created; otherwise they raise an error.
        operation: The operation that must be permitted to this user: "WRITE" or "READ".

    Returns:
        For each topic, the largest message that it accepts (`max.message.bytes`), in bytes.

    Raises:
        ConfigError: A topic is missing and may not be created, has unsuitable settings, or may not be used by this
            user.
        Unavailable: No broker responds.
    """
    if not topics:
        return {}
    admin = load_client(cluster).open_admin(cluster)
    try:
        existing = admin.describe_topics(topics, DELIVERY_SECONDS)
        missing = sorted(topics.keys() - existing.keys())
        if missing and not create:
            raise ConfigError(
                f"Kafka at {cluster.servers} has no topic {', '.join(missing)}: create it, or use "
                "--missing-topics create"
            )
        for name in missing:
            _create_topic(cluster, admin, name, topics[name])
        descriptions = existing | (admin.describe_topics(missing, DELIVERY_SECONDS) if missing else {})
        for name, description in descriptions.items():
            _check_permission(cluster, name, description, operation)
        settings_by_topic = admin.fetch_settings(topics, DELIVERY_SECONDS)
        for name, description in existing.items():
            if "cleanup.policy" in topics[name].get("configs", {}):
                _check_compacted(name, topics[name], settings_by_topic.get(name, {}))
                ensure_partitions(admin, name, description.num_partitions, topics[name]["num_partitions"], create)
        return {
            name: int(settings_by_topic.get(name, {}).get("max.message.bytes", DEFAULT_MAX_MESSAGE_BYTES))
            for name in topics
        }
    finally:
        admin.close()


def _create_topic(cluster: KafkaCluster, admin: Admin, name: str, spec: TopicSpec) -> None:
    """Create a topic. It is no error if another process creates it first.

    Raises:
        ConfigError: This user may not create the topic, or a setting is invalid.
    """
    try:
        is_created = admin.create_topic(name, spec["num_partitions"], spec.get("configs", {}), DELIVERY_SECONDS)
    except ConfigError as error:
        raise ConfigError(
            f"topic {name!r} does not exist on {cluster.servers} and cannot be created: {error}"
        ) from error
    if is_created:
        log.get_logger("kafka").info("topic_created", topic=name, partitions=spec["num_partitions"])


def _check_permission(cluster: KafkaCluster, name: str, description: TopicDescription, operation: str) -> None:
    """Raise `ConfigError` if this user may not read a topic, or may not write to it.

    The check is made at start, because the broker would refuse the user only when the first message is sent.

    Args:
        cluster: The brokers.
        name: Name of the topic.
        description: The broker's description of the topic.
        operation: The operation that must be permitted: "READ" or "WRITE".
    """
    # A broker without access control may state no operations; then everything is permitted.
    if description.operations and operation not in description.operations:
        raise ConfigError(
            f"topic {name!r} on {cluster.servers} may not be used by this user: grant the permission {operation}"
        )


def _check_compacted(name: str, spec: TopicSpec, settings: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless a topic is compacted.

    Compaction keeps the latest message of each key. A state topic, which stores the state of open records, must keep it
    however old it is.

    Args:
        name: Name of the topic.
        spec: How it would be created.
        settings: Its settings; an empty mapping if this user may not read them.
    """
    policy = settings.get("cleanup.policy", "compact")  # an unreadable setting counts as suitable
    can_delete = "delete" in spec["configs"]["cleanup.policy"]
    if can_delete:
        if "compact" not in policy.split(","):
            raise ConfigError(
                f"topic {name!r} must keep the last message of each key, but it has cleanup.policy={policy}: set "
                "cleanup.policy=compact"
            )
    elif policy != "compact":
        raise ConfigError(
            f"topic {name!r} stores the state of open records, but with cleanup.policy={policy} the broker would "
            "delete it after a while: set cleanup.policy=compact"
        )


def ensure_partitions(admin: Admin, name: str, num_partitions: int, num_required: int, create: bool) -> None:
    """Add partitions to a topic that has too few of them.

    Args:
        admin: The admin client.
        name: Name of the topic.
        num_partitions: The number of its partitions.
        num_required: The smallest number of partitions.
        create: Whether partitions may be added.

    Raises:
        ConfigError: Partitions are missing, and they may not be added.
    """
    if num_partitions >= num_required:
        return
    reason = "--missing-topics refuse does not allow it"
    if create:
        try:
            admin.add_partitions(name, num_required, DELIVERY_SECONDS)
        except ConfigError as error:
            reason = str(error)
        else:
            log.get_logger("kafka").info("partitions_added", topic=name, partitions=num_required)
            return
    raise ConfigError(
        f"topic {name!r} has {num_partitions} partitions, but it needs {num_required}, as many as the topic that is "
        f"consumed: add partitions to it ({reason})"
    )
