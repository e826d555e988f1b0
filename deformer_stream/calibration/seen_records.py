"""Fingerprints of the records that a model has seen, by which `calibrate` recognises records that it must refuse.

A calibration is valid only if the model was trained without the calibration records. Records from the training table
look more normal to the model than new ones, so thresholds become too low. The model directory therefore stores
fingerprints of the training records and of the calibration records.

The fingerprint of a record is a 64-bit hash of its readings, without regard to their order. It is the sum of a hash of
each reading, which covers the name of the feature and the exact normalised float32 value. A row of the training matrix
and the same record in a stream have the same fingerprint.

Of each set of records at most `MAX_FINGERPRINTS` fingerprints are stored, the smallest ones (a bottom-k sketch: Cohen
and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007). Whether a record belongs to the set is known exactly
if its fingerprint is not larger than the largest one that is stored. Such records are a random sample.

In some tables records repeat by nature, for example if all features are labels. Each set therefore also states how many
of its records occur in it more than once. New records are reported only if more of them are in the set than this share
explains.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.schema import Schema

UInts = NDArray[np.uint64]
Bools = NDArray[np.bool_]

MAX_FINGERPRINTS = 65_536
"""Largest number of fingerprints that are stored of a set of records: 512 KiB."""

SIGNIFICANCE = 1e-3
"""Probability of reporting new records as seen although they coincide with seen ones only by chance."""

_CHUNK_ROWS = 4096
"""Rows of a matrix that are hashed at once, few enough for the processor's caches."""

# Odd 64-bit constants of the finaliser of SplitMix64, which spreads every input bit over all output bits.
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


class RecordHasher:
    """A function from the readings of records to the fingerprints of the records."""

    def __init__(self, schema: Schema) -> None:
        """Create a hasher for the records of a schema.

        Args:
            schema: The features. Only their names enter the fingerprints, so the order of the features has no effect.
        """
        digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in schema.names)
        self._feature_keys = np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)
        self._schema = schema

    def hash_readings(self, codes: NDArray[np.integer], raw_values: NDArray[np.float64]) -> UInts:
        """Return a hash of each of M readings, (M,). The fingerprint of a record is the sum over its readings.

        The sum is taken modulo 2⁶⁴, as NumPy adds unsigned integers.

        Args:
            codes: (M,) the feature of each reading, as an index in the schema.
            raw_values: (M,) the values in raw units, or label codes. None is NaN.
        """
        return self.hash_normalised(codes, self._schema.normalise(codes, raw_values).astype(np.float32))

    def hash_normalised(self, codes: NDArray[np.integer], values: NDArray[np.float32]) -> UInts:
        """Return the hashes of `hash_readings`, (M,), from normalised values or label codes.

        Args:
            codes: (M,) the feature of each reading, as an index in the schema.
            values: (M,) the normalised values, none of which is NaN.
        """
        return _mix(values, self._feature_keys[codes])

    def hash_matrix(self, values: NDArray[np.float32]) -> UInts:
        """Return the fingerprints of N records, (N,).

        Args:
            values: (N, F) normalised values and label codes of the F features, NaN if there is no reading. The matrix
                may be memory-mapped; it is read in chunks of rows.
        """
        fingerprints = np.zeros(len(values), np.uint64)
        for start in range(0, len(values), _CHUNK_ROWS):
            chunk = np.asarray(values[start : start + _CHUNK_ROWS], np.float32)
            reading_hashes = _mix(chunk, self._feature_keys)
            reading_hashes[np.isnan(chunk)] = 0  # adds nothing to the sum
            reading_hashes.sum(1, out=fingerprints[start : start + _CHUNK_ROWS])
        return fingerprints


def _mix(values: NDArray[np.float32], feature_keys: UInts) -> UInts:
    """Return a 64-bit hash of each value together with the key of its feature, in the shape of `values`.

    Args:
        values: Normalised values, of any shape.
        feature_keys: The 64-bit hash of the name of each value's feature, of a shape that broadcasts to `values`.
    """
    bits = (values + np.float32(0.0)).view(np.uint32)  # the sum replaces −0 by 0, which is the same value
    hashes: UInts = bits ^ feature_keys
    hashes *= _MULTIPLIER_1
    hashes ^= hashes >> np.uint64(27)
    hashes *= _MULTIPLIER_2
    hashes ^= hashes >> np.uint64(31)
    hashes *= _MULTIPLIER_1
    hashes ^= hashes >> np.uint64(32)
    return hashes


