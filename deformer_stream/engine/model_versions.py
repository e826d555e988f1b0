"""The models that score open records at the same time, and their KV caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.cusum import NO_KIND
from deformer_stream.engine.records import RecordTable
from deformer_stream.engine.scoring import Cache, ModelVersion, ScoringResult
from deformer_stream.kernels.kv_cache import CacheShape
from deformer_stream.model.bounded_context import ContextLimit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class ModelVersions:
    """The model versions that score open records, by number, with their KV caches.

    A model version is a model with its calibration. The current one scores the records that are opened from now on. An
    older one stays until the last of its records is closed. The record table holds the number of each record's version.

    A KV cache holds the network's keys and values of the readings of open records. Versions with the same cache shape
    (layers, vector sizes and precision) share one cache. There are no caches before `allocate_caches` is called.

    Args:
        version: The first version, with the number 0.
        cache_bytes: Largest number of bytes of all KV caches together.

    Attributes:
        current_number: The number of the current version, which is larger than all others.
        num_cache_rebuilds: How many times the cached keys and values of a record were missing and were computed again.
            `Engine.pop_cache_rebuilds` resets the number.
    """

    def __init__(self, version: ModelVersion, cache_bytes: int) -> None:
        self.current_number = 0
        self.num_cache_rebuilds = 0
        self._version_by_number = {0: version}
        self._max_cache_bytes = cache_bytes
        self._cache_by_shape: dict[CacheShape, Cache] = {}

    @property
    def current(self) -> ModelVersion:
        """The version that scores the records which are opened from now on."""
        return self._version_by_number[self.current_number]

    @property
    def current_cache(self) -> Cache:
        """The KV cache of the current version."""
        return self._cache_by_shape[self.current.cache_shape]

    @property
    def cache_bytes_in_use(self) -> int:
        """The number of bytes in use by all KV caches."""
        return sum(cache.bytes_in_use for cache in self._cache_by_shape.values())

    @property
    def fingerprint_by_number(self) -> dict[int, str]:
        """The fingerprint of each version, a hash that identifies the model with its calibration."""
        return {number: version.fingerprint for number, version in self._version_by_number.items()}

    @property
    def context_limits(self) -> Mapping[int, ContextLimit]:
        """By number, how many readings the contexts of each version for irregular readings have at most."""
        return {
            number: version.context_limit
            for number, version in self._version_by_number.items()
            if version.context_limit is not None
        }

    def add(self, version: ModelVersion) -> None:
        """Make a new version the current one. The caller must then call `allocate_caches`."""
        self.current_number += 1
        self._version_by_number[self.current_number] = version

    def drop_all_others(self) -> None:
        """Drop all versions except the current one, and all KV caches, because the record table is replaced.

        The caller must then call `allocate_caches`.
        """
        self._version_by_number = {self.current_number: self.current}
        self._cache_by_shape.clear()

    def drop_unused(self, records: RecordTable) -> None:
        """Drop the versions that score no open record, except the current one.

        Args:
            records: The table of open records.
        """
        if len(self._version_by_number) == 1:
            return
        used = {self.current_number, *np.unique(records.model_version[records.is_open]).tolist()}
        if used != self._version_by_number.keys():
            self._version_by_number = {number: self._version_by_number[number] for number in sorted(used)}
            self.allocate_caches(records)

    def group(self, records: RecordTable, record_index: Ints) -> Iterator[tuple[ModelVersion, Ints]]:
        """Group R records by the version that scores them.

        Args:
            records: The table of open records.
            record_index: (R,) row of each record in the table; a row may occur several times.

        Yields:
            A version, and the ascending indexes into `record_index` of the records that it scores.
        """
        if len(self._version_by_number) == 1 and len(record_index):
            yield self.current, np.arange(len(record_index))  # the usual case, without a search
            return
        numbers = records.model_version[record_index]
        for number in np.unique(numbers).tolist():
            yield self._version_by_number[number], np.flatnonzero(numbers == number)

    def score_readings(self, records: RecordTable, record_index: Ints, seq: Ints, alphas: Floats) -> ScoringResult:
        """Score M readings, each by the version to which its record is assigned (`ModelVersion.score_readings`).

        Args:
            records: The table of open records, which holds the readings.
            record_index: (M,) the row of the table that belongs to the record of each reading.
            seq: (M,) position of each reading in its record, from 0.
            alphas: The false-alarm rates at which alerts are raised, descending; `NO_ALPHAS` for readings that must not
                raise an alert.
        """
        groups, results = list(self.group(records, record_index)), []
        for version, members in groups:
            cache = self._cache_by_shape[version.cache_shape]
            results.append(version.score_readings(records, cache, record_index[members], seq[members], alphas))
        num_rebuilt = sum(result.num_rebuilt for result in results)
        self.num_cache_rebuilds += num_rebuilt
        if len(results) == 1:
            return results[0]  # the usual case: one version scores all readings
        num_readings = len(record_index)
        score_rows, num_crossed = np.empty((4, num_readings)), np.zeros(num_readings, np.int64)
        kinds = np.full(num_readings, NO_KIND, np.int8)
        for (_, members), result in zip(groups, results, strict=True):
            score_rows[:, members], num_crossed[members] = result.score_rows, result.num_crossed
            kinds[members] = result.kinds
        return ScoringResult(score_rows, num_crossed, kinds, num_rebuilt)

    # The KV caches

    def allocate_caches(self, records: RecordTable) -> None:
        """Allocate the KV caches that the versions need, with equal shares of the memory.

        If the set of cache shapes has not changed, nothing happens. If it has, all cached keys and values are dropped.
        They are computed again when needed.

        Args:
            records: The table of open records.
        """
        version_by_shape = {version.cache_shape: version for version in self._version_by_number.values()}
        if version_by_shape.keys() == self._cache_by_shape.keys():
            return
        # Drop all references to the old caches first, so that both are never in memory at the same time.
        self._cache_by_shape.clear()
        for version in self._version_by_number.values():
            version.release_cache()
        max_bytes = self._max_cache_bytes // len(version_by_shape)
        self._cache_by_shape = {shape: version.create_cache(max_bytes) for shape, version in version_by_shape.items()}
        self.grow_caches(records)

    def grow_caches(self, records: RecordTable) -> None:
        """Extend the page table of every KV cache, so that it has a row for each row of the table of records.

        The page table lists the pages (blocks of the cache) that hold the keys and values of each record.

        Args:
            records: The table of open records.
        """
        for cache in self._cache_by_shape.values():
            cache.ensure_capacity(records.capacity)

    def free_pages(self, record_index: Ints) -> None:
        """Free the pages of the records in these rows, so that other records can use them (`PagePool.free`)."""
        for cache in self._cache_by_shape.values():
            cache.free(record_index)

    def remove_records(self, record_index: Ints) -> None:
        """Remove closed records from the KV caches, so that new records can use their rows (`PagePool.remove`)."""
        for cache in self._cache_by_shape.values():
            cache.remove(record_index)
