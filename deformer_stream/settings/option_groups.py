"""The headings under which `--help` and the reference page list the options of the commands.

A grouping is a mapping from a heading to the names of its settings fields, the most used field first. A command shows
the headings of which it has at least one option. Options that no heading names are shown under `OTHER_HEADING`.
"""

from __future__ import annotations

from collections.abc import Mapping

OptionGroups = Mapping[str, tuple[str, ...]]

OTHER_HEADING, GENERAL_HEADING = "Further options", "General"
"""Headings of the options that no grouping names, and of the options that every command has, such as `--config`."""

_TABLES = (
    *("where", "layout", "order", "record_column", "device_column", "time_column", "timezone", "time_unit"),
    *("delimiter", "decimal", "encoding", "header", "no_header", "seed"),
)
"""Fields of the options that say how tables are read."""

_CLIENT = ("client", "client_option")

_SECURITY = (
    *("security_protocol", "ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_password_file"),
    *("sasl_mechanism", "sasl_username", "sasl_password_file", "sasl_password"),
    *("sasl_oauth_token_endpoint", "sasl_oauth_client_id", "sasl_oauth_client_secret_file", "sasl_oauth_scope"),
    *("sasl_oauth_token_file", "sasl_aws_region", "sasl_kerberos_service_name"),
)

_REGISTRY = (
    *("schema_registry", "schema_registry_username", "schema_registry_password_file", "schema_registry_password"),
    "schema_registry_cafile",
)
"""Fields of the options that name a schema registry."""

_SOURCE_SECURITY = (
    *("source_username", "source_password_file", "source_password", "source_cafile", "source_certfile"),
    *("source_keyfile", "source_key_password_file"),
)

_INCIDENT_RULE = (
    *("incident_budget", "incident_rule", "segment", "quiet", "silent_after", "gap", "fleet"),
    *("records_per_day", "device_by"),
)
"""Fields of the options that determine when incidents open and resolve."""

SCORING_GROUPS: OptionGroups = {
    "Input": ("topic", "source", "from_", *_TABLES, "label", "normal"),
    "Model": ("model", "models", "model_by", "model_pattern", "device", "compiled"),
    "Alerts": (
        *("alpha", "alerts", "alerts_topic", "explanations", "units", "drift", "max_alert_rate"),
        *("next_reading", "suspicious", "suspicious_records", "next_readings_topic"),
    ),
    "Output": ("out", "output", "records", "explain", "rejected", "dead_letter_topic"),
    "Shards": ("output_dir", "workers", "engine", "shard_by", "shards"),
    "Incidents": ("evidence", "evidence_topic", "incidents", "open_early", *_INCIDENT_RULE),
    "Calibration": ("group_by", "trim", "review", "anomalous", "seen_records"),
    "Records and windows": ("record_timeout", "window", "grace", "ties", "tie_wait", "max_ahead"),
    "Kafka": (
        *("bootstrap_servers", "group", "instance", "delivery", "missing_topics", "patience", "session_timeout"),
        *("commit_interval", "max_wait", "max_poll_records", "max_message_bytes", *_CLIENT),
    ),
    "Kafka security": _SECURITY,
    "Message format": ("format", "output_format", *_REGISTRY),
    "State and recovery": ("state_topic", "state_dir", "snapshot_interval", "open_records", "lost_state"),
    "MQTT": ("pattern", "alerts_to", "client_id", "session_expiry"),
    "Security of the source": _SOURCE_SECURITY,
    "Memory": ("cache_memory", "record_memory", "max_open_records"),
    "Monitoring": ("http",),
    "Names of JSON fields": (
        *("record_field", "device_field", "feature_field", "value_field", "values_field", "time_field"),
    ),
}
"""The grouping of the commands that score events."""

PRODUCE_GROUPS: OptionGroups = {
    "Input": (*_TABLES, "exclude", "record_prefix", "model", "models"),
    "Output": ("topic", "output", "key", "device_by", "model_by", "rate", "shuffle_within", "payload"),
    "Kafka": ("bootstrap_servers", "partitions", *_CLIENT),
    "Kafka security": _SECURITY,
}
"""The grouping of `produce`."""

TABLE_GROUPS: OptionGroups = {
    "Model": ("model", "device"),
    "Input": _TABLES,
    "Output": ("output", "page", "count", "interval", "estimate", "quantiles", "draws", "train_time"),
}
"""The grouping of the commands that write tables: `impute`, `sample` and `demo`."""


