"""Hostile messages at full rate, and the books: every reading is accepted, declared as never coming, or refused.

    python -m tests.fuzz.million --messages 1000000             codec and engine in this process
    python -m tests.fuzz.million --messages 1000000 --kafka     and once more through a real Kafka and `consume`

Of three messages one is valid, one is or was nearly so, one is noise; some come twice, and readings in any order. Both
roads must keep the same books, and each refused message must be in the dead-letter topic, with its reason.
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

from connectors.kafka import produce
from deformer_stream import model_store
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.engine import Engine
from tests.fuzz import hostile
from tests.fuzz.laws import SECOND, Handled, engine_holds
from tests.models import SCHEMA, write_model

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
"""Of `consume`; `in_process` does the same."""
HOURS = 3600.0


@dataclass
class Books:
    """accepted, absent: readings that were scored, and that were declared as never coming, which `consume` does not
    count. refused: by reason. letters: (offset, reason) of what goes to the dead-letter topic."""

    messages: int = 0
    accepted: int = 0
    absent: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    letters: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0

    def shown(self) -> str:
        rate = self.messages / max(self.seconds, 1e-9)
        refused = ", ".join(f"{n} {reason}" for reason, n in self.refused.most_common())
        absent = f"{self.absent} declared absent, " if self.absent else ""
        return (
            f"{self.messages} messages in {self.seconds:.1f} s ({rate:.0f}/s): {self.accepted} readings accepted, "
            f"{absent}{self.refused.total()} refused ({refused}) in {len(self.letters)} letters"
        )


def polls(n: int, seed: int) -> Iterator[Messages]:
    """n messages of one partition as polls. Equal seeds give equal messages."""
    r = random.Random(seed)  # noqa: S311
    recent: deque[tuple[bytes | None, bytes | None]] = deque(maxlen=1000)
    for first in range(0, n, POLL):
        pairs = []
        for _ in range(min(POLL, n - first)):
            again = recent and r.random() < 0.02
            pair = r.choice(recent) if again else (hostile.key(r), hostile.payload(r))
            pairs.append((pair[0] or b"", None) if pair[1] is None else pair)  # the client sends no message of nothing
            recent.append(pairs[-1])
        offsets = np.arange(first, first + len(pairs), dtype=np.int64)
        stamps = (hostile.NOW // 1000 + offsets // 100) * 1000  # whole milliseconds, as Kafka has them
        keys, payloads = (list(column) for column in zip(*pairs, strict=True))
        yield Messages("hostile", keys, payloads, stamps, np.zeros(len(pairs), np.int32), offsets)


def in_process(model: Path, batches: Iterable[Messages]) -> Books:
    """Codec and engine, poll by poll. Raises AssertionError where a law does not hold."""
    loaded = model_store.read(model)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.01)
    codec = Codec(SCHEMA, window_assigner=WindowAssigner(10 * SECOND, SECOND), max_ahead_micros=3600 * SECOND)
    books = Books()
    for data in batches:
        started = time.perf_counter()
        kept = engine_holds(engine, codec, data, hostile.NOW)
        books.seconds += time.perf_counter() - started
        enter(books, data, kept)
    return books


def enter(books: Books, data: Messages, kept: Handled) -> None:
    """Add a poll. Raises AssertionError where readings are missing."""
    assert kept.accepted + kept.absent + sum(refusal.num_readings for refusal in kept.refused) == kept.readings
    books.messages += len(data)
    books.accepted += kept.accepted
    books.absent += kept.absent
    for refusal in kept.refused:
        books.refused[refusal.reason.value] += refusal.num_readings
        books.letters.append((int(data.offsets[refusal.message_index]), refusal.reason.value))


def through_kafka(bootstrap: str, model: Path, batches: Iterable[Messages], name: str) -> Books:
    """The same through a topic of one partition, which must be there, and `consume` as a process of its own."""
    from tests.integration.programs import Cluster, Consume

    rows = (
        (key, payload, int(stamp) // 1000)
        for data in batches
        for key, payload, stamp in zip(data.keys, data.payloads, data.times.tolist(), strict=True)
    )
    books = Books(messages=produce(bootstrap, name, rows, partitions=1))
    cluster = Cluster(bootstrap)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--topic", name, "--group", name, "--bootstrap-servers", bootstrap, "--model", model, *OPTIONS]
        with Consume(Path(folder) / "consume.log", *options) as consumer:
            consumer.wait_until_ready()
            started = time.perf_counter()
            consumer.wait_for(cluster.all_consumed(name, name), "all messages consumed", HOURS)
            books.seconds = time.perf_counter() - started
            totals = consumer.stop()
    books.accepted, books.refused = totals["events"], Counter(totals["rejected"])
    for letter in cluster.read(f"{name}-dead-letter"):
        headers = {key: value.decode() for key, value in letter.headers}
        books.letters.append((int(headers["offset"]), headers["reason"]))
    cluster.close()
    return books


def agree(one: Books, other: Books) -> None:
    """Both roads kept the same books. Raises AssertionError."""
    assert one.messages == other.messages
    assert one.accepted == other.accepted, (one.accepted, other.accepted)
    assert one.refused == other.refused, (one.refused, other.refused)
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
        books = in_process(model, polls(args.messages, args.seed))
        print(f"in process: {books.shown()}", flush=True)
        if args.kafka:
            from connectors.kafka import ensure_topics
            from tests.conftest import start_broker

            with start_broker() as broker:
                forever = {"num_partitions": 1, "configs": {"retention.ms": "-1"}}
                ensure_topics(broker.bootstrap, {"hostile": forever})
                again = through_kafka(broker.bootstrap, model, polls(args.messages, args.seed), "hostile")
            print(f"through Kafka: {again.shown()}", flush=True)
            agree(books, again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
