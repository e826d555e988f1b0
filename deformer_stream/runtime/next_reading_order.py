"""Scores of complete records whose readings are taken in the order that the ranking of next readings chooses.

`calibrate --order next` uses them. The readings of a log have arrived in some order. If a record becomes suspicious,
its most informative remaining reading is scored next instead (`engine.next_reading_ranking`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.engine.next_reading import DEFAULT_SUSPICIOUS
from deformer_stream.engine.record_scores import compute_record_scores
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.load_network import load_network
from deformer_stream.model.parameters import Model
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]

RECORDS_PER_PASS = 256
"""Number of records whose orders are chosen at the same time."""


class RecordReadingsSink:
    """A sink that keeps the scored readings of every record that is closed, in the order of arrival.

    Args:
        schema: The features of the model.
    """

    def __init__(self, schema: Schema) -> None:
        self._num_features = len(schema)
        self._open: dict[str, list[tuple[int, float]]] = {}
        # A record id can come again after its record was closed. The records of an id are in the order of closing.
        self._closed: dict[str, list[list[tuple[int, float]]]] = {}

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Keep the readings of one batch.

        Args:
            effects: What the engine returned for the batch.
            data: The messages from which the batch was decoded. They are not used.
        """
        batch = effects.batch
        for event in effects.scored.event_indices.tolist():
            reading = int(batch.features[event]), float(batch.values[event])
            self._open.setdefault(batch.record_ids[event], []).append(reading)
        for record in effects.closed.record_ids:
            readings = self._open.pop(record, None)
            if readings is not None:
                self._closed.setdefault(record, []).append(readings)

    def get_matrices(self, record_ids: Sequence[str]) -> tuple[Floats, NDArray[np.int64]]:
        """Return closed records as matrices.

        Args:
            record_ids: N record ids in any order. An id that was closed twice is contained twice.

        Returns:
            (N, F) values of N records, in the order of the ids, and F features, in raw units or label codes, NaN if
            missing. (N, L) the feature codes of the readings in the order of arrival, −1 as padding. Records with the
            same id are in the order of closing.
        """
        remaining = {record: iter(closed) for record, closed in self._closed.items()}
        records = [next(remaining[record]) for record in record_ids]
        longest = max(map(len, records), default=0)
        values = np.full((len(records), self._num_features), np.nan)
        orders = np.full((len(records), longest), -1, np.int64)
        for row, readings in enumerate(records):
            for position, (code, value) in enumerate(readings):
                values[row, code] = value
                orders[row, position] = code
        return values, orders

    def flush(self) -> None:
        """Do nothing, because the sink writes nothing."""

    def close(self) -> None:
        """Do nothing, because the sink writes nothing."""


def score_in_chosen_order(
    model: Model,
    calibration: Calibration,
    record_ids: Sequence[str],
    values: Floats,
    orders: NDArray[np.int64],
    alpha: float,
    suspicious: float = DEFAULT_SUSPICIOUS,
) -> Floats:
    """Return the anomaly scores of N records whose readings are taken in the chosen order, (N,).

    Args:
        model: The features, hyperparameters and weights.
        calibration: The calibration whose p-values decide which records are suspicious.
        record_ids: N record ids.
        values: (N, F) values in raw units or label codes, NaN if missing.
        orders: (N, L) feature codes in the order of arrival, −1 as padding.
        alpha: The false-alarm rate of the alert.
        suspicious: Largest p-value of a suspicious record.

    Raises:
        ConfigError: The readings of the model are irregular, or PyTorch is not installed.
    """
    network = load_network(model, "choosing the next reading")
    # Imported here, because it imports PyTorch.
    from deformer_stream.engine.next_reading_ranking import arrange_by_next_reading

    kernels = CpuKernels.for_model(model)
    scores = [np.empty(0)]
    for start in range(0, len(values), RECORDS_PER_PASS):
        part = slice(start, start + RECORDS_PER_PASS)
        chosen = arrange_by_next_reading(
            network, calibration, record_ids[part], values[part], orders[part], alpha, suspicious
        )
        codes = np.maximum(chosen, 0)
        normalised = model.schema.normalise(codes, np.take_along_axis(values[part], codes, 1))
        scores.append(compute_record_scores(kernels, model, chosen, np.nan_to_num(normalised)).statistics)
    return np.concatenate(scores)
