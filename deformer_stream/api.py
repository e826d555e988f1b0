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
from deformer_stream.engine.record_scores import compute_record_scores
from deformer_stream.errors import InputError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.timing import WallClock

Value = float | int | str | bool | None
"""The value of a reading; None declares that the feature will not be observed. NumPy scalars are accepted as well."""


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
            time may follow (`ties="hold"` in `Detector.scorer`). A later update or `Scorer.finish` then returns its
            alerts.
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
        # The engine may also have scored earlier readings, which waited for others with the same event time. Only this
        # reading has the event index 0. It has no entry if it was rejected or waits itself.
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


class Detector:
    """A trained model with its calibration, which scores, explains and imputes records.

    `deformer_stream.load` creates it from a model directory.

    Attributes:
        artifact: The contents of the model directory.
        codec: The decoder of this model's readings, from JSON messages to batches of events.
    """

    def __init__(self, artifact: model_store.Artifact) -> None:
        self.artifact = artifact
        self.codec = _make_codec(artifact.schema, 0.0)

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

        Raises:
            ValueError: If a number is out of range. The message names it.
        """
        return Scorer(self, alpha, record_timeout, ties, tie_wait, grace)

    def engine(
        self, alpha: float | Sequence[float], limits: Limits | None = None, ties: TiePolicy | None = None
    ) -> Engine:
        """Return a new engine (the object that scores batches of decoded readings) for this model.

        It is for programs that run the stages decode, score and write themselves. Otherwise `scorer` is simpler.

        Args:
            alpha: The false-alarm rate, that is, the largest share of normal records that may ever raise an alert; or
                several such rates, each with alerts of its own.
            limits: Limits on the time and memory that open records may take; by default those of `Limits()`.
            ties: What to do with readings of one record that have the same event time. "hold" scores them together,
                "arrival" scores each when it arrives. None uses the policy with which the model was calibrated.

        Raises:
            ValueError: If an alpha does not lie between 0 and 1.
        """
        alphas = np.atleast_1d(np.asarray(alpha, np.float64))
        if not len(alphas) or not ((alphas > 0) & (alphas < 1)).all():
            raise ValueError(f"alpha is {alpha}, but it must be one or more false-alarm rates between 0 and 1")
        return Engine(self.artifact.model, self.artifact.calibration, self.fingerprint, alpha, limits, ties=ties)

    def score(self, records: Sequence[Mapping[str, Value]], alpha: float = 0.01) -> RecordScores:
        """Return the scores of complete records.

        Args:
            records: For each record its values by feature name, in the order of arrival. A feature that is missing,
                None or NaN is treated as not observed.
            alpha: The false-alarm rate at which `RecordScores.alert_seq` reports alerts.

        Raises:
            InputError: If a reading cannot be accepted; the message names the record and the feature.
        """
        # With this limit, the engine never closes a record early to free memory for others.
        engine = self.engine(alpha, Limits(max_open_records=max(1, len(records))))
        # The engine closes a record when it has all features. `finish` closes the others.
        completed = engine.handle(self._make_batch(records), now=0).closed  # without timeouts, the time has no effect
        incomplete = engine.finish().closed
        closed_ids = [*completed.record_ids, *incomplete.record_ids]
        closed_index_by_id = {record_id: i for i, record_id in enumerate(closed_ids)}
        # A record without readings was never opened. Its index −1 selects the default that `arrange` appends.
        closed_indices = np.array([closed_index_by_id.get(str(i), -1) for i in range(len(records))], np.int64)

        def arrange(
            completed_values: NDArray[Any], incomplete_values: NDArray[Any], default: float
        ) -> NDArray[np.float64]:
            """Return the values of closed records in the order of `records`, and the default for unopened ones."""
            values_by_closed_index = np.concatenate([completed_values, incomplete_values, [default]])
            return np.asarray(values_by_closed_index[closed_indices])

        return RecordScores(
            log_likelihood=arrange(completed.log_likelihood, incomplete.log_likelihood, 0.0),
            anomaly_score=arrange(completed.anomaly_score, incomplete.anomaly_score, 0.0),
            p_value=arrange(completed.p_value, incomplete.p_value, 1.0),
            alert_seq=arrange(completed.alert_seq, incomplete.alert_seq, -1).astype(np.int32),
            score=arrange(completed.score, incomplete.score, 0.0),
        )

    def explain(self, record: Mapping[str, Value], alpha: float = 0.01) -> tuple[Contribution, ...]:
        """Return how much each reading of a complete record contributes to its anomaly score.

        Args:
            record: The values by feature name, in the order of arrival. A feature that is missing, None or NaN is
                treated as not observed.
            alpha: The false-alarm rate of the alert to explain. If the record raises an alert at this rate,
                `Contribution.suspect` is true for the readings to which the alert is attributed; otherwise for none.

        Returns:
            One contribution per reading, the most suspicious first. Readings of context features (which condition the
            others and are never scored) are left out.

        Raises:
            InputError: If a reading cannot be accepted; the message names the feature.
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
        # `explain_records` assumes that the record raises an alert, and may mark suspects even if it does not. Compute
        # whether it does, from the record's largest anomaly score, in an array of shape (1, 1).
        scores = compute_record_scores(self._cpu_kernels, model, codes, self.schema.normalise(codes, raw_values))
        has_alert = alert_rule(scores.statistics[:, None], record_ids)[0, 0]
        contributions = explanation.contributions
        if has_alert:
            return contributions
        return tuple(replace(contribution, suspect=False) for contribution in contributions)

    def impute(self, record: Mapping[str, Value], interval: float = 0.9) -> dict[str, Imputation]:
        """Predict the value of each missing feature of a record, given the values of all present ones.

        Context features only condition the other features, and the model has no distribution for them. Missing ones are
        therefore left out. To impute a table, use the command `deformer-stream impute`.

        Args:
            record: The present values by feature name; None and NaN count as missing.
            interval: Probability that the value lies in the central prediction interval, between 0 and 1.

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
        # `imputed` holds arrays (1, F) for the F features of the schema, NaN for features that were not imputed.
        for code in np.flatnonzero(~np.isnan(imputed.median[0])).tolist():
            feature = self.schema.features[code]
            if feature.labels:
                label = feature.labels[int(imputed.median[0, code])]  # for labels, the median is the likeliest code
                imputations[feature.name] = Imputation(label, low=None, high=None)
            else:
                # In the order of the attributes of `Imputation`.
                statistics = (imputed.median, imputed.low, imputed.high, imputed.mean, imputed.mode)
                imputations[feature.name] = Imputation(*(float(statistic[0, code]) for statistic in statistics))
        return imputations

    def quantiles(self, record: Mapping[str, Value], qs: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Return quantiles of the predicted distribution of each missing continuous feature of a record.

        Context features only condition the other features, and the model has no distribution for them. Missing ones are
        therefore left out.

        Args:
            record: The present values by feature name, on which the predictions depend; None and NaN count as missing.
            qs: The probabilities of the quantiles, each between 0 and 1; 0.5 for the median.

        Returns:
            By feature name, the quantiles in raw units (the units of the input) in the order of `qs`.

        Raises:
            ValueError: If `qs` is empty or a probability does not lie between 0 and 1.
            InputError: If a value cannot be accepted; the message names the feature.
        """
        if not qs or not all(0 < q < 1 for q in qs):
            raise ValueError(
                f"qs is {list(qs)}, but it must be one or more probabilities of quantiles, each between 0 and 1"
            )
        values = self._make_values(record)
        # (Q, F) for the Q probabilities and the F features of the schema, NaN for features that were not imputed. The
        # middle index 0 selects the only record.
        quantiles = impute_quantiles(self.artifact.model, values, np.isnan(values), qs)[:, 0]
        codes = np.flatnonzero(~np.isnan(quantiles[0])).tolist()
        return {self.schema.names[code]: tuple(quantiles[:, code].tolist()) for code in codes}

    def complete(self, record: Mapping[str, Value], draws: int = 1, seed: int = 0) -> list[dict[str, float | str]]:
        """Return copies of a record in which random values replace the missing ones.

        The values are drawn from the joint distribution of the missing features given the present ones. Context
        features only condition the others, and the model has no distribution for them, so missing ones stay missing.
        Equal arguments give equal results.

        Args:
            record: The present values by feature name; None and NaN count as missing.
            draws: Number of completed records to return, at least 1.
            seed: The seed of the random numbers.

        Returns:
            `draws` dicts of values by feature name; numbers are floats, labels are text.

        Raises:
            ValueError: If `draws` is less than 1.
            InputError: If a value cannot be accepted; the message names the feature.
        """
        if draws < 1:
            raise ValueError(f"draws is {draws}, but the number of copies to return must be at least 1")
        values = self._make_values(record)
        # (draws, F) values of the F features of the schema; index 0 is the only record.
        completions = sample_completions(self.artifact.model, values, np.isnan(values), draws, seed)[:, 0]
        return [self._make_record(row) for row in completions]

    def _make_values(self, record: Mapping[str, Value]) -> NDArray[np.float64]:
        """Return the values of a record as an array (1, F) for the F features of the schema, as the model needs it.

        Column i belongs to feature i of the schema. It holds a number in raw units (the units of the input), the code
        of a label (its index among the feature's labels), or NaN if the value is missing.

        Args:
            record: The present values by feature name; None and NaN count as missing.

        Raises:
            InputError: If a value cannot be accepted; the message names the feature.
        """
        batch = self._make_batch([record])
        values = np.full((1, len(self.schema)), np.nan)
        values[0, batch.features] = batch.values
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

    def _make_batch(self, records: Sequence[Mapping[str, Value]]) -> EventBatch:
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
