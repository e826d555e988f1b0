"""Whether the stream's records are still like those of the calibration: a test martingale over their ranks.

A record that ends has a rank among the calibration's statistics M and those of the stream's earlier records. While all
are exchangeable the ranks, ties broken at random, are independent and uniform (Vovk, Gammerman and Shafer, "Algorithmic
Learning in a Random World", chapter 8): p_t, small where the record is more anomalous than most. Ranks among the
calibration alone would not do: its own chance would be taken for drift in a long stream. Earlier records are counted in
bins between calibration statistics, with 1, 2, 4, … of them from the top, which keeps the law exact: by exchangeability
a record falls into a bin in proportion to the calibration's places and the earlier records there (Pólya's urn).

Evidence against exchangeability is the capital of a gambler who bets on small p-values. For a change before record s,

    M_s,t = mean over ε of Π_{i=s…t} ε p_i^(ε−1)        power martingales
    M_t = Σ_{s≤t} w_s M_s,t + Σ_{s>t} w_s               any s, prior w_s = s^−a − (s+1)^−a

so that a change after a long quiet time is found almost as soon as an early one. M_t is a martingale that begins at 1:
P(M_t ≥ c at any t) ≤ 1/c (Ville). It looks one way: records that are less surprising than the calibration's, since many
of their readings are missing, are no drift.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from struct import unpack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import SCORE_TOLERANCE, Calibration, extract_group, group_indexes_by_key
from deformer_stream.calibration.torch_scoring import score_records
from deformer_stream.calibration.drift_state import DriftNotice, DriftState, FeatureShift
from deformer_stream.model.deformer import DEformer

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BETS = (0.25, 0.5, 0.75)
"""ε: the smaller, the more is won by few very small p-values."""
PRIOR = 0.25
"""a: of a change before record s the prior weight falls as s^−1.25."""
MOST = 1e12
"""The capital of a bet is cut there, so that it is lost again in reasonable time."""
RECENT = 64
"""Records by which the features that moved are told."""


class Ruler:
    """Finds the bin of a statistic among calibration statistics, (n,), of which equal ones are put in an order by
    chance. prior: calibration places by bin; above: of those above it; places: of all."""

    def __init__(self, scores: Floats, seed: int) -> None:
        grid, jitter = _grid(scores), np.random.default_rng(seed).random(len(scores))
        order = np.lexsort((jitter, grid))
        self._grid, self._jitter = grid[order], jitter[order]
        self.places = len(scores) + 1
        self.above = [2**b - 1 for b in range(self.places.bit_length())]
        self.prior = [min(2**b, self.places - start) for b, start in enumerate(self.above)]

    def bins(self, scores: Floats, jitter: Sequence[float]) -> list[int]:
        """Of R statistics; among equal ones `jitter`, (R,) uniform, decides."""
        grid = _grid(scores)
        first, last = np.searchsorted(self._grid, grid, "left"), np.searchsorted(self._grid, grid, "right")
        for i in (first < last).nonzero()[0].tolist():
            first[i] += np.searchsorted(self._jitter[first[i] : last[i]], jitter[i])
        return [(len(self._grid) - at + 1).bit_length() - 1 for at in first.tolist()]


def _grid(scores: Floats) -> Ints:
    """What differs by the noise of float32 sums only is equal."""
    return np.rint(np.log1p(scores) / SCORE_TOLERANCE).astype(np.int64)


def _untouched(records: int) -> float:
    """Prior weight of a change after so many records."""
    return math.pow(records + 1, -PRIOR)


class PartitionEvidence:
    """What is known of one partition, record by record."""

    def __init__(self, model: str, records: int = 0) -> None:
        self.model, self.records, self.alarmed = model, records, False
        self.capital = [0.0] * len(BETS)
        self._untouched = _untouched(records)
        self.counts: dict[str, list[int]] = {}

    @staticmethod
    def of(drift: DriftState) -> PartitionEvidence:
        evidence = PartitionEvidence(drift.model, drift.records)
        evidence.alarmed, evidence.capital = drift.alarmed, list(drift.wealth)
        evidence.counts = {group: list(counts) for group, counts in drift.counts.items()}
        return evidence

    def value(self) -> DriftState:
        counts = {group: tuple(counts) for group, counts in self.counts.items()}
        return DriftState(self.model, self.records, tuple(self.capital), self.alarmed, counts)

    @property
    def martingale(self) -> float:
        return sum(self.capital) / len(BETS) + self._untouched

    def add(self, group: str, ruler: Ruler, bin: int, smooth: float) -> None:
        """One record more. smooth: uniform, breaks the ties within the bin."""
        counts = self.counts.get(group)
        if counts is None:
            counts = self.counts[group] = [0] * len(ruler.prior)
        above = ruler.above[bin] + sum(counts[:bin])
        p = (above + smooth * (ruler.prior[bin] + counts[bin])) / (ruler.places + sum(counts))
        counts[bin] += 1
        self.records += 1
        before, self._untouched = self._untouched, _untouched(self.records)
        stake = before - self._untouched
        self.capital = [min((c + stake) * e * p ** (e - 1.0), MOST) for c, e in zip(self.capital, BETS, strict=True)]


Log = tuple[Ints, Floats]
"""The readings of a record: feature codes and raw values in order of arrival, each (L,)."""


class Reached(NamedTuple):
    """The end of a record has brought the evidence of its partition to the level. records: seen by then."""

    record: str
    partition: int
    martingale: float
    records: int


class DriftMonitor:
    """Follows the partitions for one model. level: the probability of a notice, ever, is at most 1/level for a
    partition whose records are exchangeable with the calibration's; infinite for none."""

    def __init__(self, calibration: Calibration, model: str, level: float) -> None:
        self.model, self.level = model, level
        self._usual, self._separator = calibration.mean_neg_log_p_by_feature, calibration.separator
        seed = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "big")
        self._hash = hashlib.blake2b(f"{model}\0".encode("utf-8", "surrogatepass"), digest_size=16)
        self._rulers = {"": Ruler(calibration.scores, seed)}
        self._rulers |= {name: Ruler(own.scores, seed) for name, own in calibration.calibration_by_group.items()}
        self._partitions: dict[int, PartitionEvidence] = {}
        self._recent: dict[int, deque[Log]] = {}
        self._changed: set[int] = set()
        self._reached: list[Reached] = []

    def observe(
        self, sources: Sequence[int], records: Sequence[str], scores: Floats, log: Callable[[int], Log] | None = None
    ) -> None:
        """R records of these partitions have ended, in this order. scores: (R,). log: the readings of the i-th."""
        self._changed.update(sources)
        if log is not None and math.isfinite(self.level):
            for source, rows in group_indexes_by_key(sources).items():
                self._recent.setdefault(source, deque(maxlen=RECENT)).extend(map(log, rows[-RECENT:]))
        chance = [self._uniforms(record) for record in records]
        found: list[tuple[str, int]] = [("", 0)] * len(records)
        for group, rows in group_indexes_by_key(map(self._group, records)).items():
            bins = self._rulers[group].bins(scores[rows], [chance[i][0] for i in rows])
            for i, bin in zip(rows, bins, strict=True):
                found[i] = group, bin
        for source, record, (group, bin), (_, smooth) in zip(sources, records, found, chance, strict=True):
            evidence = self._partitions.get(source)
            if evidence is None:
                evidence = self._partitions[source] = PartitionEvidence(self.model)
            evidence.add(group, self._rulers[group], bin, smooth)
            martingale = evidence.martingale
            if evidence.alarmed:
                evidence.alarmed = martingale >= 1.0
            elif martingale >= self.level:
                evidence.alarmed = True
                self._reached.append(Reached(record, source, martingale, evidence.records))

    def _uniforms(self, record: str) -> tuple[float, float]:
        """Two numbers in (0, 1] that chance could have drawn, the same whenever the record is seen."""
        hashed = self._hash.copy()
        hashed.update(record.encode("utf-8", "surrogatepass"))
        u, v = unpack(">QQ", hashed.digest())
        return (u + 1) * 2.0**-64, (v + 1) * 2.0**-64

    def _group(self, record: str) -> str:
        name = extract_group(record, self._separator) if self._separator else ""
        return name if name in self._rulers else ""

    def take_reached(self) -> list[Reached]:
        """Since the last call; one for each time that the evidence of a partition got to the level from below 1."""
        reached, self._reached = self._reached, []
        return reached

    def told(self, model: DEformer, now: int) -> tuple[list[DriftNotice], dict[int, DriftState]]:
        """Since the last call: the notices that are due, and the evidence of the partitions that have more of it; none
        where nobody is told of it. now: microseconds."""
        changed, self._changed = self._changed, set()
        evidence = {p: self._partitions[p].value() for p in sorted(changed)} if math.isfinite(self.level) else {}
        return [self._notice(reached, model, now) for reached in self.take_reached()], evidence

    def _notice(self, reached: Reached, model: DEformer, now: int) -> DriftNotice:
        return DriftNotice(
            id=notice_id(reached, self.model),
            record=reached.record,
            partition=reached.partition,
            model=self.model,
            level=self.level,
            log10=math.log10(reached.martingale),
            records=reached.records,
            time=now,
            moved=moved(surprise_of(model, self._recent[reached.partition]), self._usual),
        )

    def of(self, source: int) -> DriftState | None:
        """The evidence of a partition."""
        return self._partitions[source].value() if source in self._partitions else None

    def restore(self, source: int, drift: DriftState | None) -> None:
        """Go on where an earlier life was; evidence about another model is of no use."""
        if drift is not None and drift.model == self.model and self._fits(drift.counts):
            self._partitions[source] = PartitionEvidence.of(drift)

    def _fits(self, counts: Mapping[str, tuple[int, ...]]) -> bool:
        return all(name in self._rulers and len(c) == len(self._rulers[name].prior) for name, c in counts.items())

    def forget(self, sources: Iterable[int]) -> None:
        """These partitions are no longer ours."""
        for source in sources:
            self._partitions.pop(source, None)
            self._recent.pop(source, None)
            self._changed.discard(source)

    def log10(self) -> dict[int, float]:
        """By partition, log10 of the martingale."""
        return {source: math.log10(evidence.martingale) for source, evidence in self._partitions.items()}


