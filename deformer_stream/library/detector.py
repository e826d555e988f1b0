"""A trained model as an object that scores, explains and imputes records; loading, saving and pickling it."""

from __future__ import annotations

import html
import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.calibration.fault_classifier import FaultClassifier, FaultName
from deformer_stream.codec import Order
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Contribution, EventBatch
from deformer_stream.engine.explain import ExplanationEffort, explain_records
from deformer_stream.engine.fault_inputs import classify_records
from deformer_stream.engine.record_scores import compute_record_scores
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.errors import AlphaOutOfReachWarning, ArtifactError, ConfigError, InputError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.library.frames import (
    ArrayRecords,
    FrameRecords,
    TabularRecords,
    read_single_record,
    read_tabular,
    warn,
)
from deformer_stream.library.records import (
    Record,
    UnseenLabelCheck,
    arrange_readings,
    decode_table,
    make_batch,
    make_codec,
    make_record,
    pad_readings,
    read_dicts,
    read_table_values,
)
from deformer_stream.library.results import (
    Imputation,
    RecordScores,
    make_default_scores,
    store_scores,
    tabulate_explanations,
    to_nullable,
)
from deformer_stream.library.scorer import Scorer
from deformer_stream.model.load_network import load_network
from deformer_stream.model.schema import Schema

if TYPE_CHECKING:
    from narwhals.typing import IntoDataFrame

    from deformer_stream.engine.imputation import ImputedValues
    from deformer_stream.model.deformer import DEformer

FrameT = TypeVar("FrameT", bound="IntoDataFrame")
"""The type of a data frame or an Arrow table. Results have the type of the input."""

NUM_SHOWN_NAMES = 6
"""Number of features that the text of a detector names."""


