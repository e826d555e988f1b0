"""Why an alert: each reading's surprise, and what was expected in its place when it came."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.core.batch import Contribution, Expected
from deformer_stream.core.cache import tensor
from deformer_stream.core.heads import Conditional
from deformer_stream.core.model import DEformer
from deformer_stream.core.schema import Schema

LOW, MEDIAN, HIGH = 0.05, 0.5, 0.95


def expected_ranges(schema: Schema, codes: NDArray[np.int64], conditional: Conditional) -> list[Expected]:
    """The 5% quantile, median and 95% quantile in raw units of M conditionals; the likeliest label of discrete ones."""
    low, middle, high = (
        schema.denormalise(codes, conditional.quantile(q).double().cpu().numpy()) for q in (LOW, MEDIAN, HIGH)
    )
    modes = conditional.mode_code().long().cpu().numpy() if schema.discrete[codes].any() else None
    out = []
    for i, code in enumerate(codes):
        feature = schema.features[code]
        if feature.kind == "continuous":
            out.append(Expected(float(low[i]), float(middle[i]), float(high[i])))
        else:
            assert modes is not None  # noqa: S101 - a discrete code is among the codes
            mode = int(modes[i])
            out.append(Expected(None, feature.labels[mode] if mode < len(feature.labels) else None, None))
    return out


def contributions(
    model: DEformer, codes: NDArray[np.int64], values: NDArray[np.float64], unseen: dict[int, str]
) -> tuple[Contribution, ...]:
    """One record's readings in arrival order (codes (L,), raw values (L,)), the most surprising first.

    Surprises are −ln of the highest-density p-value given the readings before, in nats; expected ranges are given
    those readings, too. Context is left out. unseen: texts of labels the model does not know, by place.
    """
    schema = model.schema
    features = torch.from_numpy(codes[None]).to(model.device)
    x = tensor(schema.normalise(codes, values)[None], model)
    with torch.inference_mode():
        conditional = model.conditionals(features, x)
        surprise = -conditional.log_p_value(x)[0].double().cpu().numpy()
        ranges = expected_ranges(schema, codes, conditional[0])
    parts = [
        Contribution(schema.names[code], _shown(schema, int(code), float(values[i]), unseen.get(i)), float(surprise[i]), ranges[i])
        for i, code in enumerate(codes)
        if not schema.context[code]
    ]
    return tuple(sorted(parts, key=lambda part: -part.surprise))


def _shown(schema: Schema, code: int, value: float, text: str | None) -> float | str | None:
    """A value as a person knows it: the number, or the label's text."""
    labels: Sequence[str] = schema.features[code].labels
    if not labels:
        return value
    return labels[int(value)] if value < len(labels) else text
