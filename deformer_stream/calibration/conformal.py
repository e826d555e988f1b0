"""When to alert: prefix statistics and an anytime-valid rule with a guaranteed false-alarm rate.

Each reading yields a highest-density p-value p_i under the model. For a prefix of k readings two statistics, comparable
between short and long prefixes:

    G_k = −ln sf_χ²(2k)(−2 Σ ln p_i)        many mild surprises (Fisher's combination)
    B_k = −ln(1 − (1 − min p_i)^k)          one wild surprise (Šidák's correction)

with p_i to the power `TEMPER` in both, and g_k = max(G_k, B_k). On n held-out normal records, in their real arrival
orders, M_i is the largest g over all prefixes of record i. A record's p-value after k readings is
p_k = (1 + #{i: M_i ≥ max_{j≤k} g_j}) / (n + 1). It never rises, and P(p_k ≤ α at any k) ≤ α for a normal record
exchangeable with the calibration records, however wrong the model is (Laxhammar and Falkman on incomplete examples;
Bates et al., arXiv 2104.08279).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.distributions import log_gamma_sf

Floats = NDArray[np.float64]

Ties = Literal["arrival", "hold"]
"""What readings of one record and one event time are: one after the other as they came, or a block whose order means
nothing, decided once (`engine.ties`)."""

ALPHAS = (0.05, 0.01, 0.001)
"""Those that are shown where nobody has asked for any."""

TEMPER = 0.8
"""Power of the p-values before they are combined. The surprises of a normal record lean on each other, so that Σ ln p
spreads more than that of independent ones, the more the longer the prefix (Brown 1975 corrects Fisher's combination for
it). Tempered, long prefixes do not set the bar for short ones: alerts fall earlier (docs/experiments.md, section 5)."""

NOISE = 1e-4
"""Scores closer than this, relative to 1 + score, count as equal: float32 sums differ with the batch they are taken in,
and a tie must count against the record in each of them. It only ever raises a p-value, so the guarantee stays."""


@dataclass(frozen=True, slots=True)
class PrefixState:
    """What R records carry from reading to reading: scored readings, −Σ ln p and min ln p, tempered, and max g so far,
    each (R,)."""

    count: NDArray[np.int64]
    total: Floats
    least: Floats
    peak: Floats

    @staticmethod
    def start(records: int) -> PrefixState:
        zero = np.zeros(records)
        return PrefixState(np.zeros(records, np.int64), zero, zero, zero)


def advance(
    state: PrefixState, log_p: Floats, scored: NDArray[np.bool_], decided: NDArray[np.bool_] | None = None
) -> tuple[Floats, PrefixState]:
    """Add L readings to each of R records.

    log_p: (R, L) ln of the highest-density p-values; scored: (R, L), false for context and padding, which change
    nothing. decided: (R, L), false for readings of a block of ties but its last: no prefix ends with them. Returns the
    running statistic max_{j≤k} g_j after each reading, (R, L), larger is more anomalous, and the state after the last.
    Sums run in arrival order, so that any split of the readings gives the same bits.
    """
    log_p = np.where(scored, TEMPER * np.minimum(log_p, 0.0), 0.0)
    count = state.count[:, None] + scored.cumsum(1)
    total = running_sum(state.total, -log_p)
    least = np.minimum.accumulate(np.minimum(log_p, state.least[:, None]), 1)
    g = np.where(count > 0, np.maximum(_fisher(count, total), _sidak(count, least)), 0.0)
    if decided is not None:
        g = np.where(decided, g, 0.0)
    peak = np.maximum.accumulate(np.maximum(g, state.peak[:, None]), 1)
    return peak, PrefixState(count[:, -1], total[:, -1], least[:, -1], peak[:, -1])


def running_sum(start: Floats, more: Floats) -> Floats:
    """Running sums of L numbers for each of R records, which begin with `start`, (R,); (R, L)."""
    sums: Floats = np.concatenate([start[:, None], more], 1).cumsum(1)[:, 1:]
    return sums


def _fisher(count: NDArray[np.int64], total: Floats) -> Floats:
    """G_k: sf of χ² with 2k degrees of freedom at 2t is Q(k, t)."""
    shape = np.maximum(count, 1).astype(np.float64)
    x = torch.from_numpy(np.ascontiguousarray(total))
    result: Floats = -log_gamma_sf(torch.from_numpy(shape), x, shape.max(initial=1.0)).numpy()
    return np.maximum(result, 0.0)


def _sidak(count: NDArray[np.int64], least: Floats) -> Floats:
    """B_k, by series where 1 − (1 − p)^k would cancel."""
    count = np.maximum(count, 1)
    tiny = least < -25.0
    some = bool(tiny.any())
    p = np.exp(np.minimum(np.where(tiny, -1.0, least) if some else least, -1e-12))
    result: Floats = -np.log(-np.expm1(count * np.log1p(-p)))
    return np.where(tiny, -least - np.log(count), result) if some else result


MOST = 20_000
"""Calibration records that are kept: more sharpen the threshold at α = 0.1% by less than its own error."""


def group_of(record: str, separator: str) -> str:
    """The group of sources that a record belongs to: its id up to the last separator; "" where there is none."""
    return record.rpartition(separator)[0]


Key = TypeVar("Key", int, str)


def rows_by(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Where each key stands, in the order in which they first come."""
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


