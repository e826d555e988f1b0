"""The adaptation of a snapshot to a model with other features, labels or rules than the model that made it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME
from deformer_stream.engine.snapshot import EventTimes, Snapshot, TieGroups, Vocabulary, WaitingReadings
from deformer_stream.model.cycles import Cycle, compute_circular_mean
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdaptedSnapshot:
    """A snapshot that has the features, labels and rules of a model.

    Attributes:
        snapshot: The snapshot.
        num_dropped_by_feature: Number of readings that were dropped, because the model cannot have them, by the name of
            their feature. Features without a dropped reading are missing.
        is_translated: Whether the records have other readings or features than before, so that they may be complete.
        has_valid_scores: Whether the scores of the records are still those that their models would compute.
    """

    snapshot: Snapshot
    num_dropped_by_feature: Counter[str]
    is_translated: bool
    has_valid_scores: bool


def adapt_snapshot(snapshot: Snapshot, schema: Schema, holds_ties: bool) -> AdaptedSnapshot:
    """Return a snapshot in the form that a model needs.

    Args:
        snapshot: The snapshot, possibly of another model.
        schema: The schema of the model.
        holds_ties: Whether readings of one record with the same event time are scored together as a tie group.
    """
    has_ties = snapshot.ties is not None
    is_translated = False
    if snapshot.waiting is not None and not _can_wait(snapshot, schema):
        # The model does not combine the readings of a time slot in the same way. So the readings that wait for the end
        # of their slot are added to their records now.
        snapshot, is_translated = _accept_waiting(snapshot, snapshot.waiting), True
    num_before = _count_readings(snapshot)
    vocabulary, is_irregular = Vocabulary.from_schema(schema), schema.reading_times is not None
    if snapshot.vocabulary != vocabulary:
        # The snapshot has other features or labels. Its codes are translated to those of the model.
        snapshot, is_translated = translate_snapshot(snapshot, vocabulary), True
    if is_irregular != (snapshot.event_times is not None):
        # Only one of the two models lets a sensor report any number of times in a record.
        snapshot = _drop_readings_without_times(snapshot) if is_irregular else remove_times(snapshot)
        is_translated = True
    # No earlier score of translated records is valid, and no record may be scored partly with and partly without ties.
    has_valid_scores = not is_translated and has_ties == holds_ties
    return AdaptedSnapshot(snapshot, num_before - _count_readings(snapshot), is_translated, has_valid_scores)


def _count_readings(snapshot: Snapshot) -> Counter[str]:
    """Return the number of readings of each feature of a snapshot, by the name of the feature."""
    names = snapshot.vocabulary.names
    return Counter(dict(zip(names, np.bincount(snapshot.features, minlength=len(names)).tolist(), strict=True)))


def _can_wait(snapshot: Snapshot, schema: Schema) -> bool:
    """Return whether readings of a snapshot that wait for the end of their time slot can do so with a model.

    Args:
        snapshot: The snapshot, which has such readings.
        schema: The schema of the model, which must have the same features and the same rules for a time slot.
    """
    waiting, window = snapshot.waiting, schema.window
    return (
        waiting is not None
        and snapshot.vocabulary == Vocabulary.from_schema(schema)
        and window is not None
        and schema.reading_times is None
        and window.per_slot == waiting.rule
        and _list_cycles(waiting) == [schema.slot_mean_cycles[code] for code in waiting.feature.tolist()]
    )


def _list_cycles(waiting: WaitingReadings) -> list[Cycle | None]:
    """Return the cycle on which each waiting reading is averaged, None if its mean is not circular."""
    if waiting.circular is None:
        return [None] * len(waiting)
    cycles = zip(waiting.circular.period.tolist(), waiting.circular.start.tolist(), strict=True)
    return [Cycle(period, start) if period else None for period, start in cycles]


def _accept_waiting(snapshot: Snapshot, waiting: WaitingReadings) -> Snapshot:
    """Return a snapshot in which no reading waits for the end of its time slot.

    The waiting readings become the last readings of their records, in the order of their times. No model has scored
    them, so they are pending (`TieGroups.num_pending`). A feature that was only declared as "will not be observed"
    is declared missing.

    Args:
        snapshot: The snapshot.
        waiting: Its waiting readings.
    """
    is_continuous = np.array([kind == "continuous" for kind in snapshot.vocabulary.kinds])[waiting.feature]
    new_values = _compute_slot_values(waiting, is_continuous)
    has_value = waiting.num_values > 0
    # Append the new readings to the old ones, and sort all by record. Within a record, the old ones come first.
    added = np.flatnonzero(has_value)
    added = added[np.argsort(waiting.time[added], kind="stable")]
    old_record, _ = snapshot.reading_positions()
    record = np.append(old_record, waiting.record[added])
    order = np.argsort(record, kind="stable")
    counts = np.bincount(record, minlength=len(snapshot)).astype(np.int32)
    text_by_reading = dict(zip(waiting.unseen.tolist(), waiting.unseen_text, strict=True))
    new_labels = []
    num_added = np.zeros(len(snapshot), np.int64)
    for reading in added.tolist():
        record_index = int(waiting.record[reading])
        place = int(snapshot.counts[record_index] + num_added[record_index])
        num_added[record_index] += 1
        if reading in text_by_reading:
            new_labels.append((record_index, place, text_by_reading[reading]))
    old_labels = zip(snapshot.unseen_record.tolist(), snapshot.unseen_place.tolist(), snapshot.unseen_text, strict=True)
    labels = sorted([*old_labels, *new_labels])
    missing_record, _ = ragged_indices(snapshot.num_declared_missing)
    all_missing_records = np.append(missing_record, waiting.record[~has_value])
    missing_order = np.argsort(all_missing_records, kind="stable")
    ties = snapshot.ties
    if ties is None:
        no_group = np.full(len(snapshot), NO_TIME)
        ties = TieGroups(np.zeros(len(old_record), np.bool_), np.zeros(len(snapshot), np.int32), no_group)
    tie_time = np.where(num_added > 0, NO_TIME, ties.tie_time)
    np.maximum.at(tie_time, waiting.record[added], waiting.time[added])
    ties = TieGroups(
        is_tied=np.append(ties.is_tied, np.zeros(len(added), np.bool_))[order],
        num_pending=(ties.num_pending + num_added).astype(np.int32),
        tie_time=tie_time,
    )
    latest_event_time = snapshot.latest_event_time
    if latest_event_time is not None:
        latest_event_time = latest_event_time.copy()
        np.maximum.at(latest_event_time, waiting.record[added], waiting.time[added])
    return replace(
        snapshot,
        counts=counts,
        features=np.append(snapshot.features, waiting.feature[added])[order].astype(np.int16),
        values=np.append(snapshot.values, new_values[added])[order],
        num_declared_missing=np.bincount(all_missing_records, minlength=len(snapshot)).astype(np.int32),
        declared_missing=np.append(snapshot.declared_missing, waiting.feature[~has_value])[missing_order].astype(
            np.int16
        ),
        unseen_record=np.array([label_record for label_record, _, _ in labels], np.int32),
        unseen_place=np.array([place for _, place, _ in labels], np.int32),
        unseen_text=[text for _, _, text in labels],
        ties=ties,
        waiting=None,
        latest_event_time=latest_event_time,
    )


def _compute_slot_values(waiting: WaitingReadings, is_continuous: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the values that stand for the time slots if no further reading arrives; 0 if there is no value.

    Args:
        waiting: S readings that wait for the end of their time slot.
        is_continuous: (S,) whether the values of each reading are numbers.
    """
    if waiting.rule != "mean":
        return waiting.value
    num_values = np.maximum(waiting.num_values, 1)
    is_circular = np.zeros(len(waiting), bool) if waiting.circular is None else waiting.circular.period > 0
    values = np.where(is_continuous & ~is_circular, waiting.value / num_values, waiting.value)
    if waiting.circular is not None:
        sums = waiting.circular
        columns = (sums.sine, sums.cosine, num_values, waiting.value, sums.period, sums.start)
        values[is_circular] = compute_circular_mean(*(column[is_circular] for column in columns))
    return values


