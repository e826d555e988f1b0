"""What outlives a process, as values: a partition's state (`Snapshot`) and what its log cannot tell (`Decisions`).

A partition's state is a function of its log and of a few decisions, those of the clock, of the bound on open records,
and alerts. A snapshot carries the vocabulary that it is written in, so that another model can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.core.remembered import Texts
from deformer_stream.core.schema import Kind, Schema

QUIET = 1.0
"""In place of the strictest alpha that has raised an alert of a record, where none has: every alpha is stricter."""

ALL_TOLD = 0.0
"""In its place where it is not known: no alpha is stricter, so the record alerts no more."""


@dataclass(frozen=True, slots=True)
class Alerted:
    """A record has alerted. seq: place of the reading that raised the first alert. alpha: the strictest so far."""

    seq: int
    alpha: float = ALL_TOLD

    def __add__(self, later: Alerted) -> Alerted:
        return Alerted(self.seq, min(self.alpha, later.alpha))


@dataclass(frozen=True, slots=True)
class Drift:
    """The evidence that a partition's records are other than those of the calibration (`core.drift`), as a value.

    model: fingerprint of the model whose calibration it is about. records: how many were seen. capital: by bet.
    alarmed: a notice was given, and the evidence has not gone since. counts: group → records by bin; "" has those that
    are judged by all calibration records.
    """

    model: str
    records: int
    capital: tuple[float, ...]
    alarmed: bool = False
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What was decided about one partition that its log cannot tell.

    closed: records closed by the clock or for want of room, in order. alerted: of records that the log has left open.
    drift: the evidence that notices go by, None where it is as it was. waited: numbers of readings that records had
    when the clock decided a block of ties.
    """

    closed: tuple[str, ...] = ()
    alerted: Mapping[str, Alerted] = field(default_factory=dict)
    drift: Drift | None = None
    waited: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.closed or self.alerted or self.drift or self.waited)

    def __add__(self, later: Decisions) -> Decisions:
        alerted = dict(self.alerted)
        for record, told in later.alerted.items():
            alerted[record] = alerted[record] + told if record in alerted else told
        waited = dict(self.waited)
        for record, counts in later.waited.items():
            waited[record] = waited.get(record, ()) + counts
        return Decisions(self.closed + later.closed, alerted, later.drift or self.drift, waited)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What feature codes and label codes stand for: name, kind and labels per feature."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    labels: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.names)

    @staticmethod
    def of(schema: Schema) -> Vocabulary:
        features = schema.features
        return Vocabulary(schema.names, tuple(f.kind for f in features), tuple(f.labels for f in features))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Readings of one time, of R records with T readings, where they wait for each other (`core.ties`).

    tied: (T,) whether a reading is of the block of the one before it. held: (R,) int32, how many of the last readings
    are not judged yet. instant: (R,) int64 their time, or that of the last block, microseconds.
    """

    tied: NDArray[np.bool_]
    held: NDArray[np.int32]
    instant: NDArray[np.int64]


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
    closed: Texts
    devices: list[str]
    marks: NDArray[np.int64]
    drift: Drift | None = None
    ties: Blocks | None = None

    def __len__(self) -> int:
        """Open records."""
        return len(self.ids)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each reading its record and its place in it, each (T,)."""
        return ragged(self.counts)

    def translated(self, vocabulary: Vocabulary) -> tuple[Snapshot, int]:
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
        record, _ = self.places()
        first = np.cumsum(self.counts) - self.counts
        before = np.concatenate([[0], np.cumsum(keep)])  # readings kept before each, over all records
        at = np.clip(self.alert_seq + 1, 0, self.counts)
        alert_seq = np.maximum(before[first + at] - before[first] - 1, 0)
        new = np.array(sorted(i for i in texts if keep[i]), np.int64)  # readings whose label is not known there
        absent = code[self.absent]
        absent_record, _ = ragged(self.absent_counts)
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

    def _kept(self, ties: Blocks, keep: NDArray[np.bool_]) -> Blocks:
        """Without the readings that are not kept, (T,)."""
        record, place = self.places()
        block = np.cumsum(~ties.tied)[keep]
        waits = keep & (place >= (self.counts - ties.held)[record])
        held = np.bincount(record[waits], minlength=len(self)).astype(np.int32)
        return Blocks(np.diff(block, prepend=-1) == 0, held, ties.instant)

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


def ragged(counts: NDArray[np.int32] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and place in the row of every element of rows of so many elements."""
    sizes = counts.astype(np.int64)
    row = np.arange(len(sizes)).repeat(sizes)
    return row, np.arange(len(row)) - (sizes.cumsum() - sizes)[row]


def runs(ordered: NDArray[Any]) -> NDArray[np.int64]:
    """(R + 1,) where runs of equal numbers begin, and the end."""
    edge = np.ones(len(ordered) + 1, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=edge[1:-1])
    return edge.nonzero()[0]


def _feature_codes(old: Vocabulary, new: Vocabulary) -> NDArray[np.int16]:
    """Per old feature its new code, −1 where there is none of this name and kind."""
    codes = {(name, kind): code for code, (name, kind) in enumerate(zip(new.names, new.kinds, strict=True))}
    pairs = zip(old.names, old.kinds, strict=True)
    return np.array([codes.get(pair, -1) for pair in pairs], np.int16)