def trim_largest(statistics: Floats, share: float) -> Floats:
    """Ascending, without this share of the largest, rounded: of records that may hold as many anomalies. Where they
    hold none, up to this share of normal records alerts beside α."""
    return np.sort(statistics)[: len(statistics) - round(share * len(statistics))]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The statistics M of n held-out normal records, ascending, and the arrival law (`order`) they were taken in.

    groups: sources with a calibration of their own, by name (`group_of` with `separator`); their records are judged by
    it, all others by `scores`, which are those of all sources. A group is part of the record's id, so it is known from
    the first reading on and needs no memory. surprise: mean −ln p by feature, by which a notice of drift tells what has
    moved; features may be missing. ties: how readings of one time were taken.
    """

    scores: Floats
    order: str
    separator: str = ""
    groups: Mapping[str, Calibration] = field(default_factory=dict)
    surprise: Mapping[str, float] = field(default_factory=dict)
    ties: Ties = "arrival"

    def __post_init__(self) -> None:
        if self.scores.ndim != 1 or not np.isfinite(self.scores).all() or (np.diff(self.scores) < 0).any():
            raise ValueError("calibration scores must be finite and ascending")
        if bool(self.groups) != bool(self.separator):
            raise ValueError("calibration groups need a separator, and a separator groups")
        if not all(math.isfinite(mean) for mean in self.surprise.values()):
            raise ValueError("the mean surprise of a feature in calibration is not finite")
        if self.ties not in get_args(Ties):
            raise ValueError(f"calibration knows no ties {self.ties!r}")
        laws = {(own.order, own.ties) for own in self.groups.values()} - {(self.order, self.ties)}
        if laws or any(not name or own.groups for name, own in self.groups.items()):
            raise ValueError("a calibration group has no name, groups of its own, or another law")

    @staticmethod
    def of(
        statistics: Floats, order: str, surprise: Mapping[str, float] | None = None, ties: Ties = "arrival"
    ) -> Calibration:
        return Calibration(np.sort(np.asarray(statistics, np.float64)), order, surprise=surprise or {}, ties=ties)

    def grouped(self, statistics: Mapping[str, Floats], separator: str, least: int) -> Calibration:
        """With the groups of which there are at least so many records. statistics: M by group."""
        enough = {
            name: Calibration.of(m, self.order, ties=self.ties)
            for name, m in statistics.items()
            if name and len(m) >= least
        }
        return replace(self, separator=separator if enough else "", groups=enough)

    def beyond(self, alphas: Iterable[float]) -> dict[float, int]:
        """The alphas that are out of reach, and how many calibration records each of them takes."""
        return {alpha: self.needed(alpha) for alpha in alphas if alpha < self.smallest_p}

    @staticmethod
    def needed(alpha: float) -> int:
        """The fewest calibration records that bring an alpha within reach."""
        n = math.ceil(1.0 / alpha) - 1
        return n if 1.0 / (n + 1) <= alpha else n + 1

    def reach(self, alpha: float) -> str:
        """Whether alerts at this alpha can be raised, in words."""
        needed = self.beyond([alpha]).get(alpha)
        return (
            "yes" if needed is None else f"no: it takes {needed:,} calibration records, there are {len(self.scores):,}"
        )

    @property
    def smallest_p(self) -> float:
        """1/(n + 1): an alpha below it is out of reach, no record can ever raise an alert."""
        return 1.0 / (len(self.scores) + 1)

    def p_value(self, score: Floats) -> Floats:
        """Anytime-valid p-values of running statistics, elementwise; a tie within `NOISE` counts against the record."""
        at_least = len(self.scores) - np.searchsorted(self.scores, score - NOISE * (1.0 + score), "left")
        p: Floats = ((1.0 + at_least) / (len(self.scores) + 1.0)).astype(np.float64)
        return p

    def p_values(
        self, score: Floats, records: Callable[[], Sequence[str]], counts: NDArray[np.int64] | None = None
    ) -> Floats:
        """P-values of R records' running statistics, (R, L), each by its group. records: says their ids. counts: (R,)
        how many statistics are a record's, where they stand one record after the other, (M,)."""
        p = self.p_value(score)
        if self.groups:
            rows = rows_by(group_of(record, self.separator) for record in records())
            for name in rows.keys() & self.groups.keys():
                own = np.zeros(sum(map(len, rows.values())), bool)
                own[rows[name]] = True
                own = own if counts is None else own.repeat(counts)
                p[own] = self.groups[name].p_value(score[own])
        return p

    def alarming(self, alpha: float) -> Callable[[Floats, Sequence[str]], NDArray[np.bool_]]:
        """Which running statistics of R records, (R, C), raise an alert at this alpha, given the records' ids."""
        return lambda score, records: self.p_values(score, lambda: records) <= alpha

    def threshold(self, alpha: float) -> float:
        """The running statistic above which an alert goes out at this alpha; infinite where alpha is out of reach."""
        allowed = (
            int(np.searchsorted(np.arange(1, len(self.scores) + 2) / (len(self.scores) + 1.0), alpha, "right")) - 1
        )
        if allowed < 0:
            return math.inf
        if allowed >= len(self.scores):
            return -math.inf
        return (float(self.scores[len(self.scores) - 1 - allowed]) + NOISE) / (1.0 - NOISE)

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"order": self.order, "records": len(self.scores), "scores": self.scores.tolist()}
        if self.ties != "arrival":
            row["ties"] = self.ties
        if self.surprise:
            row["surprise"] = dict(self.surprise)
        if self.groups:
            groups = {name: own.scores.tolist() for name, own in self.groups.items()}
            row |= {"separator": self.separator, "groups": groups}
        return row

    @staticmethod
    def from_json(row: dict[str, Any]) -> Calibration:
        order, ties = str(row["order"]), row.get("ties", "arrival")
        groups = {n: Calibration(np.asarray(m, np.float64), order, ties=ties) for n, m in row.get("groups", {}).items()}
        surprise = {str(name): float(mean) for name, mean in row.get("surprise", {}).items()}
        scores = np.asarray(row["scores"], np.float64)
        return Calibration(scores, order, row.get("separator", ""), groups, surprise, ties)


