"""The library: `deformer_stream.load(DIR)` returns a `Detector`, which scores, explains and imputes records.

A record is a set of features. Its readings, each a value of one feature, may arrive one by one:

detector = deformer_stream.load("model")
scorer = detector.scorer(alpha=0.01)
scorer.update("pump-7/10:34:33", "Pressure", 9.1).p_value      # 0.0008
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.validation import is_unicode
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, Alert, Contribution, EventBatch, Rejection
from deformer_stream.engine.explain import explain_records
from deformer_stream.engine.imputation import impute, impute_quantiles, sample_completions
from deformer_stream.engine.record_scores import survey_records
from deformer_stream.errors import InputError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.timing import WallClock

Value = float | int | str | bool | None
"""The value of a reading; None declares that the feature will not be observed. NumPy scalars are accepted as well."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of adding one reading to a record: its scores, alerts and rejection.

    `log_likelihood`, `running_log_likelihood`, `score` and `p_value` are NaN if the reading was rejected, if it
    declares that the feature will not be observed, or if `is_waiting` is true.

    Attributes:
        log_likelihood: Natural logarithm of p(value | earlier readings of the record). It is a density in normalised
            units, or a probability if the feature is discrete. NaN for a context feature, which is never scored.
        running_log_likelihood: Sum of the log-likelihoods of the record's readings so far.
        score: The anomaly score of the record after its readings so far; larger is more anomalous.
        p_value: Anytime-valid p-value of the record: the probability that it ever falls to alpha or less is at most
            alpha for a normal record. It never rises within a record.
        alerts: The alerts that this call raised for this or other records. A record raises at most one alert for each
            alpha (false-alarm rate). The alerts of one reading are sorted by alpha, the largest first.
        rejection: Why the reading was rejected, or None if it was accepted.
        is_waiting: Whether the reading is not scored yet, because further readings of the record with the same event
            time may follow (tie policy "hold"). Its alerts are then part of a later update or of `Scorer.finish`.
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
        """The last of the alerts, which for one record is that of the smallest alpha; None if there is no alert."""
        return self.alerts[-1] if self.alerts else None


