"""A new calibration for a model that stays as it is, from normal records that have taken the road.

What the engine makes of records in a replay it makes of them in a stream, windows and arrival orders included. So the
largest statistics of new normal records, as they end, calibrate the model for records like these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import DEFAULT_ALPHAS, MAX_CALIBRATION_RECORDS, Calibration, TiePolicy, extract_group, group_indexes_by_key, trim_largest
from deformer_stream.calibration.drift import average_neg_log_p_by_feature
from deformer_stream.codec.payloads import Payload, WideRows
from deformer_stream.engine.events import Effects
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.windows import WINDOW_SEPARATOR
from deformer_stream.model_store import Artifact
from deformer_stream.report import charts, pages

LOGGED = 2_000
"""Records by which the usual surprise of each feature is told."""

DEVICE = "device"
"""The separator that this stands for is the one of windows: DEVICE@START."""


class MaxStatisticSink:
    """A sink that keeps the largest statistic of every record that ends with at least one reading. wide: whether rows
    of wide tables, which know no arrival, were among them; arrivals: whether anything else was."""

    def __init__(self) -> None:
        self.records: list[str] = []
        self.logs: dict[str, list[tuple[int, float]]] = {}  # of the first `LOGGED` records
        self.wide = self.arrivals = False
        self._scores: list[NDArray[np.float64]] = []

    @property
    def scores(self) -> NDArray[np.float64]:
        return np.concatenate([np.empty(0), *self._scores])

    def write(self, effects: Effects, data: Payload | None) -> None:
        self.wide |= isinstance(data, WideRows)
        self.arrivals |= data is not None and not isinstance(data, WideRows)
        self._log(effects)
        closed = effects.closed
        some = np.flatnonzero(closed.num_readings > 0)
        self.records += [closed.record_ids[i] for i in some.tolist()]
        self._scores.append(closed.score[some])

    def _log(self, effects: Effects) -> None:
        batch, events = effects.batch, effects.scored.event_indices
        rows = zip(events.tolist(), batch.features[events].tolist(), batch.values[events].tolist(), strict=True)
        for event, code, value in rows:
            record = batch.record_ids[event]
            if record in self.logs or len(self.logs) < LOGGED:
                self.logs.setdefault(record, []).append((code, value))

    def surprise(self, model: DEformer) -> dict[str, float]:
        """Mean −ln p by feature, nats."""
        pairs = (tuple(zip(*log, strict=True)) for log in self.logs.values())
        return average_neg_log_p_by_feature(model, [(np.array(codes, np.int64), np.array(values)) for codes, values in pairs])

    def order(self, of_rows: str, asked: str | None) -> str:
        """The arrival law of what was collected. of_rows: of the readings of a wide row. asked: for all. Raises
        `ConfigError` where there are two."""
        if self.wide and self.arrivals and asked is None and of_rows != "arrival":
            raise ConfigError("rows of wide tables know no arrival, the other files do: give --order, or one kind")
        return of_rows if self.wide else asked or "arrival"

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Recalibration:
    """The new calibration beside the old one. records: that it was made of. pooled: groups with too few records for a
    calibration of their own, how many each has; least: how many it takes. ungrouped: records whose id names none."""

    before: Calibration
    calibration: Calibration
    records: int
    pooled: dict[str, int]
    least: int
    ungrouped: int

    def rows(self, alphas: Iterable[float]) -> list[tuple[str, str, str, str]]:
        """Alpha, threshold before and now, whether it is in reach; then the smallest p-values."""
        table = [
            (f"{a:g}", _threshold(self.before, a), _threshold(self.calibration, a), self.calibration.describe_reachability(a))
            for a in sorted({*DEFAULT_ALPHAS, *alphas}, reverse=True)
        ]
        before, now = (f"{calibration.min_p_value:.2g}" for calibration in (self.before, self.calibration))
        return [*table, ("smallest p", before, now, "")]

    def groups(self) -> list[str]:
        """What became of the groups, in sentences; none without groups."""
        own, pooled = self.calibration.calibration_by_group, self.pooled
        if not own and not pooled:
            return []
        sizes = {name: len(calibration.scores) for name, calibration in own.items()}
        lines = [f"{len(own)} groups have calibrations of their own{': ' if own else ''}{_counts(sizes)}"]
        if pooled:
            lines.append(
                f"{len(pooled)} groups with fewer than {self.least} records are judged with all records together: "
                f"{_counts(pooled)}"
            )
        if self.ungrouped:
            lines.append(f"{self.ungrouped} records name no group and are judged with all records together")
        return lines


def recalibrate(
    loaded: Artifact,
    peaks: MaxStatisticSink,
    order: str,
    alphas: Sequence[float],
    group_by: str | None = None,
    trim: float = 0.0,
    seed: int = 0,
    ties: TiePolicy = "arrival",
) -> Recalibration:
    """Calibrate on what was collected.

    order: the arrival law of it; ties: how readings of one time were taken. alphas: a group is on its own where all of
    these are in reach with its records. group_by: `DEVICE`, or the separator behind the group in a record's id. trim:
    share of the largest statistics that are left out. Raises `InputError` without any record, or without any that names
    a group."""
    before, scores = loaded.calibration, peaks.scores
    if not len(scores):
        raise InputError("no record to calibrate on: the input holds no reading that the model knows")
    rng = np.random.default_rng([seed, 0xCA1B])
    pool = Calibration.from_statistics(trim_largest(_thinned(scores, rng), trim), order, peaks.surprise(loaded.model), ties)
    least = max(1, *(Calibration.count_required_records(alpha) for alpha in alphas))
    if group_by is None:
        return Recalibration(before, pool, len(scores), {}, least, 0)
    separator = WINDOW_SEPARATOR if group_by == DEVICE else group_by
    rows = group_indexes_by_key(extract_group(record, separator) for record in peaks.records)
    ungrouped = len(rows.pop("", []))
    if not rows:
        raise InputError(
            f"--group-by {group_by}: no record id has a group, like pump-7 in 'pump-7{separator}…' "
            f"(the first is {peaks.records[0][:40]!r}); name records so, or see --record-column and --window"
        )
    own = {name: trim_largest(_thinned(scores[at], rng), trim) for name, at in rows.items()}
    pooled = {name: len(rows[name]) for name, statistics in own.items() if len(statistics) < least}
    return Recalibration(before, pool.with_groups(own, separator, least), len(scores), pooled, least, ungrouped)


def _thinned(scores: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """At most `MOST`, a random choice."""
    return scores if len(scores) <= MAX_CALIBRATION_RECORDS else rng.choice(scores, MAX_CALIBRATION_RECORDS, replace=False)


def written(found: Recalibration, loaded: Artifact, directory: Any, alphas: Sequence[float]) -> str:
    """Write the model with its new calibration as a model directory; returns the fingerprint. Its report is the
    training's with a section more."""
    note = {
        "from": loaded.fingerprint,
        "records": found.records,
        "order": found.calibration.arrival_order,
        "ties": found.calibration.tie_policy,
        "groups": len(found.calibration.calibration_by_group),
        "groups_pooled": len(found.pooled),
    }
    try:
        page = (loaded.directory / model_store.REPORT).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        page = ""
    report = pages.append_blocks(page, "Calibration report", *_section(found, loaded.fingerprint, alphas))
    training = loaded.manifest["training"] | {"recalibrated": note}
    return model_store.write(directory, loaded.model, found.calibration, training, report)


