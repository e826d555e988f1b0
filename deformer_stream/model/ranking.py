"""Ranking of complete records by how anomalous they are.

Alerts need a statistic that is comparable from reading to reading while a record is open. A ranking of complete records
can use all readings at once. If there are few training records, the distance to the nearest of them is the best simple
ranking, because it needs no training. It misses anomalies in the relation of a few features, which the density of the
network detects. The score is therefore the sum of the distance and the centered NLL (negative log-likelihood of the
readings minus its expectation). Each of the two is in units of its spread among normal records. On some tables the
density of the Gaussian prior, or that of the readings without regard to one another, is a further term
(`exemplars.Exemplars`).

Shapes use these letters: R is the number of records, F the number of features, M the number of exemplars (stored
training records).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.model.exemplars import NUM_NEIGHBORS, compute_positions, has_unordered_labels
from deformer_stream.model.schema import Schema

FloatArray = NDArray[np.float64]

MAX_DIFFERENCES = 4_000_000
"""The largest number of differences between readings of records and of exemplars that are computed at once."""


class Ranking(nn.Module):
    """A nearest-neighbour ranking of complete records, relative to M stored training records (exemplars).

    A record that is far from its nearest exemplars is anomalous. To compare readings, each one is represented by a
    number, its position: the scaled value, or a number for the label (`compute_positions`). The distance of two records
    is the sum of the absolute differences of their positions over the F features. The difference of each feature is
    first divided by its typical size in training (`deviations`).

    Args:
        schema: The F features.
        num_exemplars: The number M of exemplars.
        num_terms: Number of terms of the ranking.

    Attributes:
        positions: (M, F), the positions of the readings of the exemplars, divided by `deviations`. This and the
            following attributes are buffers with default values, until training sets them.
        known: (M, F) bool, false where the exemplar has no reading of the feature.
        deviations: (F,), the typical difference of each feature, which is the standard deviation of its positions in
            training without extreme values. For labels that are not numbers, it is the probability that two records
            have different labels.
        typical: (`num_terms`, 2), statistics of normal records. Row 0 is for the distance to the nearest exemplars, row
            1 for the centered NLL (negative log-likelihood minus its expectation). Further rows are for −ln p of the
            record under the Gaussian prior, and for −ln p of the readings without regard to one another, for as far as
            these are terms. Column 0 is the median, column 1 the difference between the 90% quantile and the median, or
            the standard deviation if they are equal.
    """

    is_text_label: Tensor
    cycle_lengths: Tensor | None
    positions: Tensor
    known: Tensor
    deviations: Tensor
    typical: Tensor

    def __init__(self, schema: Schema, num_exemplars: int, num_terms: int = 2) -> None:
        super().__init__()
        self.schema = schema
        is_text_label = [has_unordered_labels(feature) for feature in schema.features]
        # Labels that are not numbers have no order: they are only compared for equality.
        self.register_buffer("is_text_label", torch.tensor(is_text_label), persistent=False)
        cycle_lengths = torch.tensor(schema.cycle_lengths) if schema.is_cyclic.any() else None
        self.register_buffer("cycle_lengths", cycle_lengths, persistent=False)
        # Training sets these four buffers. Their names are part of the keys in model.safetensors.
        shape = (num_exemplars, len(schema))
        self.register_buffer("positions", torch.zeros(shape))
        self.register_buffer("known", torch.ones(shape, dtype=torch.bool))
        self.register_buffer("deviations", torch.ones(len(schema)))
        self.register_buffer("typical", torch.tensor([[0.0, 1.0]], dtype=torch.float64).repeat(num_terms, 1))

    @property
    def num_exemplars(self) -> int:
        """The number of exemplars, the training records that are stored to compare other records with."""
        return len(self.positions)

    def compute_positions(self, values: FloatArray) -> Tensor:
        """Return the number that represents each reading (`exemplars.compute_positions`).

        Args:
            values: (R, F), for each of R records the normalised values or label codes of the F features; any value for
                a missing reading.

        Returns:
            (R, F) float32 positions, not yet divided by the deviations of the features.
        """
        return torch.from_numpy(compute_positions(self.schema, values))

    def compute_distances(self, positions: Tensor, known: Tensor, own_exemplar: Tensor | None = None) -> Tensor:
        """Return the mean distance of each record to its nearest exemplars.

        The distance of two records is the sum of the absolute differences of their readings. Features that one of the
        two records lacks are left out, and the sum is scaled up accordingly (`_compute_pairwise_distances`).

        Args:
            positions: (R, F), the numbers that represent the readings of R records for the F features. They are
                computed by `compute_positions` and divided by the attribute `deviations` (typical differences).
            known: (R, F) bool, false where the record has no reading of the feature. Its position is then ignored.
            own_exemplar: (R,), for each record the index of an exemplar to leave out. In training the records are
                themselves exemplars, and their distance to themselves would be 0. By default none is left out.

        Returns:
            (R,), the mean of the distances to the `NUM_NEIGHBORS` nearest exemplars, or to all if there are fewer.
            Exemplars without a common feature are left out; NaN if no other remains.
        """
        num_records, num_features = positions.shape
        distances = torch.empty(num_records, device=positions.device)
        num_candidates = self.num_exemplars if own_exemplar is None else self.num_exemplars - 1
        num_neighbors = min(NUM_NEIGHBORS, num_candidates)
        # Each record has a difference of positions for each exemplar and feature. Process the records in chunks, to
        # limit the memory for these differences.
        rows_at_once = max(1, MAX_DIFFERENCES // max(1, self.num_exemplars * num_features))
        for start in range(0, num_records, rows_at_once):
            rows = slice(start, start + rows_at_once)
            distances_to_exemplars = self._compute_pairwise_distances(positions[rows], known[rows])
            if own_exemplar is not None:
                # With an infinite distance, the exemplar to leave out is never among the nearest.
                distances_to_exemplars.scatter_(1, own_exemplar[rows, None], torch.inf)
            nearest_distances = torch.topk(distances_to_exemplars, num_neighbors, largest=False).values
            # The mean of none is NaN.
            distances[rows] = nearest_distances.where(nearest_distances.isfinite(), torch.nan).nanmean(1)
        return distances

    def _compute_pairwise_distances(self, positions: Tensor, known: Tensor) -> Tensor:
        """Return the distance of each record to each exemplar (stored training record).

        The distance is the sum of the absolute differences of positions over the features that both records have. It
        is multiplied by F / (number of these features), so that records with missing readings are comparable. Two
        values of a cyclic feature, such as times of day, differ by the shorter way around the cycle. Two different
        labels that are not numbers differ by 1. All differences are divided by the feature's entry of `deviations`, its
        typical difference. The distance of two records without a common feature is infinite.

        Args:
            positions: (R, F), the numbers that represent the readings of R records for the F features. They are
                computed by `compute_positions` and divided by the attribute `deviations`.
            known: (R, F) bool, false where the record has no reading of the feature. Its position is then ignored.

        Returns:
            (R, M), the distance of each record to each of the M exemplars.
        """
        has_only_numbers = not self.is_text_label.any() and self.cycle_lengths is None
        if has_only_numbers and bool(known.all()) and bool(self.known.all()):
            # The common case needs only sums of absolute differences, for which there is a fast function.
            return torch.cdist(positions, self.positions, p=1.0)
        differences = (positions[:, None] - self.positions).abs()  # (R, M, F)
        if self.cycle_lengths is not None:
            # The length is infinite for features that are not cyclic; their differences stay unchanged.
            cycle_lengths = self.cycle_lengths.to(differences) / self.deviations
            differences = differences % cycle_lengths
            differences = torch.minimum(differences, cycle_lengths - differences)
        differences = torch.where(self.is_text_label, (differences > 0) / self.deviations, differences)
        both_known = known[:, None] & self.known  # (R, M, F)
        num_features = positions.shape[1]
        num_shared = both_known.sum(-1)
        sums = (differences * both_known).sum(-1)
        # The divisor is at least 1, to avoid a division by 0.
        return torch.where(num_shared > 0, sums * num_features / num_shared.clamp(min=1), torch.inf)
