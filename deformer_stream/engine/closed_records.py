"""What the engine adds to closed records: their final scores, the names of their faults, and evidence of drift."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift import DriftMonitor, RecordReadings
from deformer_stream.calibration.fault_classifier import FaultName
from deformer_stream.engine.events import ClosedRecords, CloseReason
from deformer_stream.engine.last_context import find_last_context
from deformer_stream.engine.model_versions import ModelVersions
from deformer_stream.engine.records import RecordTable
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]

UNFORCED_CLOSINGS = frozenset((CloseReason.COMPLETE, CloseReason.WINDOW, CloseReason.TIMEOUT))
"""The reasons for closing after which a record counts as evidence of drift (`DriftMonitor`).

The other reasons close a record before all of its readings have arrived, so its score is not comparable with those of
the calibration records.
"""


def add_final_scores(
    closed: ClosedRecords, records: RecordTable, record_index: Ints, versions: ModelVersions, names_faults: bool
) -> ClosedRecords:
    """Return closed records with the scores by which complete records are ranked, their models, and names of faults.

    These depend on the model, so `RecordTable.close` does not compute them.

    Args:
        closed: R closed records.
        records: The record table, in which their readings are still available.
        record_index: (R,) their rows in the table.
        versions: The model versions that have scored them.
        names_faults: Whether the fault of each alerted record is named by all of its readings.
    """
    anomaly_score, record_p_value = closed.anomaly_score.copy(), closed.record_p_value.copy()
    faults: dict[int, FaultName | None] = {}
    models = [versions.current.fingerprint] * len(closed)
    for version, members in versions.group(records, record_index):
        anomaly_score[members] = version.rank_records(records, record_index[members])
        if version is not versions.current:
            for index in members.tolist():
                models[index] = version.fingerprint
        record_ids = [closed.record_ids[index] for index in members.tolist()]
        p_values = version.calibration.compute_record_p_values(anomaly_score[members], record_ids)
        if p_values is not None:
            record_p_value[members] = p_values
        if names_faults and version.fault_classifier is not None:
            alerted = members[closed.alert_seq[members] >= 0]
            num_readings = closed.num_readings[alerted].astype(np.int64)
            faults |= zip(
                alerted.tolist(), version.name_faults(records, record_index[alerted], num_readings), strict=True
            )
    return replace(
        closed,
        anomaly_score=anomaly_score,
        record_p_value=record_p_value,
        faults=tuple(map(faults.get, range(len(closed)))) if faults else (),
        models=models,
    )


def observe_drift(
    monitor: DriftMonitor, closed: ClosedRecords, records: RecordTable, record_index: Ints, current_version: int
) -> None:
    """Pass closed records to the drift monitor, which tests whether they still resemble the calibration records.

    Three kinds of records are left out. They have no readings, or another model than the current one has scored them,
    or they were closed before all of their readings had arrived.

    Args:
        monitor: The drift monitor.
        closed: R closed records.
        records: The record table, in which their readings are still available.
        record_index: (R,) their rows in the table.
        current_version: Number of the current model version.
    """
    is_unforced = np.array([reason in UNFORCED_CLOSINGS for reason in closed.reasons], bool)
    is_current_model = records.model_version[record_index] == current_version
    observed = (is_unforced & (closed.num_readings > 0) & is_current_model).nonzero()[0]
    observed = observed[closed.partitions[observed].argsort(kind="stable")]  # by partition, then in closing order
    table_rows = record_index[observed]
    monitor.observe(
        closed.partitions[observed].tolist(),
        [closed.record_ids[i] for i in observed.tolist()],
        closed.score[observed],
        # The monitor requests the readings of only a few of the observed records, so they are not all copied.
        get_readings=lambda indexes: _get_last_readings(records, table_rows[indexes]),
    )


def _get_last_readings(records: RecordTable, record_index: Ints) -> list[RecordReadings]:
    """Return the readings of R records; if they are irregular, those of the last block with their context.

    Args:
        records: The record table.
        record_index: (R,) rows of the records in the table.
    """
    if records.is_irregular:
        return [_get_last_block(records, index) for index in record_index.tolist()]
    num_readings = records.num_readings[record_index]
    ends = num_readings.cumsum().tolist()
    row, place = ragged_indices(num_readings)
    codes, values = records.log.gather(record_index[row], place)
    # Copies, because a part of a larger array would keep the readings of all records in memory.
    starts = [0, *ends[:-1]]
    return [RecordReadings(codes[i:j].copy(), values[i:j].copy()) for i, j in zip(starts, ends, strict=True)]


def _get_last_block(records: RecordTable, record_index: int) -> RecordReadings:
    """Return the irregular readings of the last block of a record with their context.

    Args:
        records: The record table.
        record_index: Row of the record in the table.
    """
    num_readings = int(records.num_readings[record_index])
    places, num_context = find_last_context(records, record_index, num_readings)
    rows = np.full(len(places), record_index)
    codes, values = records.log.gather(rows, places)
    return RecordReadings(codes, values, records.ages_of(rows, places), num_context)
