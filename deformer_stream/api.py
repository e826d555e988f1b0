"""The library: `deformer_stream.load(DIR)` returns a `Detector`, which scores, explains and imputes records.

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
from math import nan
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
"""The value of a reading. NumPy scalars are accepted as well."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one reading.

    The four numbers are NaN if the reading was rejected, if it declares that the feature will not be observed, or if it
    is waiting.

    Attributes:
        log_likelihood: Natural logarithm of p(value | earlier readings of the record). It is a density in normalised
            units, or a probability if the feature is discrete. NaN for a context feature.
        running_log_likelihood: Sum of the record's log-likelihoods so far.
        score: The record's running statistic; larger is more anomalous.
        p_value: Anytime-valid p-value of the record; it never rises within a record.
        alerts: The alerts that were raised, at most one per alpha, the largest alpha first.
        rejection: Why the reading was rejected, or None if it was accepted.
        is_waiting: Whether the reading waits for others with the same event time (tie policy "hold"). Its alerts are
            then part of a later update or of `Scorer.finish`.
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
        """The most severe of the alerts (that of the smallest alpha), or None if there is none."""
        return self.alerts[-1] if self.alerts else None


@dataclass(frozen=True, slots=True)
class RecordScores:
    """The scores of N complete records, in the order of the records.

    Attributes:
        log_likelihood: (N,) natural logarithm of p(record).
        anomaly_score: (N,) score for ranking complete records; larger is more anomalous.
        p_value: (N,) anytime-valid p-values.
        alert_seq: (N,) place of the reading that raised the first alert, from 0; −1 if there was no alert.
        score: (N,) final value of the running statistic that raises alerts; larger is more anomalous.
    """

    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    score: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Imputation:
    """The prediction for a missing reading.

    Attributes:
        value: Median of the predicted distribution, or the most probable label of a discrete feature.
        low: Lower end of the central interval; None for a discrete feature.
        high: Upper end of the central interval; None for a discrete feature.
        mean: Mean of the predicted distribution; None for a discrete feature.
        mode: Most probable value; None for a discrete feature.
    """

    value: float | str
    low: float | None
    high: float | None
    mean: float | None = None
    mode: float | None = None


