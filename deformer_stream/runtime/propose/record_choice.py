"""Choices of records: for review, for a new calibration of records, and for one of two halves of the log.

The choices are random, and the same for every order of the log: they depend on hashes of ids and a seed.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deformer_stream.runtime.incident_difference import LabelledIncident
from deformer_stream.runtime.propose.proposal import ProposalOptions, Review, ReviewRecord

Floats = NDArray[np.float64]

MAX_COLLECTED_RECORDS = 1_000_000
"""Largest number of records from which a calibration of records is made. Of more records, a random sample is used."""


@dataclass(slots=True)
class KeptRecords:
    """Records from which a calibration of records is made: all of them, or a random sample of bounded size.

    Attributes:
        seed: Seed of the choice.
    """

    seed: int
    _heap: list[tuple[float, str, float, float]] = field(default_factory=list)

    def add(self, record: str, score: float, record_score: float) -> None:
        """Add a record. If there are too many, the ones with the smallest hashes stay.

        Args:
            record: Id of the record.
            score: Its score.
            record_score: Its score as a complete record, NaN if it is unknown.
        """
        entry = (-_hash_record(record, self.seed), record, score, record_score)
        if len(self._heap) < MAX_COLLECTED_RECORDS:
            heapq.heappush(self._heap, entry)
        elif entry[0] > self._heap[0][0]:
            heapq.heapreplace(self._heap, entry)

    @property
    def record_ids(self) -> list[str]:
        """The ids of the records, in the order of `scores`."""
        return [record for _, record, _, _ in self._list()]

    @property
    def scores(self) -> Floats:
        """The scores of the records."""
        return np.array([score for _, _, score, _ in self._list()])

    @property
    def record_scores(self) -> Floats | None:
        """The scores of the records as complete records, None if one of them is unknown."""
        scores = np.array([record_score for _, _, _, record_score in self._list()])
        return None if np.isnan(scores).any() else scores

    def _list(self) -> list[tuple[float, str, float, float]]:
        """Return the records in an order that does not depend on that of the log."""
        return sorted(self._heap, key=lambda entry: (-entry[0], entry[1]))


class ReviewChooser:
    """Chooses the records at which a person should look, and counts the answers so far.

    Args:
        label_by_record: The labels of single records.
        options: Number of records of each kind, and the seed of the choice.
    """

    def __init__(self, label_by_record: Mapping[str, str], options: ProposalOptions) -> None:
        self._label_by_record, self._seed = label_by_record, options.seed
        # The largest scores and the smallest hashes; the hash breaks ties.
        self._largest, self._silent = _Best(options.num_review), _Best(options.num_review)
        self._num_answers = self._num_missed = 0

    def add(self, entry: ReviewRecord, is_alerted: bool, owner: LabelledIncident | None) -> None:
        """Add a record.

        Args:
            entry: The record.
            is_alerted: Whether it has alerted.
            owner: The incident to which it belongs, None without one.
        """
        label = self._label_by_record.get(entry.record)
        if label is not None and not is_alerted:
            self._num_answers += 1
            self._num_missed += label == "true"
        if label is not None or (owner is not None and owner.label is not None):
            return  # a person has looked at it
        hash_ = _hash_record(entry.record, self._seed)
        if is_alerted:
            self._largest.add((entry.score, -hash_), entry)
        else:
            self._silent.add((-hash_, 0.0), entry)

    def make_review(self) -> Review:
        """Return the chosen records."""
        return Review(
            tuple(sorted(self._largest.entries, key=lambda entry: (-entry.score, entry.time, entry.record))),
            tuple(sorted(self._silent.entries, key=lambda entry: (entry.time, entry.record))),
            self._num_answers,
            self._num_missed,
        )


def _hash_record(record: str, seed: int) -> float:
    """Return a number from 0 to 1 that is a hash of a record id and a seed."""
    digest = hashlib.blake2b(f"{seed}\0{record}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, slots=True)
class LogSplit:
    """A random half of the log, which calibrates the records. The other half calibrates the segments.

    Attributes:
        length: Length of a part of the log of one device that is in one half, in microseconds.
        seed: Seed of the choice.
    """

    length: int
    seed: int

    def is_for_records(self, device: str, time: int) -> bool:
        """Return whether a time of a device is in the half that calibrates the records."""
        return _hash_record(f"{device}\0{time // self.length}", self.seed) < 0.5

    def has_calibrated_records(self, device: str, length: int, number: int) -> bool:
        """Return whether a segment, which is not longer than a part, is partly in this half.

        Args:
            device: The device.
            length: Length of the segment in microseconds.
            number: Its number, as `time // length`.
        """
        start = number * length
        return self.is_for_records(device, start) or self.is_for_records(device, start + length - 1)


class _Best:
    """The records with the largest keys.

    Args:
        size: Largest number of records.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entry_by_record: dict[str, ReviewRecord] = {}
        self._heap: list[tuple[tuple[float, float], str]] = []

    @property
    def entries(self) -> list[ReviewRecord]:
        """The records, in any order."""
        return list(self._entry_by_record.values())

    def add(self, key: tuple[float, float], entry: ReviewRecord) -> None:
        """Add a record, and drop the one with the smallest key if there are too many. A record counts once."""
        if entry.record in self._entry_by_record or not self._size:
            return
        if len(self._heap) >= self._size:
            if (key, entry.record) <= self._heap[0]:
                return
            del self._entry_by_record[heapq.heappop(self._heap)[1]]
        heapq.heappush(self._heap, (key, entry.record))
        self._entry_by_record[entry.record] = entry
