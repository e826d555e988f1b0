"""What it is worth to hold ties: readings that come in blocks of one time, judged together or as they happen to come.

    python -m benchmarks.ties --tables cardio,pendigits --seeds 0 --max-time 30s --models /tmp/models

Splits, training and tables are those of `benchmarks.early`. Each record's features come in a random order of its own, a
few at a time, those of one time in a random order. Everything goes through the engine, calibration too; both laws see
the same events, and a second time those of each block shuffled. Stated are false alarms, detections by share of the
features, the AUROC of the largest statistic, how many of the records that alerted do so in one of both shuffles only,
and the time of an event.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import launch, machine, parser, publish, today
from benchmarks.early import ALPHA, SHARES, Case, judge, prepare, worth
from benchmarks.tables import find_tables, need_peers, seeds_of
from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import EventBatch
from deformer_stream.model.deformer import DEformer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LAWS: tuple[TiePolicy, ...] = get_args(TiePolicy)
CHUNK = 8192


def statistics(model: DEformer, ties: TiePolicy, values: Floats, codes: Ints, block: int) -> tuple[Floats, float]:
    """(N, L) running statistics of records (N, F), in the model's units, whose features come in the order of codes
    (N, L), `block` at a time; and the seconds of an event."""
    n, length = codes.shape
    engine = Engine(model, Calibration(np.empty(0), "arrival", tie_policy=ties), "", (), effort="off")
    order = np.argsort(np.tile(np.arange(length) // block, n), kind="stable")  # time by time, all records in between
    record, code = np.repeat(np.arange(n), length)[order], codes.ravel()[order]
    raw = model.schema.denormalise(code, np.take_along_axis(values, codes, 1).ravel()[order])
    times = np.tile(np.arange(length) // block, n)[order]
    out, seconds = np.empty(codes.shape), 0.0
    for start in range(0, len(record) + 1, CHUNK):
        rows = slice(start, start + CHUNK)
        ids, none = [str(r) for r in record[rows].tolist()], np.zeros(len(record[rows]), np.int32)
        batch = EventBatch(ids, code[rows].astype(np.int32), raw[rows], times[rows], none, none)
        began = time.perf_counter()
        effects = engine.handle(batch, 0)
        seconds += time.perf_counter() - began
        owner = [int(effects.batch.record_ids[event]) for event in effects.scored.event_indices.tolist()]
        out[owner, effects.scored.seq] = effects.scored.score
    return out, seconds / out.size


def shuffled(codes: Ints, block: int, rng: np.random.Generator) -> Ints:
    """The same blocks, each in another order."""
    key = np.arange(codes.shape[1]) // block + rng.random(codes.shape)
    return np.take_along_axis(codes, np.argsort(key, 1), 1)


def auroc(scores: Floats, anomaly: NDArray[np.bool_]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(anomaly, scores))


Statistics = Callable[[DEformer, TiePolicy, Floats, Ints, int], tuple[Floats, float]]


def measure(case: Case, seed: int, block: int, of: Statistics = statistics) -> dict[str, Any]:
    """One table, one seed: law → what it was worth."""
    rng = np.random.default_rng([seed, 0x71E5])
    n, features = case.calibration.shape
    calibration, test = (np.argsort(rng.random((size, features)), 1) for size in (n, len(case.test)))
    again = shuffled(test, block, rng)
    alphas = [alpha for alpha in (0.05, ALPHA) if alpha * (n + 1) >= 1]
    run: dict[str, Any] = {"seed": seed, "calibrated": n}
    for law in LAWS:
        lives = of(case.model, law, case.calibration, calibration, block)[0]
        found, seconds = of(case.model, law, case.test, test, block)
        other = of(case.model, law, case.test, again, block)[0]
        judged, twice = judge(lives, found), judge(lives, other)
        run[law] = {"auroc": auroc(found.max(1), case.anomaly), "seconds": seconds, "alphas": []}
        for alpha in alphas:
            told = worth(judged, case.anomaly, n, alpha)
            first, second = judged.p[:, -1] <= alpha, twice.p[:, -1] <= alpha
            flips = int((first != second).sum()) / max(1, int((first | second).sum()))
            run[law]["alphas"].append(asdict(told) | {"within": told.within, "flips": flips})
    return run


def report(lines: list[dict[str, Any]], when: str) -> str:
    """A table of means over seeds."""
    shares = " | ".join(f"by {share:.0%}" for share in SHARES)
    head = (
        f"| table | α | ties | false alarms (99% bounds) | {shares} | AUROC | alerts of one shuffle only | µs/event |"
    )
    out = [f"# Ties\n\n{when}\n", head, "|" + "---|" * (head.count("|") - 1)]
    for line in lines:
        for place in range(min(len(run["hold"]["alphas"]) for run in line["runs"])):
            for law in LAWS:
                own = [run[law] for run in line["runs"]]
                at = [run["alphas"][place] for run in own]
                hits = " | ".join(f"{np.mean([one['at_shares'][s] for one in at]):.3f}" for s in range(len(SHARES)))
                alarms, low, high = (sum(one[name] for one in at) for name in ("alarms", "low", "high"))
                out.append(
                    f"| {line['table']} | {at[0]['alpha']:g} | {law} | {alarms} ({low}–{high}) | {hits} | "
                    f"{np.mean([run['auroc'] for run in own]):.3f} | {np.mean([one['flips'] for one in at]):.1%} | "
                    f"{1e6 * np.mean([run['seconds'] for run in own]):.0f} |"
                )
    return "\n".join(out) + "\n"


def run(arguments: argparse.Namespace) -> None:
    need_peers()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            table, runs = pq.read_table(path), []
            for seed in seeds_of(arguments.seeds):
                case = prepare(table, seed, arguments.max_time, kept / f"{name}-{seed}")
                runs.append(measure(case, seed, arguments.block))
            lines.append({"table": name, "block": arguments.block, "runs": runs})
            print(name, file=sys.stderr, flush=True)
    text = report(
        lines,
        f"{machine()}, {today()}; blocks of {arguments.block}, seeds {arguments.seeds}, at most "
        f"{arguments.max_time} of training each, calibration included.",
    )
    means = {
        law: {
            "auroc": float(np.mean([run[law]["auroc"] for line in lines for run in line["runs"]])),
            "microseconds": float(1e6 * np.mean([run[law]["seconds"] for line in lines for run in line["runs"]])),
        }
        for law in LAWS
    }
    assert all(math.isfinite(mean["auroc"]) for mean in means.values())
    print(json.dumps({"benchmark": "ties", "block": arguments.block, "tables": len(lines)} | means))
    publish("ties", text, lines)


def main() -> None:
    options = parser(__doc__, seeds="0", max_time="30s")
    options.add_argument("--block", type=int, default=4, help="readings of one time; 4 by default")
    options.add_argument("--models", default="", help="folder in which trained models are kept; none by default")
    launch("ties", run, options)


if __name__ == "__main__":
    main()
