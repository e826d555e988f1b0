"""A sink that collects what a new calibration needs from a replay of normal records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift import average_neg_log_p_by_feature
from deformer_stream.codec.payloads import Payload, WideRows
from deformer_stream.engine.events import Effects
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer

NUM_RECORDS_WITH_READINGS = 2_000
"""Number of records whose readings are kept to compute the mean negative log p-value of each feature."""


class MaxStatisticSink:
    """A sink that keeps the largest prefix statistic of every record that is closed with at least one reading.

    Attributes:
        record_ids: Ids of these records.
        has_wide_rows: Whether rows of wide tables, which have no order of arrival, were among the input.
        has_ordered_readings: Whether readings with an order of arrival were among the input.
    """

    def __init__(self) -> None:
        self.record_ids: list[str] = []
        self.has_wide_rows = self.has_ordered_readings = False
        self._max_statistics: list[NDArray[np.float64]] = []
        self._readings_by_record: dict[str, list[tuple[int, float]]] = {}  # feature code and raw value

    @property
    def max_statistics(self) -> NDArray[np.float64]:
        """(N,) the largest prefix statistic of each of the N records of `record_ids`, larger is more anomalous."""
        return np.concatenate([np.empty(0), *self._max_statistics])

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Collect the records that were closed in one step of the pipeline, and the readings that were scored."""
        is_wide = isinstance(data, WideRows)
        self.has_wide_rows |= is_wide
        self.has_ordered_readings |= data is not None and not is_wide
        self._keep_readings(effects)
        closed = effects.closed
        has_readings = np.flatnonzero(closed.num_readings > 0)
        self.record_ids += [closed.record_ids[i] for i in has_readings.tolist()]
        self._max_statistics.append(closed.score[has_readings])

    def _keep_readings(self, effects: Effects) -> None:
        """Keep the scored readings of the first records."""
        batch, events = effects.batch, effects.scored.event_indices
        rows = zip(events.tolist(), batch.features[events].tolist(), batch.values[events].tolist(), strict=True)
        for event, code, value in rows:
            record = batch.record_ids[event]
            if record in self._readings_by_record or len(self._readings_by_record) < NUM_RECORDS_WITH_READINGS:
                self._readings_by_record.setdefault(record, []).append((code, value))

    def average_neg_log_p_by_feature(self, model: DEformer) -> dict[str, float]:
        """Return the mean of −ln p over the kept readings of each feature, in nats."""
        columns = (tuple(zip(*readings, strict=True)) for readings in self._readings_by_record.values())
        return average_neg_log_p_by_feature(
            model, [(np.array(codes, np.int64), np.array(values)) for codes, values in columns]
        )

    def find_arrival_order(self, order_of_rows: str, requested_order: str | None) -> str:
        """Return the distribution of arrival orders in which the collected records were scored.

        Args:
            order_of_rows: Order of the readings of a row of a wide table.
            requested_order: Order that the user requested for all input, if any.

        Raises:
            ConfigError: The input has records with two different orders.
        """
        if self.has_wide_rows and self.has_ordered_readings and requested_order is None and order_of_rows != "arrival":
            raise ConfigError(
                "rows of wide tables have no order of arrival and the other files have one: give --order, or only "
                "one kind of file"
            )
        return order_of_rows if self.has_wide_rows else requested_order or "arrival"

    def flush(self) -> None:
        """Do nothing, because the sink writes nothing."""

    def close(self) -> None:
        """Do nothing, because the sink writes nothing."""