@dataclass(frozen=True)
class RecordSet:
    """The fingerprints of a set of records, such as the records of a training table.

    Attributes:
        fingerprints: (K,) the smallest K different fingerprints of the set, ascending, K ≤ `MAX_FINGERPRINTS`.
        num_records: Number of records of the set.
        num_repeated: How many of these records occur in the set more than once.
        num_different: Number of different records of the set.
        num_different_repeated: How many of the different records occur in the set more than once.

    Raises:
        ValueError: The attributes contradict each other.
    """

    fingerprints: UInts
    num_records: int
    num_repeated: int
    num_different: int
    num_different_repeated: int

    def __post_init__(self) -> None:
        fingerprints = self.fingerprints
        if fingerprints.dtype != np.uint64 or fingerprints.ndim != 1 or len(fingerprints) > MAX_FINGERPRINTS:
            raise ValueError(f"the fingerprints of seen records are not a list of at most {MAX_FINGERPRINTS} integers")
        if (fingerprints[1:] <= fingerprints[:-1]).any():
            raise ValueError("the fingerprints of seen records are not in ascending order")
        counts = (self.num_different_repeated, self.num_different, self.num_repeated, self.num_records)
        if any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in counts):
            raise ValueError(f"the numbers of seen records are {counts}, but must be integers of at least 0")
        if self.num_repeated > self.num_records or self.num_different_repeated > self.num_different:
            raise ValueError(f"the numbers of seen records {counts} contradict each other")
        if len(fingerprints) != min(self.num_different, MAX_FINGERPRINTS):
            raise ValueError(f"there are {len(fingerprints)} fingerprints of {self.num_different} seen records")

    @staticmethod
    def from_fingerprints(fingerprints: UInts) -> RecordSet:
        """Return the set of N records with these fingerprints, (N,), in any order and with repetitions."""
        different, counts = np.unique(fingerprints, return_counts=True)
        is_repeated = counts > 1
        return RecordSet(
            fingerprints=different[:MAX_FINGERPRINTS].copy(),
            num_records=len(fingerprints),
            num_repeated=int(counts[is_repeated].sum()),
            num_different=len(different),
            num_different_repeated=int(is_repeated.sum()),
        )

    @cached_property
    def _limit(self) -> np.uint64:
        """The largest fingerprint of which it is known whether it belongs to the set."""
        is_complete = self.num_different <= MAX_FINGERPRINTS
        return np.uint64(2**64 - 1) if is_complete else self.fingerprints[-1]

    def find(self, fingerprints: UInts) -> tuple[Bools, Bools]:
        """Return which of N records are in the set, and of which this is known.

        Args:
            fingerprints: (N,) the fingerprints of the records.

        Returns:
            is_member: (N,) whether the record is known to be in the set.
            is_known: (N,) whether it is known if the record is in the set.
        """
        return np.isin(fingerprints, self.fingerprints), fingerprints <= self._limit

    def exceeds_chance(self, fingerprints: UInts, larger: Sequence[RecordSet] = ()) -> bool:
        """Return whether more of N new records are in the set than records repeat by nature.

        Without a common source, a new record is in the set about as often as a record of the set has another one that
        equals it. The test is Fisher's exact test at the level `SIGNIFICANCE`. It is made twice, with all records and
        with different records only, and both must fail. One frequent record (a machine at rest) then does not
        matter, because it counts once in the second test.

        Args:
            fingerprints: (N,) the fingerprints of the new records.
            larger: Sets of similar records that are at least as large. Their records repeat at least as often, so they
                make the test more certain if this set is small.
        """
        different = np.unique(fingerprints)
        sets = (self, *larger)
        tests = (
            (fingerprints, sum(s.num_records for s in sets), sum(s.num_repeated for s in sets)),
            (different, sum(s.num_different for s in sets), sum(s.num_different_repeated for s in sets)),
        )
        for tested, num_records, num_repeated in tests:
            is_member, is_known = self.find(tested)
            num_members, num_known = int(is_member.sum()), int(is_known.sum())
            if compute_excess_p_value(num_members, num_known, num_repeated, num_records) > SIGNIFICANCE:
                return False
        return True


