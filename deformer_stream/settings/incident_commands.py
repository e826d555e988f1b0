"""The settings of the commands around incidents: `incidents`, `serve`, `feedback` and `propose`."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from deformer_stream.settings.base import Duration, Settings, Share, TextList, Timeout, split_at_commas, text_default
from deformer_stream.settings.group_member import DeliveryGuarantee, GroupMemberSettings
from deformer_stream.settings.incident_rule import IncidentRuleSettings
from deformer_stream.settings.kafka import KafkaSettings
from deformer_stream.settings.option_groups import (
    FEEDBACK_GROUPS,
    INCIDENT_GROUPS,
    PROPOSE_GROUPS,
    SERVE_GROUPS,
    OptionGroups,
)
from deformer_stream.settings.registry import OutputFormatSettings, RegistryAddressSettings
from deformer_stream.settings.tables import check_timezone


def check_networks(networks: tuple[str, ...]) -> tuple[str, ...]:
    """Return texts that are IP addresses or networks unchanged.

    Raises:
        ValueError: One of them is neither.
    """
    for network in networks:
        try:
            ip_network(network)
        except ValueError as error:
            raise ValueError(
                f"{error}; write addresses such as 10.0.0.5 or networks such as 10.244.0.0/16, with commas between them"
            ) from None
    return networks


class DeliverySettings(Settings):
    """The options that name the receivers of incidents."""

    alertmanager: TextList = text_default(
        "", description="Address of a Prometheus Alertmanager, such as http://alertmanager:9093. Several, with commas."
    )
    webhook: TextList = text_default(
        "", description="Address that gets each incident as JSON by HTTP. Several, with commas."
    )
    webhook_secret_file: Path | None = Field(
        None, description="File with the secret that signs the requests to --webhook (HMAC-SHA256)."
    )
    pagerduty_key_file: Path | None = Field(
        None, description="File with the integration key of a PagerDuty service (Events API v2)."
    )
    pagerduty_url: str = Field(
        "https://events.pagerduty.com/v2/enqueue", description="Address of the PagerDuty Events API v2."
    )
    notify: SecretStr | None = Field(
        None, description="Address of a chat or a mailbox in the notation of Apprise. Several, with commas."
    )
    notify_file: Path | None = Field(
        None, description="File with addresses in the notation of Apprise, one in each line."
    )
    external_url: str | None = Field(
        None,
        description="Address of the operator's page, for links in messages, such as https://plant.example.",
    )
    receiver_timeout: Timeout = text_default("10s", description="Longest time that a request to a receiver takes.")


class IncidentsSettings(IncidentRuleSettings, DeliverySettings, GroupMemberSettings, OutputFormatSettings):
    """The options of `deformer-stream incidents`."""

    option_groups: ClassVar[OptionGroups] = INCIDENT_GROUPS
    contradictory: ClassVar[tuple[str, ...]] = ("model", "models")

    topic: str = Field(description="Kafka topic with the events. Its evidence is read from TOPIC-evidence.")
    model: Path | None = Field(
        None, description="Model directory that deformer-train wrote. Required, unless --deliver-only is given."
    )
    models: Path | None = Field(
        None,
        description="Folder with one model directory for each type, in place of --model: that of `consume --models`. "
        "Each model has incidents and a budget of its own.",
    )
    evidence_topic: str | None = Field(None, description="Topic with the evidence. Default: TOPIC-evidence.")
    incidents_topic: str | None = Field(None, description="Compacted topic for incidents. Default: TOPIC-incidents.")
    feedback_topic: str | None = Field(None, description="Topic with labels of operators. Default: TOPIC-feedback.")
    group: str = Field(
        "deformer-stream",
        min_length=1,
        description="Name of the consumer group that `consume` uses. The groups of this command begin with it.",
    )
    delivery: DeliveryGuarantee = Field(
        "exactly-once",
        description="exactly-once writes incidents and offsets in one transaction. at-least-once is for brokers "
        "without transactions; evidence that comes again is then ignored.",
    )
    commit_interval: Duration = text_default(
        "1s", description="Shortest time between two commits. An incident that opens is committed at once."
    )
    snapshot_interval: Duration = text_default(
        "30s", description="Time between two snapshots of the state, from which a restarted process continues."
    )
    state_topic: str | None = Field(
        None, description="Compacted topic for the state. Default: GROUP-TOPIC-incidents-state."
    )
    session_timeout: Timeout = text_default(
        "15s", description="Time after which a second process takes over from one that does not respond."
    )
    deliver_only: bool = Field(
        False, description="Notify receivers of the incidents in the topic, without looking for incidents."
    )
    http: str | None = Field(
        None,
        description="Address [HOST]:PORT for /metrics, /healthz and /readyz. Without a host, only this machine can "
        "connect. Default: no HTTP server.",
    )


class ServeSettings(KafkaSettings, RegistryAddressSettings):
    """The options of `deformer-stream serve`."""

    option_groups: ClassVar[OptionGroups] = SERVE_GROUPS

    topic: str = Field(description="Kafka topic with the events. Incidents are read from TOPIC-incidents.")
    model: Path | None = Field(None, description="Model directory, for the page about the state of the system.")
    incidents_topic: str | None = Field(None, description="Topic with the incidents. Default: TOPIC-incidents.")
    feedback_topic: str | None = Field(None, description="Topic for labels. Default: TOPIC-feedback.")
    next_readings_topic: str | None = Field(
        None,
        description="Topic with suspicious records, which are shown if the topic exists. Default: TOPIC-next-readings.",
    )
    http: str = Field(
        "127.0.0.1:8080",
        description="Address HOST:PORT of the page. An address that other machines can reach needs --token-file or "
        "--users-file.",
    )
    patience: Timeout = text_default(
        "2m",
        description="Time to retry at the start while the brokers cannot be reached, if other machines can reach "
        "--http. After it, the command ends with exit code 4.",
    )
    token_file: Path | None = Field(None, description="File with the token that a person enters to log in.")
    users_file: Path | None = Field(
        None, description="File with users, one in each line as NAME:HASH; deformer-stream serve --hash prints a hash."
    )
    metrics: TextList = text_default(
        "", description="Addresses of the /metrics of `consume` and `incidents`. Several, with commas."
    )
    external_url: str | None = Field(
        None, description="Address under which people reach the page, if a proxy is in front of it."
    )
    trusted_proxy: Annotated[TextList, AfterValidator(check_networks)] = text_default(
        "",
        description="Addresses or networks of proxies in front of the page, such as 10.0.0.5 or 10.244.0.0/16. Their "
        "header X-Forwarded-For states the client, whose wrong passwords are counted. Several, with commas. Default: "
        "the client is whoever connects.",
    )
    timezone: Annotated[str, AfterValidator(check_timezone)] | None = Field(
        None, description="Time zone of the page, such as Europe/Berlin. Default: that of this machine."
    )


class FeedbackSettings(KafkaSettings, RegistryAddressSettings):
    """The options of `deformer-stream feedback`."""

    option_groups: ClassVar[OptionGroups] = FEEDBACK_GROUPS

    topic: str = Field(description="Kafka topic with the events. Labels are written to TOPIC-feedback.")
    incidents_topic: str | None = Field(None, description="Topic with the incidents. Default: TOPIC-incidents.")
    feedback_topic: str | None = Field(None, description="Topic for labels. Default: TOPIC-feedback.")
    name: str | None = Field(None, max_length=200, description="Name of the fault.")
    note: str = Field("", max_length=2000, description="Free text.")
    by: str = Field("", max_length=200, description="Who gives the label. Default: the user of this machine.")
    maintenance: str | None = Field(None, description="Device of a maintenance window, with --from and --to.")
    record: str | None = Field(
        None,
        description="Id of a record that `propose` offers for review, which gets the label in place of an incident.",
    )
    from_: str | None = Field(
        None, validation_alias="DEFORMER_FROM", description="Beginning of the maintenance window, RFC 3339."
    )
    to: str | None = Field(None, description="End of the maintenance window, RFC 3339.")


Changes = Annotated[tuple[Literal["patterns", "segments", "records"], ...], NoDecode, BeforeValidator(split_at_commas)]
"""Parts of the calibration that a candidate replaces."""


class ProposeSettings(IncidentRuleSettings, KafkaSettings, RegistryAddressSettings):
    """The options of `deformer-stream propose`."""

    option_groups: ClassVar[OptionGroups] = PROPOSE_GROUPS

    model: Path = Field(description="Model directory whose calibration is in use.")
    log: TextList = text_default(
        "",
        description="Files with evidence, of `replay --evidence` or copied from TOPIC-evidence. Several, with spaces "
        "or commas. Default with --topic: TOPIC-evidence.",
    )
    feedback: Path | None = Field(
        None, description="File with labels as JSON lines. Default with --topic: TOPIC-feedback."
    )
    topic: str | None = Field(
        None, description="Kafka topic with the events. Evidence and labels are read from its topics."
    )
    evidence_topic: str | None = Field(None, description="Topic with the evidence. Default: TOPIC-evidence.")
    feedback_topic: str | None = Field(None, description="Topic with the labels. Default: TOPIC-feedback.")
    out: Path | None = Field(None, description="Folder for the candidate, which must not exist yet.")
    since: str | None = Field(None, description="Beginning of the span that is compared, RFC 3339.")
    until: str | None = Field(None, description="End of the span that is compared, RFC 3339.")
    alpha: Share = text_default(0.01, "Largest share of normal records that raise an alert.")
    change: Changes = text_default(
        "patterns",
        description="What the candidate replaces, with commas: patterns of false alarms, segments of normal operation, "
        "or records (the calibration of alerts).",
    )
    review: int = Field(
        20, ge=0, description="Number of alerts, and of records without an alert, that are offered for review."
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of records for review.")
    approve: Path | None = Field(None, description="Candidate that replaces the calibration of --model.")
    roll_back: bool = Field(False, description="Restore the calibration that was in use before the last approval.")
    by: str = Field("", max_length=200, description="Who approves. Default: the user of this machine.")
