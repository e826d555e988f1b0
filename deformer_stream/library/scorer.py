"""Scoring of readings that arrive one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import nan
from typing import Any, Protocol

import numpy as np

from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Alert, EventBatch, Rejection
from deformer_stream.engine.next_reading import DEFAULT_NUM_DRAWS, DEFAULT_SUSPICIOUS, NextReading
from deformer_stream.errors import ConfigError
from deformer_stream.library.frames import is_missing
from deformer_stream.library.records import NOT_CONVERTED, Value, encode_json, make_codec, make_messages, to_json_type
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.timing import WallClock


@dataclass(frozen=True, slots=True)
class Update:
    """The result of adding one reading to a record: its scores, alerts and rejection.

    The four scores `log_likelihood`, `running_log_likelihood`, `score` and `p_value` are NaN if the reading was
    rejected or if `is_waiting` is true. They are also NaN if the reading declares that the feature will not be
    observed.

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
        is_waiting: Whether the reading is not scored yet. Either further readings of the record with the same event
            time may follow (`ties="hold"` in `Detector.scorer`). Or the model combines the readings of a time slot, and
            the slot is not over. A later update or `Scorer.finish` then returns its alerts.
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


class ScoringModel(Protocol):
    """The part of a `Detector` that a scorer uses: its features, and engines for its model."""

    @property
    def schema(self) -> Schema:
        """The features of the model."""

    def engine(
        self, alpha: float | Sequence[float], limits: Limits | None = None, ties: TiePolicy | None = None
    ) -> Engine:
        """Return a new engine for the model (see `Detector.engine`)."""


class Scorer:
    """A scorer of readings that arrive one by one; the readings of many records may be interleaved.

    A scorer is created by `Detector.scorer`, which explains the arguments. It must not be used by several threads at
    the same time.
    """

    def __init__(
        self,
        detector: ScoringModel,
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
        self._codec = make_codec(detector.schema, grace)
        self._is_windowed = detector.schema.window is not None
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

        A reading that cannot be accepted changes nothing, and the result states the reason. Reasons are an unknown
        feature, a number that is not finite, or a second value of the same feature.

        Args:
            record: The record id; a new id opens a new record.
            feature: The feature name.
            value: The value. None declares that the feature will not be observed. NaN and `pandas.NA` are rejected, as
                in a stream, because a later reading of the feature may come.
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
            value: The value. None declares that the feature will not be observed.
            time: Event time as seconds since 1970 or as a datetime with a time zone.

        Returns:
            The scores and alerts, as `update` returns them.

        Raises:
            ConfigError: If the model was not trained on windows.
            InputError: If an argument has a type that no reading can have.
        """
        if not self._is_windowed:
            raise ConfigError(
                "update_device cannot be used, because the model was not trained on windows of the readings of a "
                "device: use update(record, feature, value, time)"
            )
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
        entries_of_reading = [
            i
            for i, event in enumerate(scored.event_indices.tolist())
            if len(batch)
            and effects.batch.features[event] == batch.features[0]
            and effects.batch.record_ids[event] == batch.record_ids[0]
        ]
        if entries_of_reading:
            i = entries_of_reading[0]
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
        if event["value"] is not None and is_missing(event["value"]):
            event = event | {"value": nan}  # pandas.NA and pandas.NaT, too
        document = {name: to_json_type(value) for name, value in event.items()}
        if NOT_CONVERTED in document.values():  # at least one value needs the JSON parser of the codec
            return self._codec.decode(make_messages([encode_json(event)]))
        return self._codec.decode_document(document)

    def next_readings(
        self, record: str | None = None, suspicious: float = DEFAULT_SUSPICIOUS, draws: int = DEFAULT_NUM_DRAWS
    ) -> dict[str, list[NextReading]]:
        """Return which reading to take next of open records that are suspicious but have not raised an alert.

        The features that a record does not have yet are ranked by what their readings would show if one of the
        suspicious readings is wrong (module `deformer_stream.engine.next_reading_ranking`). The record does not change.

        If readings are chosen by this ranking, their order of arrival depends on their values. The false-alarm rate is
        then only guaranteed with a calibration that was made with the same choice: `deformer-stream calibrate --order
        next`.

        Args:
            record: Id of an open record; None for all records whose p-value is at most `suspicious`, and that have not
                raised an alert.
            suspicious: Largest p-value of a suspicious record, from 0 to 1.
            draws: Number of values that stand for the distribution of a continuous feature; more are more exact.

        Returns:
            By record id, the features that the record may still get, the most informative one first. A record that is
            not open has no entry.

        Raises:
            ConfigError: If the readings of the model are irregular.
            ValueError: If a number is out of range.
        """
        if not 0 <= suspicious <= 1:
            raise ValueError(f"suspicious is {suspicious}, but it must be a p-value from 0 to 1")
        return self._engine.rank_next_readings(None if record is None else [record], suspicious, draws)

    def finish(self) -> tuple[Alert, ...]:
        """Close all open records, and return the alerts that this raises.

        With `ties="hold"`, readings may still wait for others with the same event time. They are scored now.
        """
        return tuple(self._engine.finish().alerts)


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
