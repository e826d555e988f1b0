"""`RiverDetector`: the model as an anomaly detector with the interface of River.

River is an optional dependency. Its detectors learn and score one record at a time. This one is trained once, on the
first records that it is given, or before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deformer_stream.api import Detector, train

try:
    from river.base import AnomalyDetector
except ImportError as error:
    raise ImportError(f"RiverDetector needs River ({error}); install it with pip install river") from None


class RiverDetector(AnomalyDetector):
    """An anomaly detector with the interface of River, for complete and partial records that are dicts.

    Args:
        detector: A trained detector. `learn_one` then does nothing. None to train one on the first records.
        training_records: The number of records after which `learn_one` trains the model, once.
        alpha: The false-alarm rate of `predict_one`.
        options: Options of `deformer_stream.train`, such as `{"preset": "small"}`.
        max_time: The time limit of training, such as "30s" or "10m". None for none. The call of `learn_one` that trains
            the model blocks for this time.
    """

    def __init__(
        self,
        detector: Detector | None = None,
        training_records: int = 1000,
        alpha: float = 0.01,
        options: Mapping[str, Any] | None = None,
        max_time: str | float | None = "1m",
    ) -> None:
        self.detector = detector
        self.training_records = training_records
        self.alpha = alpha
        self.options = options
        self.max_time = max_time
        self._trained = detector
        self._records: list[dict[Any, Any]] = []

    @property
    def is_trained(self) -> bool:
        """Whether there is a model. Without one, all scores are 0."""
        return self._trained is not None

    def learn_one(self, x: dict[Any, Any]) -> None:
        """Store a record for training. The model is trained when there are `training_records` of them.

        That one call blocks until training ends, at most for about `max_time`. To train elsewhere, give `detector`.

        Args:
            x: The values of the record by feature name. Missing keys, None and NaN are missing values.

        Raises:
            DeformerError: If the records cannot be used for training.
        """
        if self._trained is not None:
            return
        self._records.append(dict(x))
        if len(self._records) >= self.training_records:
            self._trained = train(self._records, **{"max_time": self.max_time, **(self.options or {})})
            self._records = []

    def score_one(self, x: dict[Any, Any]) -> float:
        """Return the anomaly score of a complete or partial record; larger is more anomalous.

        Args:
            x: The values of the record by feature name. They are scored in the order in which the model was calibrated
                (`Detector.score`).

        Returns:
            The score; 0 as long as there is no model.

        Raises:
            InputError: If a value cannot be accepted.
        """
        return 0.0 if self._trained is None else float(self._trained.score(x, self.alpha).anomaly_score[0])

    def predict_one(self, x: dict[Any, Any]) -> bool:
        """Return whether a complete or partial record raises an alert at the false-alarm rate `alpha`.

        Args:
            x: The values of the record by feature name. They are scored in the order in which the model was calibrated
                (`Detector.score`), for which `alpha` is guaranteed.

        Returns:
            Whether there is an alert; False as long as there is no model.

        Raises:
            InputError: If a value cannot be accepted.
        """
        return self._trained is not None and bool(self._trained.score(x, self.alpha).alert_seq[0] >= 0)
