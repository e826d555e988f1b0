"""The settings of `bridge`, which passes readings from MQTT or OPC UA on to Kafka."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from deformer_stream.settings.base import TextList, Timeout, text_default
from deformer_stream.settings.kafka import KafkaSettings
from deformer_stream.settings.option_groups import BRIDGE_GROUPS, OptionGroups
from deformer_stream.settings.plant_source import (
    PlantSourceSettings,
    SourceAddress,
    TranslationSettings,
    parse_source_address,
)


class BridgeSettings(KafkaSettings, PlantSourceSettings, TranslationSettings):
    """The options of `deformer-stream bridge`."""

    option_groups: ClassVar[OptionGroups] = BRIDGE_GROUPS

    source: str = Field(
        description="Where readings come from: mqtt://HOST:PORT/FILTER, mqtts://… with TLS, such as "
        "mqtts://broker.plant.example/plant/#, or opc.tcp://HOST:PORT. Topics that begin with spBv1.0/ are Sparkplug B."
    )
    topic: str = Field(description="Kafka topic to which the events are written.")
    nodes: TextList = text_default(
        "",
        description="Nodes of an OPC UA server, such as ns=2;i=5: variables, or objects with variables below them. "
        "Several, with commas. Default: all variables below the folder Objects, except those of the server itself.",
    )
    sampling_interval: Timeout = text_default(
        "1s", description="Sampling interval that is requested of an OPC UA server."
    )
    opcua_policy: Literal["None", "Basic256Sha256", "Aes128Sha256RsaOaep", "Aes256Sha256RsaPss"] = Field(
        "None",
        description="Security policy of the connection to an OPC UA server. It requires --source-certfile and "
        "--source-cafile, whose files have certificates in PEM or DER.",
    )
    opcua_mode: Literal["Sign", "SignAndEncrypt"] = Field(
        "SignAndEncrypt", description="Whether messages of an OPC UA server are encrypted, or only signed."
    )
    dead_letter_topic: str | None = Field(
        None, description="Topic for messages that cannot be translated. Default: TOPIC-bridge-dead-letter."
    )
    births_topic: str | None = Field(
        None,
        description="Compacted topic that stores the births of Sparkplug edge nodes over a restart. Default: "
        "TOPIC-sparkplug-births.",
    )
    partitions: int = Field(4, ge=1, description="Number of partitions of the topic, if it must be created.")
    missing_topics: Literal["create", "refuse"] = Field(
        "create", description="What to do if a topic for events, dead letters or births does not exist."
    )
    patience: Timeout = text_default(
        "2m",
        description="Time to retry while the source or the brokers cannot be reached; at the start only with --http. "
        "After it, the command ends with exit code 4.",
    )
    http: str | None = Field(
        None,
        description="Address [HOST]:PORT for /metrics, /healthz and /readyz. Without a host, only this machine can "
        "connect. Default: no HTTP server.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        """Raise `ValueError` if the address of the source is malformed, or an option has no effect with it."""
        address = self.address
        is_mqtt = address.scheme.startswith("mqtt")
        if is_mqtt:
            self.check_topics(address)
        if is_mqtt and self.nodes:
            raise ValueError("--nodes is for OPC UA; write the topic filter of MQTT into --source")
        if self.opcua_policy != "None":
            if is_mqtt:
                raise ValueError("--opcua-policy is for OPC UA; write mqtts:// to encrypt MQTT")
            if self.source_certfile is None or self.source_cafile is None:
                raise ValueError(
                    "--opcua-policy requires --source-certfile, the client's certificate, and --source-cafile, the "
                    "certificate of the server or of its authority; add both"
                )
        self.check_source_login(address, address.scheme == "mqtts" or self.opcua_policy != "None")
        return self

    @property
    def address(self) -> SourceAddress:
        """The parts of the address of the source."""
        return parse_source_address(self.source)