class Scorer:
    """Scores readings one by one; the readings of many records may be interleaved.

    `Detector.scorer` makes one and explains the arguments. A scorer must not be used by several threads at once.
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
        """Add one reading of a record.

        A reading that cannot be accepted (an unknown feature, a number that is not finite, a second value of the same
        feature) changes nothing, and the result states why.

        Args:
            record: The record id.
            feature: The feature name.
            value: The value; None declares that the feature will not be observed.
            time: Event time as seconds since 1970 or as a datetime with a time zone.

        Raises:
            InputError: If an argument has a type that no reading can have.
        """
        return self._update({"record": record, "feature": feature, "value": value, "time": time})

    def update_device(self, device: str, feature: str, value: Value, time: float | datetime) -> Update:
        """Add one reading of a device to the time window that contains `time`.

        This is for models that were trained on windows. Arguments and result are those of `update`, with the device in
        place of the record.
        """
        return self._update({"device": device, "feature": feature, "value": value, "time": time})

    def _update(self, event: dict[str, Any]) -> Update:
        """Decode and score one event, given by its fields."""
        batch, rejections = self._decode(event)
        now = self._clock.at(batch.times)
        # Time has passed since the last update, so records may have timed out before this reading arrived.
        timeout_alerts = self._engine.handle(EventBatch.empty(), now).alerts if self._has_timeouts else []
        effects = self._engine.handle(batch, now)
        alerts = (*timeout_alerts, *effects.alerts)
        scored = effects.scored
        # If the reading ended a tie group, earlier readings are scored with it; this one has the event index 0.
        for i in np.flatnonzero(scored.event_indices == 0).tolist():
            return Update(
                float(scored.log_likelihood[i]),
                float(scored.running_log_likelihood[i]),
                float(scored.score[i]),
                float(scored.p_value[i]),
                alerts,
            )
        rejection = next(iter([*rejections, *effects.rejections]), None)
        is_waiting = rejection is None and len(batch) > 0 and not np.isnan(batch.values[0])
        return Update(nan, nan, nan, nan, alerts, rejection, bool(is_waiting))

    def _decode(self, event: dict[str, Any]) -> tuple[EventBatch, list[Rejection]]:
        """Return one event as a batch, or the reason for its rejection, by the rules of JSON messages.

        Values of the usual types are passed to the codec directly. All others are first converted to JSON, so that
        there is one definition of what they mean.
        """
        document = {name: _to_json_type(value) for name, value in event.items()}
        if _NOT_CONVERTED in document.values():
            return self._codec.decode(_make_messages([_encode_json(event)]))
        return self._codec.decode_document(document)

    def finish(self) -> tuple[Alert, ...]:
        """Close all open records, and return the alerts of readings that waited for others with the same time."""
        return tuple(self._engine.finish().alerts)


class Detector:
    """A trained model with its calibration.

    Attributes:
        artifact: The model directory's contents.
        codec: Decodes readings for this model.
    """

    def __init__(self, artifact: model_store.Artifact) -> None:
        self.artifact = artifact
        self.codec = _make_codec(artifact.schema, 0.0)

    @cached_property
    def _cpu_kernels(self) -> CpuKernels | None:
        """The compiled kernels for the model, or None if they cannot be used."""
        return CpuKernels.for_model(self.artifact.model)

    @property
    def schema(self) -> Schema:
        """The features of the model."""
        return self.artifact.schema

    @property
    def fingerprint(self) -> str:
        """The identifier of the model and its calibration, which is part of each alert."""
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
            alpha: Largest share of normal records that may ever raise an alert; or several such shares, each with
                alerts of its own.
            record_timeout: Seconds without a reading after which a record is closed; None for never.
            ties: What to do with readings of one record that have the same event time. "hold" lets them wait for each
                other and decides them together, "arrival" scores each when it arrives. None does as in calibration.
            tie_wait: Seconds without a reading after which waiting readings are decided; None for never. It takes
                effect with the next update.
            grace: Seconds that a device's time window accepts readings after its end, for models of windows.

        Raises:
            ValueError: If a number is out of range.
        """
        return Scorer(self, alpha, record_timeout, ties, tie_wait, grace)

    def engine(
        self, alpha: float | Sequence[float], limits: Limits | None = None, ties: TiePolicy | None = None
    ) -> Engine:
        """Return a new engine for this model; for programs that run the pipeline themselves.

        Raises:
            ValueError: If an alpha does not lie between 0 and 1.
        """
        alphas = np.atleast_1d(np.asarray(alpha, np.float64))
        if not len(alphas) or not ((alphas > 0) & (alphas < 1)).all():
            raise ValueError(f"alpha is {alpha}, but it must lie between 0 and 1")
        return Engine(self.artifact.model, self.artifact.calibration, self.fingerprint, alpha, limits, ties=ties)

    def score(self, records: Sequence[Mapping[str, Value]], alpha: float = 0.01) -> RecordScores:
        """Score complete records.

        Args:
            records: Values by feature name, in the order of arrival. A feature that is missing, None or NaN is treated
                as not observed.
            alpha: The false-alarm rate of the alerts.

        Raises:
            InputError: If a reading cannot be accepted; the message names the record and the feature.
        """
        engine = self.engine(alpha, Limits(max_open_records=max(1, len(records))))
        completed = engine.handle(self._make_batch(records), 0).closed
        incomplete = engine.finish().closed
        index_by_id = {record_id: i for i, record_id in enumerate([*completed.record_ids, *incomplete.record_ids])}
        # A record without any reading is unknown to the engine. Index -1 refers to its default value at the end.
        indices = np.array([index_by_id.get(str(i), -1) for i in range(len(records))], np.int64)

        def arrange(of_completed: NDArray[Any], of_incomplete: NDArray[Any], default: float) -> NDArray[np.float64]:
            return np.asarray(np.concatenate([of_completed, of_incomplete, [default]])[indices])

        return RecordScores(
            log_likelihood=arrange(completed.log_likelihood, incomplete.log_likelihood, 0.0),
            anomaly_score=arrange(completed.anomaly_score, incomplete.anomaly_score, 0.0),
            p_value=arrange(completed.p_value, incomplete.p_value, 1.0),
            alert_seq=arrange(completed.alert_seq, incomplete.alert_seq, -1).astype(np.int32),
            score=arrange(completed.score, incomplete.score, 0.0),
        )

    def explain(self, record: Mapping[str, Value], alpha: float = 0.01) -> tuple[Contribution, ...]:
        """Return the contribution of each reading to an alert of the record, the most suspicious first.

        Args:
            record: Values by feature name, in the order of arrival.
            alpha: The false-alarm rate of the alert. If the record raises no alert, no reading is a suspect.
        """
        batch = self._make_batch([record])
        if not len(batch):
            return ()
        model, alert_rule = self.artifact.model, self.artifact.calibration.make_alert_rule(alpha)
        codes, raw = batch.features.astype(np.int64)[None], batch.values[None]
        (explanation,) = explain_records(
            model, codes, raw, [batch.unseen_labels], [""], alert_rule, kernels=self._cpu_kernels
        )
        survey = survey_records(self._cpu_kernels, model, codes, self.schema.normalise(codes, raw))
        has_alert = alert_rule(survey.statistics[:, None], [""])[0, 0]
        contributions = explanation.contributions
        return contributions if has_alert else tuple(replace(part, suspect=False) for part in contributions)

    def impute(self, record: Mapping[str, Value], interval: float = 0.9) -> dict[str, Imputation]:
        """Predict each missing feature of a record, given all present ones.

        Missing context features are left out, because the model has no distribution for them. For whole tables there is
        the command `deformer-stream impute`.

        Args:
            record: Values by feature name.
            interval: Probability of the central interval.

        Returns:
            Predictions by feature name.
        """
        if not 0 < interval < 1:
            raise ValueError(f"interval is {interval}, but it must lie between 0 and 1")
        values = self._make_values(record)
        imputed = impute(self.artifact.model, values, np.isnan(values), interval)
        imputations: dict[str, Imputation] = {}
        for code in np.flatnonzero(~np.isnan(imputed.median[0])).tolist():
            feature = self.schema.features[code]
            if feature.labels:
                label = feature.labels[int(imputed.median[0, code])]
                imputations[feature.name] = Imputation(label, None, None)
            else:
                parts = (imputed.median, imputed.low, imputed.high, imputed.mean, imputed.mode)
                imputations[feature.name] = Imputation(*(float(part[0, code]) for part in parts))
        return imputations

    def quantiles(self, record: Mapping[str, Value], qs: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Return the quantiles of each missing continuous feature, given all present features.

        Args:
            record: Values by feature name.
            qs: The probabilities, each between 0 and 1.

        Returns:
            Quantiles by feature name, in the order of `qs`.
        """
        if not qs or not all(0 < q < 1 for q in qs):
            raise ValueError(f"the quantiles are {list(qs)}, but each must lie between 0 and 1")
        values = self._make_values(record)
        quantiles = impute_quantiles(self.artifact.model, values, np.isnan(values), qs)[:, 0]
        codes = np.flatnonzero(~np.isnan(quantiles[0])).tolist()
        return {self.schema.names[code]: tuple(quantiles[:, code].tolist()) for code in codes}

    def complete(self, record: Mapping[str, Value], draws: int = 1, seed: int = 0) -> list[dict[str, float | str]]:
        """Draw the missing features of a record jointly, given the present ones.

        Missing context features stay missing. Equal arguments give equal results.

        Args:
            record: Values by feature name.
            draws: Number of records to draw.
            seed: The seed of the random numbers.

        Returns:
            The records: numbers as floats, labels as text.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}, but it must be at least 1")
        values = self._make_values(record)
        completions = sample_completions(self.artifact.model, values, np.isnan(values), draws, seed)[:, 0]
        return [self._make_record(row) for row in completions]

    def _make_values(self, record: Mapping[str, Value]) -> NDArray[np.float64]:
        """Return a record as (1, F) values by feature code, NaN if missing."""
        batch = self._make_batch([record])
        values = np.full((1, len(self.schema)), np.nan)
        values[0, batch.features] = batch.values
        return values

    def _make_record(self, row: NDArray[np.float64]) -> dict[str, float | str]:
        """Return (F,) values as a record; missing values and labels that training never saw are left out."""
        record: dict[str, float | str] = {}
        for feature, value in zip(self.schema.features, row.tolist(), strict=True):
            if feature.labels and value < len(feature.labels):
                record[feature.name] = feature.labels[int(value)]
            elif not feature.labels and value == value:
                record[feature.name] = value
        return record

    def _make_batch(self, records: Sequence[Mapping[str, Value]]) -> EventBatch:
        """Return the readings of complete records; the record ids are "0", "1", and so on.

        Raises:
            InputError: If a reading cannot be accepted.
        """
        present = [{name: v for name, v in record.items() if not _is_missing(v)} for record in records]
        payloads = [_encode_json({"record": str(i), "values": readings}) for i, readings in enumerate(present)]
        batch, rejections = self.codec.decode(_make_messages(payloads))
        for rejection in rejections:
            if present[rejection.message_index]:  # a record without any reading is rejected too, but is no error
                raise InputError(f"record {rejection.message_index}: {rejection.detail} ({rejection.reason.value})")
        return batch


