"""`DeformerDetector`: the model as an outlier detector of scikit-learn, for pipelines, searches and cross-validation.

scikit-learn is an optional dependency: `pip install 'deformer-stream[sklearn]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.errors import DeformerError
from deformer_stream.extras import format_remedy
from deformer_stream.library.detector import check_alpha
from deformer_stream.library.frames import TabularRecords, read_array, read_frame, warn
from deformer_stream.library.records import read_table_values
from deformer_stream.library.training import UnknownOptionError, run_training
from deformer_stream.library.training_scores import compare_with_other_records
from deformer_stream.model.exemplars import Exemplars

try:
    from sklearn.base import BaseEstimator, OutlierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:  # scikit-learn is not installed, or is older than 1.6
    raise ImportError(
        f"DeformerDetector needs scikit-learn 1.6 or later ({error}); install it with {format_remedy('sklearn')}"
    ) from None

if TYPE_CHECKING:
    from trainer.job import TrainingOutput

MAX_THRESHOLD_RECORDS = 20_000
"""Largest number of calibration records from which the threshold is computed."""

NO_ALERTS_ALPHA = 0.5
"""The false-alarm rate for scores whose alerts are not used. It is in reach of every calibration, so nothing warns."""


class DeformerDetector(OutlierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """An outlier detector for complete records, with a false-alarm rate that you choose.

    The estimator learns the joint distribution of the columns of a table of normal records. It ranks records by
    `RecordScores.anomaly_score`. Its threshold is the conformal one: it is computed from calibration records, which are
    not used to fit the weights. At most a share `alpha` of new normal records is predicted as outliers, in the mean
    over tables of normal records. For alerts before a record is complete, use `detector_.scorer()`.

    Columns may hold numbers, texts, categories and booleans, and missing values (NaN, None). NumPy arrays hold numbers.

    Args:
        alpha: The false-alarm rate: the share of normal records that may be predicted as outliers, between 0 and 1.
        max_time: The time limit of `fit`, such as "30s" or "10m". None for none. With a limit the result depends on the
            speed of the machine; for equal results use None and set `epochs`.
        preset: The size of the model, "tiny", "small", "base" or "paper". None to choose one for the table and the
            time.
        epochs: The number of passes over the training records. None to choose it for the table.
        calibration_share: The share of the records that is used for calibration and not for training. None for about
            0.2, as `deformer-train` chooses it.
        random_state: The seed of all random choices.
        options: Further options of `deformer-train`, with underscores, such as `{"contamination": 0.02}`.
        verbose: Whether to print the progress of training.

    Attributes:
        detector_: The trained `Detector`. It explains, imputes and scores partial records.
        offset_: `decision_function` is `score_samples` minus this number.
        alpha_: The false-alarm rate in effect. It is larger than `alpha` if there are too few calibration records.
        n_features_in_: The number of columns.
        feature_names_in_: The names of the columns, if all are texts.
    """

    def __init__(
        self,
        alpha: float = 0.01,
        *,
        max_time: str | float | None = "1m",
        preset: str | None = None,
        epochs: int | None = None,
        calibration_share: float | None = None,
        random_state: int | np.random.RandomState | None = None,
        options: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.alpha = alpha
        self.max_time = max_time
        self.preset = preset
        self.epochs = epochs
        self.calibration_share = calibration_share
        self.random_state = random_state
        self.options = options
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        """Return what the estimator can do, for scikit-learn: missing values are allowed."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train the model on a table of normal records, and compute the threshold.

        Args:
            X: (N, C) records: a NumPy array of numbers, a data frame, or a list of lists.
            y: Ignored.

        Returns:
            The estimator.

        Warns:
            UserWarning: If the table has too few records, if columns are left out, or if training reports that the
                model may be poor.

        Raises:
            ValueError: If the table, or a parameter, cannot be used.
        """
        check_alpha(self.alpha)
        table = self._read(X, reset=True)
        try:
            detector, output = run_training(
                _repeat_few_records(table), None, self._list_options(), verbose=self.verbose
            )
        except (DeformerError, UnknownOptionError) as error:
            raise ValueError(str(error)) from error
        from trainer.job import TrainingOutput  # imported late, like the whole trainer

        if not isinstance(output, TrainingOutput):
            raise ValueError("the option irregular cannot be used here, because the rows of a matrix are records")
        left_out = [f"{column.name!r} ({column.reason})" for column in output.data.excluded_columns]
        if left_out:
            warn(f"columns are not used: {', '.join(left_out)}; options={{'continuous': [...]}} uses a column")
        for entry in output.summary.get("warnings", ()):
            warn(entry["message"])
        self.detector_ = detector
        scores = self._score_calibration_records(output)
        # A new normal record is equally likely to have any rank among the n + 1 scores. So the share of normal records
        # above the k-th largest calibration score is at most k / (n + 1).
        rank = int(self.alpha * (len(scores) + 1))
        if rank < 1:
            warn(
                f"alpha {self.alpha:g} is out of reach with {len(scores):,} calibration records: the threshold has the "
                f"false-alarm rate {1 / (len(scores) + 1):.2g}; use a larger alpha or more records"
            )
        self.alpha_ = max(self.alpha, 1 / (len(scores) + 1))
        self.offset_ = -float(np.sort(scores)[-max(1, rank)])
        return self

    def score_samples(self, X: Any) -> NDArray[np.float64]:
        """Return how normal each record is.

        Args:
            X: (N, C) records with the columns of `fit`.

        Returns:
            (N,) the anomaly scores with the opposite sign; smaller is more anomalous.
        """
        check_is_fitted(self)
        return self._compute_scores(self._read(X, reset=False))

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return how far each record is from the threshold.

        Args:
            X: (N, C) records with the columns of `fit`.

        Returns:
            (N,) negative for outliers.
        """
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> NDArray[np.int64]:
        """Return whether each record is an outlier.

        Args:
            X: (N, C) records with the columns of `fit`.

        Returns:
            (N,) −1 for outliers, 1 for others.
        """
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _list_options(self) -> dict[str, Any]:
        """Return the parameters as options of `deformer_stream.train`."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        named = {"max_time": self.max_time, "preset": self.preset, "epochs": self.epochs}
        named |= {"calibration_share": self.calibration_share, "seed": seed, "layout": "wide"}
        # The threshold is computed from the scores of calibration records. A stored record would be at distance 0 from
        # itself, so its score would be smaller than that of a new record.
        named |= {"calibration_exemplars": False}
        return named | dict(self.options or {})

    def _read(self, X: Any, reset: bool) -> TabularRecords:
        """Return records as a table, after the checks of scikit-learn.

        Args:
            X: The records.
            reset: Whether to store the number and the names of the columns (in `fit`), or to compare with them.

        Raises:
            ValueError: The columns differ from those of `fit`, a value is infinite, or there is no record.
        """
        try:
            frame = read_frame(X)
        except DeformerError as error:
            raise ValueError(str(error)) from error
        if frame is None:
            minimum = 2 if reset else 1
            array = validate_data(self, X, reset=reset, ensure_all_finite="allow-nan", ensure_min_samples=minimum)
            if reset:
                self._column_names = [f"x{index}" for index in range(array.shape[1])]
            return read_array(array, self._column_names)
        validate_data(self, X, reset=reset, skip_check_array=True)
        if not frame.num_records:
            raise ValueError("the data frame has no rows (0 samples); give at least one record")
        if reset:
            self._column_names = list(frame.column_names)
        elif not hasattr(self, "feature_names_in_"):  # `fit` got no names of columns, so the columns are in its order
            columns = [frame.get_column(name) for name in frame.column_names]
            renamed = pa.Table.from_arrays(columns, names=self._column_names)
            return cast("TabularRecords", read_frame(renamed))
        return frame

    def _compute_scores(self, table: TabularRecords) -> NDArray[np.float64]:
        """Return the anomaly scores of the records of a table with the opposite sign, (N,).

        Args:
            table: The records.

        Raises:
            ValueError: A value cannot be accepted; the message names its row and column.
        """
        try:
            # The order of the schema, so that equal records have the same score in every table.
            scores = self.detector_.score(self._select_features(table), NO_ALERTS_ALPHA, order="schema")
        except DeformerError as error:
            raise ValueError(str(error)) from error
        return -np.asarray(scores["anomaly_score"].to_numpy())

    def _select_features(self, table: TabularRecords) -> pa.Table:
        """Return the columns of a table that are features of the model, in the order of its schema.

        Args:
            table: The records.

        Raises:
            InputError: A cell has a type that no reading can have.
        """
        names = [name for name in self.detector_.schema.names if name in table.column_names]
        return pa.table({name: table.get_column(name) for name in names})

    def _score_training_samples(self, X: Any) -> NDArray[np.float64]:
        """Return how normal each record of the table of `fit` is, compared with the other records.

        The result is comparable with `score_samples` of new records. `score_samples` of a record that the model stores
        would be too large, because the record would be compared with itself.

        Args:
            X: (N, C) the records of `fit`.

        Returns:
            (N,) the anomaly scores with the opposite sign; smaller is more anomalous.
        """
        table = self._read(X, reset=False)
        scores = self._compute_scores(table)
        detector = self.detector_
        exemplars = Exemplars.from_parameters(detector.artifact.scoring_model.extract_parameters())
        features = read_frame(self._select_features(table))
        if exemplars is None or features is None:
            return scores
        raw_values = read_table_values(features, detector.schema)
        codes = np.broadcast_to(np.arange(raw_values.shape[1]), raw_values.shape)
        values = detector.schema.normalise(codes, raw_values)
        return scores - compare_with_other_records(exemplars, values)

    def _score_calibration_records(self, output: TrainingOutput) -> NDArray[np.float64]:
        """Return the anomaly scores of the calibration records, (n,).

        The records are taken from the matrix of the training job, because the job may have used only a part of the
        table.

        Args:
            output: The results of the training job.
        """
        from trainer.calibrate import sample_rows
        from trainer.data import Split

        data = output.data
        rows = sample_rows(data.select_rows(Split.CALIBRATION), 0, MAX_THRESHOLD_RECORDS)
        schema = self.detector_.schema
        codes = np.broadcast_to(np.arange(len(schema)), (len(rows), len(schema)))
        values = schema.denormalise(codes, np.asarray(data.values[rows], np.float64))
        columns: dict[str, pa.Array] = {}
        for code, feature in enumerate(schema.features):
            if feature.labels:
                # The code after the last label stands for a label that did not occur in training.
                texts = [*feature.labels, "\N{REPLACEMENT CHARACTER}"]
                cells = [None if np.isnan(value) else texts[int(value)] for value in values[:, code]]
                columns[feature.name] = pa.array(cells, pa.string())
            else:
                columns[feature.name] = pa.array(values[:, code], from_pandas=True)
        scores = self.detector_.score(pa.table(columns), NO_ALERTS_ALPHA, order="schema")
        return np.asarray(scores["anomaly_score"].to_numpy())


def _repeat_few_records(table: TabularRecords) -> pa.Table:
    """Return a table as an Arrow table; if it has too few records to train on, they are repeated.

    Args:
        table: The records.

    Warns:
        UserWarning: If the records are repeated, because the false-alarm rate is then not guaranteed.
    """
    from trainer.data import MIN_RECORDS

    records = pa.table({name: table.get_column(name) for name in table.column_names})
    if len(records) >= MIN_RECORDS:
        return records
    warn(
        f"{len(records)} records are too few to train and to calibrate on, so they are repeated: the false-alarm "
        f"rate is not guaranteed; give at least {MIN_RECORDS} records, better 1000"
    )
    return records.take(pa.array(np.arange(MIN_RECORDS) % len(records)))
