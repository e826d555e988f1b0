"""`PyODDetector`: the model as a detector with the conventions of PyOD.

PyOD is an optional dependency. Its detectors assume that the training table contains a known share of outliers. They
return scores that are larger for outliers, and predict 1 for outliers and 0 for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deformer_stream.adapters.scikit_learn import DeformerDetector

try:
    from pyod.models.base import BaseDetector
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError(f"PyODDetector needs PyOD ({error}); install it with pip install pyod") from None

MAX_CONTAMINATION = 0.49
"""The largest share of records that is left out of training, because the trainer needs a majority of normal records."""


class PyODDetector(BaseDetector):  # type: ignore[misc]  # PyOD ships no types
    """An outlier detector with the interface of PyOD. `deformer_stream.DeformerDetector` does the work.

    Args:
        contamination: The share of outliers in the training table. The most unusual records are left out of training,
            and `threshold_` is the score that this share of the table exceeds.
        max_time: The time limit of `fit`, such as "30s" or "10m". None for none.
        preset: The size of the model; None to choose one for the table and the time.
        epochs: The number of passes over the training records. None to choose it for the table.
        random_state: The seed of all random choices.
        options: Further options of `deformer-train`, with underscores.
        verbose: Whether to print the progress of training.

    Attributes:
        decision_scores_: (N,) the scores of the training records, each compared with the other records; larger is more
            anomalous. `decision_function` compares with all stored training records. For such a record, its score is
            smaller than `decision_scores_`.
        threshold_: The score above which a record is an outlier.
        labels_: (N,) 1 for the outliers among the training records, 0 for the others.
        estimator_: The fitted `DeformerDetector`; its `detector_` explains and imputes records.
    """

    def __init__(
        self,
        contamination: float = 0.1,
        max_time: str | float | None = "1m",
        preset: str | None = None,
        epochs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        options: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(contamination=contamination)
        self.max_time = max_time
        self.preset = preset
        self.epochs = epochs
        self.random_state = random_state
        self.options = options
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train the model, and compute the scores, the threshold and the labels of the training records.

        Args:
            X: (N, C) records: a NumPy array of numbers or a data frame. NaN is a missing value.
            y: Ignored.

        Returns:
            The detector.

        Raises:
            ValueError: If the table, or a parameter, cannot be used.
        """
        self._set_n_classes(y)
        options = {"contamination": min(float(self.contamination), MAX_CONTAMINATION)} | dict(self.options or {})
        self.estimator_ = DeformerDetector(
            max_time=self.max_time,
            preset=self.preset,
            epochs=self.epochs,
            random_state=self.random_state,
            options=options,
            verbose=self.verbose,
        ).fit(X)
        # Like the detectors of PyOD, without comparing a record with itself. Otherwise `threshold_` would be too low.
        self.decision_scores_ = -self.estimator_._score_training_samples(X)
        self._process_decision_scores()  # of PyOD: computes threshold_ and labels_
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return the anomaly score of each record.

        Args:
            X: (N, C) records with the columns of `fit`.

        Returns:
            (N,) scores; larger is more anomalous.
        """
        check_is_fitted(self, ["estimator_"])
        return -self.estimator_.score_samples(X)
