"""The exemplars (stored training records) of a model as buffers of the network, which are stored with its weights.

Alerts need a statistic that is comparable from reading to reading while a record is open. A ranking of complete records
can use all readings at once. If there are few training records, the distance to the nearest of them is the best simple
ranking, because it needs no training. It misses anomalies in the relation of a few features, which the density of the
network detects. So the ranking is a sum of both, and on some tables of further terms. `exemplars.Exemplars` computes
it, without PyTorch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.schema import Schema


class Ranking(nn.Module):
    """The M exemplars of a model, to which complete records are compared.

    The names of the buffers are part of the keys in model.safetensors. They have default values until training or a
    stored model sets them.

    Args:
        schema: The F features.
        num_exemplars: The number M of exemplars.
        num_terms: Number of terms of the ranking.

    Attributes:
        schema: The F features.
        positions: (M, F) as in `Exemplars`, like the following ones.
        known: (M, F) bool.
        deviations: (F,).
        typical: (`num_terms`, 2).
    """

    positions: Tensor
    known: Tensor
    deviations: Tensor
    typical: Tensor

    def __init__(self, schema: Schema, num_exemplars: int, num_terms: int = 2) -> None:
        super().__init__()
        self.schema = schema
        shape = (num_exemplars, len(schema))
        self.register_buffer("positions", torch.zeros(shape))
        self.register_buffer("known", torch.ones(shape, dtype=torch.bool))
        self.register_buffer("deviations", torch.ones(len(schema)))
        self.register_buffer("typical", torch.tensor([[0.0, 1.0]], dtype=torch.float64).repeat(num_terms, 1))

    @staticmethod
    def from_exemplars(exemplars: Exemplars) -> Ranking:
        """Return the buffers of exemplars. The densities among the terms have buffers of their own."""
        ranking = Ranking(exemplars.schema, len(exemplars.positions), len(exemplars.typical))
        for name in ("positions", "known", "deviations", "typical"):
            # Exemplars store one feature after the other, and a file of weights one exemplar after the other.
            setattr(ranking, name, torch.from_numpy(np.ascontiguousarray(getattr(exemplars, name))))
        return ranking

    def to_exemplars(self) -> Exemplars:
        """Return the exemplars, without the densities that are further terms of the ranking."""
        return Exemplars(
            self.schema,
            positions=self.positions.float().cpu().numpy(),
            known=self.known.cpu().numpy(),
            deviations=self.deviations.float().cpu().numpy(),
            typical=self.typical.double().cpu().numpy(),
        )

    @property
    def num_exemplars(self) -> int:
        """The number of exemplars, the training records that are stored to compare other records with."""
        return len(self.positions)
