"""Shared parts of the benchmark programs: common options, one-line errors, and storage of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from deformer_stream.errors import DeformerError

RESULTS = Path(__file__).parent / "results"


def build_parser(doc: str | None, tables: str = "all by default", **defaults: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options that most benchmarks have.

    Args:
        doc: The benchmark's module docstring, which is printed by --help.
        tables: Describes the default of --tables; without this option if empty.
        defaults: Defaults of further options, `seeds` for --seeds and `max_time` for --max-time. An option is only
            added if its default is given.
    """
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tables:
        options.add_argument("--tables", default="", help=f"comma-separated names of tables; {tables}")
    if seeds := defaults.get("seeds"):
        help_text = f"comma-separated seeds of splits, training and orders; {seeds} by default"
        options.add_argument("--seeds", default=seeds, help=help_text)
    if max_time := defaults.get("max_time"):
        help_text = f"largest duration of each training run; {max_time} by default"
        options.add_argument("--max-time", default=max_time, help=help_text)
    return options


def add_again_option(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --again to a parser, for benchmarks that keep their measurements in a `ResultStore`."""
    options.add_argument("--again", action="store_true", help="repeat measurements that an earlier run has stored")
    return options


def run_benchmark(name: str, run: Callable[[argparse.Namespace], None], options: argparse.ArgumentParser) -> None:
    """Parse the command line and run a benchmark; print a one-line error and exit if it fails.

    Args:
        name: Name of the benchmark's module, for error messages.
        run: Runs the benchmark with the parsed options.
        options: The parser of the command line.
    """
    try:
        run(options.parse_args())
    except DeformerError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def describe_machine() -> str:
    """Return the processor, the number of cores and threads, and the version of PyTorch, as text."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    version, threads = torch.__version__.split("+")[0], torch.get_num_threads()
    return f"{os.cpu_count()} cores, {processor}, torch {version}, {threads} threads"


def read_child_cpu_seconds() -> float:
    """Return the processor seconds of all child processes of this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def format_today() -> str:
    """Return the date of today as YYYY-MM-DD."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def publish_results(
    name: str, text: str, lines: Iterable[Mapping[str, Any]] | None = None, folder: Path | None = None
) -> None:
    """Print a report and store it in a folder.

    Args:
        name: Name of the files without suffix.
        text: The report, stored as NAME.md.
        lines: The measurements, stored as NAME.jsonl with one line each; not stored if None.
        folder: The folder, which is created if it does not exist; None for the results folder.
    """
    print("\n" + text)
    folder = RESULTS if folder is None else folder
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{name}.md").write_text(text)
    if lines is not None:
        _write_json_lines(folder / f"{name}.jsonl", lines)


class ResultStore:
    """Measurements in a file with one JSON object per line, so that an interrupted run can continue.

    Attributes:
        lines: The measurements that were made with this setting.
    """

    def __init__(self, name: str, setting: Mapping[str, Any], again: bool = False, folder: Path | None = None) -> None:
        """Open the store.

        Args:
            name: Name of the file without suffix.
            setting: Keys that are added to every measurement. Stored measurements with another setting are dropped.
            again: Drop the stored measurements with this setting, too.
            folder: The folder, which is created if it does not exist; None for the results folder.
        """
        folder = RESULTS if folder is None else folder
        folder.mkdir(exist_ok=True, parents=True)
        self._path, self._setting = folder / f"{name}.jsonl", setting
        stored = self._path.read_text().splitlines() if self._path.exists() and not again else []
        self.lines: list[dict[str, Any]] = [line for line in map(json.loads, stored) if _contains(line, setting)]
        if num_others := len(stored) - len(self.lines):
            print(
                f"{self._path}: {num_others} measurements were not made with {dict(setting)}. They are deleted when "
                "the first new one is stored; interrupt the program to keep them.",
                file=sys.stderr,
            )

    def find(self, **keys: Any) -> dict[str, Any] | None:
        """Return the measurement with these keys and values, None if it has not been made."""
        return next((line for line in self.lines if _contains(line, keys)), None)

    def add(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Store a measurement and return it with the keys of the setting."""
        self.lines.append({**line, **self._setting})
        _write_json_lines(self._path, self.lines)
        return self.lines[-1]


def _contains(line: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether a measurement has these keys and values."""
    return all(line.get(key) == value for key, value in expected.items())


def _write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
