"""The contenders of the benchmarks with irregular readings, and the options that choose them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS
from benchmarks.gru_d import GruD
from benchmarks.irregular_alerts import Case, Contender, measure_contender
from benchmarks.irregular_cusums import CusumContender
from benchmarks.irregular_deformer import CommandDeformer
from benchmarks.irregular_peers import CarriedForward, IntervalMixture, LastValue, MarginalMixtures
from deformer_stream.errors import InputError


def add_contender_options(options: argparse.ArgumentParser, peer_time: float) -> argparse.ArgumentParser:
    """Add the options that choose the contenders.

    Args:
        options: The parser.
        peer_time: Default of --peer-time in seconds.
    """
    help_text = f"seconds of GRU-D's training, 0 to leave it out; {peer_time:g} by default"
    options.add_argument("--peer-time", type=float, default=peer_time, help=help_text)
    options.add_argument("--deformer", action="store_true", help="train and measure the deformer, too")
    peers_help = "measure the peers, or take their stored figures of the same splits; measured by default"
    options.add_argument("--peers", choices=["measured", "stored"], default="measured", help=peers_help)
    models_help = "folder in which the deformer's model and tables are stored; not stored by default"
    options.add_argument("--models", type=Path, help=models_help)
    return options


def make_contenders(arguments: argparse.Namespace, seed: int, interval: float) -> list[Contender]:
    """Return the contenders, the deformer first if it was requested.

    Args:
        arguments: The parsed options.
        seed: Seed of all contenders.
        interval: Usual time between readings of a sensor in seconds: the width of the Gaussian mixture's intervals and
            the unit of time of GRU-D.
    """
    contenders: list[Contender] = []
    if arguments.deformer:
        contenders.append(CommandDeformer(arguments.max_time, seed, arguments.models))
    if arguments.peers == "stored":
        return contenders
    if arguments.peer_time > 0:
        contenders.append(GruD(seed, arguments.peer_time, interval))
    contenders += [
        IntervalMixture(interval, seed),
        LastValue(seed),
        MarginalMixtures(seed),
        CarriedForward("forest", seed),
        CarriedForward("neighbours", seed),
    ]
    return contenders


def describe_times(arguments: argparse.Namespace, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return sentences with the durations of the training runs, and with the deformer's steps.

    Args:
        arguments: The parsed options.
        lines: The JSON lines of all contenders.
    """
    deformer = f", the deformer for at most {arguments.max_time}" if arguments.deformer else ""
    trainings = [line["training"] for line in lines if line.get("training")]
    peers = " The figures of the peers are from an earlier run." if arguments.peers == "stored" else ""
    text = f"GRU-D trains for {arguments.peer_time:g} s{deformer}.{peers}"
    if trainings:
        steps = ", ".join(f"{training['steps']} steps of preset {training['preset']}" for training in trainings)
        loads = ", ".join(f"{training['load']:g}" for training in trainings)
        text += f" The deformer did {steps}, at a load average of {loads}."
    return text


def measure_cases(
    arguments: argparse.Namespace,
    benchmark: str,
    key: str,
    numbers: Sequence[int],
    make_case: Callable[[int], Case],
    interval: float,
) -> tuple[list[dict[str, Any]], Case]:
    """Measure all contenders on several cases, such as a case for each seed.

    Args:
        arguments: The parsed options.
        benchmark: Name of the benchmark.
        key: What distinguishes the cases, such as "seed".
        numbers: The number of each case, at least one.
        make_case: Returns the case with a number, which is also the seed of the contenders.
        interval: Usual time between readings of a sensor in seconds, as in `make_contenders`.

    Returns:
        The JSON lines of all contenders and cases, and the last case.
    """
    lines: list[dict[str, Any]] = []
    for number in numbers:
        case = make_case(number)
        description = {"benchmark": benchmark, key: number}
        lines += measure_contenders(make_contenders(arguments, number, interval), case, description)
        if arguments.peers == "stored":
            lines += read_stored_peers(RESULTS / f"{benchmark}.jsonl", description)
    return lines, case


def read_stored_peers(path: Path, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stored JSON lines of the peers of a case.

    Args:
        path: File with a JSON line for each contender and case.
        description: What the lines of the case begin with.

    Raises:
        InputError: There are none.
    """
    stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = [line for line in stored if description.items() <= line.items() and line["contender"] != "deformer"]
    if not lines:
        case = ", ".join(f"{name} {value}" for name, value in description.items())
        raise InputError(f"{path} has no peers of {case}: measure them with --peers measured")
    return lines


def measure_contenders(
    contenders: Sequence[Contender], case: Case, description: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Measure contenders one after the other; print and return a JSON line for each that begins with a description.

    A line contains the load average after the measurement, and for the deformer what it states about its training. A
    contender with p-values is measured a second time, with cumulative sums (`irregular_cusums`).
    """
    lines = []
    for contender in contenders:
        lines.append({**description, **measure_contender(contender, case), "load": round(os.getloadavg()[0], 1)})
        if isinstance(contender, CommandDeformer):
            lines[-1]["training"] = contender.training
        print(json.dumps(lines[-1]), flush=True)
        if contender.score(case.calibration.select([0])).log_p_values is not None:
            lines.append({**description, **measure_contender(CusumContender(contender, case.train), case)})
            print(json.dumps(lines[-1]), flush=True)
    return lines
