"""How soon drift is noticed, and how often wrongly, beside change detectors of River, on the tables of ADBench.

    python -m benchmarks.drift --tables pendigits,satellite --models /tmp/models

Models, splits and units are those of `benchmarks.early` (`--models DIR` shares them). The held-out normals, those of
the calibration and those of the test, come in random orders, and each has the statistic M of alerts. A life draws anew
which of them are the calibration and which the stream, so that all are exchangeable in fact, and sends the stream to

    ours              `calibration/drift.py`, at the level that bounds the chance of a false notice, ever, by its inverse
    ADWIN, KSWIN      River, as they come, on the records' p-values among the calibration
    Page-Hinkley      likewise, on minus the p-values: it looks for a growing mean, so for more anomalous records

Quiet lives count false notices. In the others, after `QUIET` records like the calibration's, come records of which one
feature is shifted or noisier, by so many of its standard deviations in the model's units, or a share are anomalies:
counted are lives with a notice within `DRIFTED` records of the change, and how many records that took; a notice
before the change spoils a life. For a feature that changed also: how often our notice names it first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import launch, machine, parser, publish, today
from benchmarks.early import LAWS, Case, prepare
from benchmarks.tables import find_tables, markdown_head, markdown_row, seeds_of
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_max_statistics, score_records
from deformer_stream.calibration.drift import RECENT, DriftMonitor, moved
from deformer_stream.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS = (10.0, 100.0, 1000.0)
LEVEL = 1000.0
"""Of our notices where something changes; 10 of 10,000 quiet lives may have one."""
QUIET, DRIFTED = 400, 600
LIVES, CHANGED_LIVES = 200, 20
LEAST = 1500
"""Held-out normals without which a life would repeat records."""
PEERS = ("ADWIN", "KSWIN", "Page-Hinkley")
CHANGES = ("shift 0.5", "shift 1", "shift 2", "noise 1", "noise 2", "anomalies 10%", "anomalies 30%")

Notice = Callable[[Floats, Floats], "int | None"]
"""Calibration statistics, statistics of the stream in its order → records by the first notice, None without any."""


def ours(level: float) -> Notice:
    def first(calibration: Floats, stream: Floats) -> int | None:
        watch = DriftMonitor(Calibration.from_statistics(calibration, "random"), "model", level)
        watch.observe([0] * len(stream), [str(i) for i in range(len(stream))], stream)
        reached = watch.take_reached()
        return reached[0].records if reached else None

    return first


def peer(name: str, seed: int) -> Notice:
    from river import drift

    def first(calibration: Floats, stream: Floats) -> int | None:
        made = {
            "ADWIN": drift.ADWIN,
            "KSWIN": lambda: drift.KSWIN(seed=seed),
            "Page-Hinkley": lambda: drift.PageHinkley(mode="up"),
        }
        detector, sign = made[name](), -1.0 if name == "Page-Hinkley" else 1.0
        for i, p in enumerate(Calibration.from_statistics(calibration, "random").compute_pooled_p_values(stream).tolist(), 1):
            detector.update(sign * p)
            if detector.drift_detected:
                return i
        return None

    return first


def changed(kind: str, rows: Floats, anomalies: Floats, spread: Floats, rng: np.random.Generator) -> tuple[Floats, int]:
    """Records of which something is not as it was, (N, F), and the feature that changed, −1 for all. spread: (F,)."""
    what, amount = kind.split(" ")
    rows = rows.copy()
    if what == "anomalies":
        count = round(float(amount.rstrip("%")) / 100 * len(rows))
        rows[rng.permutation(len(rows))[:count]] = anomalies[rng.integers(len(anomalies), size=count)]
        return rows, -1
    feature = int(rng.integers(rows.shape[1]))
    step = float(amount) * spread[feature]
    rows[:, feature] += step if what == "shift" else step * rng.standard_normal(len(rows))
    return rows, feature


def named_first(case: Case, calibration: Ints, feature: int, codes: Ints, rows: Floats) -> bool:
    """Whether a notice after these records (N, F) in these orders, N ≤ `RECENT`, names the feature that changed first.

    calibration: rows of the life's calibration among `case`'s held-out normals."""
    names = case.model.schema.names
    normals = held_out(case)
    usual_codes = LAWS["random"](len(calibration), normals.shape[1], np.random.default_rng(0))
    usual = score_records(case.model, usual_codes, np.take_along_axis(normals[calibration], usual_codes, 1)).average_neg_log_p_by_feature(names)
    recent = score_records(case.model, codes, np.take_along_axis(rows, codes, 1)).average_neg_log_p_by_feature(names)
    found = moved(recent, usual)
    return bool(found) and found[0].feature == names[feature]


def held_out(case: Case) -> Floats:
    """(N, F) the normals that the model has not seen."""
    return np.concatenate([case.calibration, case.test[~case.anomaly]])


def quiet(statistics: Floats, calibrated: int, contenders: dict[str, Notice], seed: int) -> dict[str, int]:
    """Contender → lives with a notice, of `LIVES`. statistics: (N,) M of the held-out normals."""
    rng = np.random.default_rng([seed, 0xD21F])
    found = dict.fromkeys(contenders, 0)
    for _ in range(LIVES):
        order = rng.permutation(len(statistics))
        life = statistics[order[:calibrated]], statistics[order[calibrated : calibrated + QUIET + DRIFTED]]
        for name, notice in contenders.items():
            found[name] += notice(*life) is not None
    return found


def drifting(
    case: Case, statistics: Floats, kind: str, calibrated: int, contenders: dict[str, Notice], seed: int
) -> dict[str, Any]:
    """Contender → the records that a notice took after the change, None where it came too early or not, by life; and
    of our notices how many name the feature first."""
    rng = np.random.default_rng([seed, 0xC4A6, CHANGES.index(kind)])
    normals, anomalies = held_out(case), case.test[case.anomaly]
    delays: dict[str, list[int | None]] = {name: [] for name in contenders}
    named: list[bool] = []
    for _ in range(CHANGED_LIVES):
        order = rng.permutation(len(normals))
        calibration, rest = order[:calibrated], order[calibrated:]
        rows, feature = changed(kind, normals[rest[QUIET:][:DRIFTED]], anomalies, normals.std(0), rng)
        codes = LAWS["random"](*rows.shape, rng)
        after = compute_max_statistics(case.model, codes, np.take_along_axis(rows, codes, 1))
        stream = np.concatenate([statistics[rest[:QUIET]], after])
        for name, notice in contenders.items():
            at = notice(statistics[calibration], stream)
            delay = None if at is None or at <= QUIET else at - QUIET
            delays[name].append(delay)
            if name == "ours" and delay is not None and feature >= 0:
                last = slice(max(0, delay - RECENT), delay)
                named.append(named_first(case, calibration, feature, codes[last], rows[last]))
    return {"delays": delays, "named": named}


def measure(case: Case, seed: int) -> dict[str, Any]:
    """One table, one seed."""
    normals = held_out(case)
    codes = LAWS["random"](*normals.shape, np.random.default_rng([seed, 0x0DE5]))
    statistics = compute_max_statistics(case.model, codes, np.take_along_axis(normals, codes, 1))
    calibrated = min(len(case.calibration), len(normals) - QUIET - DRIFTED)
    peers = {name: peer(name, seed) for name in PEERS}
    false = quiet(statistics, calibrated, {f"level {level:g}": ours(level) for level in LEVELS} | peers, seed)
    either = {"ours": ours(LEVEL)} | peers
    changes = {kind: drifting(case, statistics, kind, calibrated, either, seed) for kind in CHANGES}
    return {"seed": seed, "calibrated": calibrated, "lives": LIVES, "false": false, "changes": changes}


def delay_of(delays: list[int | None]) -> str:
    """Share of lives with a notice, and the median of the records that it took."""
    known = [d for d in delays if d is not None]
    share = f"{100 * len(known) / len(delays):.0f}%"
    return f"{share} · {np.median(known):.0f}" if known else share


def report(lines: list[dict[str, Any]]) -> str:
    runs = [run for line in lines for run in line["runs"]]
    watched = [f"level {level:g}" for level in LEVELS] + list(PEERS)
    text = ["## Quiet lives with a notice", ""]
    text += markdown_head(["table", "calibrated", "lives", *watched])
    for line in lines:
        for run in line["runs"]:
            cells = [line["table"], str(run["calibrated"]), str(run["lives"])]
            text.append(markdown_row(cells + [str(run["false"][name]) for name in watched]))
    total = sum(run["lives"] for run in runs)
    shares = [f"{100 * sum(run['false'][name] for run in runs) / total:.1f}%" for name in watched]
    text.append(markdown_row(["**all**", "", str(total), *shares]))
    allowed = [f"{100 / level:g}%" for level in LEVELS] + ["none promised"] * len(PEERS)
    text.append(markdown_row(["**at most**", "", "", *allowed]))
    text += ["", f"## Something changes after {QUIET} records: lives with a notice · median records it took", ""]
    text += markdown_head(["change", f"ours, level {LEVEL:g}", *PEERS, "ours names the feature first"])
    for kind in CHANGES:
        pooled = {name: [d for run in runs for d in run["changes"][kind]["delays"][name]] for name in ("ours", *PEERS)}
        named = [n for run in runs for n in run["changes"][kind]["named"]]
        first = f"{100 * np.mean(named):.0f}% of {len(named)}" if named else ""
        text.append(markdown_row([kind, *(delay_of(pooled[name]) for name in pooled), first]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    try:
        import river  # noqa: F401
    except ImportError:
        raise ConfigError(
            "river is not installed: run make bench-quality, or pip install -c constraints.txt -e '.[bench]'"
        ) from None
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            table = pq.read_table(path)
            cases = {
                seed: prepare(table, seed, arguments.max_time, kept / f"{name}-{seed}")
                for seed in seeds_of(arguments.seeds)
            }
            few = min(len(held_out(case)) for case in cases.values())
            if few < LEAST:
                print(f"{name}: {few} held-out normals, a life takes {LEAST}", file=sys.stderr, flush=True)
                continue
            lines.append({"table": name, "runs": [measure(case, seed) for seed, case in cases.items()]})
            print(name, file=sys.stderr, flush=True)
    if not lines:
        raise ConfigError(f"--tables {arguments.tables}: none has {LEAST} held-out normals")
    when = f"{machine()}, {today()}; {len(lines)} tables, seeds {arguments.seeds}."
    text = f"# Drift\n\n{when}\n\n{report(lines)}\n"
    found = {
        kind: delay_of([d for line in lines for r in line["runs"] for d in r["changes"][kind]["delays"]["ours"]])
        for kind in CHANGES
    }
    print(json.dumps({"benchmark": "drift", "tables": len(lines), "level": LEVEL, "found": found}))
    publish("drift", text, lines)


def main() -> None:
    options = parser(__doc__, "all with enough normals by default", seeds="0", max_time="45s")
    options.add_argument("--models", default="", help="folder in which trained models are kept; none by default")
    launch("drift", run, options)


if __name__ == "__main__":
    main()