class TemporaryFolder:
    """A new folder that is deleted when this object is no longer used, at the latest when the process ends.

    `tempfile.TemporaryDirectory` would warn if it is not closed explicitly, but a detector has no end that users call.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="deformer-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def check_alpha(alpha: object) -> float:
    """Return a false-alarm rate as a float.

    Raises:
        ValueError: It is no number between 0 and 1.
    """
    try:
        # Texts such as "0.01" are no numbers here. A list is none either, although some lists of one number are.
        number = math.nan if isinstance(alpha, str) or np.ndim(alpha) else float(alpha)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < 1:
        raise ValueError(f"alpha is {alpha!r}, but it must be one false-alarm rate between 0 and 1, such as 0.01")
    return number


class Detector:
    """A trained model with its calibration, which scores, explains and imputes records.

    `deformer_stream.load` creates it from a model directory, and `deformer_stream.train` from a table. A detector can
    be pickled and copied. The pickle refers to the model directory by path and fingerprint. If the model was trained
    without a directory, the pickle contains its files.

    Attributes:
        artifact: The contents of the model directory.
        codec: The decoder of this model's readings, from JSON messages to batches of events.
    """

    def __init__(self, artifact: model_store.Artifact, temporary_folder: TemporaryFolder | None = None) -> None:
        """Create a detector from the contents of a model directory.

        Args:
            artifact: The contents of the model directory.
            temporary_folder: The folder that contains the model directory, if it exists only as long as the detector.
        """
        self.artifact = artifact
        self.codec = make_codec(artifact.schema, 0.0)
        self._temporary_folder = temporary_folder

    @cached_property
    def _cpu_kernels(self) -> CpuKernels | None:
        """The compiled CPU kernels that run the model; None if they do not support it, so that PyTorch runs it."""
        return CpuKernels.for_model(self.artifact.scoring_model)

    @property
    def schema(self) -> Schema:
        """The features of the model."""
        return self.artifact.schema

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the model and its calibration; each alert contains them."""
        return self.artifact.fingerprint

    def _load_network(self) -> DEformer:
        """Return the network in PyTorch, with which missing values are predicted.

        Raises:
            ConfigError: PyTorch is not installed.
        """
        return load_network(self.artifact.scoring_model, "the imputation of missing values")

    def __repr__(self) -> str:
        """Return the first features, the number of calibration records, the fingerprint and the model directory."""
        num_calibration = len(self.artifact.calibration.scores)
        place = "" if self._temporary_folder is not None else f" in {self.artifact.directory}"
        return (
            f"Detector({self._describe_features()}; {num_calibration:,} calibration records; "
            f"model {self.fingerprint}{place})"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table of the features, which notebooks show."""
        rows = []
        for feature in self.schema.features:
            kind = f"{feature.kind}, context" if feature.context else feature.kind
            values = (
                f"{feature.low:g} to {feature.high:g}" if feature.low is not None and feature.high is not None else ""
            )
            if feature.labels:
                values = ", ".join(feature.labels[:NUM_SHOWN_NAMES])
                values += ", …" if len(feature.labels) > NUM_SHOWN_NAMES else ""
            cells = "".join(f"<td>{html.escape(text)}</td>" for text in (feature.name, kind, values))
            rows.append(f"<tr>{cells}</tr>")
        head = "<tr><th>feature</th><th>kind</th><th>values in training</th></tr>"
        return f"<p><code>{html.escape(repr(self))}</code></p><table>{head}{''.join(rows)}</table>"

    def _describe_features(self) -> str:
        """Return the number of features and the names of the first ones, such as "2 features: flow, power"."""
        names = self.schema.names
        shown = ", ".join(names[:NUM_SHOWN_NAMES]) + (", …" if len(names) > NUM_SHOWN_NAMES else "")
        return f"{len(names)} feature{'s' * (len(names) != 1)}: {shown}"

    def save(self, directory: str | Path) -> None:
        """Write the model to a directory, from which `deformer_stream.load` and all commands can read it.

        Args:
            directory: The model directory to write. A model that it holds is replaced.

        Raises:
            ConfigError: The directory cannot be created, or holds something other than a model.
            ArtifactError: The model directory that was loaded has changed since, or is gone.
        """
        model_store.write_files(Path(directory), self._read_files())

    def _read_files(self) -> dict[str, bytes]:
        """Return the contents of the model's files by name.

        Raises:
            ArtifactError: The model directory has changed since it was loaded, or is gone.
        """
        contents = model_store.read_files(self.artifact.directory)
        _check_fingerprint(self.artifact.directory, json.loads(contents[model_store.MANIFEST]), self.fingerprint)
        return contents

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a pickle restores the detector: from its model directory, or from the files of a temporary one."""
        device = self.artifact.device
        if self._temporary_folder is not None:
            return _restore_from_files, (self._read_files(), device)
        return _restore_from_directory, (str(self.artifact.directory.absolute()), self.fingerprint, device)

    def __copy__(self) -> Detector:
        """Return a detector with the same model, which never changes."""
        return Detector(self.artifact, self._temporary_folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> Detector:
        """Return a detector with the same model, which never changes."""
        return self.__copy__()

    def scorer(
        self,
        alpha: float | Sequence[float] = 0.01,
        record_timeout: float | None = None,
        ties: TiePolicy | None = None,
        tie_wait: float | None = None,
        grace: float = 0.0,
    ) -> Scorer:
        """Return a new scorer for readings that arrive one by one.

        Args:
            alpha: The false-alarm rate: the largest share of normal records that may ever raise an alert. Several rates
                may be given, each with alerts of its own.
            record_timeout: Seconds without a reading after which a record is closed; None for never.
            ties: What to do with readings of one record that have the same event time. "hold" scores them together when
                a reading with another time arrives, "arrival" scores each when it arrives. None uses the policy with
                which the model was calibrated.
            tie_wait: For "hold", seconds without a reading of the record after which its waiting readings are scored
                (by the next call of `update`). None to wait for a reading with another time or the end of the record.
            grace: Seconds after the end of a time window in which it still accepts readings; for models that were
                trained on windows.

        Warns:
            AlphaOutOfReachWarning: If the calibration has too few records for any alert at a false-alarm rate.

        Raises:
            ValueError: If a number is out of range. The message names it.
        """
        scorer = Scorer(self, alpha, record_timeout, ties, tie_wait, grace)
        self._warn_if_unreachable(np.atleast_1d(np.asarray(alpha, np.float64)).tolist(), has_groups=True)
        return scorer

    def _warn_if_unreachable(self, alphas: Sequence[float], has_groups: bool) -> None:
        """Warn if the calibration has too few records for any alert at one of the false-alarm rates.

        Args:
            alphas: The false-alarm rates.
            has_groups: Whether records have ids, by which they can belong to calibration groups.
        """
        calibration = self.artifact.calibration
        for alpha, num_required in calibration.find_unreachable_alphas(alphas).items():
            warn(
                f"no record can raise an alert at alpha {alpha:g}: this needs {num_required:,} calibration records, "
                f"and the model has {len(calibration.scores):,}; use a larger alpha, or calibrate with more records",
                AlphaOutOfReachWarning,
            )
        for alpha in alphas if has_groups else ():
            if names := calibration.find_unreachable_groups(alpha):
                num_groups = len(calibration.calibration_by_group)
                warn(
                    f"no record of {len(names)} of {num_groups} calibration groups can raise an alert at alpha "
                    f"{alpha:g}, such as {names[0]!r}: they have too few calibration records; use a larger alpha, or "
                    "calibrate with more records",
                    AlphaOutOfReachWarning,
                )

    def engine(
        self,
        alpha: float | Sequence[float],
        limits: Limits | None = None,
        ties: TiePolicy | None = None,
        effort: ExplanationEffort = "full",
    ) -> Engine:
        """Return a new engine (the object that scores batches of decoded readings) for this model.

        It is for programs that run the stages decode, score and write themselves. Otherwise `scorer` is simpler.

        Args:
            alpha: The false-alarm rate: the largest share of normal records that may ever raise an alert. Several rates
                may be given, each with alerts of its own.
            limits: Limits on the time and memory that open records may take; by default those of `Limits()`.
            ties: What to do with readings of one record that have the same event time. "hold" scores them together,
                "arrival" scores each when it arrives. None uses the policy with which the model was calibrated.
            effort: How thoroughly alerts are explained: "full", "fast" (one forward pass per record) or "off".

        Raises:
            ValueError: If an alpha does not lie between 0 and 1.
        """
        try:
            alphas = [check_alpha(one) for one in (np.asarray(alpha).tolist() if np.ndim(alpha) else [alpha])]
        except ValueError:
            alphas = []
        if not alphas:
            raise ValueError(f"alpha is {alpha!r}, but it must be one or more false-alarm rates between 0 and 1")
        model, calibration = self.artifact.scoring_model, self.artifact.calibration
        return Engine(
            model,
            calibration,
            self.fingerprint,
            alphas,
            limits,
            effort=effort,
            ties=ties,
            fault_classifier=self.artifact.fault_classifier,
        )

    @overload
    def score(
        self,
        records: Record | Sequence[Record] | NDArray[Any],
        alpha: float = 0.01,
        *,
        columns: Sequence[str] | None = None,
        order: Order | None = None,
    ) -> RecordScores: ...

    @overload
    def score(self, records: FrameT, alpha: float = 0.01, *, order: Order | None = None) -> FrameT: ...

    def score(
        self, records: Any, alpha: float = 0.01, *, columns: Sequence[str] | None = None, order: Order | None = None
    ) -> Any:
        """Return the scores of complete records.

        `log_likelihood` and `anomaly_score` hardly depend on the order of the readings, but `score`, `p_value` and
        `alert_seq` do. The false-alarm rate of alerts is guaranteed for the order in which the model was calibrated,
        which is the default. That is a random order unless the model was trained on logged arrivals.

        Columns and keys that are not features of the model are ignored with a warning. If more than half of the
        features have no column, there is a warning as well.

        Args:
            records: One record as a dict, or several as a list of dicts, a data frame, an Arrow table or record batch,
                or a NumPy array with a row per record. The data frame may be of pandas, polars or another library that
                narwhals supports. A feature that is missing, None or NaN is treated as not observed.
            alpha: The false-alarm rate at which `RecordScores.alert_seq` reports alerts.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.
            order: The order in which the readings of a record are scored. "arrival" is the order of the keys of a dict
                or of the columns of a table. "schema" is the order of the model's features. "random" is a random order
                that depends on the values of the record alone, so selecting or sorting records does not change it. None
                is the order in which the model was calibrated, as for `deformer-stream replay`.

        Returns:
            For a data frame or an Arrow table, a table of the same kind, whose columns are the attributes of
            `RecordScores`. A pandas data frame has the index of the input. For other inputs, `RecordScores`.

        Warns:
            AlphaOutOfReachWarning: If the calibration has too few records for any alert at `alpha`.
            UserWarning: If a feature of several records has only labels that training has not seen, or as above.

        Raises:
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
            ValueError: If `alpha` does not lie between 0 and 1.
            ConfigError: If the order is unknown, or the readings of the model are irregular; `scorer` scores them with
                their times.
        """
        check_single_readings(self.schema, "score")
        alpha = check_alpha(alpha)
        order = self._choose_order(order)
        table = read_tabular(records, self.schema, columns)
        if table is None:
            scores = self._score_dicts(read_dicts(records, self.schema), alpha, order)
        else:
            scores = self._score_table(table, alpha, order)
        self._warn_if_unreachable([alpha], has_groups=False)
        if table is None or isinstance(table, ArrayRecords):
            return scores
        names = ("log_likelihood", "anomaly_score", "p_value", "alert_seq", "score")
        return table.make_table({name: pa.array(getattr(scores, name)) for name in names})

    def _choose_order(self, order: Order | None) -> Order:
        """Return the order in which readings are scored, by default that of the calibration.

        Args:
            order: The argument of `score` and `explain`.

        Raises:
            ConfigError: The order is unknown.
        """
        if order is None:
            return self.artifact.calibration.row_order
        if order not in get_args(Order):
            raise ConfigError(f"the order of readings {order!r} is unknown; use {', '.join(get_args(Order))} or None")
        return order

    def _score_dicts(self, records: Sequence[Record], alpha: float, order: Order) -> RecordScores:
        """Return the scores of N records that are dicts.

        Args:
            records: The records, without keys that are not features.
            alpha: The false-alarm rate.
            order: The order in which the readings of a record are scored (`score`).
        """
        # With this limit, the engine never closes a record early to free memory for others.
        engine = self.engine(alpha, Limits(max_open_records=max(1, len(records))), effort="off")
        scores = make_default_scores(len(records))
        # The engine closes a record when it has all features. `finish` closes the others. A record without readings was
        # never opened and keeps the default scores. Without timeouts, the time has no effect.
        batch = arrange_readings(make_batch(records, self.codec), self.schema, order)
        store_scores(engine.handle(batch, now=0).closed, scores)
        store_scores(engine.finish().closed, scores)
        unseen_labels = UnseenLabelCheck(self.schema)
        unseen_labels.add(batch)
        unseen_labels.warn()
        return scores

    def _score_table(self, table: TabularRecords, alpha: float, order: Order) -> RecordScores:
        """Return the scores of the N records of a table.

        Args:
            table: The records.
            alpha: The false-alarm rate.
            order: The order in which the readings of a record are scored (`score`).

        Raises:
            InputError: If a value cannot be accepted; the message names its row.
        """
        engine = self.engine(alpha, effort="off")
        scores = make_default_scores(table.num_records)
        unseen_labels = UnseenLabelCheck(self.schema)
        # Features that are not observed are declared as missing, so all records of a batch are closed with it.
        for _, _, batch in decode_table(table, self.schema, order):
            unseen_labels.add(batch)
            store_scores(engine.handle(batch, now=0).closed, scores)
        unseen_labels.warn()
        return scores

    @overload
    def explain(
        self, records: Record, alpha: float = 0.01, *, order: Order | None = None
    ) -> tuple[Contribution, ...]: ...

    @overload
    def explain(
        self,
        records: Sequence[Record] | NDArray[Any],
        alpha: float = 0.01,
        *,
        columns: Sequence[str] | None = None,
        order: Order | None = None,
    ) -> list[tuple[Contribution, ...]]: ...

    @overload
    def explain(self, records: FrameT, alpha: float = 0.01, *, order: Order | None = None) -> FrameT: ...

    def explain(
        self,
        records: Any,
        alpha: float = 0.01,
        *,
        columns: Sequence[str] | None = None,
        order: Order | None = None,
    ) -> Any:
        """Return how much each reading of complete records contributes to the anomaly score of its record.

        An explanation takes many times as long as a score: select the records that have raised alerts.

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. A
                feature that is missing, None or NaN is treated as not observed.
            alpha: The false-alarm rate of the alert to explain. If a record raises an alert at this rate,
                `Contribution.suspect` is true for the readings to which the alert is attributed; otherwise for none.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.
            order: The order in which the readings of a record are scored, as in `score`. A record that raises an alert
                there has suspects here, if `alpha` and `order` are the same.

        Returns:
            For one record, one contribution per reading, the most suspicious first. Readings of context features
            (which condition the others and are never scored) are left out. For a list of dicts or a NumPy array, a list
            of such tuples. For a data frame or an Arrow table, a table of the same kind with one row per reading:
            `record` (row number, from 0), `rank` (from 0), `feature`, `value` or `label`, `suspect`, `surprise`,
            `relief`, `leave_one_out`, `attribution`, and the expected range `low`, `median`, `high` or
            `expected_label`. The rows of a pandas data frame have the index of their record.

        Warns:
            AlphaOutOfReachWarning: If the calibration has too few records for any alert at `alpha`.

        Raises:
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
            ValueError: If `alpha` does not lie between 0 and 1.
            ConfigError: If the order is unknown.
        """
        alpha = check_alpha(alpha)
        order = self._choose_order(order)
        table = read_tabular(records, self.schema, columns)
        if table is None:
            dicts = read_dicts(records, self.schema)
            batch = arrange_readings(make_batch(dicts, self.codec), self.schema, order)
            explanations = self._explain_batch(batch, len(dicts), alpha)
        else:
            explanations = [
                explanation
                for _, num_rows, batch in decode_table(table, self.schema, order)
                for explanation in self._explain_batch(batch, num_rows, alpha)
            ]
        self._warn_if_unreachable([alpha], has_groups=False)
        if table is None:
            return explanations[0] if read_single_record(records) is not None else explanations
        if isinstance(table, ArrayRecords):
            return explanations
        return tabulate_explanations(table, explanations)

    @overload
    def classify(self, records: Record) -> FaultName: ...

    @overload
    def classify(
        self, records: Sequence[Record] | NDArray[Any], *, columns: Sequence[str] | None = None
    ) -> list[FaultName | None]: ...

    @overload
    def classify(self, records: FrameT) -> FrameT: ...

    def classify(self, records: Any, *, columns: Sequence[str] | None = None) -> Any:
        """Return which known fault complete or partial records look like.

        It answers which of the faults of the labelled records a record resembles most, and does not say whether the
        record is anomalous: `score` and alerts do. `FaultName.name` is "unknown" if the record resembles none.

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. A
                feature that is missing, None or NaN is treated as not observed. The order of the readings has no
                effect.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one record its `FaultName`. For a list of dicts or a NumPy array, a list with one for each record, None
            for records without readings. For a data frame or an Arrow table, a table of the same kind with a row for
            each record: `fault`, `fault_probability` (null if the fault is unknown), and for each known fault its
            probability, in a column with the name of the fault behind `probability__`.

        Raises:
            InputError: If a value cannot be accepted, or if the one record has no reading.
            ConfigError: If the model has no classifier of faults. `deformer-train --faults TABLE --model DIR` adds it.
        """
        classifier = self.artifact.fault_classifier
        if classifier is None:
            raise ConfigError(
                "the model has no classifier of faults: add one with deformer-train --faults TABLE --model DIR"
            )
        table = read_tabular(records, self.schema, columns)
        if table is None:
            dicts = read_dicts(records, self.schema)
            values = self._collect_normalised(make_batch(dicts, self.codec), len(dicts))
            names, _ = self._classify(classifier, values)
            if read_single_record(records) is None:
                return names
            if names[0] is None:
                raise InputError("the record has no reading of a feature of the model, so its fault cannot be named")
            return names[0]
        parts = [self._collect_normalised(batch, num_rows) for _, num_rows, batch in decode_table(table, self.schema)]
        values = np.concatenate([np.empty((0, len(self.schema))), *parts])
        names, probabilities = self._classify(classifier, values)
        if isinstance(table, ArrayRecords):
            return names
        return table.make_table(
            {
                "fault": pa.array([None if name is None else name.name for name in names], pa.string()),
                "fault_probability": pa.array(
                    [None if name is None else name.probability for name in names], pa.float64()
                ),
                **{
                    f"probability__{fault}": to_nullable(probabilities[:, index])
                    for index, fault in enumerate(classifier.names)
                },
            }
        )

    def _classify(
        self, classifier: FaultClassifier, values: NDArray[np.float64]
    ) -> tuple[list[FaultName | None], NDArray[np.float64]]:
        """Return which known fault each of N records looks like, and the probabilities of all faults (N, C).

        Args:
            classifier: The classifier of faults.
            values: (N, F) values in normalised units or label codes, NaN for features without a reading.
        """
        return classify_records(self.artifact.scoring_model, self._cpu_kernels, classifier, values)

    def _collect_normalised(self, batch: EventBatch, num_records: int) -> NDArray[np.float64]:
        """Return the values of N records in normalised units or label codes, (N, F), NaN for missing readings.

        Args:
            batch: The readings of all records, one record after the other; message index i belongs to record i.
                Readings with the value NaN are left out.
            num_records: The number N of records.
        """
        codes, raw_values, _ = pad_readings(batch, num_records)  # (N, L), −1 as padding
        rows, positions = np.nonzero(codes >= 0)
        values = np.full((num_records, len(self.schema)), np.nan)
        codes = codes[rows, positions]
        values[rows, codes] = self.schema.normalise(codes, raw_values[rows, positions])
        return values

    def _explain_batch(self, batch: EventBatch, num_records: int, alpha: float) -> list[tuple[Contribution, ...]]:
        """Return the contributions of the readings of each of N complete records.

        Args:
            batch: The readings of all records, one record after the other; message index i belongs to record i.
                Readings with the value NaN are left out.
            num_records: The number N of records.
            alpha: The false-alarm rate of the alert to explain.
        """
        codes, raw_values, unseen_labels = pad_readings(batch, num_records)  # (N, L), −1 as padding
        explanations: list[tuple[Contribution, ...]] = [()] * num_records
        rows = np.flatnonzero((codes >= 0).any(1))
        if not len(rows):
            return explanations
        codes, raw_values = codes[rows], raw_values[rows]
        model, alert_rule = self.artifact.scoring_model, self.artifact.calibration.make_alert_rule(alpha)
        # A record without an id belongs to no calibration group and is compared with all calibration records.
        record_ids = [""] * len(rows)
        unseen = [unseen_labels[row] for row in rows.tolist()]
        found = explain_records(model, codes, raw_values, unseen, record_ids, alert_rule, kernels=self._cpu_kernels)
        # `explain_records` assumes that the records raise alerts, and may mark suspects even if they do not. Compute
        # whether they do, from the largest anomaly score of each record, in an array of shape (R, 1).
        normalised = self.schema.normalise(np.maximum(codes, 0), raw_values)
        scores = compute_record_scores(self._cpu_kernels, model, codes, normalised)
        has_alert = alert_rule(scores.statistics[:, None], record_ids)[:, 0]
        for row, is_alert, explanation in zip(rows.tolist(), has_alert.tolist(), found, strict=True):
            contributions = explanation.contributions
            if not is_alert:
                contributions = tuple(replace(contribution, suspect=False) for contribution in contributions)
            explanations[row] = contributions
        return explanations

    @overload
    def impute(self, records: Record, interval: float = 0.9) -> dict[str, Imputation]: ...

    @overload
    def impute(self, records: Sequence[Record], interval: float = 0.9) -> list[dict[str, Imputation]]: ...

    @overload
    def impute(
        self, records: NDArray[Any], interval: float = 0.9, *, columns: Sequence[str] | None = None
    ) -> NDArray[Any]: ...

    @overload
    def impute(self, records: FrameT, interval: float = 0.9, *, bounds: bool = False) -> FrameT: ...

    def impute(
        self, records: Any, interval: float = 0.9, *, bounds: bool = False, columns: Sequence[str] | None = None
    ) -> Any:
        """Predict the value of each missing feature of records, given the values of all present ones.

        Context features only condition the other features, and the model has no distribution for them. Missing ones are
        therefore left out. To impute a file, use the command `deformer-stream impute`.

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. None and
                NaN count as missing.
            interval: Probability that the value lies in the central prediction interval, between 0 and 1.
            bounds: Whether the result for a data frame has further columns `FEATURE__low` and `FEATURE__high` with the
                bounds of the interval. They are null where the value was present.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one dict, the predictions by feature name; for a list of dicts, a list of them. For a data frame or an
            Arrow table, a copy in which the median, or the most probable label, replaces each missing value. A feature
            without a column gets one at the end. For a NumPy array, such a copy as well.

        Raises:
            ValueError: If `interval` does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
            ConfigError: If the readings of the model are irregular, but the rows are not readings with times.
        """
        if not 0 < interval < 1:
            raise ValueError(f"interval is {interval}, but it must be a probability between 0 and 1")
        network = self._load_network()
        # Imported here, because these modules import PyTorch, which scoring does not need.
        from deformer_stream.engine import imputation
        from deformer_stream.library import readings

        if self.schema.reading_times is not None:
            return readings.impute_readings(network, self.codec, records, interval, bounds, columns)
        table = read_tabular(records, self.schema, columns)
        if bounds and not isinstance(table, FrameRecords):
            raise ValueError(
                "bounds=True adds columns and needs a data frame or an Arrow table; pass one, or leave it out"
            )
        values = self._read_values(records, table)
        imputed = imputation.impute(network, values, np.isnan(values), interval)
        if table is None:
            imputations = [self._describe_imputation(imputed, row) for row in range(len(values))]
            return imputations[0] if read_single_record(records) is not None else imputations
        filled = self._fill_columns(table, imputed.median)
        if bounds:
            for code, feature in enumerate(self.schema.features):
                if not feature.labels and not feature.context:
                    filled[f"{feature.name}__low"] = to_nullable(imputed.low[:, code])
                    filled[f"{feature.name}__high"] = to_nullable(imputed.high[:, code])
        return table.replace_columns(filled)

    def _describe_imputation(self, imputed: ImputedValues, row: int) -> dict[str, Imputation]:
        """Return the predictions for the missing features of one record by feature name.

        Args:
            imputed: The predictions for all records, (N, F) each, NaN for features that were not imputed.
            row: The number of the record.
        """
        imputations: dict[str, Imputation] = {}
        for code in np.flatnonzero(~np.isnan(imputed.median[row])).tolist():
            feature = self.schema.features[code]
            if feature.labels:
                label = feature.labels[int(imputed.median[row, code])]  # for labels, the median is the likeliest code
                imputations[feature.name] = Imputation(label, low=None, high=None)
            else:
                # In the order of the attributes of `Imputation`.
                statistics = (imputed.median, imputed.low, imputed.high, imputed.mean, imputed.mode)
                imputations[feature.name] = Imputation(*(float(statistic[row, code]) for statistic in statistics))
        return imputations

    def _fill_columns(
        self, table: TabularRecords, values: NDArray[np.float64], rows: NDArray[np.int64] | None = None
    ) -> dict[str, pa.Array]:
        """Return the columns of a table in which gaps (missing values) are filled.

        Args:
            table: The N records.
            values: (M, F) the value of each gap in raw units, or the code of a label; NaN for other cells.
            rows: (M,) the row of the table that each row repeats; None if M is N and the rows correspond.

        Returns:
            The M cells of each column with gaps, by feature name. Columns keep their types. A feature without a column
            gets one.
        """
        from connectors.files.imputation import fill_gaps

        filled: dict[str, pa.Array] = {}
        for code in np.flatnonzero(~np.isnan(values).all(0)).tolist():
            feature = self.schema.features[code]
            if feature.name in table.column_names:
                column = table.get_column(feature.name)
                column = column if rows is None else column.take(pa.array(rows))
            else:
                column = pa.nulls(len(values))
            filled[feature.name] = fill_gaps(column, feature, values[:, code], f"column {feature.name!r}")
        return filled

    @overload
    def quantiles(self, records: Record, qs: Sequence[float]) -> dict[str, tuple[float, ...]]: ...

    @overload
    def quantiles(self, records: Sequence[Record], qs: Sequence[float]) -> list[dict[str, tuple[float, ...]]]: ...

    @overload
    def quantiles(
        self, records: NDArray[Any], qs: Sequence[float], *, columns: Sequence[str] | None = None
    ) -> NDArray[np.float64]: ...

    @overload
    def quantiles(self, records: FrameT, qs: Sequence[float]) -> FrameT: ...

    def quantiles(self, records: Any, qs: Sequence[float], *, columns: Sequence[str] | None = None) -> Any:
        """Return quantiles of the predicted distribution of each missing continuous feature of records.

        Context features only condition the other features, and the model has no distribution for them. Missing ones are
        therefore left out.

        If the readings of the model are irregular, rows and dicts are readings as in `impute`. The result for a list of
        dicts is then a list with a tuple of quantiles for each request and None for other rows. That for a data frame
        has columns such as `value__q0.05`.

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. The
                predictions depend on the present values; None and NaN count as missing.
            qs: The probabilities of the quantiles, each between 0 and 1; 0.5 for the median.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one dict, by feature name, the quantiles in raw units (the units of the input) in the order of `qs`. For
            a list of dicts, a list of them. For a data frame or an Arrow table, a table of the same kind. It has a
            column such as `FEATURE__q0.05` for each continuous feature and quantile, null where the value was present.
            For a NumPy array, an array (Q, N, C) for Q quantiles, N rows and C columns, NaN where the value was
            present.

        Raises:
            ValueError: If `qs` is empty or a probability does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        qs = [float(q) for q in qs]
        if not qs or not all(0 < q < 1 for q in qs):
            raise ValueError(
                f"qs is {list(qs)}, but it must be one or more probabilities of quantiles, each between 0 and 1"
            )
        network = self._load_network()
        # Imported here, because these modules import PyTorch, which scoring does not need.
        from deformer_stream.engine import imputation
        from deformer_stream.library import readings

        if self.schema.reading_times is not None:
            return readings.compute_reading_quantiles(network, self.codec, records, qs, columns)
        table = read_tabular(records, self.schema, columns)
        values = self._read_values(records, table)
        # (Q, N, F) for Q probabilities, N records and F features, NaN for features that were not imputed.
        quantiles = imputation.impute_quantiles(network, values, np.isnan(values), qs)
        if table is None:
            found = [
                {
                    self.schema.names[code]: tuple(quantiles[:, row, code].tolist())
                    for code in np.flatnonzero(~np.isnan(quantiles[0, row])).tolist()
                }
                for row in range(len(values))
            ]
            return found[0] if read_single_record(records) is not None else found
        if isinstance(table, ArrayRecords):
            result = np.full((len(qs), table.num_records, len(table.column_names)), np.nan)
            for index, name in enumerate(table.column_names):
                if name in self.schema.code_by_name:
                    result[:, :, index] = quantiles[:, :, self.schema.code_by_name[name]]
            return result
        added = {
            f"{feature.name}__q{q:g}": to_nullable(quantiles[index, :, code])
            for code, feature in enumerate(self.schema.features)
            if not feature.labels and not feature.context
            for index, q in enumerate(qs)
        }
        return table.make_table(added)

    @overload
    def complete(self, records: Record, draws: int = 1, seed: int = 0) -> list[dict[str, float | str]]: ...

    @overload
    def complete(
        self, records: Sequence[Record], draws: int = 1, seed: int = 0
    ) -> list[list[dict[str, float | str]]]: ...

    @overload
    def complete(
        self, records: NDArray[Any], draws: int = 1, seed: int = 0, *, columns: Sequence[str] | None = None
    ) -> NDArray[Any]: ...

    @overload
    def complete(self, records: FrameT, draws: int = 1, seed: int = 0) -> FrameT: ...

    def complete(self, records: Any, draws: int = 1, seed: int = 0, *, columns: Sequence[str] | None = None) -> Any:
        """Return copies of records in which random values replace the missing ones.

        The values are drawn from the joint distribution of the missing features given the present ones. Context
        features only condition the others, and the model has no distribution for them, so missing ones stay missing.
        Equal arguments give equal results.

        If the readings of the model are irregular, rows and dicts are readings as in `impute`. All requested values of
        a record are drawn jointly. The result for a list of dicts is then a list of `draws` such lists.

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. None and
                NaN count as missing.
            draws: Number of completed copies of each record to return, at least 1.
            seed: The seed of the random numbers.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one dict, `draws` dicts of values by feature name; numbers are floats, labels are text. For a list of
            dicts, a list of such lists. For a data frame or an Arrow table, a table of the same kind in which each row
            is repeated `draws` times. The column `draw` numbers the copies from 0. For a NumPy array, an array with
            such rows.

        Raises:
            ValueError: If `draws` is less than 1.
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}, but the number of completed records to return must be at least 1")
        network = self._load_network()
        # Imported here, because these modules import PyTorch, which scoring does not need.
        from deformer_stream.engine import imputation
        from deformer_stream.library import readings

        if self.schema.reading_times is not None:
            return readings.complete_readings(network, self.codec, records, draws, seed, columns)
        table = read_tabular(records, self.schema, columns)
        values = self._read_values(records, table)
        # (draws, N, F) values of N records and F features.
        completions = imputation.sample_completions(network, values, np.isnan(values), draws, seed)
        if table is None:
            completed = [[make_record(row, self.schema) for row in completions[:, i]] for i in range(len(values))]
            return completed[0] if read_single_record(records) is not None else completed
        rows = np.repeat(np.arange(len(values)), draws)
        drawn = np.where(np.isnan(values), completions, np.nan)  # only the gaps are filled
        # (draws, N, F) to (N, draws, F) to (N · draws, F), so that the copies of a row are adjacent.
        filled = self._fill_columns(table, drawn.transpose(1, 0, 2).reshape(len(rows), -1), rows)
        if isinstance(table, FrameRecords):
            filled[readings.DRAW_COLUMN] = pa.array(np.tile(np.arange(draws), len(values)))
        return table.replace_columns(filled, rows)

    def _read_values(self, records: Any, table: TabularRecords | None) -> NDArray[np.float64]:
        """Return the values of N records as an array (N, F) for the F features of the schema, as the model needs it.

        Column i belongs to feature i of the schema. It holds a number in raw units (the units of the input), the code
        of a label (its index among the feature's labels), or NaN if the value is missing.

        Args:
            records: The records as the user has given them. Only used if they are not in a table.
            table: The records in a table, or None.

        Raises:
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        if table is None:
            dicts = read_dicts(records, self.schema)
            batch = make_batch(dicts, self.codec)
            values = np.full((len(dicts), len(self.schema)), np.nan)
            values[batch.message_indices, batch.features] = batch.values
            return values
        return read_table_values(table, self.schema)


def load(directory: str | Path, device: str = "cpu") -> Detector:
    """Read and verify a model directory, and return its model as a `Detector`, ready to score.

    Args:
        directory: The model directory that `deformer-train` wrote.
        device: The torch device for the model, such as "cpu" or "cuda"; "auto" means a GPU if there is one.

    Raises:
        ArtifactError: If the directory is missing, incomplete or altered; the message names the problem and the remedy.
        ConfigError: If the device is not available.
    """
    return Detector(model_store.read(Path(directory), device))


def _check_fingerprint(directory: Path, manifest: Mapping[str, Any], fingerprint: str) -> None:
    """Check that a model directory still holds the model to which a detector refers.

    Args:
        directory: The model directory.
        manifest: The contents of its manifest.json.
        fingerprint: The fingerprint of the detector.

    Raises:
        ArtifactError: It holds another model.
    """
    if manifest["fingerprint"] != fingerprint:
        raise ArtifactError(
            f"the model directory {directory} holds the model {manifest['fingerprint']}, but the detector refers to "
            f"the model {fingerprint}, which was there before: load the directory again, or restore the old model"
        )


def _restore_from_directory(directory: str, fingerprint: str, device: str) -> Detector:
    """Return the detector of a pickle that refers to a model directory.

    Args:
        directory: The absolute path of the model directory.
        fingerprint: The fingerprint of the model.
        device: The torch device of the model.

    Raises:
        ArtifactError: The directory is gone, altered, or holds another model.
    """
    _check_fingerprint(Path(directory), model_store.read_manifest(Path(directory)), fingerprint)
    return load(directory, device)


def _restore_from_files(contents: Mapping[str, bytes], device: str) -> Detector:
    """Return the detector of a pickle that contains the files of its model, which are written to a temporary folder.

    Args:
        contents: The contents of the files by name.
        device: The torch device of the model.
    """
    folder = TemporaryFolder()
    model_store.write_files(folder.path / "model", contents)
    return Detector(model_store.read(folder.path / "model", device), folder)
