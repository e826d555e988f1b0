"""The library: `train` and `load` return a `Detector`, which scores, explains and imputes records.

A record is a set of features. Complete or partial records are rows of a data frame, of an Arrow table or of a NumPy
array, or dicts:

detector = deformer_stream.train(normal, max_time="1m")        # or deformer_stream.load("model")
scores = detector.score(frame)                                 # a data frame of the same kind, with the same index

The readings of a record, each a value of one feature, may also arrive one by one:

scorer = detector.scorer(alpha=0.01)
scorer.update("pump-7/10:34:33", "Pressure", 9.1).p_value      # 0.0008
"""

from __future__ import annotations

import difflib
import html
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.codec import Codec, Order, WindowAssigner
from deformer_stream.codec.payloads import Messages, WideRows
from deformer_stream.codec.validation import is_unicode
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, Alert, ClosedRecords, Contribution, EventBatch, Rejection
from deformer_stream.engine.explain import ExplanationEffort, explain_records
from deformer_stream.engine.imputation import ImputedValues, impute, impute_quantiles, sample_completions
from deformer_stream.engine.record_scores import compute_record_scores
from deformer_stream.errors import AlphaOutOfReachWarning, ArtifactError, InputError
from deformer_stream.frames import (
    ArrayRecords,
    FrameRecords,
    TabularRecords,
    convert_cells,
    read_array,
    read_feature_columns,
    read_frame,
    read_single_record,
    read_tabular,
    warn,
    warn_of_unknown_names,
)
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.timing import WallClock
from deformer_stream.tables.table import Table

if TYPE_CHECKING:
    from narwhals.typing import IntoDataFrame

    from trainer.job import TrainingOutput

Value = float | int | str | bool | None
"""The value of a reading; None declares that the feature will not be observed. NumPy scalars are accepted as well."""

Record = Mapping[str, Value]
"""A record: its values by feature name, in the order of arrival. None and NaN count as not observed."""

FrameT = TypeVar("FrameT", bound="IntoDataFrame")
"""The type of a data frame or an Arrow table. Results have the type of the input."""

ROWS_PER_BATCH = 4096
"""Number of rows of a table that are decoded and scored at a time. It bounds memory and does not change any score."""

NUM_SHOWN_NAMES = 6
"""Number of features that the text of a detector names."""

DRAW_COLUMN = "draw"
"""The column that numbers the copies of each row in the result of `Detector.complete`, from 0."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of adding one reading to a record: its scores, alerts and rejection.

    The four scores `log_likelihood`, `running_log_likelihood`, `score` and `p_value` are NaN if the reading was
    rejected, if it declares that the feature will not be observed, or if `is_waiting` is true.

    Attributes:
        log_likelihood: Natural logarithm of p(value | earlier readings of the record). It is a density in normalised
            units, or a probability if the feature is discrete. NaN for a context feature (a feature that conditions
            the others and is never scored itself).
        running_log_likelihood: Sum of the log-likelihoods of the record's scored readings so far.
        score: The anomaly score of the record after its readings so far, from which the p-value is computed; larger is
            more anomalous.
        p_value: Anytime-valid p-value of the record: the probability that it ever falls to alpha or less is at most
            alpha for a normal record. It never rises within a record.
        alerts: The alerts that this call raised, the latest last. A record raises at most one alert for each alpha
            (false-alarm rate). If a reading raises several, the largest alpha comes first. There are also alerts of
            other records if a timeout has closed these records, or has ended the wait of their readings (`is_waiting`).
        rejection: Why the reading was rejected, or None if it was accepted.
        is_waiting: Whether the reading is not scored yet, because further readings of the record with the same event
            time may follow (`ties="hold"` in `Detector.scorer`), or because the model combines the readings of a time
            slot, which is not over. A later update or `Scorer.finish` then returns its alerts.
    """

    log_likelihood: float
    running_log_likelihood: float
    score: float
    p_value: float
    alerts: tuple[Alert, ...] = ()
    rejection: Rejection | None = None
    is_waiting: bool = False

    @property
    def alert(self) -> Alert | None:
        """The last entry of `alerts`; None if there is none.

        If a reading raised several alerts, this is the most severe one, which has the smallest alpha.
        """
        return self.alerts[-1] if self.alerts else None


@dataclass(frozen=True, slots=True, repr=False)
class RecordScores:
    """The scores of N complete records, in the order of the records.

    There are two anomaly scores. `score` is the one from which p-values and alerts follow. `anomaly_score` is for
    ranking: it can use all readings at once, but has no guaranteed false-alarm rate. A record without readings has
    the scores 0, the p-value 1 and the `alert_seq` −1.

    Attributes:
        log_likelihood: (N,) natural logarithm of p(record), the sum over the record's readings.
        anomaly_score: (N,) score for ranking complete records; larger is more anomalous.
        p_value: (N,) anytime-valid p-value after the last reading: the probability that it ever falls to alpha or less
            is at most alpha for a normal record.
        alert_seq: (N,) position in the record, from 0, of the reading that raised the alert; −1 without an alert.
        score: (N,) the running anomaly score after the last reading, from which `p_value` is computed; larger is more
            anomalous.
    """

    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    score: NDArray[np.float64]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.p_value)

    def __repr__(self) -> str:
        """Return the number of records and of alerts, and the first and last scores."""
        num_alerts = int((self.alert_seq >= 0).sum())
        anomaly_score, p_value = (
            np.array2string(column, precision=4, threshold=6, edgeitems=3, separator=", ")
            for column in (self.anomaly_score, self.p_value)
        )
        return (
            f"RecordScores({len(self)} record{'s' * (len(self) != 1)}, {num_alerts} alert{'s' * (num_alerts != 1)}, "
            f"anomaly_score={anomaly_score}, p_value={p_value})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Imputation:
    """The prediction for a missing value of a record, in raw units (the units of the input).

    Attributes:
        value: Median of the predicted distribution, or the most probable label of a discrete feature.
        low: Lower end of the central prediction interval, which has equal probability below and above it; None for a
            discrete feature.
        high: Upper end of the same interval; None for a discrete feature.
        mean: Mean of the predicted distribution; None for a discrete feature.
        mode: Most probable value; None for a discrete feature.
    """

    value: float | str
    low: float | None
    high: float | None
    mean: float | None = None
    mode: float | None = None

    def __repr__(self) -> str:
        """Return the statistics with six digits; those that a discrete feature does not have are left out."""
        names = ("value", "low", "high", "mean", "mode")
        statistics = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        shown = (
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value:.6g}"
            for name, value in statistics.items()
        )
        return f"Imputation({', '.join(shown)})"