INIT_GROUPS: OptionGroups = {
    "Configuration file": ("yes", "output", "force"),
    "Answers": (
        *(
            "record",
            "window",
            "slots",
            "per_slot",
            "irregular",
            "label",
            "normal",
            "contamination",
            "exclude",
            "timezone",
        ),
        *("alpha", "max_time"),
    ),
    "Tables": ("time_column", "time_unit", "device_column", "delimiter", "decimal", "encoding", "header", "no_header"),
    "Kafka": ("topic", "listen", "save", "bootstrap_servers", *_CLIENT),
    "Kafka security": _SECURITY,
}
"""The grouping of `init`."""

_INCIDENT_TOPICS = ("evidence_topic", "incidents_topic", "feedback_topic")

INCIDENT_GROUPS: OptionGroups = {
    "Input": ("topic", "model", "models", "from_"),
    "Incidents": (*_INCIDENT_RULE, "max_ahead"),
    "Receivers": (
        *("alertmanager", "webhook", "webhook_secret_file", "pagerduty_key_file", "pagerduty_url"),
        *("notify", "notify_file", "external_url", "receiver_timeout", "deliver_only"),
    ),
    "Kafka": (
        *("bootstrap_servers", "group", "instance", *_INCIDENT_TOPICS, "delivery", "missing_topics", "patience"),
        *("session_timeout", "commit_interval", *_CLIENT),
    ),
    "Kafka security": _SECURITY,
    "Message format": ("output_format", *_REGISTRY),
    "State and recovery": ("state_topic", "snapshot_interval", "lost_state"),
    "Monitoring": ("http",),
}
"""The grouping of `incidents`."""

SERVE_GROUPS: OptionGroups = {
    "Input": ("topic", "model", "metrics"),
    "Page": ("http", "external_url", "trusted_proxy", "timezone", "token_file", "users_file"),
    "Kafka": ("bootstrap_servers", *_INCIDENT_TOPICS, "next_readings_topic", "patience", *_CLIENT),
    "Kafka security": _SECURITY,
    "Message format": _REGISTRY,
}
"""The grouping of `serve`."""

FEEDBACK_GROUPS: OptionGroups = {
    "Label": ("record", "name", "note", "by"),
    "Maintenance window": ("maintenance", "from_", "to"),
    "Kafka": ("topic", "bootstrap_servers", *_INCIDENT_TOPICS, *_CLIENT),
    "Kafka security": _SECURITY,
    "Message format": _REGISTRY,
}
"""The grouping of `feedback`."""

_BRIDGE_FIELDS = ("device_field", "feature_field", "value_field", "values_field", "time_field")

DEAD_LETTERS_GROUPS: OptionGroups = {
    "Selection": ("reason", "since", "until", "limit"),
    "Replay": ("to", "dry_run"),
    "Messages that bridge has rejected": ("pattern", "timezone", "time_unit", "max_message_bytes", *_BRIDGE_FIELDS),
    "Kafka": ("topic", "dead_letter_topic", "bootstrap_servers", *_CLIENT),
    "Kafka security": _SECURITY,
}
"""The grouping of `dead-letters`."""

BRIDGE_GROUPS: OptionGroups = {
    "Input": ("source", "pattern", "timezone", "time_unit", "max_message_bytes"),
    "MQTT session": ("client_id", "session_expiry"),
    "OPC UA": ("nodes", "sampling_interval", "opcua_policy", "opcua_mode"),
    "Security of the source": _SOURCE_SECURITY,
    "Kafka": (
        *(
            "topic",
            "bootstrap_servers",
            "dead_letter_topic",
            "births_topic",
            "partitions",
            "missing_topics",
            "patience",
        ),
        *_CLIENT,
    ),
    "Kafka security": _SECURITY,
    "Monitoring": ("http",),
    "Names of JSON fields": _BRIDGE_FIELDS,
}
"""The grouping of `bridge`."""

PROPOSE_GROUPS: OptionGroups = {
    "Candidate": ("model", "log", "feedback", "out", "change", "since", "until", "alpha", "review", "seed"),
    "Approval": ("approve", "roll_back", "by"),
    "Incidents": (*_INCIDENT_RULE, "max_ahead"),
    "Kafka": ("topic", "bootstrap_servers", "evidence_topic", "feedback_topic", *_CLIENT),
    "Kafka security": _SECURITY,
    "Message format": _REGISTRY,
}
"""The grouping of `propose`."""


def arrange_by_heading(names: list[str], groups: OptionGroups) -> dict[str, list[str]]:
    """Return the names of fields by heading, in the order in which the help lists them.

    Args:
        names: Names of the fields of a command.
        groups: The grouping of the command.
    """
    names_by_heading = {heading: [field for field in fields if field in names] for heading, fields in groups.items()}
    grouped = {field for fields in groups.values() for field in fields}
    names_by_heading[OTHER_HEADING] = [name for name in names if name not in grouped]
    return {heading: fields for heading, fields in names_by_heading.items() if fields}
