"""The options of every command that joins a Kafka consumer group and restores its state from a topic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deformer_stream.settings.base import Duration, Timeout, text_default
from deformer_stream.settings.kafka import KafkaSettings

DeliveryGuarantee = Literal["exactly-once", "at-least-once"]
"""Whether output and consumed offsets are committed together."""


class GroupMemberSettings(KafkaSettings):
    """The options of a member of a consumer group: where it starts, how it commits, and where its state is.

    A subclass gives a default and a description to the fields that have none here.
    """

    from_: Literal["earliest", "latest"] = Field(
        "earliest",
        validation_alias="DEFORMER_FROM",
        description="Where a consumer group without committed offsets starts to read.",
    )
    delivery: DeliveryGuarantee = Field(
        "exactly-once",
        description="exactly-once writes all output and the offsets in one transaction. at-least-once writes them one "
        "after the other; choose it for brokers without transactions.",
    )
    commit_interval: Duration
    snapshot_interval: Duration
    state_topic: str | None
    lost_state: Literal["refuse", "rebuild", "forget"] = Field(
        "refuse",
        description="What to do if a snapshot of the state, or a message that it requires, no longer exists. refuse "
        "ends with an error. rebuild reads the remaining messages again without raising alerts or writing incidents. "
        "forget starts with an empty state.",
    )
    missing_topics: Literal["create", "refuse"] = Field(
        "create", description="What to do if a topic that the command writes does not exist."
    )
    instance: str | None = Field(
        None,
        description="Permanent name of this process in the consumer group, different for each process. After a "
        "restart the process continues at once, without waiting for --session-timeout.",
    )
    session_timeout: Timeout
    patience: Timeout = text_default(
        "2m",
        description="Time to retry while the brokers or a partition cannot be reached; at the start only with --http. "
        "After it, the command ends with exit code 4.",
    )