def _section(found: Recalibration, fingerprint: str, alphas: Sequence[float]) -> list[str]:
    new = found.calibration
    thresholds = {f"α = {alpha:g}": new.compute_threshold(alpha) for alpha in alphas}
    return [
        pages.render_heading("Calibrated again"),
        pages.render_paragraph(
            f"{found.records:,} normal records in {new.arrival_order} order{_held(new)} calibrate the model that was "
            f"{fingerprint} before; "
            "its weights are as they were. What is said above about when it alerts was true of the calibration before."
        ),
        charts.draw_histogram(
            new.scores,
            "Largest statistic of normal records",
            "statistic, nats",
            vertical={name: t for name, t in thresholds.items() if np.isfinite(t)},
        ),
        pages.render_table(["α", "statistic that alerted", "statistic that alerts", "in reach?"], found.rows(alphas)),
        *(pages.render_paragraph(line + ".") for line in found.groups()),
    ]


def _threshold(calibration: Calibration, alpha: float) -> str:
    value = calibration.compute_threshold(alpha)
    return f"{value:.3f}" if np.isfinite(value) else "—"


def _held(calibration: Calibration) -> str:
    return " (readings of one time judged together)" if calibration.tie_policy == "hold" else ""


def _counts(groups: dict[str, int], most: int = 8) -> str:
    """`pump-1 (120), pump-2 (80), …`"""
    shown = ", ".join(f"{name[:40]} ({n})" for name, n in sorted(groups.items())[:most])
    return shown + (", …" if len(groups) > most else "")