@dataclass(frozen=True, slots=True)
class RecordScores:
    """The scores of N complete records, in the order of the records.

    Attributes:
        log_likelihood: (N,) natural logarithms of p(record), the sums over the readings of a record.
        anomaly_score: (N,) scores for ranking complete records; larger is more anomalous.
        p_value: (N,) anytime-valid p-values after the last reading: the probability that such a p-value ever falls to
            alpha or less is at most alpha for a normal record.
        alert_seq: (N,) index in the record, from 0, of the reading that raised the first alert; −1 without an alert.
        score: (N,) scores after the last reading, of the kind from which alerts are raised; larger is more anomalous.
    """

    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    score: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Imputation:
    """The prediction for a missing value of a record, in raw units.

    Attributes:
        value: Median of the predicted distribution, or the most probable label of a discrete feature.
        low: Lower end of the central prediction interval; None for a discrete feature.
        high: Upper end of the central prediction interval; None for a discrete feature.
        mean: Mean of the predicted distribution; None for a discrete feature.
        mode: Most probable value; None for a discrete feature.
    """

    value: float | str
    low: float | None
    high: float | None
    mean: float | None = None
    mode: float | None = None


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
        timeout_micros = _to_micros("record_timeout", record_timeout)
        tie_wait_micros = _to_micros("tie_wait", tie_wait)
        if not 0 <= grace <= 1e9:
            raise ValueError(f"grace is {grace}, but it must be a number of seconds from 0 to 1e9")
        self._codec = _make_codec(detector.schema, grace)
        self._clock = WallClock()
        self._has_timeouts = timeout_micros is not None or tie_wait_micros is not None
        self._engine = detector.engine(alpha, Limits(timeout_micros, tie_wait=tie_wait_micros), ties)

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

        Use it with models that were trained on windows: each window of a device's readings is one record.

        Args:
            device: The name of the device.
            feature: The name of the feature, or of the sensor if it can report several times in a window.
            value: The value; None declares that the feature will not be observed.
            time: Event time as seconds since 1970 or as a datetime with a time zone.

        Returns:
            The scores and alerts, as `update` returns them.

        Raises:
            InputError: If an argument has a type that no reading can have.
        """
        return self._update({"device": device, "feature": feature, "value": value, "time": time})

    def _update(self, event: dict[str, Any]) -> Update:
        """Decode and score one reading.

        Args:
            event: The fields of the reading by the names that JSON messages use: `record` or `device`, `feature`,
                `value` and `time`.
        """
        batch, rejections = self._decode(event)
        now = self._clock.at(batch.times)
        # Time has passed since the last update, so records may have timed out before this reading arrived.
        timeout_alerts = self._engine.handle(EventBatch.empty(), now).alerts if self._has_timeouts else []
        effects = self._engine.handle(batch, now)
        alerts = (*timeout_alerts, *effects.alerts)
        scored = effects.scored
        # The call can also score earlier readings, which waited for others with the same event time. This reading has
        # the event index 0, and no entry if it was rejected or waits itself.
        own_entries = np.flatnonzero(scored.event_indices == 0).tolist()
        if own_entries:
            i = own_entries[0]
            return Update(
                float(scored.log_likelihood[i]),
                float(scored.running_log_likelihood[i]),
                float(scored.score[i]),
                float(scored.p_value[i]),
                alerts,
            )
        rejection = next(iter([*rejections, *effects.rejections]), None)
        is_declared_missing = len(batch) > 0 and np.isnan(batch.values[0])
        is_waiting = rejection is None and len(batch) > 0 and not is_declared_missing
        return Update(nan, nan, nan, nan, alerts, rejection, bool(is_waiting))

    def _decode(self, event: dict[str, Any]) -> tuple[EventBatch, list[Rejection]]:
        """Decode one reading by the rules of JSON messages.

        Values of the usual types are passed to the codec directly. All others are first converted to JSON text, so that
        there is one definition of what they mean.

        Args:
            event: The fields of the reading by name: `record` or `device`, `feature`, `value` and `time`.

        Returns:
            A batch with the reading and no rejections, or an empty batch and a rejection that states the reason.
        """
        document = {name: _to_json_type(value) for name, value in event.items()}
        if _NOT_CONVERTED in document.values():
            return self._codec.decode(_make_messages([_encode_json(event)]))
        return self._codec.decode_document(document)

    def finish(self) -> tuple[Alert, ...]:
        """Close all open records, and return the alerts that this raises.

        Such alerts come from readings that waited for others with the same event time (tie policy "hold").
        """
        return tuple(self._engine.finish().alerts)


class Detector:
    """A trained model with its calibration, which scores, explains and imputes records.

    `deformer_stream.load` creates it from a model directory.

    Attributes:
        artifact: The contents of the model directory.
        codec: The decoder of this model's readings.
    """

    def __init__(self, artifact: model_store.Artifact) -> None:
        self.artifact = artifact
        self.codec = _make_codec(artifact.schema, 0.0)

    @cached_property
    def _cpu_kernels(self) -> CpuKernels | None:
        """The compiled kernels that compute the model in place of PyTorch, or None if they do not support the model."""
        return CpuKernels.for_model(self.artifact.model)

    @property
    def schema(self) -> Schema:
        """The features of the model."""
        return self.artifact.schema

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the model and its calibration; each alert contains them."""
        return self.artifact.fingerprint

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
            tie_wait: Seconds without a reading of the record after which "hold" scores the waiting readings; None to
                wait for the next reading or the end of the record. They are scored by the next call of `update`.
            grace: Seconds after the end of a time window in which it still accepts readings; for models that were
                trained on windows.

        Raises:
            ValueError: If a number is out of range. The message names it.
        """
        return Scorer(self, alpha, record_timeout, ties, tie_wait, grace)

    def engine(
        self, alpha: float | Sequence[float], limits: Limits | None = None, ties: TiePolicy | None = None
    ) -> Engine:
        """Return a new engine for this model, for programs that run the pipeline (decode, score, write) themselves.

        Args:
            alpha: The false-alarm rate, that is, the largest share of normal records that may ever raise an alert; or
                several such rates, each with alerts of its own.
            limits: Limits on the time and memory that open records may take; by default those of `Limits()`.
            ties: The tie policy for readings of one record that have the same event time: "hold" scores them together,
                "arrival" scores each when it arrives. None uses the policy with which the model was calibrated.

        Raises:
            ValueError: If an alpha does not lie between 0 and 1.
        """
        alphas = np.atleast_1d(np.asarray(alpha, np.float64))
        if not len(alphas) or not ((alphas > 0) & (alphas < 1)).all():
            raise ValueError(f"alpha is {alpha}, but each false-alarm rate must lie between 0 and 1")
        return Engine(self.artifact.model, self.artifact.calibration, self.fingerprint, alpha, limits, ties=ties)

    def score(self, records: Sequence[Mapping[str, Value]], alpha: float = 0.01) -> RecordScores:
        """Return the scores of complete records.

        Args:
            records: For each record its values by feature name, in the order of arrival. A feature that is missing,
                None or NaN is treated as not observed.
            alpha: The false-alarm rate of the alerts in `RecordScores.alert_seq`.

        Raises:
            InputError: If a reading cannot be accepted; the message names the record and the feature.
        """
        engine = self.engine(alpha, Limits(max_open_records=max(1, len(records))))
        # The engine closes a record when it has all features. `finish` closes the others.
        completed = engine.handle(self._make_batch(records), 0).closed
        incomplete = engine.finish().closed
        closed_ids = [*completed.record_ids, *incomplete.record_ids]
        closed_index_by_id = {record_id: i for i, record_id in enumerate(closed_ids)}
        # The engine never opened a record without readings. Index -1 selects the default value at the end.
        closed_indices = np.array([closed_index_by_id.get(str(i), -1) for i in range(len(records))], np.int64)

        def arrange(
            completed_values: NDArray[Any], incomplete_values: NDArray[Any], default: float
        ) -> NDArray[np.float64]:
            """Return one value for each record, in the order of `records`."""
            return np.asarray(np.concatenate([completed_values, incomplete_values, [default]])[closed_indices])

        return RecordScores(
            log_likelihood=arrange(completed.log_likelihood, incomplete.log_likelihood, 0.0),
            anomaly_score=arrange(completed.anomaly_score, incomplete.anomaly_score, 0.0),
            p_value=arrange(completed.p_value, incomplete.p_value, 1.0),
            alert_seq=arrange(completed.alert_seq, incomplete.alert_seq, -1).astype(np.int32),
            score=arrange(completed.score, incomplete.score, 0.0),
        )

    def explain(self, record: Mapping[str, Value], alpha: float = 0.01) -> tuple[Contribution, ...]:
        """Return the contribution of each reading to an alert of the record, the most suspicious reading first.

        Args:
            record: The values of a complete record by feature name, in the order of arrival.
            alpha: The false-alarm rate of the alert. If the record raises no alert, `Contribution.suspect` is false for
                each reading.
        """
        batch = self._make_batch([record])
        if not len(batch):
            return ()
        model, alert_rule = self.artifact.model, self.artifact.calibration.make_alert_rule(alpha)
        codes, raw_values = batch.features.astype(np.int64)[None], batch.values[None]  # (1, L), one record
        # A record without an id belongs to no calibration group and is compared with all calibration records.
        record_ids = [""]
        (explanation,) = explain_records(
            model, codes, raw_values, [batch.unseen_labels], record_ids, alert_rule, kernels=self._cpu_kernels
        )
        scores = survey_records(self._cpu_kernels, model, codes, self.schema.normalise(codes, raw_values))
        has_alert = alert_rule(scores.statistics[:, None], record_ids)[0, 0]
        contributions = explanation.contributions
        if has_alert:
            return contributions
        return tuple(replace(contribution, suspect=False) for contribution in contributions)

    def impute(self, record: Mapping[str, Value], interval: float = 0.9) -> dict[str, Imputation]:
        """Predict the value of each missing feature of a record, given the values of all present ones.

        Missing context features are left out, because the model has no distribution for them. To impute a table, use
        the command `deformer-stream impute`.

        Args:
            record: The present values by feature name.
            interval: Probability of the central prediction interval, between 0 and 1.

        Returns:
            Predictions by feature name.

        Raises:
            ValueError: If `interval` does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the feature.
        """
        if not 0 < interval < 1:
            raise ValueError(f"interval is {interval}, but it must be a probability between 0 and 1")
        values = self._make_values(record)
        imputed = impute(self.artifact.model, values, np.isnan(values), interval)
        imputations: dict[str, Imputation] = {}
        for code in np.flatnonzero(~np.isnan(imputed.median[0])).tolist():
            feature = self.schema.features[code]
            if feature.labels:
                label = feature.labels[int(imputed.median[0, code])]
                imputations[feature.name] = Imputation(label, None, None)
            else:
                # In the order of the attributes of `Imputation`.
                statistics = (imputed.median, imputed.low, imputed.high, imputed.mean, imputed.mode)
                imputations[feature.name] = Imputation(*(float(statistic[0, code]) for statistic in statistics))
        return imputations

    def quantiles(self, record: Mapping[str, Value], qs: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Return quantiles of the predicted distribution of each missing continuous feature of a record.

        Args:
            record: The present values by feature name, on which the predictions depend.
            qs: The probabilities, each between 0 and 1.

        Returns:
            Quantiles in raw units by feature name, in the order of `qs`.

        Raises:
            ValueError: If `qs` is empty or a probability does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the feature.
        """
        if not qs or not all(0 < q < 1 for q in qs):
            raise ValueError(f"the quantiles are {list(qs)}, but there must be at least one, each between 0 and 1")
        values = self._make_values(record)
        quantiles = impute_quantiles(self.artifact.model, values, np.isnan(values), qs)[:, 0]
        codes = np.flatnonzero(~np.isnan(quantiles[0])).tolist()
        return {self.schema.names[code]: tuple(quantiles[:, code].tolist()) for code in codes}

    def complete(self, record: Mapping[str, Value], draws: int = 1, seed: int = 0) -> list[dict[str, float | str]]:
        """Return copies of a record in which random values replace the missing ones.

        The values are drawn from the joint distribution of the missing features given the present ones. Missing context
        features stay missing. Equal arguments give equal results.

        Args:
            record: The present values by feature name.
            draws: Number of completed records to return, at least 1.
            seed: The seed of the random numbers.

        Returns:
            The completed records, values by feature name: numbers as floats, labels as text.

        Raises:
            ValueError: If `draws` is less than 1.
            InputError: If a value cannot be accepted; the message names the feature.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}, but it must be at least 1")
        values = self._make_values(record)
        completions = sample_completions(self.artifact.model, values, np.isnan(values), draws, seed)[:, 0]
        return [self._make_record(row) for row in completions]

    def _make_values(self, record: Mapping[str, Value]) -> NDArray[np.float64]:
        """Return the values of a record as an array (1, F) for the F features of the schema.

        The array holds raw values and label codes in the order of the feature codes, and NaN for missing values.

        Raises:
            InputError: If a value cannot be accepted; the message names the feature.
        """
        batch = self._make_batch([record])
        values = np.full((1, len(self.schema)), np.nan)
        values[0, batch.features] = batch.values
        return values

    def _make_record(self, row: NDArray[np.float64]) -> dict[str, float | str]:
        """Return an array of values as a record, a dict of values by feature name.

        Missing values are left out, and so are labels that did not occur in training.

        Args:
            row: (F,) raw values and label codes of the F features in the order of their codes, NaN if missing.
        """
        record: dict[str, float | str] = {}
        for feature, value in zip(self.schema.features, row.tolist(), strict=True):
            # The code after the last label stands for all labels that did not occur in training.
            if feature.labels and value < len(feature.labels):
                record[feature.name] = feature.labels[int(value)]
            elif not feature.labels and not isnan(value):
                record[feature.name] = value
        return record

    def _make_batch(self, records: Sequence[Mapping[str, Value]]) -> EventBatch:
        """Return the readings of complete records, for the engine; the record ids are "0", "1", and so on.

        Args:
            records: For each record its values by feature name. None and NaN are treated as not observed.

        Raises:
            InputError: If a reading cannot be accepted; the message names the record and the feature.
        """
        present_values = [{name: v for name, v in record.items() if not _is_missing(v)} for record in records]
        payloads = [_encode_json({"record": str(i), "values": values}) for i, values in enumerate(present_values)]
        batch, rejections = self.codec.decode(_make_messages(payloads))
        for rejection in rejections:
            # The codec also rejects a record without any reading, but here this is no error.
            if present_values[rejection.message_index]:
                raise InputError(f"record {rejection.message_index}: {rejection.detail} ({rejection.reason.value})")
        return batch


_NOT_CONVERTED = object()
"""The result of `_to_json_type` for a value that must first be written as JSON text, so that the codec parses it."""


def _to_json_type(value: object) -> object:
    """Return a Python value as the type that parsing its JSON text would give, without making the text.

    A NumPy scalar becomes a Python scalar, and a datetime becomes text.

    Returns:
        The converted value. `_NOT_CONVERTED` for values whose JSON text has special cases: containers, subclasses,
        integers beyond 64 bits, and text that is not valid Unicode.
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
        return _NOT_CONVERTED if isinstance(item, np.generic) else _to_json_type(item)
    if isinstance(value, datetime):
        return value.isoformat()
    return _NOT_CONVERTED


