"""`deformer-stream` that kills itself, by SIGKILL, when it reaches a numbered step of the road for the n-th time.

python -m tests.chaos.dying STEP N consume --topic …
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from kafka import KafkaConsumer, KafkaProducer

from connectors.kafka.sink import KafkaSink
from connectors.kafka.transactions import Transactions
from deformer_stream.cli import main
from deformer_stream.engine.engine import Engine
from deformer_stream.runtime.recovery import Recovery

STEPS: dict[str, tuple[type, str, bool]] = {
    "3-handled": (Engine, "handle", True),
    "4-writing": (KafkaSink, "write", False),
    "5.1-flushed": (KafkaSink, "flush", True),
    "5.2-saved": (Recovery, "collect_state", True),
    "5.3-begun": (Transactions, "add_partitions_and_group", True),
    "5.3-on-its-way": (Transactions, "send_offsets", False),
    "5.3-answered": (Transactions, "end", False),
    "5.3-transaction-ended": (Transactions, "end", True),
    "5.3-transmitted": (KafkaProducer, "flush", True),
    "5.3-offsets-committed": (KafkaConsumer, "commit", True),
    "5.3-kept": (Recovery, "mark_committed", False),
}
"""Step → the method that takes it, and whether death comes after it rather than before."""

TRANSACTIONS = {step for step, (kind, _, _) in STEPS.items() if kind is Transactions}
"""Steps that only a transaction has."""

NO_TRANSACTIONS = {"5.3-transmitted"}
"""Steps that are only taken without."""


def fatal(kind: type, name: str, after: bool, turn: int) -> None:
    """Let the n-th call of a method be the last thing that this process does."""
    original: Callable[..., Any] = getattr(kind, name)
    left = turn

    def replaced(self: object, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *args, **kwargs)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, name, replaced)


if __name__ == "__main__":
    step, turn, *rest = sys.argv[1:]
    fatal(*STEPS[step], int(turn))
    sys.argv = ["deformer-stream", *rest]
    main.main()
