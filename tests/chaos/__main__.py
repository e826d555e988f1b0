"""`python -m tests.chaos`: the run, its figures on the last line; exit status 0 when nothing was lost or doubled."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from deformer_stream.runtime.process import limit_thread_spinning
from tests.chaos.run import SIZES, chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Consumers under fire.")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--delivery", choices=["exactly-once", "at-least-once", "both"], default="both")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--logs", type=Path, help="keep the consumers' logs in this folder")
    args = parser.parse_args()
    limit_thread_spinning()
    modes = ["exactly-once", "at-least-once"] if args.delivery == "both" else [args.delivery]
    logs = args.logs or Path(tempfile.mkdtemp(prefix="deformer-chaos-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"chaos: size {args.size}, seed {args.seed}, logs in {logs}", file=sys.stderr, flush=True)
    figures = chaos(SIZES[args.size], modes, args.seed, logs)
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