def translate_snapshot(snapshot: Snapshot, vocabulary: Vocabulary) -> Snapshot:
    """Return a snapshot with the codes of another model's vocabulary, so that the other model can read it.

    Features are matched by name and kind, labels by their text. Readings of features that the other vocabulary does not
    have are dropped. If the reading that raised the first alert is dropped, `alert_seq` becomes the position of the
    last remaining reading before it, or 0. The scores of the records are not changed.

    Args:
        snapshot: The snapshot.
        vocabulary: The features and labels of the other model.
    """
    if vocabulary == snapshot.vocabulary:
        return snapshot
    new_codes = _map_feature_codes(snapshot.vocabulary, vocabulary)
    values, text_by_reading = _translate_labels(snapshot, vocabulary, new_codes)
    features = new_codes[snapshot.features]
    # Readings with a label that the other vocabulary does not have.
    record, place = snapshot.reading_positions()
    unseen = np.array(sorted(text_by_reading), np.int64)
    # Features that were declared as "will not be observed", and their records.
    declared_missing = new_codes[snapshot.declared_missing]
    missing_record, _ = ragged_indices(snapshot.num_declared_missing)
    is_missing_kept = declared_missing >= 0
    translated = replace(
        snapshot,
        vocabulary=vocabulary,
        features=features,
        values=values,
        num_declared_missing=np.bincount(missing_record[is_missing_kept], minlength=len(snapshot)).astype(np.int32),
        declared_missing=declared_missing[is_missing_kept],
        unseen_record=record[unseen].astype(np.int32),
        unseen_place=place[unseen].astype(np.int32),
        unseen_text=[text_by_reading[reading] for reading in unseen.tolist()],
        cusums=None,  # they have an entry for each feature of the old vocabulary
    )
    return _drop_readings(translated, features >= 0)