class Scorer:
    """A scorer of readings that arrive one by one; the readings of many records may be interleaved.

    A scorer is created by `Detector.scorer`, which explains the arguments. It must not be used by several threads at
    the same time.
    """

    def __init__(
        self,
        detector: Detector,
        alpha: float | Sequence[float],
        record_timeout: float | None,
        ties: TiePolicy | None = None,
        tie_wait: float | None = None,
        grace: float = 0.0,
    ) -> None:
        # `Detector.scorer` explains the arguments.
        timeout_micros = _to_micros("record_timeout", record_timeout)
        tie_wait_micros = _to_micros("tie_wait", tie_wait)
        if not 0 <= grace <= 1e9:
            raise ValueError(
                f"grace (seconds after the end of a time window in which it still accepts readings) is {grace}, but it "
                "must be from 0 to 1e9"
            )
        self._codec = _make_codec(detector.schema, grace)
        self._clock = WallClock()
        # Whether time alone can close records or end the wait of readings, so that `update` must check for it.
        self._has_timeouts = timeout_micros is not None or tie_wait_micros is not None
        self._engine = detector.engine(alpha, Limits(timeout_micros, tie_wait=tie_wait_micros), ties)

    def __repr__(self) -> str:
        """Return the false-alarm rates, the number of open records and the fingerprint of the model."""
        alphas = ", ".join(f"{alpha:g}" for alpha in self._engine.alphas)
        return f"Scorer(alpha={alphas}; open records: {len(self._engine.records)}; model {self._engine.fingerprint})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be pickled or copied, because the open records of a scorer belong to one stream.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a Scorer cannot be pickled or copied, because it holds the open records of one stream; pickle the "
            "Detector and create a scorer from it with detector.scorer(...)"
        )

    def update(self, record: str, feature: str, value: Value, time: float | datetime | None = None) -> Update:
        """Add one reading to a record, and return its scores and alerts.

        A reading that cannot be accepted (an unknown feature, a number that is not finite, a second value of the same
        feature) changes nothing, and the result states the reason.

        Args:
            record: The record id; a new id opens a new record.
            feature: The feature name.
            value: The value; None declares that the feature will not be observed.
            time: Event time as seconds since 1970 or as a datetime with a time zone; None if it is unknown.

        Raises:
            InputError: If an argument has a type that no reading can have.
        """
        return self._update({"record": record, "feature": feature, "value": value, "time": time})

    def update_device(self, device: str, feature: str, value: Value, time: float | datetime) -> Update:
        """Add one reading of a device to the record of the time window that contains `time`.

        Use it with models that were trained on windows: each window of a device's readings is one record. A sensor that
        can report several times in a window has one feature for each part of the window. Its readings name the sensor,
        and `time` selects the feature.

        Args:
            device: The name of the device.
            feature: The name of the feature, or of a sensor that can report several times in a window.
            value: The value; None declares that the feature will not be observed.
            time: Event time as seconds since 1970 or as a datetime with a time zone.

        Returns:
            The scores and alerts, as `update` returns them.

        Raises:
            InputError: If an argument has a type that no reading can have.
        """
        return self._update({"device": device, "feature": feature, "value": value, "time": time})

    def _update(self, event: dict[str, Any]) -> Update:
        """Decode and score one reading, and return its scores, alerts and rejection.

        Args:
            event: The fields of the reading by the names that JSON messages use: `record` or `device`, `feature`,
                `value` and `time`.
        """
        batch, rejections = self._decode(event)
        now = self._clock.at(batch.times)
        # Records may have timed out since the last update. Close them before this reading is added, because it must not
        # join a record that was idle for too long.
        timeout_alerts = self._engine.handle(EventBatch.empty(), now).alerts if self._has_timeouts else []
        effects = self._engine.handle(batch, now)
        alerts = (*timeout_alerts, *effects.alerts)
        scored = effects.scored
        # The engine may also have scored earlier readings, which waited for others with the same event time or for the
        # end of their time slot. A record has one reading of each feature, so both identify this reading. It has no
        # entry if it was rejected or waits itself.
        own_entries = [
            i
            for i, event in enumerate(scored.event_indices.tolist())
            if len(batch)
            and effects.batch.features[event] == batch.features[0]
            and effects.batch.record_ids[event] == batch.record_ids[0]
        ]
        if own_entries:
            i = own_entries[0]
            return Update(
                float(scored.log_likelihood[i]),
                float(scored.running_log_likelihood[i]),
                float(scored.score[i]),
                float(scored.p_value[i]),
                alerts,
            )
        # The codec rejects readings that it cannot decode, the engine those that do not fit the record.
        rejection = next(iter([*rejections, *effects.rejections]), None)
        # The value NaN declares that the feature will not be observed; such a reading is never scored.
        is_declared_missing = len(batch) > 0 and np.isnan(batch.values[0])
        is_waiting = rejection is None and len(batch) > 0 and not is_declared_missing
        # A reading that is not scored has NaN in place of its four scores.
        return Update(nan, nan, nan, nan, alerts, rejection, bool(is_waiting))

    def _decode(self, event: dict[str, Any]) -> tuple[EventBatch, list[Rejection]]:
        """Decode one reading by the rules of JSON messages.

        If all values have types that JSON has, the codec gets them directly, which is faster. Otherwise the reading is
        first written as JSON text, which the codec parses like a message from Kafka.

        Args:
            event: The fields of the reading by name: `record` or `device`, `feature`, `value` and `time`.

        Returns:
            A batch with the reading and no rejections, or an empty batch and a rejection that states the reason.
        """
        document = {name: _to_json_type(value) for name, value in event.items()}
        if _NOT_CONVERTED in document.values():  # at least one value needs the JSON parser of the codec
            return self._codec.decode(_make_messages([_encode_json(event)]))
        return self._codec.decode_document(document)

    def finish(self) -> tuple[Alert, ...]:
        """Close all open records, and return the alerts that this raises.

        With `ties="hold"`, readings may still wait for others with the same event time. They are scored now.
        """
        return tuple(self._engine.finish().alerts)


