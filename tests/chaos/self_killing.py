"""Run `deformer-stream` in a process that kills itself with SIGKILL at the n-th call of a certain step.

    python -m tests.chaos.self_killing STEP N consume --topic …

The names of the steps begin with the number of the stage of the pipeline.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from connectors.kafka.sink import KafkaSink
from deformer_stream.cli import main
from deformer_stream.engine.engine import Engine
from deformer_stream.runtime.incident_pipeline import IncidentPipeline
from deformer_stream.runtime.recovery import Recovery

if os.environ.get("DEFORMER_CLIENT") == "librdkafka":
    from connectors.kafka.librdkafka_client import LibrdkafkaConsumer as Consumer
    from connectors.kafka.librdkafka_client import LibrdkafkaProducer as Producer
else:
    from connectors.kafka.kafka_python_client import KafkaPythonConsumer as Consumer  # type: ignore[assignment]
    from connectors.kafka.kafka_python_client import KafkaPythonProducer as Producer  # type: ignore[assignment]

STEPS: dict[str, tuple[type, str, bool]] = {
    "3-handled": (Engine, "handle", True),
    "4-writing": (KafkaSink, "write", False),
    "5.1-flushed": (KafkaSink, "flush", True),
    "5.2-saved": (Recovery, "collect_state", True),
    "5.3-begun": (Producer, "begin_transaction", True),
    "5.3-sending-offsets": (Producer, "send_offsets", False),
    "5.3-answered": (Producer, "commit_transaction", False),
    "5.3-transaction-ended": (Producer, "commit_transaction", True),
    "5.3-transmitted": (Producer, "send", True),
    "5.3-offsets-committed": (Consumer, "commit", True),
    "5.3-recorded": (Recovery, "mark_committed", False),
}
"""By name of the step, the class and the method that execute it, and whether the process dies after the call instead
of before it.
"""

INCIDENT_STEPS: dict[str, tuple[type, str, bool]] = {
    "handled": (IncidentPipeline, "_handle", True),
    "saved": (IncidentPipeline, "_collect_states", True),
    "recorded": (IncidentPipeline, "_mark_saved", False),
}
"""The same for `deformer-stream incidents`, which has the steps of transactions, too."""

TRANSACTIONS = {"5.3-begun", "5.3-sending-offsets", "5.3-answered", "5.3-transaction-ended"}
"""Steps that exist only with transactions."""

NO_TRANSACTIONS = {"5.3-transmitted", "5.3-offsets-committed"}
"""Steps that exist only without transactions. With them, only a commit that has nothing to send commits its offsets
alone, which does not happen while records are open.
"""


def make_fatal(kind: type, name: str, is_after: bool, num_calls: int) -> None:
    """Replace a method so that one of its calls ends the process with SIGKILL.

    Args:
        kind: The class.
        name: The method.
        is_after: Whether the process ends after the call instead of before it.
        num_calls: The number of the call that ends the process, from 1.
    """
    original: Callable[..., Any] = getattr(kind, name)
    calls_left = num_calls

    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0 and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *args, **kwargs)
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, name, call)


if __name__ == "__main__":
    step, num_calls, *rest = sys.argv[1:]
    make_fatal(*(STEPS | INCIDENT_STEPS)[step], int(num_calls))
    sys.argv = ["deformer-stream", *rest]
    main.main()