def _map_feature_codes(old: Vocabulary, new: Vocabulary) -> NDArray[np.int16]:
    """Return the code in the new vocabulary of each of the old vocabulary's F features, (F,).

    The code is -1 if the new vocabulary has no feature of the same name and kind ("continuous" or "discrete").
    """
    code_by_feature = {feature: code for code, feature in enumerate(zip(new.names, new.kinds, strict=True))}
    old_features = zip(old.names, old.kinds, strict=True)
    return np.array([code_by_feature.get(feature, -1) for feature in old_features], np.int16)


def _translate_labels(
    snapshot: Snapshot, vocabulary: Vocabulary, new_codes: NDArray[np.int16]
) -> tuple[NDArray[np.float64], dict[int, str]]:
    """Return the values of the T readings of a snapshot with the label codes of another vocabulary.

    Args:
        snapshot: The snapshot.
        vocabulary: The other vocabulary.
        new_codes: (F,) code in the other vocabulary of each of the F features of the snapshot, -1 if it has none.

    Returns:
        (T,) values, in which the codes of labels are translated; and the text of each label that the other
        vocabulary does not have, by the index of its reading among the T readings.
    """
    values = snapshot.values.copy()
    # Texts of labels that its vocabulary does not have either, by the index of the reading.
    first_reading = np.cumsum(snapshot.counts) - snapshot.counts
    unseen_readings = first_reading[snapshot.unseen_record] + snapshot.unseen_place
    old_text_by_reading = dict(zip(unseen_readings.tolist(), snapshot.unseen_text, strict=True))
    text_by_reading: dict[int, str] = {}
    for old_feature, new_feature in enumerate(new_codes.tolist()):
        if new_feature < 0 or snapshot.vocabulary.kinds[old_feature] != "discrete":
            continue  # the other vocabulary lacks the feature, or the feature has no labels
        # A label is unseen by a vocabulary that does not have it. The number of a feature's labels is the code of
        # all its unseen labels.
        old_labels = snapshot.vocabulary.labels[old_feature]
        code_by_label = {label: code for code, label in enumerate(vocabulary.labels[new_feature])}
        unseen_code = len(code_by_label)
        # Translate by a table from old to new label codes. Its last entry is for labels unseen by this vocabulary.
        new_label_codes = [code_by_label.get(label, unseen_code) for label in old_labels]
        table = np.array([*new_label_codes, unseen_code], np.float64)
        readings = np.flatnonzero(snapshot.features == old_feature)
        values[readings] = table[snapshot.values[readings].astype(np.int64)]
        # The table gives `unseen_code` to every label that one of the vocabularies does not have. Look up its text:
        # a label unseen by this vocabulary may have a code in the other one. If not, the text is returned.
        for reading in readings[values[readings] == unseen_code].tolist():
            old_label = int(snapshot.values[reading])
            text = old_labels[old_label] if old_label < len(old_labels) else old_text_by_reading.get(reading)
            if text in code_by_label:
                values[reading] = code_by_label[text]
            elif text is not None:  # None: this snapshot has no text for the unseen label
                text_by_reading[reading] = text
    return values, text_by_reading


