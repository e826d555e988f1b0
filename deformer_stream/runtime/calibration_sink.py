"""A sink that collects anomaly scores and readings during a replay of normal records, to make a new calibration.

A calibration holds the scores of normal records, to which the scores of new records are compared for their p-values.
What is collected does not depend on the order in which records close. So it is the same if processes collect parts of
the records, and the parts are merged.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift import RecordReadings
from deformer_stream.calibration.seen_records import RecordHasher
from deformer_stream.codec.payloads import Messages, Payload, UnreadablePayload, WideRows
from deformer_stream.engine.events import Effects
from deformer_stream.engine.record_scores import average_neg_log_p_by_feature
from deformer_stream.errors import ConfigError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.parameters import Model
from deformer_stream.model.schema import Schema

NUM_RECORDS_WITH_READINGS = 2_000
"""Number of records whose readings are kept to compute the mean negative log p-value of each feature."""

Readings = Sequence[tuple[int, float]]
"""The readings of a record in the order of arrival, each as feature code and raw value."""


@dataclass(frozen=True, slots=True)
class CollectedRecords:
    """What a calibration is made of: the scores of N closed records, and the readings of some of them.

    Attributes:
        record_ids: Ids of the N records in alphabetical order. Records with the same id are in the order of closing.
        max_statistics: (N,) the final anomaly score of each record; larger is more anomalous. It is the largest prefix
            statistic (anomaly score of the record after its first k readings).
        record_scores: (N,) the anomaly score of each record as a whole; None with irregular readings. Irregular
            readings have no complete records; evidence states the p-value of their cumulative sums.
        fingerprints: (N,) the fingerprint of each record: a hash of its readings (`RecordHasher`).
        readings_by_record: The readings of at most `NUM_RECORDS_WITH_READINGS` records by id. The records are those
            with the smallest hashes of their ids.
        has_wide_rows: Whether the input had rows of wide tables (one record per row), which have no order of arrival.
        has_ordered_readings: Whether the input had other readings, which have an order of arrival.
    """

    record_ids: list[str]
    max_statistics: NDArray[np.float64]
    record_scores: NDArray[np.float64] | None
    fingerprints: NDArray[np.uint64]
    readings_by_record: Mapping[str, Readings]
    has_wide_rows: bool
    has_ordered_readings: bool

    @staticmethod
    def merge(parts: Iterable[CollectedRecords]) -> CollectedRecords:
        """Return the records of at least one part together. Records with the same id must be in the same part.

        An iterator can read one part after the other: of each part, only the readings that are still kept remain.
        """
        record_ids: list[str] = []
        max_statistics: list[NDArray[np.float64]] = []
        scores: list[NDArray[np.float64] | None] = []
        fingerprints: list[NDArray[np.uint64]] = []
        readings: dict[str, Readings] = {}
        has_wide_rows = has_ordered_readings = False
        for part in parts:
            record_ids += part.record_ids
            max_statistics.append(part.max_statistics)
            scores.append(part.record_scores)
            fingerprints.append(part.fingerprints)
            readings |= part.readings_by_record
            chosen = heapq.nsmallest(NUM_RECORDS_WITH_READINGS, readings, key=_hash_id)
            readings = {record: readings[record] for record in chosen}
            has_wide_rows |= part.has_wide_rows
            has_ordered_readings |= part.has_ordered_readings
        known_scores = [part_scores for part_scores in scores if part_scores is not None]
        return CollectedRecords(
            record_ids,
            np.concatenate(max_statistics),
            np.concatenate(known_scores) if len(known_scores) == len(scores) else None,
            np.concatenate(fingerprints),
            readings,
            has_wide_rows,
            has_ordered_readings,
        )._sort()

    def _sort(self) -> CollectedRecords:
        """Return the records in the order of their ids."""
        order = sorted(range(len(self.record_ids)), key=self.record_ids.__getitem__)  # stable
        return replace(
            self,
            record_ids=[self.record_ids[index] for index in order],
            max_statistics=self.max_statistics[order],
            record_scores=None if self.record_scores is None else self.record_scores[order],
            fingerprints=self.fingerprints[order],
        )

    def average_neg_log_p_by_feature(self, model: Model, record_ids: Collection[str]) -> dict[str, float]:
        """Return the mean negative log p-value of the kept readings of each feature, over some records.

        It is stored with the calibration, so that a later change of a feature can be detected.

        Args:
            model: The model that computes the p-value of a reading: the probability of a value that is at most as
                likely as the observed one, given the other readings of its record.
            record_ids: Ids of the records to use.

        Returns:
            The mean of −ln p by feature name, in nats. Empty if no readings of these records were kept.
        """
        # For each record, the feature codes and the values of its readings as two arrays.
        records: list[RecordReadings] = []
        chosen = set(record_ids)
        for record_id, readings in sorted(self.readings_by_record.items()):  # sums depend on the order
            if record_id not in chosen:
                continue
            codes, values = zip(*readings, strict=True)
            records.append(RecordReadings(np.array(codes, np.int64), np.array(values)))
        return average_neg_log_p_by_feature(CpuKernels.for_model(model), model, records)

    def find_arrival_order(self, order_of_rows: str, requested_order: str | None) -> str:
        """Return the name of the order in which the readings of the collected records were scored.

        The calibration states it, because it holds only for new records whose readings arrive in the same kind of
        order.

        Args:
            order_of_rows: Order in which the readings of a row of a wide table were scored: "arrival" for the column
                order, "schema" for the model's feature order, or "random".
            requested_order: Order that the user requested with `--order` for all input; None without the option.

        Returns:
            "arrival", "schema" or "random".

        Raises:
            ConfigError: If some records were scored in another order than the others.
        """
        # Without the option, readings that do not come from rows of wide tables are scored in their order of arrival.
        order_of_other_readings = requested_order or "arrival"
        if not self.has_wide_rows:
            return order_of_other_readings
        if self.has_ordered_readings and requested_order is None and order_of_rows != order_of_other_readings:
            raise ConfigError(
                "the input has tables with one record per row, which have no order of arrival, and other files, which "
                "have one; give --order, or only one kind of file"
            )
        return order_of_rows


class MaxStatisticSink:
    """A sink that keeps the final anomaly score of every record that is closed with at least one reading.

    A new calibration of a model is made from these scores. The final score is the largest prefix statistic of the
    record. A prefix statistic is the anomaly score of the record after its first k readings.
    """

    def __init__(self, schema: Schema) -> None:
        """Create a sink without records.

        Args:
            schema: The features of the model, whose names enter the fingerprints of the records.
        """
        self._record_ids: list[str] = []
        self._has_wide_rows = self._has_ordered_readings = False
        self._max_statistics: list[NDArray[np.float64]] = []
        self._record_scores: list[NDArray[np.float64]] = []
        self._is_irregular = schema.reading_times is not None
        self._readings_by_record: dict[str, list[tuple[int, float]]] = {}  # feature code and raw value
        # Statistics of each feature are not computed from irregular readings, whose times are not kept.
        self._max_kept_records = NUM_RECORDS_WITH_READINGS if schema.reading_times is None else 0
        self._kept_hashes: list[tuple[int, str]] = []  # a heap of the records with readings, largest hash first
        self._hasher = RecordHasher(schema)
        self._hash_sum_by_open_record: dict[str, int] = {}
        self._fingerprints: list[int] = []

    def collect(self) -> CollectedRecords:
        """Return the records that were closed."""
        return CollectedRecords.merge(
            [
                CollectedRecords(
                    self._record_ids,
                    np.concatenate([np.empty(0), *self._max_statistics]),
                    None if self._is_irregular else np.concatenate([np.empty(0), *self._record_scores]),
                    np.array(self._fingerprints, np.uint64),
                    self._readings_by_record,
                    self._has_wide_rows,
                    self._has_ordered_readings,
                )
            ]
        )

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Collect the final scores of the records that one turn of the pipeline's loop closed.

        Also keep some of the scored readings, and whether the input had rows of wide tables.

        Args:
            effects: The results of the turn.
            data: The messages or table rows of the turn, or None if there were none.
        """
        is_wide = isinstance(data, WideRows)
        self._has_wide_rows |= is_wide
        # Malformed rows of a wide CSV file come as messages that hold no readings.
        is_unreadable = isinstance(data, Messages) and all(isinstance(p, UnreadablePayload) for p in data.payloads)
        self._has_ordered_readings |= data is not None and not is_wide and not is_unreadable
        self._keep_readings(effects)
        closed = effects.closed
        indices = np.flatnonzero(closed.num_readings > 0)  # a record without readings has no score
        closed_ids = [closed.record_ids[i] for i in indices.tolist()]
        self._record_ids += closed_ids
        self._fingerprints += [self._hash_sum_by_open_record.pop(record_id, 0) for record_id in closed_ids]
        self._max_statistics.append(closed.score[indices])  # the score is the largest prefix statistic
        self._record_scores.append(closed.anomaly_score[indices])

    def _keep_readings(self, effects: Effects) -> None:
        """Keep the scored readings of some records, for statistics of each feature.

        More readings are not needed. Of all records, add the hashes of the readings to their fingerprints.

        Args:
            effects: The results of one turn of the pipeline's loop.
        """
        batch, event_indices = effects.batch, effects.scored.event_indices
        record_ids = [batch.record_ids[event_index] for event_index in event_indices.tolist()]
        codes, values = batch.features[event_indices], batch.values[event_indices]
        hash_sums = self._hash_sum_by_open_record
        for record_id, reading_hash in zip(record_ids, self._hasher.hash_readings(codes, values).tolist(), strict=True):
            hash_sums[record_id] = (hash_sums.get(record_id, 0) + reading_hash) % 2**64
        for record_id in dict.fromkeys(record_ids):
            self._choose_record(record_id)
        for record_id, code, value in zip(record_ids, codes.tolist(), values.tolist(), strict=True):
            if record_id in self._readings_by_record:
                self._readings_by_record[record_id].append((code, value))

    def _choose_record(self, record_id: str) -> None:
        """Keep the readings of a record from now on if the hash of its id is among the smallest so far.

        The limit only falls. So a record that is kept at the end was kept since its first reading.
        """
        if record_id in self._readings_by_record or not self._max_kept_records:
            return
        entry = -_hash_id(record_id), record_id
        if len(self._kept_hashes) < self._max_kept_records:
            heapq.heappush(self._kept_hashes, entry)
        elif entry[0] <= self._kept_hashes[0][0]:
            return
        else:
            _, dropped = heapq.heapreplace(self._kept_hashes, entry)
            del self._readings_by_record[dropped]
        self._readings_by_record[record_id] = []

    def flush(self) -> None:
        """Do nothing, because the sink writes nothing."""

    def close(self) -> None:
        """Do nothing, because the sink writes nothing."""


def _hash_id(record_id: str) -> int:
    """Return the hash of a record id, by which records are chosen whatever their order: 64 bits."""
    return int.from_bytes(hashlib.blake2b(record_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())