class _TemporaryFolder:
    """A new folder that is deleted when this object is no longer used, at the latest when the process ends.

    `tempfile.TemporaryDirectory` would warn if it is not closed explicitly, but a detector has no end that users call.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="deformer-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class Detector:
    """A trained model with its calibration, which scores, explains and imputes records.

    `deformer_stream.load` creates it from a model directory, and `deformer_stream.train` from a table. A detector can
    be pickled and copied: the pickle refers to the model directory by path and fingerprint, or contains the files of
    the model if it was trained without a directory.

    Attributes:
        artifact: The contents of the model directory.
        codec: The decoder of this model's readings, from JSON messages to batches of events.
    """

    def __init__(self, artifact: model_store.Artifact, temporary_folder: _TemporaryFolder | None = None) -> None:
        """Create a detector from the contents of a model directory.

        Args:
            artifact: The contents of the model directory.
            temporary_folder: The folder that contains the model directory, if it exists only as long as the detector.
        """
        self.artifact = artifact
        self.codec = _make_codec(artifact.schema, 0.0)
        self._temporary_folder = temporary_folder

    @cached_property
    def _cpu_kernels(self) -> CpuKernels | None:
        """The compiled CPU kernels that run the model; None if they do not support it, so that PyTorch runs it."""
        return CpuKernels.for_model(self.artifact.model)

    @property
    def schema(self) -> Schema:
        """The features of the model."""
        return self.artifact.schema

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the model and its calibration; each alert contains them."""
        return self.artifact.fingerprint

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
        device = str(self.artifact.model.device)
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
            alpha: The false-alarm rate, that is, the largest share of normal records that may ever raise an alert; or
                several such rates, each with alerts of its own.
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
        self._warn_if_unreachable(np.atleast_1d(np.asarray(alpha, np.float64)).tolist())
        return scorer

    def _warn_if_unreachable(self, alphas: Sequence[float]) -> None:
        """Warn if the calibration has too few records for any alert at one of the false-alarm rates `alphas`."""
        calibration = self.artifact.calibration
        for alpha, num_required in calibration.find_unreachable_alphas(alphas).items():
            warn(
                f"no record can raise an alert at alpha {alpha:g}: this needs {num_required:,} calibration records, "
                f"and the model has {len(calibration.scores):,}; use a larger alpha, or calibrate with more records",
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
            alpha: The false-alarm rate, that is, the largest share of normal records that may ever raise an alert; or
                several such rates, each with alerts of its own.
            limits: Limits on the time and memory that open records may take; by default those of `Limits()`.
            ties: What to do with readings of one record that have the same event time. "hold" scores them together,
                "arrival" scores each when it arrives. None uses the policy with which the model was calibrated.
            effort: How thoroughly alerts are explained: "full", "fast" (one forward pass per record) or "off".

        Raises:
            ValueError: If an alpha does not lie between 0 and 1.
        """
        alphas = np.atleast_1d(np.asarray(alpha, np.float64))
        if not len(alphas) or not ((alphas > 0) & (alphas < 1)).all():
            raise ValueError(f"alpha is {alpha}, but it must be one or more false-alarm rates between 0 and 1")
        model, calibration = self.artifact.model, self.artifact.calibration
        return Engine(model, calibration, self.fingerprint, alpha, limits, effort=effort, ties=ties)

    @overload
    def score(
        self,
        records: Record | Sequence[Record] | NDArray[Any],
        alpha: float = 0.01,
        *,
        columns: Sequence[str] | None = None,
        order: Order = "arrival",
    ) -> RecordScores: ...

    @overload
    def score(self, records: FrameT, alpha: float = 0.01, *, order: Order = "arrival") -> FrameT: ...

    def score(
        self, records: Any, alpha: float = 0.01, *, columns: Sequence[str] | None = None, order: Order = "arrival"
    ) -> Any:
        """Return the scores of complete records.

        `log_likelihood` and `anomaly_score` hardly depend on the order of the readings, but `score`, `p_value` and
        `alert_seq` do. The false-alarm rate of alerts is guaranteed for the order in which the model was calibrated.
        That is a random order unless the model was trained on logged arrivals. `deformer-stream replay` uses it for the
        rows of wide tables.

        Columns and keys that are not features of the model are ignored with a warning. If more than half of the
        features have no column, there is a warning as well.

        Args:
            records: One record as a dict, a list of dicts, a data frame (pandas, polars or another one that narwhals
                supports), an Arrow table or record batch, or a NumPy array with a row per record. A feature that is
                missing, None or NaN is treated as not observed.
            alpha: The false-alarm rate at which `RecordScores.alert_seq` reports alerts.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.
            order: The order in which the readings of a record are scored: "arrival" for the order of the keys of a dict
                or of the columns of a table, "schema" for the order of the model's features, "random" for a random
                order that depends on the number of the row. Dicts have only the first.

        Returns:
            For a data frame or an Arrow table a table of the same kind, whose columns are the attributes of
            `RecordScores`; a pandas data frame has the index of the input. For other inputs `RecordScores`.

        Raises:
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
            ValueError: If `alpha` does not lie between 0 and 1, or if dicts are to be scored in another order.
        """
        table = read_tabular(records, self.schema, columns)
        if table is None:
            if order != "arrival":
                raise ValueError(
                    f"order={order!r} is for tables; put the keys of a dict into the order to score them in"
                )
            return self._score_dicts(self._read_dicts(records), alpha)
        scores = self._score_table(table, alpha, order)
        if isinstance(table, ArrayRecords):
            return scores
        names = ("log_likelihood", "anomaly_score", "p_value", "alert_seq", "score")
        return table.make_table({name: pa.array(getattr(scores, name)) for name in names})

    def _score_dicts(self, records: Sequence[Record], alpha: float) -> RecordScores:
        """Return the scores of N records that are dicts, each in the order of its keys.

        Args:
            records: The records, without keys that are not features.
            alpha: The false-alarm rate.
        """
        # With this limit, the engine never closes a record early to free memory for others.
        engine = self.engine(alpha, Limits(max_open_records=max(1, len(records))), effort="off")
        scores = _make_default_scores(len(records))
        # The engine closes a record when it has all features. `finish` closes the others. A record without readings was
        # never opened and keeps the default scores. Without timeouts, the time has no effect.
        _store_scores(engine.handle(self._make_batch(records), now=0).closed, scores)
        _store_scores(engine.finish().closed, scores)
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
        scores = _make_default_scores(table.num_records)
        # Features that are not observed are declared as missing, so all records of a batch are closed with it.
        for _, _, batch in self._decode_table(table, order):
            _store_scores(engine.handle(batch, now=0).closed, scores)
        return scores

    def _decode_table(self, table: TabularRecords, order: Order = "arrival") -> Iterator[tuple[int, int, EventBatch]]:
        """Decode the records of a table, some rows at a time. Record ids are the row numbers, from "0".

        Args:
            table: The N records.
            order: The order of the readings of a record (`score`).

        Yields:
            (first row, number of rows, batch). The batch has one event per row and feature of the model; the value NaN
            means that the feature was not observed. Its message indices are counted from the first row.

        Raises:
            InputError: If a value cannot be accepted; the message names its row.
        """
        codec = Codec(self.schema, order=order)
        columns = read_feature_columns(table, self.schema)
        first_row = 0
        for rows in pa.table(columns).to_batches(max_chunksize=ROWS_PER_BATCH):
            record_ids = [str(row) for row in range(first_row, first_row + len(rows))]
            batch, rejections = codec.decode(WideRows("the table", rows, record_ids, first_row))
            for rejection in rejections:
                row = first_row + rejection.message_index
                raise InputError(f"row {row} cannot be accepted: {rejection.detail} ({rejection.reason.value})")
            yield first_row, len(rows), batch
            first_row += len(rows)

    @overload
    def explain(self, records: Record, alpha: float = 0.01) -> tuple[Contribution, ...]: ...

    @overload
    def explain(
        self,
        records: Sequence[Record] | NDArray[Any],
        alpha: float = 0.01,
        *,
        columns: Sequence[str] | None = None,
    ) -> list[tuple[Contribution, ...]]: ...

    @overload
    def explain(self, records: FrameT, alpha: float = 0.01) -> FrameT: ...

    def explain(self, records: Any, alpha: float = 0.01, *, columns: Sequence[str] | None = None) -> Any:
        """Return how much each reading of complete records contributes to the anomaly score of its record.

        An explanation takes many times as long as a score: select the records that have raised alerts.

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. A
                feature that is missing, None or NaN is treated as not observed.
            alpha: The false-alarm rate of the alert to explain. If a record raises an alert at this rate,
                `Contribution.suspect` is true for the readings to which the alert is attributed; otherwise for none.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one record, one contribution per reading, the most suspicious first. Readings of context features
            (which condition the others and are never scored) are left out. For a list of dicts or a NumPy array, a list
            of such tuples. For a data frame or an Arrow table, a table of the same kind with one row per reading:
            `record` (row number, from 0), `rank` (from 0), `feature`, `value` or `label`, `suspect`, `surprise`,
            `relief`, `leave_one_out`, `attribution`, and the expected range `low`, `median`, `high` or
            `expected_label`. The rows of a pandas data frame have the index of their record.

        Raises:
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        table = read_tabular(records, self.schema, columns)
        if table is None:
            dicts = self._read_dicts(records)
            explanations = self._explain_batch(self._make_batch(dicts), len(dicts), alpha)
            return explanations[0] if read_single_record(records) is not None else explanations
        explanations = [
            explanation
            for _, num_rows, batch in self._decode_table(table)
            for explanation in self._explain_batch(batch, num_rows, alpha)
        ]
        if isinstance(table, ArrayRecords):
            return explanations
        return _tabulate_explanations(table, explanations)

    def _explain_batch(self, batch: EventBatch, num_records: int, alpha: float) -> list[tuple[Contribution, ...]]:
        """Return the contributions of the readings of each of N complete records.

        Args:
            batch: The readings of all records, one record after the other; message index i belongs to record i.
                Readings with the value NaN are left out.
            num_records: The number N of records.
            alpha: The false-alarm rate of the alert to explain.
        """
        codes, raw_values, unseen_labels = _pad_readings(batch, num_records)  # (N, L), −1 as padding
        explanations: list[tuple[Contribution, ...]] = [()] * num_records
        rows = np.flatnonzero((codes >= 0).any(1))
        if not len(rows):
            return explanations
        codes, raw_values = codes[rows], raw_values[rows]
        model, alert_rule = self.artifact.model, self.artifact.calibration.make_alert_rule(alpha)
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
            Arrow table, a copy in which the median, or the most probable label, replaces each missing value; a feature
            without a column gets one at the end. For a NumPy array, such a copy as well.

        Raises:
            ValueError: If `interval` does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        if not 0 < interval < 1:
            raise ValueError(f"interval is {interval}, but it must be a probability between 0 and 1")
        table = read_tabular(records, self.schema, columns)
        if bounds and not isinstance(table, FrameRecords):
            raise ValueError(
                "bounds=True adds columns and needs a data frame or an Arrow table; pass one, or leave it out"
            )
        values = self._read_values(records, table)
        imputed = impute(self.artifact.model, values, np.isnan(values), interval)
        if table is None:
            imputations = [self._describe_imputation(imputed, row) for row in range(len(values))]
            return imputations[0] if read_single_record(records) is not None else imputations
        filled = self._fill_columns(table, imputed.median)
        if bounds:
            for code, feature in enumerate(self.schema.features):
                if not feature.labels and not feature.context:
                    filled[f"{feature.name}__low"] = _to_nullable(imputed.low[:, code])
                    filled[f"{feature.name}__high"] = _to_nullable(imputed.high[:, code])
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

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. The
                predictions depend on the present values; None and NaN count as missing.
            qs: The probabilities of the quantiles, each between 0 and 1; 0.5 for the median.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one dict, by feature name, the quantiles in raw units (the units of the input) in the order of `qs`; for
            a list of dicts, a list of them. For a data frame or an Arrow table, a table of the same kind with a column
            such as `FEATURE__q0.05` for each continuous feature and quantile, null where the value was present. For a
            NumPy array, an array (Q, N, C) for Q quantiles, N rows and C columns, NaN where the value was present.

        Raises:
            ValueError: If `qs` is empty or a probability does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        if not qs or not all(0 < q < 1 for q in qs):
            raise ValueError(
                f"qs is {list(qs)}, but it must be one or more probabilities of quantiles, each between 0 and 1"
            )
        table = read_tabular(records, self.schema, columns)
        values = self._read_values(records, table)
        # (Q, N, F) for Q probabilities, N records and F features, NaN for features that were not imputed.
        quantiles = impute_quantiles(self.artifact.model, values, np.isnan(values), qs)
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
            f"{feature.name}__q{q:g}": _to_nullable(quantiles[index, :, code])
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

        Args:
            records: One record as a dict or as a row of a pandas data frame, or several records as in `score`. None and
                NaN count as missing.
            draws: Number of completed copies of each record to return, at least 1.
            seed: The seed of the random numbers.
            columns: The names of the columns of a NumPy array; by default the features in the order of the schema.

        Returns:
            For one dict, `draws` dicts of values by feature name; numbers are floats, labels are text. For a list of
            dicts, a list of such lists. For a data frame or an Arrow table, a table of the same kind in which each row
            is repeated `draws` times, and the column `draw` numbers the copies from 0. For a NumPy array, an array with
            such rows.

        Raises:
            ValueError: If `draws` is less than 1.
            InputError: If a value cannot be accepted; the message names the record or row, and the feature.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}, but the number of copies to return must be at least 1")
        table = read_tabular(records, self.schema, columns)
        values = self._read_values(records, table)
        # (draws, N, F) values of N records and F features.
        completions = sample_completions(self.artifact.model, values, np.isnan(values), draws, seed)
        if table is None:
            completed = [[self._make_record(row) for row in completions[:, i]] for i in range(len(values))]
            return completed[0] if read_single_record(records) is not None else completed
        rows = np.repeat(np.arange(len(values)), draws)
        drawn = np.where(np.isnan(values), completions, np.nan)  # only the gaps are filled
        # (draws, N, F) to (N, draws, F) to (N · draws, F), so that the copies of a row are adjacent.
        filled = self._fill_columns(table, drawn.transpose(1, 0, 2).reshape(len(rows), -1), rows)
        if isinstance(table, FrameRecords):
            filled[DRAW_COLUMN] = pa.array(np.tile(np.arange(draws), len(values)))
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
            dicts = self._read_dicts(records)
            batch = self._make_batch(dicts)
            values = np.full((len(dicts), len(self.schema)), np.nan)
            values[batch.message_indices, batch.features] = batch.values
            return values
        values = np.full((table.num_records, len(self.schema)), np.nan)
        for first_row, _, batch in self._decode_table(table):
            values[first_row + batch.message_indices, batch.features] = batch.values
        return values

    def _make_record(self, row: NDArray[np.float64]) -> dict[str, float | str]:
        """Return an array of values as a record, a dict of values by feature name.

        Missing values are left out. Labels that did not occur in training are also left out, because the array does not
        contain their text.

        Args:
            row: (F,) values of the F features in the order of the schema: numbers in raw units (the units of the
                input), codes of labels (index among the feature's labels), NaN if missing.
        """
        record: dict[str, float | str] = {}
        for feature, value in zip(self.schema.features, row.tolist(), strict=True):
            # The code after the last label stands for all labels that did not occur in training. A missing label is
            # NaN, for which the comparison is false.
            if feature.labels and value < len(feature.labels):
                record[feature.name] = feature.labels[int(value)]
            elif not feature.labels and not isnan(value):
                record[feature.name] = value
        return record

    def _read_dicts(self, records: Any) -> list[Record]:
        """Return records as a list of dicts without keys that are not features of the model, of which a warning tells.

        Args:
            records: One record, or several records. Each is a mapping or a row of a pandas data frame.

        Raises:
            InputError: The object, or one of several records, is no record.
        """
        single = read_single_record(records)
        if single is None and (isinstance(records, str | bytes | Path) or not hasattr(records, "__iter__")):
            raise InputError(
                f"records of type {type(records).__name__} cannot be read: give a dict, a list of dicts, a data frame, "
                "an Arrow table or a NumPy array; a file is scored by the command deformer-stream replay"
            )
        dicts: list[Record] = []
        unknown_names: dict[str, None] = {}  # in the order of their first use
        for index, item in enumerate([single] if single is not None else records):
            record = read_single_record(item)
            if record is None:
                raise InputError(
                    f"record {index} has the type {type(item).__name__}: give each record as a dict of values by "
                    "feature name"
                )
            unknown_names |= {str(name): None for name in record if name not in self.schema.code_by_name}
            dicts.append({name: value for name, value in record.items() if name in self.schema.code_by_name})
        warn_of_unknown_names(list(unknown_names), "keys")
        return dicts

    def _make_batch(self, records: Sequence[Record]) -> EventBatch:
        """Return the readings of complete records as one batch; the record ids are "0", "1", and so on.

        Args:
            records: For each record its values by feature name, in the order of arrival. None and NaN are left out.

        Raises:
            InputError: If a reading cannot be accepted; the message names the record and the feature.
        """
        present_values = [
            {name: value for name, value in record.items() if not _is_missing(value)} for record in records
        ]
        # JSON messages are the input for which the codec defines the checks and conversions of values.
        payloads = [_encode_json({"record": str(i), "values": values}) for i, values in enumerate(present_values)]
        batch, rejections = self.codec.decode(_make_messages(payloads))
        for rejection in rejections:
            # Each record is one message. The codec also rejects a record without any reading; here this is no error.
            if present_values[rejection.message_index]:
                # `detail` names the feature and says what is wrong with its value.
                raise InputError(
                    f"record {rejection.message_index} cannot be accepted: {rejection.detail} "
                    f"({rejection.reason.value})"
                )
        return batch


