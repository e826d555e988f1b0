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


def again(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """With --again, for benchmarks that keep what they have measured (`Kept`)."""
    options.add_argument("--again", action="store_true", help="measure anew what an earlier run has measured")
    return options


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
        _write(RESULTS / f"{name}.jsonl", lines)


class Kept:
    """What was measured, line by line in NAME.jsonl, so that a run that was cut off goes on where it was.

    setting: part of every line; lines of another one are no longer kept. again: nor are those of this one."""

    def __init__(self, name: str, setting: Mapping[str, Any], again: bool = False) -> None:
        RESULTS.mkdir(exist_ok=True)
        self._path, self._setting = RESULTS / f"{name}.jsonl", setting
        there = self._path.read_text().splitlines() if self._path.exists() and not again else []
        self.lines: list[dict[str, Any]] = [line for line in map(json.loads, there) if _has(line, setting)]

    def find(self, **keys: Any) -> dict[str, Any] | None:
        """The line with these values, if it has been measured."""
        return next((line for line in self.lines if _has(line, keys)), None)

    def add(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a line, given without the setting; returns it whole."""
        self.lines.append({**line, **self._setting})
        _write(self._path, self.lines)
        return self.lines[-1]


def _has(line: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(line.get(key) == value for key, value in values.items())


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
