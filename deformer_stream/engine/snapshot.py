"""What outlives a process, as values: a partition's state (`Snapshot`) and what its log cannot tell (`Decisions`).

A partition's state is a function of its log and of a few decisions, those of the clock, of the bound on open records,
and alerts. A snapshot carries the vocabulary that it is written in, so that another model can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift_state import DriftState
from deformer_stream.engine.id_set import BoundedIdSet, StringColumn
from deformer_stream.engine.records import Partition, RecordTable
from deformer_stream.model.schema import Kind, Schema
from deformer_stream.ragged import ragged_indices


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What feature codes and label codes stand for: name, kind and labels per feature."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    labels: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.names)

    @staticmethod
    def from_schema(schema: Schema) -> Vocabulary:
        features = schema.features
        return Vocabulary(schema.names, tuple(f.kind for f in features), tuple(f.labels for f in features))


@dataclass(frozen=True, slots=True)
class TieGroups:
    """Readings of one time, of R records with T readings, where they wait for each other (`engine.ties`).

    tied: (T,) whether a reading is of the block of the one before it. held: (R,) int32, how many of the last readings
    are not judged yet. instant: (R,) int64 their time, or that of the last block, microseconds.
    """

    is_tied: NDArray[np.bool_]
    num_pending: NDArray[np.int32]
    tie_time: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One partition: R open records in the order of their opening, ids remembered as closed, watermarks of devices.

    vocabulary: of all codes. models: fingerprints of the models that scored the records. ids: R record ids. model: (R,)
    int32 into models. age: (R,) int64 microseconds since the last accepted event. counts: (R,) int32 readings of each
    record, which stand one after the other in arrival order in features, (T,) int16 codes, and values, (T,) float64 as
    in `EventBatch`. absent_counts, absent: likewise the features declared as never coming. log_likelihood, scored,
    total, least, peak, excess, p_value, alert_seq, alert_alpha: (R,) the records' running numbers, as in `Records`.
    unseen_record, unseen_place, unseen_text: U labels that the model does not know, by index and place in the record.
    window_record, window_device, window_deadline: the W records that are windows of a device's time.
    closed: ids of closed records, the earliest first. devices, marks: D devices and their latest event times,
    microseconds, the one heard from last at the end. drift: None where nothing is known. ties: None where readings are
    judged one by one.
    """

    vocabulary: Vocabulary
    models: tuple[str, ...]
    ids: list[str]
    model: NDArray[np.int32]
    age: NDArray[np.int64]
    counts: NDArray[np.int32]
    features: NDArray[np.int16]
    values: NDArray[np.float64]
    absent_counts: NDArray[np.int32]
    absent: NDArray[np.int16]
    log_likelihood: NDArray[np.float64]
    scored: NDArray[np.int32]
    total: NDArray[np.float64]
    least: NDArray[np.float64]
    peak: NDArray[np.float64]
    excess: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    alert_alpha: NDArray[np.float64]
    unseen_record: NDArray[np.int32]
    unseen_place: NDArray[np.int32]
    unseen_text: list[str]
    window_record: NDArray[np.int32]
    window_device: list[str]
    window_deadline: NDArray[np.int64]
    closed: StringColumn
    devices: list[str]
    marks: NDArray[np.int64]
    drift: DriftState | None = None
    ties: TieGroups | None = None

    def __len__(self) -> int:
        """Open records."""
        return len(self.ids)

    def reading_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each reading its record and its place in it, each (T,)."""
        return ragged_indices(self.counts)

    def translate(self, vocabulary: Vocabulary) -> tuple[Snapshot, int]:
        """The same in other words: features by name, labels by text. The running numbers are those of the old words.

        A feature that is unknown there, or of another kind, is left out; returns how many readings went with it. An
        alert whose reading went stays, at the reading before.
        """
        if vocabulary == self.vocabulary:
            return self, 0
        code = _feature_codes(self.vocabulary, vocabulary)
        values, texts = self._relabelled(vocabulary, code)
        features = code[self.features]
        keep = features >= 0
        record, _ = self.reading_positions()
        first = np.cumsum(self.counts) - self.counts
        before = np.concatenate([[0], np.cumsum(keep)])  # readings kept before each, over all records
        at = np.clip(self.alert_seq + 1, 0, self.counts)
        alert_seq = np.maximum(before[first + at] - before[first] - 1, 0)
        new = np.array(sorted(i for i in texts if keep[i]), np.int64)  # readings whose label is not known there
        absent = code[self.absent]
        absent_record, _ = ragged_indices(self.absent_counts)
        snapshot = replace(
            self,
            vocabulary=vocabulary,
            counts=np.bincount(record[keep], minlength=len(self)).astype(np.int32),
            features=features[keep],
            values=values[keep],
            absent_counts=np.bincount(absent_record[absent >= 0], minlength=len(self)).astype(np.int32),
            absent=absent[absent >= 0],
            alert_seq=np.where(self.alert_seq < 0, -1, alert_seq).astype(np.int32),
            unseen_record=record[new].astype(np.int32),
            unseen_place=(before[new] - before[first[record[new]]]).astype(np.int32),
            unseen_text=[texts[i] for i in new.tolist()],
            ties=None if self.ties is None else self._kept(self.ties, keep),
        )
        return snapshot, int((~keep).sum())

    def _kept(self, ties: TieGroups, keep: NDArray[np.bool_]) -> TieGroups:
        """Without the readings that are not kept, (T,)."""
        record, place = self.reading_positions()
        block = np.cumsum(~ties.is_tied)[keep]
        waits = keep & (place >= (self.counts - ties.num_pending)[record])
        held = np.bincount(record[waits], minlength=len(self)).astype(np.int32)
        return TieGroups(np.diff(block, prepend=-1) == 0, held, ties.tie_time)

    def _relabelled(
        self, vocabulary: Vocabulary, code: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], dict[int, str]]:
        """(T,) values with the label codes of another vocabulary; and the texts of labels that it does not know, by
        reading. code: from `_feature_codes`."""
        values = self.values.copy()
        first = np.cumsum(self.counts) - self.counts
        at = first[self.unseen_record] + self.unseen_place
        texts = dict(zip(at.tolist(), self.unseen_text, strict=True))
        unknown: dict[int, str] = {}
        for old, new in enumerate(code.tolist()):
            if new < 0 or self.vocabulary.kinds[old] != "discrete":
                continue
            known = {label: k for k, label in enumerate(vocabulary.labels[new])}
            labels = self.vocabulary.labels[old]
            table = np.array([*(known.get(label, len(known)) for label in labels), len(known)], np.float64)
            here = np.flatnonzero(self.features == old)
            values[here] = table[self.values[here].astype(np.int64)]
            for i in here[values[here] == len(known)].tolist():
                label = int(self.values[i])
                text = labels[label] if label < len(labels) else texts.get(i)
                if text in known:
                    values[i] = known[text]
                elif text is not None:
                    unknown[i] = text
        return values, unknown


def _feature_codes(old: Vocabulary, new: Vocabulary) -> NDArray[np.int16]:
    """Per old feature its new code, −1 where there is none of this name and kind."""
    codes = {(name, kind): code for code, (name, kind) in enumerate(zip(new.names, new.kinds, strict=True))}
    pairs = zip(old.names, old.kinds, strict=True)
    return np.array([codes.get(pair, -1) for pair in pairs], np.int16)


# A partition's records out of their arrays into a snapshot, and back. Everything goes column by column.


Ints = NDArray[np.int64]


def export_state(
    records: RecordTable, source: int, now: int, models: Mapping[int, str], drift: DriftState | None = None
) -> Snapshot:
    """What is known of a partition. now: microseconds. models: generation → fingerprint."""
    partition = records.partitions.get(source) or Partition(records.max_closed_ids)
    ids = list(partition.record_index_by_id)
    slots = np.fromiter(partition.record_index_by_id.values(), np.int64, len(ids))
    generations, model = np.unique(records.model_version[slots], return_inverse=True)
    counts = records.num_readings[slots].astype(np.int32)
    record, place = ragged_indices(counts)
    absent_record, absent = _absent(records, slots)
    unseen = _unseen(records, slots)
    windows = partition.watermarks.open_windows()
    index = dict(zip(ids, range(len(ids)), strict=True)) if windows else {}
    marks, running = partition.watermarks.watermark_by_device, records.running
    return Snapshot(
        vocabulary=Vocabulary.from_schema(records.schema),
        models=tuple(models[g] for g in generations.tolist()),
        ids=ids,
        model=model.astype(np.int32),
        age=now - records.last_accepted_at[slots],
        counts=counts,
        features=records.log_feature[slots[record], place],
        values=records.log_value[slots[record], place],
        absent_counts=np.bincount(absent_record, minlength=len(ids)).astype(np.int32),
        absent=absent.astype(np.int16),
        log_likelihood=running["log_likelihood"][slots],
        scored=running["scored"][slots].astype(np.int32),
        total=running["total"][slots],
        least=running["least"][slots],
        peak=running["peak"][slots],
        excess=running["excess"][slots],
        p_value=running["p_value"][slots],
        alert_seq=records.alert_seq[slots],
        alert_alpha=records.alert_alpha[slots],
        unseen_record=np.array([i for i, _, _ in unseen], np.int32),
        unseen_place=np.array([k for _, k, _ in unseen], np.int32),
        unseen_text=[text for _, _, text in unseen],
        window_record=np.array([index[record] for record, _, _ in windows], np.int32),
        window_device=[device for _, device, _ in windows],
        window_deadline=np.array([deadline for _, _, deadline in windows], np.int64),
        closed=partition.closed_ids.to_column(),
        devices=list(marks),
        marks=np.fromiter(marks.values(), np.int64, len(marks)),
        drift=drift,
        ties=_blocks(records, slots) if records.holds_ties else None,
    )


def _blocks(records: RecordTable, slots: Ints) -> TieGroups:
    record, place = ragged_indices(records.num_readings[slots])
    return TieGroups(
        records.log_tied[slots[record], place], records.num_pending[slots].astype(np.int32), records.tie_time[slots]
    )


def _absent(records: RecordTable, slots: Ints) -> tuple[Ints, Ints]:
    """Record (by its place among the slots) and code of every feature declared as never coming."""
    some = np.flatnonzero(records.num_declared_missing[slots] > 0)
    n = len(records.schema)
    missing = np.unpackbits(records.observed_mask[slots[some]], axis=1, count=n, bitorder="little").astype(bool)
    row, place = ragged_indices(records.num_readings[slots[some]])
    missing[row, records.log_feature[slots[some][row], place]] = False
    row, code = np.nonzero(missing)
    return some[row], code


def _unseen(records: RecordTable, slots: Ints) -> list[tuple[int, int, str]]:
    """Record (by its place among the slots), place of the reading, text; in order."""
    index = np.full(records.capacity, -1, np.int64)
    index[slots] = np.arange(len(slots))
    rows = ((int(index[slot]), texts) for slot, texts in records.unseen_labels.items() if index[slot] >= 0)
    return sorted((i, place, text) for i, texts in rows for place, text in texts.items())


def import_state(records: RecordTable, source: int, snapshot: Snapshot, now: int, generation: Ints) -> Ints:
    """The inverse of `export_state`, of a snapshot in the records' own vocabulary; the slots of its records. generation: (R,)
    of each. The partition must be new here."""
    partition = records.partition(source)
    slots = np.array([records.allocate(record, source, partition) for record in snapshot.ids], np.int64)
    records.initialize(slots, np.full(len(slots), source, np.int32), generation)
    records.last_accepted_at[slots] = now - snapshot.age
    records.num_readings[slots], records.num_declared_missing[slots] = snapshot.counts, snapshot.absent_counts
    record, place = snapshot.reading_positions()
    records.log_feature[slots[record], place] = snapshot.features
    records.log_value[slots[record], place] = snapshot.values
    if records.holds_ties:
        ties = snapshot.ties
        records.log_tied[slots[record], place] = False if ties is None else ties.is_tied
        if ties is not None:
            records.num_pending[slots], records.tie_time[slots] = ties.num_pending, ties.tie_time
    settled = np.zeros((len(slots), len(records.schema)), bool)
    settled[record, snapshot.features] = True
    settled[ragged_indices(snapshot.absent_counts)[0], snapshot.absent] = True
    records.observed_mask[slots] = np.packbits(settled, axis=1, bitorder="little")
    for name in records.running.dtype.names or ():
        records.running[name][slots] = getattr(snapshot, name)
    records.alert_seq[slots], records.alert_alpha[slots] = snapshot.alert_seq, snapshot.alert_alpha
    rows, places = snapshot.unseen_record, snapshot.unseen_place
    for slot, at, text in zip(slots[rows].tolist(), places.tolist(), snapshot.unseen_text, strict=True):
        records.unseen_labels.setdefault(slot, {})[at] = text
    rows, deadlines = snapshot.window_record, snapshot.window_deadline
    for i, device, deadline in zip(rows.tolist(), snapshot.window_device, deadlines.tolist(), strict=True):
        partition.watermarks.open_window(device, snapshot.ids[i], deadline)
    partition.closed_ids = BoundedIdSet(records.max_closed_ids, snapshot.closed)
    partition.watermarks.restore(zip(snapshot.devices, snapshot.marks.tolist(), strict=True))
    return slots