def remove_times(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot of irregular readings for a model in whose records a feature has at most one reading.

    The first reading of each feature of a record in the snapshot is kept. A feature with a reading is
    not declared missing.

    Args:
        snapshot: The snapshot, which has event times.
    """
    record, _ = snapshot.reading_positions()
    _, first = np.unique(record * len(snapshot.vocabulary) + snapshot.features, return_index=True)
    is_kept = np.zeros(len(snapshot.features), bool)
    is_kept[first] = True
    has_reading = np.zeros((len(snapshot), len(snapshot.vocabulary)), bool)
    has_reading[record, snapshot.features] = True
    missing_record, _ = ragged_indices(snapshot.num_declared_missing)
    is_missing = ~has_reading[missing_record, snapshot.declared_missing]
    num_dropped = 0 if snapshot.event_times is None else snapshot.event_times.num_dropped
    place = np.maximum(snapshot.alert_seq - num_dropped, 0)  # of the reading that raised the first alert
    without_times = replace(
        snapshot,
        num_declared_missing=np.bincount(missing_record[is_missing], minlength=len(snapshot)).astype(np.int32),
        declared_missing=snapshot.declared_missing[is_missing],
        alert_seq=np.where(snapshot.alert_seq < 0, -1, place).astype(np.int32),
        event_times=None,
        cusums=None,
        latest_event_time=_find_latest_times(snapshot),
    )
    return _drop_readings(without_times, is_kept)


def _find_latest_times(snapshot: Snapshot) -> Ints | None:
    """Return the latest event time of the readings of each record, (R,), None if a snapshot has no times."""
    if snapshot.latest_event_time is not None or snapshot.event_times is None:
        return snapshot.latest_event_time
    latest = np.full(len(snapshot), NO_TIME, np.int64)
    record, _ = snapshot.reading_positions()
    np.maximum.at(latest, record, snapshot.event_times.times)
    return latest


def _drop_readings_without_times(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot for a model of irregular readings, which cannot score readings without times.

    All readings are dropped; the records stay open.

    Args:
        snapshot: The snapshot, which has no event times.
    """
    empty = _drop_readings(snapshot, np.zeros(len(snapshot.features), bool))
    origins = np.full(len(snapshot), NO_TIME, np.int64)
    event_times = EventTimes(np.empty(0, np.int64), origins, np.zeros(len(snapshot), np.int64))
    return replace(empty, ties=None, event_times=event_times, latest_event_time=None)


def _drop_readings(snapshot: Snapshot, is_kept: NDArray[np.bool_]) -> Snapshot:
    """Return a snapshot without some of its T readings.

    If the reading that raised the first alert of a record is dropped, `alert_seq` becomes the position of the last
    remaining reading before it, or 0.

    Args:
        snapshot: The snapshot.
        is_kept: (T,) false for readings that are dropped.
    """
    record, _ = snapshot.reading_positions()
    # (T + 1,) kept readings before each reading, over all records. The difference between an entry and that of the
    # record's first reading counts kept readings of the record: the new position of a reading.
    num_kept_before = np.concatenate([[0], np.cumsum(is_kept)])
    first_reading = np.cumsum(snapshot.counts) - snapshot.counts
    # Count the kept readings of each record up to and including the one that raised its first alert. The new
    # `alert_seq` is the position of the last one counted. Without an alert, `alert_seq` is −1 and stays so. It also
    # stays the same if the reading that raised the alert is not in the snapshot any more.
    num_dropped = 0 if snapshot.event_times is None else snapshot.event_times.num_dropped
    num_until_alert = np.clip(snapshot.alert_seq + 1 - num_dropped, 0, snapshot.counts)
    num_kept_until_alert = num_kept_before[first_reading + num_until_alert] - num_kept_before[first_reading]
    new_seq = num_dropped + np.maximum(num_kept_until_alert - 1, 0)
    alert_seq = np.where(snapshot.alert_seq < num_dropped, snapshot.alert_seq, new_seq)
    # Kept readings with an unseen label, and their new positions.
    unseen = (first_reading[snapshot.unseen_record] + snapshot.unseen_place).astype(np.int64)
    kept_labels = np.flatnonzero(is_kept[unseen])
    unseen = unseen[kept_labels]
    unseen_place = num_kept_before[unseen] - num_kept_before[first_reading[record[unseen]]]
    event_times = snapshot.event_times
    if event_times is not None:
        event_times = replace(event_times, times=event_times.times[is_kept])
    return replace(
        snapshot,
        counts=np.bincount(record[is_kept], minlength=len(snapshot)).astype(np.int32),
        features=snapshot.features[is_kept],
        values=snapshot.values[is_kept],
        alert_seq=alert_seq.astype(np.int32),
        unseen_record=snapshot.unseen_record[kept_labels],
        unseen_place=unseen_place.astype(np.int32),
        unseen_text=[snapshot.unseen_text[label] for label in kept_labels.tolist()],
        ties=None if snapshot.ties is None else _filter_ties(snapshot, snapshot.ties, is_kept),
        event_times=event_times,
    )


def _filter_ties(snapshot: Snapshot, ties: TieGroups, is_kept: NDArray[np.bool_]) -> TieGroups:
    """Return the tie groups (readings of one record with the same event time) without the dropped readings.

    Args:
        snapshot: The snapshot with all T readings.
        ties: The tie groups of all T readings.
        is_kept: (T,) false for readings that are dropped.
    """
    # Number the groups of all records. A kept reading is tied to the kept reading before it if both have the same
    # number. The numbers are not negative, so the prepended −1 makes the first reading untied.
    group = np.cumsum(~ties.is_tied)[is_kept]
    is_tied = np.diff(group, prepend=-1) == 0
    # The last `num_pending` readings of a record wait for further readings of their group: count the kept ones.
    record, place = snapshot.reading_positions()
    num_not_pending = snapshot.counts - ties.num_pending
    is_pending = is_kept & (place >= num_not_pending[record])
    num_pending = np.bincount(record[is_pending], minlength=len(snapshot)).astype(np.int32)
    return TieGroups(is_tied, num_pending, ties.tie_time)