def compute_excess_p_value(num_hits: int, num_new: int, num_old_hits: int, num_old: int) -> float:
    """Return the p-value of Fisher's exact test that new records are hits more often than old records.

    If both have the same probability of a hit, the number of hits among the new records, given the total number of
    hits, has a hypergeometric distribution. The p-value is the probability of at least the observed number.

    Args:
        num_hits: Number of hits among the new records.
        num_new: Number of new records.
        num_old_hits: Number of hits among the old records.
        num_old: Number of old records.
    """
    total, total_hits = num_new + num_old, num_hits + num_old_hits
    if num_hits * total <= num_new * total_hits:  # not more hits than expected, which includes no hits and no records
        return 1.0

    def log_choose(n: int, k: int) -> float:
        """Return the natural logarithm of the binomial coefficient C(n, k)."""
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    log_first = log_choose(num_new, num_hits) + log_choose(num_old, num_old_hits) - log_choose(total, total_hits)
    # The probabilities of more hits, relative to that of the observed number. They fall, so the sum can stop early.
    relative_sum = term = 1.0
    for hits in range(num_hits, min(num_new, total_hits)):
        term *= (total_hits - hits) * (num_new - hits) / ((hits + 1) * (num_old - total_hits + hits + 1))
        relative_sum += term
        if term < 1e-12 * relative_sum:
            break
    return min(1.0, math.exp(log_first) * relative_sum)


@dataclass(frozen=True, slots=True)
class SeenRecords:
    """The records that a model has seen.

    Attributes:
        training: The records that determined the weights, or the choice of the weights. There is one set for each
            table: a model that was adapted from another one (`--init-from`) has seen the records of both.
        calibration: The records of the calibration in force, and those that a person removed from it as anomalies.
            None if they are not known.
    """

    training: tuple[RecordSet, ...] = ()
    calibration: RecordSet | None = None

    def check(self, fingerprints: UInts) -> SeenCheck:
        """Return which of N records the model has seen.

        Args:
            fingerprints: (N,) the fingerprints of the records.
        """
        is_new = np.ones(len(fingerprints), bool)
        in_training, in_calibration = np.zeros(len(fingerprints), bool), np.zeros(len(fingerprints), bool)
        is_tested = np.ones(len(fingerprints), bool)
        # Each set with the mask of its records, and larger sets of similar records.
        sets: list[tuple[RecordSet, Bools, list[RecordSet]]] = [(table, in_training, []) for table in self.training]
        if self.calibration is not None:
            num_records = self.calibration.num_records
            larger_tables = [table for table in self.training if table.num_records >= num_records]
            sets.append((self.calibration, in_calibration, larger_tables))
        for record_set, is_seen, larger in sets:
            if record_set.exceeds_chance(fingerprints, larger):
                is_member, is_known = record_set.find(fingerprints)
                is_seen |= is_member
                is_tested &= is_known
                is_new &= is_known & ~is_member
        return SeenCheck(is_new, is_tested, in_training, in_calibration)


@dataclass(frozen=True, slots=True)
class SeenCheck:
    """Which of N records a model has seen, apart from records that coincide with seen ones by chance.

    Attributes:
        is_new: (N,) whether the model is known not to have seen the record.
        is_tested: (N,) whether it is known if the model has seen the record. It is unknown for a part of the records if
            there were more than `MAX_FINGERPRINTS` different ones.
        in_training: (N,) whether training has used the record.
        in_calibration: (N,) whether the calibration in force has used the record, or a person has removed the record
            from it as an anomaly.
    """

    is_new: Bools
    is_tested: Bools
    in_training: Bools
    in_calibration: Bools

    @property
    def num_seen(self) -> int:
        """Number of records that are known to be `in_training` or `in_calibration`."""
        return int((self.in_training | self.in_calibration).sum())

    def describe(self) -> str:
        """Return the beginning of a sentence such as "1,203 of 1,500 records were used to train this model"."""
        uses = [
            name for name, is_seen in (("train", self.in_training), ("calibrate", self.in_calibration)) if is_seen.any()
        ]
        num_records, num_tested = len(self.is_new), int(self.is_tested.sum())
        of = f"{num_records:,} records"
        if num_tested < num_records:
            of = f"{num_tested:,} tested records (a random part of {num_records:,})"
        return f"{self.num_seen:,} of {of} were used to {' or to '.join(uses)} this model"


def find_seen_records(
    schema: Schema,
    values: NDArray[np.float32],
    is_training: Bools,
    is_calibration: Bools,
    earlier: Sequence[RecordSet] = (),
) -> SeenRecords:
    """Return the records that a model has seen that was trained on a table of N records.

    Args:
        schema: The F features of the table.
        values: (N, F) normalised values and label codes, NaN if there is no reading. The matrix may be memory-mapped.
        is_training: (N,) whether the record determined the weights or the choice of the weights, or was left out of
            both as a suspected anomaly.
        is_calibration: (N,) whether the record is for calibration.
        earlier: The sets of records that the old model was trained on, if it was adapted to the table.
    """
    fingerprints = RecordHasher(schema).hash_matrix(values)
    training = RecordSet.from_fingerprints(fingerprints[is_training])
    return SeenRecords((*earlier, training), RecordSet.from_fingerprints(fingerprints[is_calibration]))