def _to_micros(name: str, seconds: float | None) -> int | None:
    """Return a duration in microseconds, rounded to an integer.

    Args:
        name: The name of the argument that holds the duration, for the error message.
        seconds: The duration in seconds, or None for an unlimited one; the result is then None.

    Raises:
        ValueError: If the duration is not positive or is 1e12 seconds or more.
    """
    if seconds is not None and not 0 < seconds < 1e12:
        raise ValueError(f"{name} is {seconds}, but it must be a positive number of seconds, or None for never")
    return None if seconds is None else round(seconds * 1e6)


def _make_codec(schema: Schema, grace: float) -> Codec:
    """Return a codec (decoder of readings) whose limits on message size never apply to the calls of the library.

    Such limits protect against messages of unknown origin, but here the input comes from the same process.

    Args:
        schema: The features of the model.
        grace: Seconds after the end of a time window in which it still accepts readings.
    """
    window_assigner = None
    if schema.window is not None:
        window_assigner = WindowAssigner(schema.window.width, round(grace * 1e6))
    max_readings = max(4096, len(schema))
    return Codec(schema, max_message_bytes=2**30, max_readings=max_readings, window_assigner=window_assigner)


def _is_missing(value: object) -> bool:
    """Return whether a value is None or NaN, both of which mean that the feature was not observed."""
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _encode_json(document: dict[str, Any]) -> bytes:
    """Return the JSON text of a message. NaN and infinity are kept, so that the codec rejects them by feature name.

    Args:
        document: The fields of the message by name, such as `record` and `values`.

    Raises:
        InputError: If a value has a type that no reading can have.
    """
    try:
        return json.dumps(document, default=_convert_for_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        record_id = document.get("record", document.get("device"))
        raise InputError(
            f"record {record_id!r} cannot be read: {error}; use numbers, text or booleans as values"
        ) from None


def _convert_for_json(value: object) -> object:
    """Return a NumPy scalar as a Python value and a datetime as text, for values that `json.dumps` does not accept.

    Raises:
        TypeError: If the value has another type.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} cannot be a reading")


def _make_messages(payloads: Sequence[bytes]) -> Messages:
    """Return JSON documents in the form in which the codec accepts messages, without keys and broker timestamps."""
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