@dataclass(frozen=True, slots=True)
class Survey:
    """What normal records tell about a model. statistics: (N,) M of each record, the largest prefix statistic over its
    life. surprise, readings: (F,) by feature, the sum of −ln p and the readings that it is the sum of."""

    statistics: Floats
    surprise: Floats
    readings: NDArray[np.int64]

    def __add__(self, more: Survey) -> Survey:
        statistics = np.concatenate([self.statistics, more.statistics])
        return Survey(statistics, self.surprise + more.surprise, self.readings + more.readings)

    def by_feature(self, names: Sequence[str]) -> dict[str, float]:
        """Mean −ln p of the features with readings, nats; 1 where the model is right."""
        return {names[f]: float(self.surprise[f] / self.readings[f]) for f in np.flatnonzero(self.readings).tolist()}


def survey(model: DEformer, features: NDArray[np.int64], values: Floats, batch: int = 256) -> Survey:
    """features: (N, L) codes in arrival order, −1 padding at the end; values: (N, L) normalised units."""
    n = len(model.schema)
    found = Survey(np.empty(0), np.zeros(n), np.zeros(n, np.int64))
    for part, (log_p, _, scored) in enumerate(_surprises(model, features, values, batch)):
        codes = features[part * batch : (part + 1) * batch][scored]
        peak = advance(PrefixState.start(len(scored)), log_p, scored)[1].peak
        found += Survey(peak, np.bincount(codes, -log_p[scored], n).astype(np.float64), np.bincount(codes, minlength=n))
    return found


def record_statistics(model: DEformer, features: NDArray[np.int64], values: Floats, batch: int = 256) -> Floats:
    """(N,) M of each record; arguments as of `survey`."""
    return survey(model, features, values, batch).statistics


def record_excess(
    model: DEformer, features: NDArray[np.int64], values: Floats, batch: int = 256
) -> NDArray[np.float64]:
    """Σ(−ln p(v) − H) of each record, nats; arguments as of `record_statistics`."""
    parts = [np.where(scored, excess, 0.0).sum(1) for _, excess, scored in _surprises(model, features, values, batch)]
    return np.concatenate(parts) if parts else np.empty(0)


def _surprises(
    model: DEformer, features: NDArray[np.int64], values: Floats, batch: int
) -> Iterator[tuple[Floats, Floats, NDArray[np.bool_]]]:
    """Batch by batch: ln of p-values, excess of the surprisals, and which places are scored, each (B, L)."""
    for start in range(0, len(features), batch):
        f, v = features[start : start + batch], np.ascontiguousarray(values[start : start + batch])
        t = torch.from_numpy(np.ascontiguousarray(f)).to(model.device)
        with torch.inference_mode():
            x = to_tensor(v, model)
            log_p, excess = (part.double().cpu().numpy() for part in model.conditionals(t, x).surprise(x))
        yield log_p, excess, (f >= 0) & ~model.schema.context[np.maximum(f, 0)]
