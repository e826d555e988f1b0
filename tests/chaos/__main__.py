"""Command line of the chaos test: `python -m tests.chaos`.

The last line of the output has the figures as JSON. The exit code is 0 if nothing was lost or duplicated, and all
planned disturbances have happened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from deformer_stream.runtime.process import limit_thread_spinning
from tests.chaos.run import SIZES, run_chaos
from tests.conftest import CLIENT_LIBRARIES


def main() -> int:
    """Run the chaos test and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Disturb consumers and compare their alerts with those of an undisturbed one.",
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="size of the run")
    parser.add_argument(
        "--delivery",
        choices=["exactly-once", "at-least-once", "both"],
        default="both",
        help="delivery of the consumers",
    )
    parser.add_argument(
        "--client", choices=CLIENT_LIBRARIES, default=CLIENT_LIBRARIES[0], help="client library of the consumers"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the random numbers")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the consumers")
    args = parser.parse_args()
    os.environ["DEFORMER_TEST_CLIENT"] = args.client
    limit_thread_spinning()
    modes = ["exactly-once", "at-least-once"] if args.delivery == "both" else [args.delivery]
    logs = args.logs or Path(tempfile.mkdtemp(prefix="deformer-chaos-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(
        f"chaos: size {args.size}, client {args.client}, seed {args.seed}, logs in {logs}", file=sys.stderr, flush=True
    )
    figures = run_chaos(SIZES[args.size], modes, args.seed, logs)
    print(json.dumps({"client": args.client, **figures}))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