def _make_default_scores(num_records: int) -> RecordScores:
    """Return the scores of N records without readings: the scores 0, the p-value 1 and no alert."""
    zeros = [np.zeros(num_records) for _ in range(3)]
    return RecordScores(zeros[0], zeros[1], np.ones(num_records), np.full(num_records, -1, np.int32), zeros[2])


def _store_scores(closed: ClosedRecords, scores: RecordScores) -> None:
    """Store the scores of closed records in arrays of all records.

    Args:
        closed: The closed records. Their ids are the numbers of the records, as text.
        scores: The scores of all records, which are changed in place.
    """
    rows = np.array([int(record_id) for record_id in closed.record_ids], np.int64)
    has_readings = closed.num_readings > 0
    rows = rows[has_readings]
    scores.log_likelihood[rows] = closed.log_likelihood[has_readings]
    scores.anomaly_score[rows] = closed.anomaly_score[has_readings]
    scores.p_value[rows] = closed.p_value[has_readings]
    scores.alert_seq[rows] = closed.alert_seq[has_readings]
    scores.score[rows] = closed.score[has_readings]


def _pad_readings(
    batch: EventBatch, num_records: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], list[dict[int, str]]]:
    """Return the readings of N complete records as arrays with a row per record.

    Args:
        batch: The readings of all records, one record after the other; message index i belongs to record i. Readings
            with the value NaN are left out.
        num_records: The number N of records.

    Returns:
        (N, L) feature codes in the order of the batch, −1 as padding at the end; (N, L) values in raw units, or label
        codes; and for each record the texts of labels that the model does not have, by the position of the reading.
        L is the number of readings of the longest record, at least 1.
    """
    events = np.flatnonzero(~np.isnan(batch.values))
    rows = batch.message_indices[events].astype(np.int64)
    counts = np.bincount(rows, minlength=num_records)
    positions = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    shape = (num_records, max(1, int(counts.max(initial=0))))
    codes, raw_values = np.full(shape, -1, np.int64), np.zeros(shape)
    codes[rows, positions] = batch.features[events]
    raw_values[rows, positions] = batch.values[events]
    unseen_labels: list[dict[int, str]] = [{} for _ in range(num_records)]
    for event, text in batch.unseen_labels.items():
        index = int(np.searchsorted(events, event))
        unseen_labels[rows[index]][int(positions[index])] = text
    return codes, raw_values, unseen_labels


