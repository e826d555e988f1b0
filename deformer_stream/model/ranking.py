"""Which whole records are the strangest: far from every record seen in training, and surprising to the density.

The alert of an open record needs a statistic that is comparable from reading to reading; a ranking of records that have
ended may look at all of a record at once. Where training saw few records, the distance to the nearest of them is the
best of all simple rankings: it follows the data wherever they lie, without having to learn it. It misses what depends
on the relation of a few features, which the density sees. The score is the sum of both in units of normal records.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]

NEAREST = 3
"""Exemplars whose mean distance counts."""
EXCESS = 0.25
"""Weight of the density's part of the score beside that of the distance."""
FARTHEST = 1e6
"""Largest difference of two readings that counts, in standard deviations: sums must stay finite."""
WORK = 4_000_000
"""Differences of readings taken at once."""


class Ranking(nn.Module):
    """M exemplars: records of training, each feature in its own standard deviations.

    positions: (M, F), see `place`. known: (M, F) bool, false where missing. deviations: (F,) standard deviation of the
    feature in training, and for labels that are words the chance that two records differ. turns: (F,) see
    `Schema.turns`; None without cycles. typical: (2, 2), median of normal records and distance from there to their 90%
    quantile, of the distance and of the excess.
    """

    def __init__(self, schema: Schema, exemplars: int) -> None:
        super().__init__()
        self.schema = schema
        self.axes = [_axis(feature) for feature in schema.features]
        words = [feature.kind == "discrete" and not _numeric(feature) for feature in schema.features]
        self.register_buffer("words", torch.tensor(words), persistent=False)
        turns = torch.tensor(schema.turns) if schema.cyclic.any() else None
        self.register_buffer("turns", turns, persistent=False)
        shape = (exemplars, len(schema))
        self.register_buffer("positions", torch.zeros(shape))
        self.register_buffer("known", torch.ones(shape, dtype=torch.bool))
        self.register_buffer("deviations", torch.ones(len(schema)))
        self.register_buffer("typical", torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64))
        self.words: Tensor
        self.turns: Tensor | None
        self.positions: Tensor
        self.known: Tensor
        self.deviations: Tensor
        self.typical: Tensor

    @property
    def exemplars(self) -> int:
        return len(self.positions)

    def place(self, values: Floats) -> Tensor:
        """(R, F) where readings lie on the axes of their features, in training's units before division by `deviations`:
        numbers without the logarithm of `Schema.normalise`, labels that are numbers as these numbers, other labels by
        their code; a label never seen lies beyond all others. values: (R, F), normalised units or label codes."""
        codes = np.arange(len(self.schema))
        places = self.schema.denormalise(np.broadcast_to(codes, values.shape), values)
        for f, (feature, axis) in enumerate(zip(self.schema.features, self.axes, strict=True)):
            if axis is None:
                places[:, f] = (places[:, f] - feature.location) / feature.scale
            else:
                places[:, f] = axis[np.clip(values[:, f], 0, len(axis) - 1).astype(np.int64)]
        return torch.from_numpy(np.clip(places, -FARTHEST, FARTHEST)).float()

    def distances(self, positions: Tensor, known: Tensor, own: Tensor | None = None) -> Tensor:
        """(R,) mean distance to the nearest exemplars: differences in standard deviations, 0 or 1/chance for words,
        summed over the features that both have and scaled up to all. positions: (R, F) in units of `deviations`; known:
        (R, F); own: (R,) each record's own exemplar, which is left out."""
        R, F = positions.shape
        out = torch.empty(R, device=positions.device)
        step = max(1, WORK // max(1, self.exemplars * F))
        for start in range(0, R, step):
            rows = slice(start, start + step)
            apart = self._apart(positions[rows], known[rows])
            if own is not None:
                apart.scatter_(1, own[rows, None], torch.inf)
            nearest = min(NEAREST, self.exemplars - (own is not None))
            out[rows] = torch.topk(apart, nearest, largest=False).values.mean(1)
        return out

    def _apart(self, positions: Tensor, known: Tensor) -> Tensor:
        """(R, M) distances."""
        if not self.words.any() and self.turns is None and bool(known.all()) and bool(self.known.all()):
            return torch.cdist(positions, self.positions, p=1.0)
        apart = (positions[:, None] - self.positions).abs()
        if self.turns is not None:
            turns = self.turns.to(apart) / self.deviations
            apart = apart % turns
            apart = torch.minimum(apart, turns - apart)
        apart = torch.where(self.words, (apart > 0) / self.deviations, apart)
        both = known[:, None] & self.known
        return (apart * both).sum(-1) * positions.shape[1] / both.sum(-1).clamp(min=1)

    def scores(self, codes: NDArray[np.int64], values: Floats, excess: Floats) -> Floats:
        """Larger is more anomalous; 1 each for distance and excess is the 90% quantile of normal records.

        codes: (R, L) the readings of each record, −1 for padding; values: (R, L) normalised units or label codes;
        excess: (R,) Σ(−ln p − H) of the record."""
        F = len(self.schema)
        values_by, known = np.zeros((len(codes), F + 1)), np.zeros((len(codes), F + 1), bool)
        place = np.where(codes < 0, F, codes)  # padding goes to a column of its own
        np.put_along_axis(values_by, place, values, 1)
        np.put_along_axis(known, place, codes >= 0, 1)
        device = self.positions.device
        positions = self.place(values_by[:, :F]).to(device) / self.deviations
        far = self.distances(positions, torch.from_numpy(known[:, :F]).to(device)).double().cpu().numpy()
        (median, spread), (usual, beyond) = self.typical.double().cpu().numpy()
        score: Floats = (far - median) / spread + EXCESS * (excess - usual) / beyond
        return score


def _numeric(feature: Feature) -> bool:
    try:
        return all(np.isfinite(float(label)) for label in feature.labels)
    except ValueError:
        return False


def _axis(feature: Feature) -> Floats | None:
    """(labels + 1,) places of labels and of one never seen; None for numbers."""
    if feature.kind == "continuous":
        return None
    if not _numeric(feature):
        return np.arange(len(feature.labels) + 1, dtype=np.float64)
    numbers = np.array([float(label) for label in feature.labels])
    return np.append(numbers, numbers.max() + max(float(np.ptp(numbers)), 1.0))
