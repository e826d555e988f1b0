"""A load test with hostile messages: every reading must be accepted, declared as absent, or rejected.

    python -m tests.fuzz.million --messages 1000000             codec and engine in this process
    python -m tests.fuzz.million --messages 1000000 --kafka     and again through a Kafka broker and `consume`

Of three messages one is valid, one is almost valid, one is noise. Some are repeated, and readings come in any order.
Both runs must give the same account, and each rejected message must be in the dead-letter topic with its reason.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from connectors.kafka import KafkaCluster, produce
from deformer_stream import model_store
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import RejectionReason
from tests.fuzz import hostile
from tests.fuzz.invariants import SECOND, HandledPoll, handle_checked
from tests.models import SCHEMA, write_model

OTHER_REASONS = frozenset(
    {
        *(RejectionReason.REPEATED, RejectionReason.MALFORMED_ROW),
        *(RejectionReason.UNKNOWN_SCHEMA, RejectionReason.UNKNOWN_MODEL),
        *(RejectionReason.UNKNOWN_TOPIC, RejectionReason.NOT_SPARKPLUG, RejectionReason.UNKNOWN_ALIAS),
    }
)
"""Reasons that JSON messages for one model without windows never have.

Readings are repeated in the time slots of windows only (tests/integration/test_slots.py), rows are malformed in tables
(tests/connectors/test_table_events.py), messages of a schema registry have an unknown schema
(tests/integration/test_registry_formats.py), a process with several models has an unknown model
(tests/integration/test_many_models.py), and the last three occur in MQTT messages (tests/integration/test_mqtt.py).
"""

POLL = 8192
OPTIONS = [
    "--window",
    "10s",
    "--grace",
    "1s",
    "--max-ahead",
    "1h",
    "--record-timeout",
    "1d",
    "--max-poll-records",
    POLL,
]
"""Options of `consume`; `run_in_process` uses the same settings."""
HOURS = 3600.0


@dataclass
class Account:
    """What happened to the messages of a run.

    Attributes:
        accepted: Number of scored readings.
        absent: Number of declarations that a feature will not be observed, which `consume` does not count.
        rejected: Number of rejected readings by reason.
        letters: Offset and reason of each dead letter.
    """

    messages: int = 0
    accepted: int = 0
    absent: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    letters: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0

    def format(self) -> str:
        """Return the account as a line of text."""
        rate = self.messages / max(self.seconds, 1e-9)
        rejected = ", ".join(f"{n} {reason}" for reason, n in self.rejected.most_common())
        absent = f"{self.absent} declared absent, " if self.absent else ""
        return (
            f"{self.messages} messages in {self.seconds:.1f} s ({rate:.0f}/s): {self.accepted} readings accepted, "
            f"{absent}{self.rejected.total()} rejected ({rejected}) in {len(self.letters)} letters"
        )


def draw_polls(n: int, seed: int) -> Iterator[Messages]:
    """Yield polls with n messages of one partition in all. Equal seeds give equal messages."""
    r = random.Random(seed)  # noqa: S311
    recent: deque[tuple[bytes | None, bytes | None]] = deque(maxlen=1000)
    for first in range(0, n, POLL):
        pairs = []
        for _ in range(min(POLL, n - first)):
            again = recent and r.random() < 0.02
            pair = r.choice(recent) if again else (hostile.draw_key(r), hostile.draw_payload(r))
            pairs.append((pair[0] or b"", None) if pair[1] is None else pair)  # the client sends no message of nothing
            recent.append(pairs[-1])
        offsets = np.arange(first, first + len(pairs), dtype=np.int64)
        stamps = (hostile.NOW // 1000 + offsets // 100) * 1000  # whole milliseconds, as Kafka has them
        keys, payloads = (list(column) for column in zip(*pairs, strict=True))
        yield Messages("hostile", keys, payloads, stamps, np.zeros(len(pairs), np.int32), offsets)


def run_in_process(model: Path, batches: Iterable[Messages]) -> Account:
    """Return the account of a run of codec and engine, and assert the invariants of every poll."""
    loaded = model_store.read(model)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.01, effort="fast")
    codec = Codec(SCHEMA, window_assigner=WindowAssigner(10 * SECOND, SECOND), max_ahead_micros=3600 * SECOND)
    account = Account()
    for data in batches:
        started = time.perf_counter()
        handled = handle_checked(engine, codec, data, hostile.NOW)
        account.seconds += time.perf_counter() - started
        add_poll(account, data, handled)
    return account


def add_poll(account: Account, data: Messages, handled: HandledPoll) -> None:
    """Add a poll to the account, and assert that all of its readings are accounted for."""
    assert (
        handled.accepted + handled.absent + sum(rejection.num_readings for rejection in handled.rejected)
        == handled.readings
    )
    account.messages += len(data)
    account.accepted += handled.accepted
    account.absent += handled.absent
    for rejection in handled.rejected:
        account.rejected[rejection.reason.value] += rejection.num_readings
        account.letters.append((int(data.offsets[rejection.message_index]), rejection.reason.value))


def run_through_kafka(bootstrap: str, model: Path, batches: Iterable[Messages], name: str) -> Account:
    """Return the account of a run through an existing topic with one partition and `consume` in a child process."""
    from tests.integration.programs import Cluster, RunningConsumer

    rows = (
        (key, payload, int(stamp) // 1000)
        for data in batches
        for key, payload, stamp in zip(data.keys, data.payloads, data.times.tolist(), strict=True)
    )
    account = Account(messages=produce(KafkaCluster(bootstrap), name, rows, partitions=1))
    cluster = Cluster(bootstrap)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--topic", name, "--group", name, "--bootstrap-servers", bootstrap, "--model", model, *OPTIONS]
        with RunningConsumer(Path(folder) / "consume.log", *options) as consumer:
            consumer.wait_until_ready()
            started = time.perf_counter()
            consumer.wait_for(cluster.is_consumed(name, name), "all messages consumed", HOURS)
            account.seconds = time.perf_counter() - started
            totals = consumer.stop()
    account.accepted, account.rejected = totals["events"], Counter(totals["rejected"])
    for letter in cluster.read_topic(f"{name}-dead-letter"):
        headers = {key: value.decode() for key, value in letter.headers}
        account.letters.append((int(headers["offset"]), headers["reason"]))
    cluster.close()
    return account


def assert_equal_accounts(one: Account, other: Account) -> None:
    """Assert that both runs give the same account."""
    assert one.messages == other.messages
    assert one.accepted == other.accepted, (one.accepted, other.accepted)
    assert one.rejected == other.rejected, (one.rejected, other.rejected)
    ours, theirs = Counter(one.letters), Counter(other.letters)
    assert ours == theirs, (list((ours - theirs).items())[:5], list((theirs - ours).items())[:5])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.million", description="Hostile messages at full rate.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kafka", action="store_true", help="once more through a real Kafka and `consume`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        account = run_in_process(model, draw_polls(args.messages, args.seed))
        print(f"in process: {account.format()}", flush=True)
        if args.kafka:
            from connectors.kafka import ensure_topics
            from tests.conftest import start_broker

            with start_broker() as broker:
                forever = {"num_partitions": 1, "configs": {"retention.ms": "-1"}}
                ensure_topics(KafkaCluster(broker.bootstrap), {"hostile": forever})
                again = run_through_kafka(broker.bootstrap, model, draw_polls(args.messages, args.seed), "hostile")
            print(f"through Kafka: {again.format()}", flush=True)
            assert_equal_accounts(account, again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
