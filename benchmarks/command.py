"""What the benchmarks' commands have in common: their usual options, errors in one line, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from deformer_stream.errors import DeformerError

RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None, tables: str = "all by default", **defaults: str) -> argparse.ArgumentParser:
    """With --tables, and with --seeds and --max-time where their defaults are given. tables: which without the option;
    "" for no such option."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tables:
        made.add_argument("--tables", default="", help=f"names with commas between; {tables}")
    if seeds := defaults.get("seeds"):
        made.add_argument("--seeds", default=seeds, help=f"of splits, training and orders; {seeds} by default")
    if time := defaults.get("max_time"):
        made.add_argument("--max-time", default=time, help=f"for each training run; {time} by default")
    return made


def launch(name: str, run: Callable[[argparse.Namespace], None], options: argparse.ArgumentParser) -> None:
    """Run the benchmark of this name with the options of the command line."""
    try:
        run(options.parse_args())
    except DeformerError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def machine() -> str:
    """What is measured on, in words."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return (
        f"{os.cpu_count()} cores, {model}, torch {torch.__version__.split('+')[0]}, {torch.get_num_threads()} threads"
    )


def today() -> str:
    """The date of a result."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def publish(name: str, text: str, lines: Iterable[Mapping[str, Any]] | None = None) -> None:
    """Print a result and keep it: the text as NAME.md and, where there are some, the lines as NAME.jsonl."""
    print("\n" + text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    if lines is not None:
        keep(RESULTS / f"{name}.jsonl", lines)


def keep(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines of JSON in place of what the file had."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
