"""Why an alert: each reading's surprise, and what was expected in its place when it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.core.batch import Contribution, Expected
from deformer_stream.core.cache import tensor
from deformer_stream.core.model import DEformer
from deformer_stream.core.schema import Feature

EXPECTED = (0.05, 0.5, 0.95)
"""The quantiles shown as what was expected."""

BATCH_READINGS = 8192
"""Readings explained in one pass."""


def contributions(
    model: DEformer, codes: NDArray[np.int64], values: NDArray[np.float64], unseen: Sequence[Mapping[int, str]]
) -> list[tuple[Contribution, ...]]:
    """The readings of A records in arrival order, the most surprising first.

    codes: (A, L), −1 padding at the end; values: (A, L) raw. unseen: per record, texts of labels the model does not
    know, by place. Surprises are −ln of the highest-density p-value given the readings before, in nats; expected ranges
    are given those readings, too. Context is left out.
    """
    step = max(1, BATCH_READINGS // max(1, codes.shape[1]))
    out = []
    for start in range(0, len(codes), step):
        part = slice(start, start + step)
        out += _explained(model, codes[part], values[part], unseen[part])
    return out


def _explained(
    model: DEformer, codes: NDArray[np.int64], values: NDArray[np.float64], unseen: Sequence[Mapping[int, str]]
) -> list[tuple[Contribution, ...]]:
    schema = model.schema
    known = np.maximum(codes, 0)
    x = tensor(schema.normalise(known, values), model)
    with torch.inference_mode():
        conditional = model.conditionals(tensor(codes, model), x)
        surprise = -conditional.log_p_value(x).double().cpu().numpy()
        quantiles = schema.denormalise(known, conditional.quantiles(EXPECTED).double().cpu().numpy())
        modes = conditional.mode_code().long().cpu().numpy()
    out = []
    for a in range(len(codes)):
        parts = []
        for i in np.flatnonzero((codes[a] >= 0) & ~schema.context[known[a]]).tolist():
            feature = schema.features[codes[a, i]]
            shown = _shown(feature, float(values[a, i]), unseen[a].get(i))
            expected = _expected(feature, quantiles[:, a, i], int(modes[a, i]))
            parts.append(Contribution(feature.name, shown, float(surprise[a, i]), expected))
        out.append(tuple(sorted(parts, key=lambda part: -part.surprise)))
    return out


def _expected(feature: Feature, quantiles: NDArray[np.float64], mode: int) -> Expected:
    """Quantiles in raw units, or the likeliest label."""
    if feature.kind == "continuous":
        return Expected(*(float(q) for q in quantiles))
    return Expected(None, feature.labels[mode] if mode < len(feature.labels) else None, None)


def _shown(feature: Feature, value: float, text: str | None) -> float | str | None:
    """A value as a person knows it: the number, or the label's text."""
    if feature.kind == "continuous":
        return value
    return feature.labels[int(value)] if value < len(feature.labels) else text