def _tabulate_explanations(table: TabularRecords, explanations: Sequence[Sequence[Contribution]]) -> Any:
    """Return the contributions of the readings of several records as a table of the same kind as the input.

    Args:
        table: The input.
        explanations: For each row of the input, the contributions of its readings.
    """
    flat = [(row, rank, item) for row, items in enumerate(explanations) for rank, item in enumerate(items)]
    rows = np.array([row for row, _, _ in flat], np.int64)
    items = [item for _, _, item in flat]

    def select_numbers(values: Sequence[float | str | None]) -> pa.Array:
        return pa.array([None if isinstance(value, str) else value for value in values], pa.float64())

    def select_texts(values: Sequence[float | str | None]) -> pa.Array:
        return pa.array([value if isinstance(value, str) else None for value in values], pa.string())

    values, medians = [item.value for item in items], [item.expected.median for item in items]
    columns = {
        "record": pa.array(rows),
        "rank": pa.array([rank for _, rank, _ in flat], pa.int64()),
        "feature": pa.array([item.feature for item in items], pa.string()),
        "value": select_numbers(values),
        "label": select_texts(values),
        "suspect": pa.array([item.suspect for item in items], pa.bool_()),
        "surprise": pa.array([item.surprise for item in items], pa.float64()),
        "relief": pa.array([item.relief for item in items], pa.float64()),
        "leave_one_out": pa.array([item.leave_one_out for item in items], pa.float64()),
        "attribution": pa.array([item.attribution for item in items], pa.float64()),
        "low": pa.array([item.expected.low for item in items], pa.float64()),
        "median": select_numbers(medians),
        "high": pa.array([item.expected.high for item in items], pa.float64()),
        "expected_label": select_texts(medians),
    }
    return table.make_table(columns, rows)


