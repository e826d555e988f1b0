"""A broker with TLS, logins and access control lists, and the options with which the commands connect to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from connectors.kafka.delivery import make_transactional_id
from tests.certificates import DAY, Authority
from tests.conftest import load_broker_script, start_broker
from tests.integration.programs import wait_until

PASSWORD = "correct-horse-battery-staple"
WRONG_PASSWORD = "incorrect-donkey-battery-clip"
PASSPHRASE = "the-key-lies-under-the-mat"
PREFIX = "safe-"
"""The prefix of all topics, groups and transactional ids that the users may use."""

SHARED_NAME = f"{PREFIX}rights"
"""The name of a topic and of a group that every user may use except for one."""

DENIED_BY_USER = {
    "no-topic": (ResourceType.TOPIC, SHARED_NAME, ACLOperation.ALL),
    "no-reading": (ResourceType.TOPIC, SHARED_NAME, ACLOperation.READ),
    "no-writing": (ResourceType.TOPIC, SHARED_NAME, ACLOperation.WRITE),
    "no-alerts": (ResourceType.TOPIC, f"{SHARED_NAME}-alerts", ACLOperation.WRITE),
    "no-group": (ResourceType.GROUP, SHARED_NAME, ACLOperation.ALL),
    "no-transactions": (
        ResourceType.TRANSACTIONAL_ID,
        make_transactional_id(SHARED_NAME, SHARED_NAME, "here"),
        ACLOperation.ALL,
    ),
}
"""The one permission that a user lacks. The user `plant` has all permissions, and `nobody` has none."""

Arguments = list[object]
"""Arguments of a command."""


class SecuredBroker:
    """A broker with a listener for each kind of encryption and login.

    Use its attribute `broker` as a context manager to stop it.

    Args:
        folder: The folder for certificates, keys and passwords.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority, foreign = Authority("trusted authority"), Authority("foreign authority")
        broker = authority.issue("broker", ("localhost", "127.0.0.1"))
        listener, users = load_broker_script().Listener, dict.fromkeys(("plant", "nobody", *DENIED_BY_USER), PASSWORD)
        self.broker = start_broker(
            listeners={
                "TLS": listener("SSL", {}, *broker),
                "MUTUAL": listener("SSL", {}, *broker, clients=authority.certificate),
                "LOGIN": listener("SASL_PLAINTEXT", users),
                "TOKEN": listener("SASL_PLAINTEXT", has_tokens=True),
                "BOTH": listener("SASL_SSL", users, *broker),
                "EXPIRED": listener("SSL", {}, *authority.issue("broker", ("127.0.0.1",), valid_for=-DAY / 2)),
                "ELSEWHERE": listener("SSL", {}, *authority.issue("broker", ("elsewhere.example",))),
            }
        )
        self.authority = self.write_file("authority.pem", authority.certificate)
        self.foreign = self.write_file("foreign.pem", foreign.certificate)
        plant, stranger = authority.issue("plant"), foreign.issue("plant")
        self.certificate, self.key = plant.write(folder, "plant")
        self.stranger, self.strange_key = stranger.write(folder, "stranger")
        self.locked_key = plant.encrypt_key(PASSPHRASE).write(folder, "locked")[1]
        self.password = self.write_file("password", PASSWORD + "\n")
        self.wrong = self.write_file("wrong", WRONG_PASSWORD)
        self.passphrase = self.write_file("passphrase", PASSPHRASE)

    def write_file(self, name: str, text: str) -> Path:
        """Write a text to a file in the folder and return its path."""
        path = self.folder / name
        path.write_text(text)
        return path

    def address_options(self, listener: str) -> Arguments:
        """Return the options that select a listener, with the certificate of the authority if it uses TLS."""
        protocol = {"LOGIN": "SASL_PLAINTEXT", "BOTH": "SASL_SSL"}.get(listener, "SSL")
        trusted = ["--ssl-cafile", self.authority] if protocol.endswith("SSL") else []
        return [
            "--bootstrap-servers",
            self.broker.address_by_listener[listener],
            "--security-protocol",
            protocol,
            *trusted,
        ]

    def login_options(self, name: str = "plant", mechanism: str = "PLAIN", password: Path | None = None) -> Arguments:
        """Return the options that log in."""
        words: Arguments = ["--sasl-mechanism", mechanism, "--sasl-username", name]
        return [*words, "--sasl-password-file", password or self.password]

    def grant_permissions(self) -> None:
        """Create the shared topics, the permissions of all users, and then the user of SCRAM-SHA-512.

        That user is created last, so the permissions are in force when the user exists.
        """
        scram = UserScramCredentialUpsertion("plant", ScramMechanism.SCRAM_SHA_512, PASSWORD)
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=self.broker.bootstrap)) as admin:
            admin.create_topics({SHARED_NAME: {"num_partitions": 1}, f"{SHARED_NAME}-alerts": {"num_partitions": 1}})
            made = admin.create_acls(list(self._rules()))
            assert made["failed"] == [], made
            assert admin.alter_user_scram_credentials([scram]) == {"plant": None}
            wait_until(lambda: bool(admin.describe_user_scram_credentials()), "the user of SCRAM-SHA-512")

    def _rules(self) -> Iterator[ACL]:
        """Yield the rules of the access control lists."""
        resource_types = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
        for user in ("plant", "CN=plant", *DENIED_BY_USER):
            for resource_type in resource_types:
                pattern = ResourcePattern(resource_type, PREFIX, ACLResourcePatternType.PREFIXED)
                yield ACL(f"User:{user}", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, pattern)
        for user, (kind, name, operation) in DENIED_BY_USER.items():
            yield ACL(f"User:{user}", "*", operation, ACLPermissionType.DENY, ResourcePattern(kind, name))
