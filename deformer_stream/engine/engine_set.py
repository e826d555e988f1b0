"""The engines of several models, which score the events of the same partitions and share limits.

Each engine has one model, and receives only the events of this model. So its scores and alerts are those of a process
that has no other model. A process with one model has an `EngineSet` with one engine, whose name is `ONLY_MODEL`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from deformer_stream.engine.alerts import do_nothing
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import ONLY_MODEL, Decisions, Effects, EventBatch
from deformer_stream.engine.snapshot import Snapshot


class EngineSet:
    """The engines of a process, each with a name. Partitions are assigned to all of them together.

    The limits on the number and on the memory of open records hold for all engines together. If there are more, an
    engine may have as many as the others leave, but at least an equal share. The memory of the KV caches is divided
    equally when the set is created.

    Args:
        engine_by_name: The engines by the name of their model.
        limits: The limits for all engines together; None for the limits of the only engine.

    Attributes:
        engine_by_name: The engines, in alphabetical order of the names.
    """

    def __init__(self, engine_by_name: Mapping[str, Engine], limits: Limits | None = None) -> None:
        self.engine_by_name = dict(sorted(engine_by_name.items()))
        self._limits = limits or next(iter(self.engine_by_name.values())).limits

    @classmethod
    def of_only_model(cls, engine: Engine) -> EngineSet:
        """Return the set of a process with one model."""
        return cls({ONLY_MODEL: engine})

    def add(self, name: str, engine: Engine) -> None:
        """Add the engine of a new model, which has no events yet."""
        self.engine_by_name = dict(sorted([*self.engine_by_name.items(), (name, engine)]))

    @property
    def has_one_model(self) -> bool:
        """Whether the process has one model, and not several ones with names."""
        return self.engine_by_name.keys() == {ONLY_MODEL}

    @property
    def fingerprint_by_name(self) -> dict[str, str]:
        """The fingerprint of the current model of each engine."""
        return {name: engine.fingerprint for name, engine in self.engine_by_name.items()}

    @property
    def partitions_to_rescore(self) -> frozenset[int]:
        """The partitions that must not be replayed or handled until `rescore` has scored all of their records."""
        return frozenset().union(*(engine.partitions_to_rescore for engine in self.engine_by_name.values()))

    @property
    def num_open_records(self) -> int:
        """The number of open records of all engines."""
        return sum(len(engine.records) for engine in self.engine_by_name.values())

    @property
    def cache_bytes(self) -> int:
        """The number of bytes in use by the KV caches of all engines."""
        return sum(engine.cache_bytes for engine in self.engine_by_name.values())

    def count_open_records(self, partition: int) -> int:
        """Return the number of open records of a partition."""
        engines = [engine for engine in self.engine_by_name.values() if partition in engine.records.partitions]
        return sum(len(engine.records.partition(partition).record_index_by_id) for engine in engines)

    def handle(
        self,
        batch_by_name: Mapping[str, EventBatch],
        now: int,
        restoring_partitions: Collection[int] = (),
        max_explained: int | None = None,
        on_progress: Callable[[], None] = do_nothing,
        ranks_suspicious: bool = True,
    ) -> list[Effects]:
        """Score new events, and close records that are complete, idle or above a limit.

        The arguments are those of `Engine.handle`, but for the batches.

        Args:
            batch_by_name: The events of each engine that has some.

        Returns:
            The effects of each engine that had events or other work, in alphabetical order of the names.
        """
        if self.has_one_model:
            engine, batch = self.engine_by_name[ONLY_MODEL], batch_by_name.get(ONLY_MODEL)
            batch = EventBatch.empty() if batch is None else batch
            return [engine.handle(batch, now, restoring_partitions, max_explained, on_progress, ranks_suspicious)]
        # Nothing may be decided about a partition while one of the models still scores its records again, because
        # nothing is committed for it.
        restoring_partitions = {*restoring_partitions, *self.partitions_to_rescore}
        num_records = {name: len(engine.records) for name, engine in self.engine_by_name.items()}
        num_bytes = {name: engine.records.num_bytes for name, engine in self.engine_by_name.items()}
        total_records, total_bytes = sum(num_records.values()), sum(num_bytes.values())
        all_effects = []
        for name, engine in self.engine_by_name.items():
            other_records, other_bytes = total_records - num_records[name], total_bytes - num_bytes[name]
            self._set_limits(engine, other_records, other_bytes)
            batch = batch_by_name.get(name)
            if batch is None and not engine.has_work(now):
                continue
            batch = EventBatch.empty() if batch is None else batch
            effects = engine.handle(batch, now, restoring_partitions, max_explained, on_progress, ranks_suspicious)
            all_effects.append(replace(effects, model_name=name))
            total_records, total_bytes = other_records + len(engine.records), other_bytes + engine.records.num_bytes
        return all_effects

    def _set_limits(self, engine: Engine, other_records: int, other_bytes: int) -> None:
        """Set the limits of an engine to what the records of the others leave of the limits for all.

        Args:
            engine: The engine.
            other_records: Number of open records of the other engines.
            other_bytes: Number of bytes of these records.
        """
        limits, num_engines = self._limits, len(self.engine_by_name)
        max_records = max(limits.max_open_records - other_records, limits.max_open_records // num_engines, 1)
        max_bytes = max(limits.max_record_bytes - other_bytes, limits.max_record_bytes // num_engines)
        if (max_records, max_bytes) != (engine.limits.max_open_records, engine.limits.max_record_bytes):
            engine.limits = replace(engine.limits, max_open_records=max_records, max_record_bytes=max_bytes)

    def replay(self, batch_by_name: Mapping[str, EventBatch], now: int, marks_alerts: bool = False) -> None:
        """Reproduce the state of the previous run from events that it has handled, as `Engine.replay` does."""
        for name, batch in batch_by_name.items():
            self.engine_by_name[name].replay(batch, now, marks_alerts)

    def preload_decisions(self, partition: int, decisions_by_name: Mapping[str, Decisions]) -> None:
        """Load decisions of the previous run that must be known before events are replayed; unknown names are ignored.

        See `Engine.preload_decisions`.
        """
        for name in decisions_by_name.keys() & self.engine_by_name.keys():
            self.engine_by_name[name].preload_decisions(partition, decisions_by_name[name])

    def apply_decisions(self, partition: int, decisions_by_name: Mapping[str, Decisions]) -> None:
        """Repeat decisions of the previous run after its events were replayed; unknown names are ignored.

        See `Engine.apply_decisions`.
        """
        for name in decisions_by_name.keys() & self.engine_by_name.keys():
            self.engine_by_name[name].apply_decisions(partition, decisions_by_name[name])

    def snapshot(self, partition: int, now: int) -> dict[str, Snapshot]:
        """Return the state of a partition in each engine that has one, by name. See `Engine.snapshot`."""
        return {
            name: engine.snapshot(partition, now)
            for name, engine in self.engine_by_name.items()
            if self.has_one_model or engine.has_partition(partition)
        }

    def restore(self, partition: int, snapshot_by_name: Mapping[str, Snapshot], now: int) -> None:
        """Load the state of a partition; `rescore` scores its records again if necessary. See `Engine.restore`.

        Args:
            partition: Number of the partition.
            snapshot_by_name: The state by name. Names without an engine are ignored.
            now: The current time in microseconds since 1970.
        """
        for name in sorted(snapshot_by_name.keys() & self.engine_by_name.keys()):
            self.engine_by_name[name].restore(partition, snapshot_by_name[name], now)

    def rescore(self, max_readings: int) -> None:
        """Score a part of the records that wait for it, of one engine. See `Engine.rescore`."""
        for engine in self.engine_by_name.values():
            if engine.partitions_to_rescore:
                engine.rescore(max_readings)
                return

    def revoke(self, partitions: Iterable[int]) -> list[Effects]:
        """Drop all state of partitions, and return the effects of each engine. See `Engine.revoke`."""
        partitions = list(partitions)
        return [replace(e.revoke(partitions), model_name=name) for name, e in self.engine_by_name.items()]

    def finish(self) -> list[Effects]:
        """Close all open records at the end of the input, and return the effects of each engine."""
        return [replace(engine.finish(), model_name=name) for name, engine in self.engine_by_name.items()]

    def pop_cache_rebuilds(self) -> int:
        """Return the sum of `Engine.pop_cache_rebuilds`."""
        return sum(engine.pop_cache_rebuilds() for engine in self.engine_by_name.values())

    def pop_late_tie_groups(self) -> int:
        """Return the sum of `Engine.pop_late_tie_groups`."""
        return sum(engine.pop_late_tie_groups() for engine in self.engine_by_name.values())

    def measure_drift(self) -> dict[int, float]:
        """Return, by partition, log10 of the evidence of drift of the model for which it is largest."""
        largest: dict[int, float] = {}
        for engine in self.engine_by_name.values():
            for partition, evidence in engine.measure_drift().items():
                largest[partition] = max(evidence, largest.get(partition, evidence))
        return largest
