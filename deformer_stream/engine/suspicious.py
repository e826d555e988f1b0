"""Which open records are suspicious and have not alerted, and for which of them the reading to take next is stated."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_ALERT, SuspiciousRecord
from deformer_stream.engine.model_versions import ModelVersions
from deformer_stream.engine.records import RecordTable

Ints = NDArray[np.int64]
Key = tuple[int, str]
"""Partition number and id of a record. The row of a record in the table changes with the model, its key does not."""

MAX_WAITING = 1024
"""Largest number of records that wait for their ranking. If there are more, the least suspicious ones do not wait until
their next reading."""


class SuspiciousRecords:
    """The suspicious records of the assigned partitions that have not alerted.

    Each of them waits until its next reading is ranked and stated. A change of the record withdraws the statement, and
    the record waits again if it is still suspicious. The set follows from the state of the records. A new run takes it
    over from the restored records (`take_over`), so that it can withdraw what the previous run has stated.

    Args:
        largest_p_value: Largest p-value of a suspicious record.
    """

    def __init__(self, largest_p_value: float) -> None:
        self._largest_p_value = largest_p_value
        # Dictionaries without values are sets that keep the order in which the records were added.
        self._waiting: dict[Key, None] = {}
        self._stated: dict[Key, None] = {}
        self._partitions: set[int] = set()

    def take_over(self, records: RecordTable, partitions: Collection[int]) -> list[Key]:
        """Add the suspicious records of partitions that were assigned, or whose records were scored again.

        A previous run may have stated the next reading of each of them.

        Args:
            records: The table of open records.
            partitions: The partitions whose records are completely restored. Those that were taken over before are
                ignored.

        Returns:
            The records whose statement is withdrawn.
        """
        new = set(partitions) - self._partitions
        if not new:
            return []
        self._partitions |= new
        rows = np.array(records.indices_of_partitions(new), np.int64)
        found = dict.fromkeys(_list_keys(records, rows[self._is_suspicious(records, rows)]))
        withdrawn = [key for key in self._stated if key[0] in new and key not in found]
        self._stated |= found
        self._waiting |= found
        self._drop(withdrawn)
        return withdrawn

    def update(self, records: RecordTable, changed: Ints, ended: Iterable[Key]) -> list[Key]:
        """Update the set after a batch.

        Args:
            records: The table of open records.
            changed: (R,) rows of the open records that the batch has changed.
            ended: The records that the batch has closed.

        Returns:
            The records whose statement is withdrawn.
        """
        # The records of a new partition are known from its first batch on, so they need not be taken over.
        self._partitions.update(np.unique(records.partition_ids[changed]).tolist())
        is_suspicious = self._is_suspicious(records, changed)
        suspicious = _list_keys(records, changed[is_suspicious])
        others = [*_list_keys(records, changed[~is_suspicious]), *ended]
        # An id occurs twice if the batch has closed its record and opened it again.
        withdrawn = [key for key in dict.fromkeys((*suspicious, *others)) if key in self._stated]
        self._drop(withdrawn)
        for key in others:
            self._waiting.pop(key, None)
        self._waiting |= dict.fromkeys(suspicious)
        return withdrawn

    def select(self, records: RecordTable, max_records: int) -> Ints:
        """Return the rows of the most suspicious records that wait, at most this many; they do not wait any more."""
        keys = list(self._waiting)
        rows = np.array([records.partitions[number].record_index_by_id[record] for number, record in keys], np.int64)
        order = np.argsort(records.running["p_value"][rows], kind="stable")[: max_records + MAX_WAITING]
        self._waiting = {keys[index]: None for index in order[max_records:].tolist()}
        selected: Ints = rows[order[:max_records]]
        return selected

    def state(self, keys: Iterable[Key]) -> None:
        """Store that the next readings of records are stated from now on."""
        self._stated |= dict.fromkeys(keys)

    def withdraw_all(self) -> list[Key]:
        """Empty the set, and return the records whose statement is withdrawn."""
        withdrawn = list(self._stated)
        self._stated, self._waiting = {}, {}
        return withdrawn

    def reset_partitions(self) -> None:
        """Let all partitions be taken over again, because their records are scored by another model."""
        self._partitions.clear()
        self._waiting.clear()

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Drop the records of partitions that another process takes over. Their statements stay valid."""
        dropped = set(partitions)
        self._partitions -= dropped
        self._waiting = {key: None for key in self._waiting if key[0] not in dropped}
        self._stated = {key: None for key in self._stated if key[0] not in dropped}

    def _is_suspicious(self, records: RecordTable, rows: Ints) -> NDArray[np.bool_]:
        """Return whether records are suspicious and have not alerted, (R,)."""
        is_silent: NDArray[np.bool_] = records.alert_alpha[rows] == NO_ALERT
        return is_silent & np.asarray(records.running["p_value"][rows] <= self._largest_p_value, np.bool_)

    def _drop(self, withdrawn: Iterable[Key]) -> None:
        """Remove records whose statement is withdrawn."""
        for key in withdrawn:
            del self._stated[key]


def suggest_next_readings(
    records: RecordTable, rows: Ints, versions: ModelVersions, alpha: float, record_timeout: int | None
) -> dict[Key, SuspiciousRecord]:
    """Return the reading to take next of suspicious records, by key; a record with only context features left has none.

    Args:
        records: The table of open records.
        rows: (R,) rows of the records.
        versions: The model versions that score them.
        alpha: The false-alarm rate at which a record would alert.
        record_timeout: `Limits.record_timeout`, which determines when a statement expires.
    """
    # Imported here, because it imports PyTorch, which scoring with compiled kernels does not need.
    from deformer_stream.engine.next_reading_ranking import collect_open_records, suggest_readings

    found: dict[Key, SuspiciousRecord] = {}
    for version, members in versions.group(records, rows):
        chosen = rows[members]
        open_records = collect_open_records(records, chosen)
        next_alphas = np.full(len(chosen), alpha)
        suggestions = suggest_readings(version.network, version.calibration, open_records, next_alphas)
        times = records.find_latest_times(chosen).tolist()
        for row, time, suggestion in zip(chosen.tolist(), times, suggestions, strict=True):
            if suggestion is None:  # only context features are left
                continue
            partition, record = int(records.partition_ids[row]), records.record_ids[row]
            found[partition, record] = SuspiciousRecord(
                record,
                partition,
                time,
                p_value=float(records.running["p_value"][row]),
                features_seen=int(records.num_readings[row]),
                features_expected=len(records.schema) - int(records.num_declared_missing[row]),
                next_reading=suggestion,
                expires=None if record_timeout is None else int(records.last_accepted_at[row]) + record_timeout,
                model=version.fingerprint,
            )
    return found


def _list_keys(records: RecordTable, rows: Ints) -> list[Key]:
    """Return the keys of records."""
    partitions = records.partition_ids[rows].tolist()
    return [(partition, records.record_ids[row]) for partition, row in zip(partitions, rows.tolist(), strict=True)]
