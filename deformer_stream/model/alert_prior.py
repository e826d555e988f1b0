"""The p-values of readings under the prior alone, which are a term of the alert's prefix statistic.

The network's conditionals have heavy tails: components with small weights bound −ln p of a reading, however far off its
value is. Those of the Gaussian prior (`gaussian_prior`, `gaussian_process`) have lighter tails, so they show broken
relations between sensors, also in records with many readings, more clearly (docs/experiments/33). The alert uses both.

P_k is the combination of the prior's p-values of the first k readings, as the larger one of Fisher's and Šidák's
statistics combines the network's p-values (`calibration.conformal`). The term is

    (k/L)^a · −ln S_k(P_k)

where S_k is the share of normal records whose first k readings, in the order of arrival, have at least this P_k, under
a prior that was fitted without them. L is the number of features that are scored, and a is `EXPONENT`. S_k is an
exponential tail, so the term is a straight line in P_k, and 0 below its start.

For wide records, the combination of the network's p-values is replaced by such a term, too. Both combinations are near
0 for complete normal records with hundreds of readings, so those of the first few readings would set the threshold of
the alert.

The lines come from training and validation records only, so the statistic is a fixed function of the record, and the
guarantee of the alert rule holds as without the term.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.parameters import Model
from deformer_stream.model.prefix_lines import compute_line_terms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXPONENT = 0.3
"""Power a of the share of readings by which the term is multiplied. Statistics of short prefixes have the heaviest
tails."""
MAX_NEG_LOG_P = 50.0
"""Largest −ln p of a reading under the prior that counts. Light tails would turn a wild value into an anomaly score of
any size."""
NETWORK, PRIOR = 0, 1
"""Rows of the lines of the network's p-values, and of those of the prior."""


@dataclass(frozen=True, slots=True)
class AlertPrior:
    """The lines that turn combined p-values into terms of the alert's statistic.

    Attributes:
        starts: (2, L) for prefixes of 1, 2, …, L readings the combined statistic from which the term is positive: row
            `NETWORK` for the network's p-values, row `PRIOR` for those of the prior.
        slopes: (2, L) by how much the term rises with the statistic from there on; not negative.
    """

    starts: Floats
    slopes: Floats

    @staticmethod
    def for_ranking(model: Model) -> AlertPrior | None:
        """Return the lines of a model for wide records, whose terms after all readings rank complete records.

        None for other models: their ranking has the density of the whole record, which is no sum of hundreds of terms.
        """
        return AlertPrior.from_model(model) if model.config.neighbors else None

    @staticmethod
    def from_model(model: Model) -> AlertPrior | None:
        """Return the lines of a model, None if the prior is no term of its alert."""
        if not model.config.alert_prior:
            return None  # before the parameters of a network on a GPU are copied
        arrays = model.extract_parameters().arrays
        names = "starts", "slopes"
        return AlertPrior(*(np.ascontiguousarray(arrays[f"alert_prior.{name}"], np.float64) for name in names))

    def compute_terms(self, of_network: Floats, of_prior: Floats, num_scored: Ints) -> Floats:
        """Return the sum of both terms for each prefix, of the shape of the arguments; larger is more anomalous.

        Args:
            of_network: The combined statistics of the network's p-values of prefixes.
            of_prior: Those of the p-values under the prior.
            num_scored: The numbers of scored readings of the prefixes.
        """
        terms = compute_line_terms(self.starts, self.slopes, np.stack([of_network, of_prior]), num_scored)
        return np.asarray(terms[NETWORK] + terms[PRIOR])


@dataclass(frozen=True, slots=True)
class PriorPValues:
    """The p-values of readings under the prior alone, with the lines that turn combined p-values into terms.

    Attributes:
        log_p: Natural logarithms of the highest-density p-values, in the shape of the readings; 0 for readings that the
            prior lacks. Those of readings that are not scored are ignored.
        lines: The lines.
    """

    log_p: Floats
    lines: AlertPrior

    @staticmethod
    def pair(lines: AlertPrior | None, log_p: Floats | None) -> PriorPValues | None:
        """Return p-values with the lines of the model; None if the model has no lines, and thus no such p-values."""
        return None if lines is None or log_p is None else PriorPValues(log_p, lines)