def _to_nullable(values: NDArray[np.float64]) -> pa.Array:
    """Return numbers as an Arrow array with nulls in place of NaN."""
    return pa.array(values, from_pandas=True)


_NOT_CONVERTED = object()
"""The result of `_to_json_type` for a value that must be written as JSON text, which the codec then parses."""


def _to_json_type(value: object) -> object:
    """Convert a value to what a JSON round trip (encode, then decode) would give, without creating the JSON text.

    A NumPy scalar becomes a Python scalar, and a datetime becomes text in ISO format.

    Returns:
        The converted value, or `_NOT_CONVERTED` for values that need the actual round trip: containers, subclasses of
        Python types, integers beyond 64 bits, and text that is not valid Unicode.
    """
    value_type = type(value)
    if value is None or value_type is float or value_type is bool:
        return value
    if value_type is str:
        return value if is_unicode(value) else _NOT_CONVERTED  # type: ignore[arg-type]  # it is a str here
    if value_type is int:
        return value if -(2**63) <= value < 2**64 else _NOT_CONVERTED  # type: ignore[operator]  # it is an int here
    if isinstance(value, np.generic):
        item = value.item()
        # A few NumPy types, such as longdouble, have no Python type; `item` then returns a NumPy scalar again.
        return _NOT_CONVERTED if isinstance(item, np.generic) else _to_json_type(item)
    if isinstance(value, datetime):
        return value.isoformat()
    return _NOT_CONVERTED


