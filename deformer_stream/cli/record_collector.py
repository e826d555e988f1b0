"""Collect the records of a calibration, in one process or in the process of a shard."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deformer_stream.runtime.calibration_sink import CollectedRecords, MaxStatisticSink
from deformer_stream.runtime.next_reading_order import RecordReadingsSink, score_in_chosen_order

if TYPE_CHECKING:
    from deformer_stream.model_store import Artifact
    from deformer_stream.runtime.ports import Sink
    from deformer_stream.settings import CalibrateSettings


class RecordCollector:
    """Collects what a calibration is made of, while records are scored.

    Args:
        loaded: The model.
        settings: Options of `calibrate`.

    Attributes:
        sinks: The sinks of the pipeline that scores the records.
    """

    def __init__(self, loaded: Artifact, settings: CalibrateSettings) -> None:
        self._loaded, self._settings = loaded, settings
        self._statistics = MaxStatisticSink(loaded.schema)
        self._readings = RecordReadingsSink(loaded.schema) if settings.order == "next" else None
        self.sinks: list[Sink] = [self._statistics, *([self._readings] if self._readings is not None else [])]

    def collect(self) -> CollectedRecords:
        """Return the records, whose scores are those in the chosen order if readings are chosen."""
        records, loaded, settings = self._statistics.collect(), self._loaded, self._settings
        if self._readings is None:
            return records
        values, orders = self._readings.get_matrices(records.record_ids)
        max_statistics = score_in_chosen_order(
            loaded.scoring_model,
            loaded.calibration,
            records.record_ids,
            values,
            orders,
            max(settings.alpha),
            settings.suspicious,
        )
        # The scores of complete records depend a little on the order of the readings, which is another one.
        return replace(records, max_statistics=max_statistics, record_scores=None)