def notice_id(reached: Reached, model: str) -> str:
    """Deterministic, as that of an alert: 32 hex digits."""
    text = f"drift\0{model}\0{reached.partition}\0{reached.record}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def surprise_of(model: DEformer, logs: Collection[Log]) -> dict[str, float]:
    """Mean −ln p by feature, nats, of those with readings."""
    if not logs:
        return {}
    codes = np.full((len(logs), max(len(c) for c, _ in logs)), -1, np.int64)
    values = np.zeros(codes.shape)
    for row, (c, v) in enumerate(logs):
        codes[row, : len(c)], values[row, : len(v)] = c, v
    found = score_records(model, codes, model.schema.normalise(np.maximum(codes, 0), values))
    return found.average_neg_log_p_by_feature(model.schema.names)


def moved(surprise: Mapping[str, float], expected: Mapping[str, float], most: int = 5) -> tuple[FeatureShift, ...]:
    """The features whose surprise has grown the most over what the calibration had; one that the calibration does not
    name is taken to be well predicted, 1."""
    found = [FeatureShift(name, mean, expected.get(name, 1.0)) for name, mean in surprise.items()]
    grown = [one for one in found if one.surprise > one.expected]
    return tuple(sorted(grown, key=lambda one: one.expected - one.surprise)[:most])
