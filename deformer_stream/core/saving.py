"""A partition's records out of their arrays into a snapshot, and back. Everything goes column by column."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deformer_stream.core.partition import Partition
from deformer_stream.core.records import Records
from deformer_stream.core.remembered import Remembered
from deformer_stream.core.snapshot import Blocks, Drift, Snapshot, Vocabulary, ragged

Ints = NDArray[np.int64]


def taken(records: Records, source: int, now: int, models: Mapping[int, str], drift: Drift | None = None) -> Snapshot:
    """What is known of a partition. now: microseconds. models: generation → fingerprint."""
    partition = records.partitions.get(source) or Partition(records.remembered)
    ids = list(partition.slot_of)
    slots = np.fromiter(partition.slot_of.values(), np.int64, len(ids))
    generations, model = np.unique(records.generation[slots], return_inverse=True)
    counts = records.count[slots].astype(np.int32)
    record, place = ragged(counts)
    absent_record, absent = _absent(records, slots)
    unseen = _unseen(records, slots)
    windows = partition.watermarks.windows()
    index = dict(zip(ids, range(len(ids)), strict=True)) if windows else {}
    marks, running = partition.watermarks.marks, records.running
    return Snapshot(
        vocabulary=Vocabulary.of(records.schema),
        models=tuple(models[g] for g in generations.tolist()),
        ids=ids,
        model=model.astype(np.int32),
        age=now - records.last[slots],
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
        closed=partition.closed.texts(),
        devices=list(marks),
        marks=np.fromiter(marks.values(), np.int64, len(marks)),
        drift=drift,
        ties=_blocks(records, slots) if records.ties else None,
    )


def _blocks(records: Records, slots: Ints) -> Blocks:
    record, place = ragged(records.count[slots])
    return Blocks(records.log_tied[slots[record], place], records.held[slots].astype(np.int32), records.instant[slots])


def _absent(records: Records, slots: Ints) -> tuple[Ints, Ints]:
    """Record (by its place among the slots) and code of every feature declared as never coming."""
    some = np.flatnonzero(records.absent[slots] > 0)
    n = len(records.schema)
    missing = np.unpackbits(records.settled[slots[some]], axis=1, count=n, bitorder="little").astype(bool)
    row, place = ragged(records.count[slots[some]])
    missing[row, records.log_feature[slots[some][row], place]] = False
    row, code = np.nonzero(missing)
    return some[row], code


def _unseen(records: Records, slots: Ints) -> list[tuple[int, int, str]]:
    """Record (by its place among the slots), place of the reading, text; in order."""
    index = np.full(records.capacity, -1, np.int64)
    index[slots] = np.arange(len(slots))
    rows = ((int(index[slot]), texts) for slot, texts in records.unseen.items() if index[slot] >= 0)
    return sorted((i, place, text) for i, texts in rows for place, text in texts.items())


def put(records: Records, source: int, snapshot: Snapshot, now: int, generation: Ints) -> Ints:
    """The inverse of `taken`, of a snapshot in the records' own vocabulary; the slots of its records. generation: (R,)
    of each. The partition must be new here."""
    partition = records.partition(source)
    slots = np.array([records.take(record, source, partition) for record in snapshot.ids], np.int64)
    records.begin(slots, np.full(len(slots), source, np.int32), generation)
    records.last[slots] = now - snapshot.age
    records.count[slots], records.absent[slots] = snapshot.counts, snapshot.absent_counts
    record, place = snapshot.places()
    records.log_feature[slots[record], place] = snapshot.features
    records.log_value[slots[record], place] = snapshot.values
    if records.ties:
        ties = snapshot.ties
        records.log_tied[slots[record], place] = False if ties is None else ties.tied
        if ties is not None:
            records.held[slots], records.instant[slots] = ties.held, ties.instant
    settled = np.zeros((len(slots), len(records.schema)), bool)
    settled[record, snapshot.features] = True
    settled[ragged(snapshot.absent_counts)[0], snapshot.absent] = True
    records.settled[slots] = np.packbits(settled, axis=1, bitorder="little")
    for name in records.running.dtype.names or ():
        records.running[name][slots] = getattr(snapshot, name)
    records.alert_seq[slots], records.alert_alpha[slots] = snapshot.alert_seq, snapshot.alert_alpha
    rows, places = snapshot.unseen_record, snapshot.unseen_place
    for slot, at, text in zip(slots[rows].tolist(), places.tolist(), snapshot.unseen_text, strict=True):
        records.unseen.setdefault(slot, {})[at] = text
    rows, deadlines = snapshot.window_record, snapshot.window_deadline
    for i, device, deadline in zip(rows.tolist(), snapshot.window_device, deadlines.tolist(), strict=True):
        partition.watermarks.open(device, snapshot.ids[i], deadline)
    partition.closed = Remembered(records.remembered, snapshot.closed)
    partition.watermarks.restore(zip(snapshot.devices, snapshot.marks.tolist(), strict=True))
    return slots