def _to_micros(name: str, seconds: float | None) -> int | None:
    """Return a duration in microseconds, rounded to an integer.

    Args:
        name: The name of the argument that holds the duration, for the error message.
        seconds: The duration in seconds. None stands for an unlimited duration; the result is then None.

    Raises:
        ValueError: If the duration is not positive or is 1e12 seconds or more.
    """
    if seconds is not None and not 0 < seconds < 1e12:
        raise ValueError(
            f"{name} is {seconds}, but it must be a number of seconds greater than 0 and less than 1e12, or None for "
            "never"
        )
    return None if seconds is None else round(seconds * 1e6)


def _make_codec(schema: Schema, grace: float) -> Codec:
    """Return a codec (decoder of readings) with limits on message size that are too high to reject any record.

    Such limits protect a service against messages of unknown origin. Here the input comes from the same process.

    Args:
        schema: The features of the model.
        grace: Seconds after the end of a time window in which it still accepts readings.
    """
    window_assigner = None
    if schema.window is not None:
        window_assigner = WindowAssigner(schema.window.width, round(grace * 1e6))
    # The limit for one message: the codec's default, or more if a complete record has more readings.
    max_readings = max(4096, len(schema))
    return Codec(schema, max_message_bytes=2**30, max_readings=max_readings, window_assigner=window_assigner)


def _is_missing(value: object) -> bool:
    """Return whether a value is None or NaN, both of which mean that the feature was not observed."""
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _encode_json(document: dict[str, Any]) -> bytes:
    """Return the JSON text of a message.

    NaN and infinity are written as `NaN` and `Infinity`. The codec then rejects them with the name of their feature.

    Args:
        document: The fields of the message by name, such as `record` and `values`.

    Raises:
        InputError: If a value has a type that no reading can have.
    """
    try:
        return json.dumps(document, default=_convert_for_json).encode()
    except (TypeError, ValueError, RecursionError) as error:  # the last two: nested containers
        record_id = document.get("record", document.get("device"))
        raise InputError(
            f"record {record_id!r} cannot be converted to JSON ({error}); correct this value of the record"
        ) from None


