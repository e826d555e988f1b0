"""A broker that wants to know who one is, in every way it can ask, and the words with which our commands answer."""

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

from tests.certificates import DAY, Authority
from tests.conftest import load_broker_script, start_broker
from tests.integration.programs import until

PASSWORD = "correct-horse-battery-staple"
WRONG = "incorrect-donkey-battery-clip"
PASSPHRASE = "the-key-lies-under-the-mat"
PREFIX = "safe-"
"""Of all topics, groups and transactions that the users may touch."""

RIGHTS = f"{PREFIX}rights"
"""A topic, and a group, that every user but one may use."""

DENIED = {
    "no-topic": (ResourceType.TOPIC, RIGHTS, ACLOperation.ALL),
    "no-reading": (ResourceType.TOPIC, RIGHTS, ACLOperation.READ),
    "no-writing": (ResourceType.TOPIC, RIGHTS, ACLOperation.WRITE),
    "no-alerts": (ResourceType.TOPIC, f"{RIGHTS}-alerts", ACLOperation.WRITE),
    "no-group": (ResourceType.GROUP, RIGHTS, ACLOperation.ALL),
    "no-transactions": (ResourceType.TRANSACTIONAL_ID, f"{RIGHTS}-here", ACLOperation.ALL),
}
"""User → the one right that he lacks; `plant` has them all, `nobody` none."""

Words = list[object]


class Fort:
    """The broker, which is stopped with the `with` block; files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours, foreign = Authority("our authority"), Authority("foreign authority")
        broker = ours.issue("broker", ("localhost", "127.0.0.1"))
        listener, users = load_broker_script().Listener, dict.fromkeys(("plant", "nobody", *DENIED), PASSWORD)
        self.broker = start_broker(
            listeners={
                "TLS": listener("SSL", {}, *broker),
                "MUTUAL": listener("SSL", {}, *broker, clients=ours.certificate),
                "LOGIN": listener("SASL_PLAINTEXT", users),
                "BOTH": listener("SASL_SSL", users, *broker),
                "EXPIRED": listener("SSL", {}, *ours.issue("broker", ("127.0.0.1",), ends=-DAY / 2)),
                "ELSEWHERE": listener("SSL", {}, *ours.issue("broker", ("elsewhere.example",))),
            }
        )
        self.authority = self.file("authority.pem", ours.certificate)
        self.foreign = self.file("foreign.pem", foreign.certificate)
        plant, stranger = ours.issue("plant"), foreign.issue("plant")
        self.certificate, self.key = plant.write(folder, "plant")
        self.stranger, self.strange_key = stranger.write(folder, "stranger")
        self.locked_key = plant.locked(PASSPHRASE).write(folder, "locked")[1]
        self.password = self.file("password", PASSWORD + "\n")
        self.wrong = self.file("wrong", WRONG)
        self.passphrase = self.file("passphrase", PASSPHRASE)

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def to(self, door: str) -> Words:
        """The words that lead to that listener, with our authority where it is needed."""
        protocol = {"LOGIN": "SASL_PLAINTEXT", "BOTH": "SASL_SSL"}.get(door, "SSL")
        trusted = ["--ssl-cafile", self.authority] if protocol.endswith("SSL") else []
        return ["--bootstrap-servers", self.broker.address_by_listener[door], "--security-protocol", protocol, *trusted]

    def user(self, name: str = "plant", mechanism: str = "PLAIN", password: Path | None = None) -> Words:
        """The words that log in."""
        words: Words = ["--sasl-mechanism", mechanism, "--sasl-username", name]
        return [*words, "--sasl-password-file", password or self.password]

    def grant(self) -> None:
        """Make the topic `RIGHTS`, everyone's rights, and then the user of SCRAM-SHA-512: whoever finds him in force
        finds the rest in force too."""
        scram = UserScramCredentialUpsertion("plant", ScramMechanism.SCRAM_SHA_512, PASSWORD)
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=self.broker.bootstrap)) as admin:
            admin.create_topics({RIGHTS: {"num_partitions": 1}, f"{RIGHTS}-alerts": {"num_partitions": 1}})
            made = admin.create_acls(list(self._rules()))
            assert made["failed"] == [], made
            assert admin.alter_user_scram_credentials([scram]) == {"plant": None}
            until(lambda: bool(admin.describe_user_scram_credentials()), "the user of SCRAM-SHA-512")

    def _rules(self) -> Iterator[ACL]:
        kinds = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
        for user in ("plant", "CN=plant", *DENIED):
            for kind in kinds:
                pattern = ResourcePattern(kind, PREFIX, ACLResourcePatternType.PREFIXED)
                yield ACL(f"User:{user}", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, pattern)
        for user, (kind, name, operation) in DENIED.items():
            yield ACL(f"User:{user}", "*", operation, ACLPermissionType.DENY, ResourcePattern(kind, name))