_NOT_CONVERTED = object()
"""The result of `_to_json_type` for a value that must be converted by way of JSON text."""


def _to_json_type(value: object) -> object:
    """Return a Python value as the type that parsing its JSON text would give.

    Returns `_NOT_CONVERTED` for values whose JSON text has special cases: containers, subclasses, integers beyond 64
    bits, and text that is not valid Unicode.
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
    """Return the argument `name`, in seconds, as microseconds. Raises ValueError if it is not positive."""
    if seconds is not None and not 0 < seconds < 1e12:
        raise ValueError(f"{name} is {seconds}, but it must be a positive number of seconds, or None for never")
    return None if seconds is None else round(seconds * 1e6)


def _make_codec(schema: Schema, grace: float) -> Codec:
    """Return a codec without limits on size, because the input comes from the same process.

    Args:
        schema: The features of the model.
        grace: Seconds that windows accept late readings.
    """
    window_assigner = None
    if schema.window is not None:
        window_assigner = WindowAssigner(schema.window.width, round(grace * 1e6))
    max_readings = max(4096, len(schema))
    return Codec(schema, max_message_bytes=2**30, max_readings=max_readings, window_assigner=window_assigner)


def _is_missing(value: object) -> bool:
    """Return whether a value is None or NaN, which tables use for values that were not observed."""
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _encode_json(document: dict[str, Any]) -> bytes:
    """Return a document as JSON. NaN and infinity are kept, so that the codec can name the feature when rejecting them.

    Raises:
        InputError: If a value has a type that no reading can have.
    """
    try:
        return json.dumps(document, default=_convert_for_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        record_id = document.get("record", document.get("device"))
        raise InputError(f"record {record_id!r}: {error}; use numbers, text or booleans as values") from None


def _convert_for_json(value: object) -> object:
    """Return a NumPy scalar as a Python value and a datetime as text. Raises TypeError for other types."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} cannot be a reading")


def _make_messages(payloads: Sequence[bytes]) -> Messages:
    """Return JSON documents as messages without keys and times."""
    n = len(payloads)
    partitions, offsets = np.zeros(n, np.int32), np.arange(n, dtype=np.int64)
    return Messages("library", [None] * n, list(payloads), np.full(n, NO_TIME), partitions, offsets)


def load(directory: str | Path, device: str = "cpu") -> Detector:
    """Read and verify a model directory.

    Args:
        directory: The model directory.
        device: The torch device for the model.

    Raises:
        ArtifactError: If the directory is missing, incomplete or altered; the message names the problem and the remedy.
    """
    return Detector(model_store.read(Path(directory), device))