def _convert_for_json(value: object) -> object:
    """Return a NumPy scalar as a Python value and a datetime as text.

    `json.dumps` calls it for each value that has no JSON type (its argument `default`).

    Raises:
        TypeError: If the value has another type.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    # `_encode_json` adds the record to the message.
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be a reading: use a number, text, a boolean, a datetime or None"
    )


def _make_messages(payloads: Sequence[bytes]) -> Messages:
    """Return JSON documents as messages without keys and broker timestamps, which the codec can decode."""
    num_messages = len(payloads)
    keys: list[bytes | None] = [None] * num_messages
    times = np.full(num_messages, NO_TIME)
    partitions, offsets = np.zeros(num_messages, np.int32), np.arange(num_messages, dtype=np.int64)
    return Messages("library", keys, list(payloads), times, partitions, offsets)


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
    folder = _TemporaryFolder()
    model_store.write_files(folder.path / "model", contents)
    return Detector(model_store.read(folder.path / "model", device), folder)


def train(
    records: Any,
    out: str | Path | None = None,
    *,
    columns: Sequence[str] | None = None,
    verbose: bool = False,
    **options: Any,
) -> Detector:
    """Train a model on normal records, as the command `deformer-train` does, and return it as a `Detector`.

    Args:
        records: The training table: a data frame (pandas, polars or another one that narwhals supports), an Arrow
            table, a list of dicts, a NumPy array, a path of a file or folder, or a list of paths. The index of a pandas
            data frame is left out.
        out: The model directory to write. An existing model directory is replaced when training has succeeded. None
            for a temporary directory that exists as long as the detector; `Detector.save` writes it to another one.
        columns: The names of the columns of a NumPy matrix; by default x0, x1, and so on.
        verbose: Whether to print the features and the progress, as the command does.
        options: The options of `deformer-train` with underscores, such as `max_time="2m"`, `exclude=["id"]` or
            `preset="small"`, and the hyperparameters of its configuration file. `DEFORMER_…` environment variables
            apply as well.

    Returns:
        The trained detector, with its model on the CPU.

    Warns:
        UserWarning: If training reports that the model may be poor.

    Raises:
        TypeError: If an option does not exist.
        ConfigError: If the value of an option is not allowed.
        InputError: If the table cannot be used.
    """
    detector, output = run_training(records, out, options, columns, verbose)
    for entry in output.summary.get("warnings", ()):
        warn(entry["message"])
    return detector


def run_training(
    records: Any,
    out: str | Path | None,
    options: Mapping[str, Any],
    columns: Sequence[str] | None = None,
    verbose: bool = False,
) -> tuple[Detector, TrainingOutput]:
    """Train a model, and return the detector with all results of the training job.

    The arguments and errors are those of `train`.

    Returns:
        The detector, with its model on the CPU, and the results of the training job, such as the split of the records.
    """
    from deformer_stream.settings import load_settings
    from trainer import job
    from trainer.feature_table import print_features
    from trainer.settings import TrainConfig

    values = dict(options)
    for name in values.keys() - TrainConfig.model_fields.keys():
        similar = difflib.get_close_matches(name, TrainConfig.model_fields, 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "; deformer-train --help lists the options"
        raise TypeError(f"train() got an unknown option {name!r}{hint}")
    if isinstance(values.get("cycle"), Mapping):
        values["cycle"] = ",".join(f"{name}={period}" for name, period in values["cycle"].items())
    temporary_folder = _TemporaryFolder() if out is None else None
    directory = Path(str(out)) if temporary_folder is None else temporary_folder.path / "model"
    settings = load_settings(TrainConfig, {**values, "out": directory}, None, "train")
    sources: Sequence[Path | Table] | None = _list_paths(records)
    if sources is None:
        sources = [Table.from_arrow(_to_training_table(records, columns), "the training table")]
    if verbose:
        output = job.train(sources, settings, on_prepared=print_features, on_message=print)
    else:
        output = job.train(sources, settings)
    return Detector(model_store.read(directory), temporary_folder), output


def _list_paths(records: object) -> list[Path] | None:
    """Return the paths that an argument names; None if it is no path and no list of paths."""
    if isinstance(records, str | Path):
        return [Path(records)]
    if isinstance(records, list | tuple) and records and all(isinstance(item, str | Path) for item in records):
        return [Path(item) for item in records]
    return None


def _to_training_table(records: Any, columns: Sequence[str] | None) -> pa.Table:
    """Return a training table in memory as an Arrow table.

    Args:
        records: A data frame, an Arrow table, a list of dicts or a NumPy array.
        columns: The names of the columns of a NumPy matrix; None for x0, x1, and so on.

    Raises:
        InputError: The object is none of these, or a cell has a type that no reading can have.
    """
    table: TabularRecords | None
    if isinstance(records, np.ndarray):
        names = columns
        if names is None and records.ndim == 2 and records.dtype.names is None:
            names = [f"x{index}" for index in range(records.shape[1])]
        table = read_array(records, names)
    else:
        table = read_frame(records)
    if table is not None:
        return pa.table({name: table.get_column(name) for name in table.column_names})
    if not isinstance(records, Sequence) or not all(isinstance(record, Mapping) for record in records):
        raise InputError(
            f"a training table of type {type(records).__name__} cannot be read: give a data frame, an Arrow table, a "
            "list of dicts, a NumPy array or paths of files"
        )
    keys = dict.fromkeys(name for record in records for name in record)  # in the order of their first use
    cells_by_name = {str(name): [record.get(name) for record in records] for name in keys}
    return pa.table({name: convert_cells(cells, name) for name, cells in cells_by_name.items()})
