"""The package as a library: `deformer_stream.load(DIR)` gives a `Detector`.

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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, Alert, Contribution, EventBatch, Rejection
from deformer_stream.engine.explain import explain_records
from deformer_stream.engine.imputation import impute, impute_quantiles, sample_completions
from deformer_stream.errors import InputError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.timing import WallClock

Value = float | int | str | bool | None
"""A reading; NumPy's scalars will do as well."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one reading did to its record.

    log_likelihood: ln p(value | earlier readings), normalised units, a mass for discrete features; NaN for context.
    running_log_likelihood: the record's sum so far. score: running statistic, larger is more anomalous. p_value:
    anytime-valid, never rises within a record. All four are NaN if the reading was refused or says that the feature
    will not be observed. alerts: those that the reading raised, at most one for each alpha, the mildest first.
    rejected: why the reading was refused, None where it was accepted. waits: with ties held, the reading waits for
    others of its time; its numbers are NaN, and what comes of it is in the alerts of a later update or of `finish`.
    """

    log_likelihood: float
    running_log_likelihood: float
    score: float
    p_value: float
    alerts: tuple[Alert, ...] = ()
    rejected: Rejection | None = None
    waits: bool = False

    @property
    def alert(self) -> Alert | None:
        """The most severe of the alerts."""
        return self.alerts[-1] if self.alerts else None


@dataclass(frozen=True, slots=True)
class RecordScores:
    """Whole records in the order given, each (N,).

    log_likelihood: ln p of the record. anomaly_score: ranks, larger is more anomalous. score: the running statistic of
    alerts in the end, likewise; p_value: of that, anytime-valid.
    alert_seq: place of the reading that raised the first alert, −1 where none did.
    """

    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    score: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Imputation:
    """A missing reading: conditional median, an interval, the conditional mean and the likeliest value (continuous), or
    the likeliest label (discrete)."""

    value: float | str
    low: float | None
    high: float | None
    mean: float | None = None
    mode: float | None = None


class Scorer:
    """Scores readings as they come, many records interleaved. Not safe for use from several threads at once."""

    def __init__(
        self,
        detector: Detector,
        alpha: float | Sequence[float],
        record_timeout: float | None,
        ties: TiePolicy | None = None,
        tie_wait: float | None = None,
        grace: float = 0.0,
    ) -> None:
        waits = [_microseconds("record_timeout", record_timeout), _microseconds("tie_wait", tie_wait)]
        if not 0 <= grace <= 1e9:
            raise ValueError("grace is a number of seconds, at least 0")
        self._codec = _codec_of(detector.schema, grace)
        self._clock = WallClock()
        self._engine = detector.engine(alpha, Limits(waits[0], tie_wait=waits[1]), ties)

    def update(self, record: str, feature: str, value: Value, time: float | datetime | None = None) -> Update:
        """Add one reading.

        value: None says that the feature will not be observed. time: epoch seconds or a datetime with its zone. A
        reading that cannot be accepted (an unknown feature, a number that is not finite, a second value of the same
        feature, …) changes nothing and comes back with `rejected` set.
        """
        return self._updated({"record": record, "feature": feature, "value": value, "time": time})

    def update_device(self, device: str, feature: str, value: Value, time: float | datetime) -> Update:
        """Add one reading of a device to the window of its time that the reading's time is in; for models that were
        trained on windows. Otherwise as `update`."""
        return self._updated({"device": device, "feature": feature, "value": value, "time": time})

    def _updated(self, document: dict[str, Any]) -> Update:
        batch, refused = self._codec.decode(_messages([_json(document)]))
        now = self._clock.at(batch.times)
        earlier = self._engine.handle(EventBatch.empty(), now)  # between two updates no one looks at the clock
        effects = self._engine.handle(batch, now)
        alerts = (*earlier.alerts, *effects.alerts)
        s, rejected = effects.scored, next(iter([*refused, *effects.rejections]), None)
        for row in np.flatnonzero(s.event_indices == 0).tolist():  # what had waited stands behind it
            log_likelihood, running, score, p_value = (
                float(column[row]) for column in (s.log_likelihood, s.running_log_likelihood, s.score, s.p_value)
            )
            return Update(log_likelihood, running, score, p_value, alerts)
        nan = float("nan")
        waits = rejected is None and len(batch) > 0 and not np.isnan(batch.values[0])
        return Update(nan, nan, nan, nan, alerts, rejected, bool(waits))

    def finish(self) -> tuple[Alert, ...]:
        """Close all open records. Returns the alerts of readings that had waited for others of their time."""
        return tuple(self._engine.finish().alerts)


class Detector:
    """A trained model with its calibration."""

    def __init__(self, loaded: model_store.Artifact) -> None:
        self.artifact = loaded
        self.codec = _codec_of(loaded.schema, 0.0)

    @cached_property
    def _compiled(self) -> CpuKernels | None:
        return CpuKernels.for_model(self.artifact.model)

    @property
    def schema(self) -> Schema:
        return self.artifact.schema

    @property
    def fingerprint(self) -> str:
        """Names the model in alerts."""
        return self.artifact.fingerprint

    def scorer(
        self,
        alpha: float | Sequence[float] = 0.01,
        record_timeout: float | None = None,
        ties: TiePolicy | None = None,
        tie_wait: float | None = None,
        grace: float = 0.0,
    ) -> Scorer:
        """A fresh event-by-event scorer.

        alpha: largest share of normal records that may ever raise an alert, or several, each with alerts of its own.
        record_timeout: seconds without a reading after which a record is closed, None for never. ties: "hold" where
        readings of a record that are updated with one time wait for each other and are judged once, "arrival" where
        they are judged as they come, None as the model was calibrated. tie_wait: seconds without a reading after which
        they wait no more, None for never; it is looked at with each update. grace: seconds past its end that a device's
        window takes what comes late, for models of windows."""
        return Scorer(self, alpha, record_timeout, ties, tie_wait, grace)

    def engine(self, alpha: float | Sequence[float], limits: Limits | None = None, ties: TiePolicy | None = None) -> Engine:
        """A fresh engine. Raises ValueError unless every alpha lies between 0 and 1."""
        alphas = np.atleast_1d(np.asarray(alpha, np.float64))
        if not len(alphas) or not ((alphas > 0) & (alphas < 1)).all():
            raise ValueError("alpha lies between 0 and 1")
        return Engine(self.artifact.model, self.artifact.calibration, self.fingerprint, alpha, limits, ties=ties)

    def score(self, records: Sequence[Mapping[str, Value]], alpha: float = 0.01) -> RecordScores:
        """Score whole records. Each mapping's order is the arrival order; what is absent, None or NaN is not observed.

        Raises `InputError` that names record and feature for a reading that cannot be accepted."""
        engine = self.engine(alpha, Limits(max_open_records=max(1, len(records))))
        batch = self._batch(records)
        effects = engine.handle(batch, 0)
        rest = engine.finish().closed
        row = {record: i for i, record in enumerate([*effects.closed.record_ids, *rest.record_ids])}
        order = np.array([row.get(str(i), -1) for i in range(len(records))], np.int64)

        def column(name: str, empty: float) -> NDArray[np.float64]:
            """By record; `empty` for one without any reading."""
            values = np.concatenate([getattr(effects.closed, name), getattr(rest, name), [empty]])
            return np.asarray(values[order])

        return RecordScores(
            column("log_likelihood", 0.0),
            column("anomaly_score", 0.0),
            column("p_value", 1.0),
            column("alert_seq", -1).astype(np.int32),
            column("score", 0.0),
        )

    def explain(self, record: Mapping[str, Value], alpha: float = 0.01) -> tuple[Contribution, ...]:
        """What each reading has to do with an alert at this alpha, the most suspicious first; none is a suspect where
        the record raises no alert. The mapping's order is the arrival order."""
        batch = self._batch([record])
        if not len(batch):
            return ()
        model, alarming = self.artifact.model, self.artifact.calibration.make_alert_rule(alpha)
        codes, raw = batch.features.astype(np.int64)[None], batch.values[None]
        why = explain_records(model, codes, raw, [batch.unseen_labels], [""], alarming, kernels=self._compiled)
        parts = why[0].contributions
        statistics = compute_max_statistics(model, codes, self.schema.normalise(codes, raw))
        loud = alarming(statistics[:, None], [""])[0, 0]
        return parts if loud else tuple(replace(part, suspect=False) for part in parts)

    def impute(self, record: Mapping[str, Value], interval: float = 0.9) -> dict[str, Imputation]:
        """Each missing feature given all present ones: median and mean, or likeliest label, and the central interval.

        Context features have no distribution, so a missing one is left out. `deformer-stream impute` fills tables."""
        if not 0 < interval < 1:
            raise ValueError("interval lies between 0 and 1")
        values = self._values(record)
        filled = impute(self.artifact.model, values, np.isnan(values), interval)
        out = {}
        for code in np.flatnonzero(~np.isnan(filled.median[0])).tolist():
            feature = self.schema.features[code]
            parts = (filled.median, filled.low, filled.high, filled.mean, filled.mode)
            value, *rest = (float(part[0, code]) for part in parts)
            labels = feature.labels
            out[feature.name] = Imputation(labels[int(value)], None, None) if labels else Imputation(value, *rest)
        return out

    def quantiles(self, record: Mapping[str, Value], qs: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Conditional quantiles, in the order of `qs`, of each missing measurement given all present readings."""
        if not qs or not all(0 < q < 1 for q in qs):
            raise ValueError("quantiles lie between 0 and 1")
        values = self._values(record)
        found = impute_quantiles(self.artifact.model, values, np.isnan(values), qs)[:, 0]
        codes = np.flatnonzero(~np.isnan(found[0])).tolist()
        return {self.schema.names[code]: tuple(found[:, code].tolist()) for code in codes}

    def complete(self, record: Mapping[str, Value], draws: int = 1, seed: int = 0) -> list[dict[str, float | str]]:
        """Records that could have been: all missing features drawn jointly given the present ones, `draws` times.

        Equal arguments draw equal records. Context is taken as it is given. What is present comes in the model's terms:
        numbers as floats, labels as text."""
        if draws < 1:
            raise ValueError("draws is at least 1")
        values = self._values(record)
        drawn = sample_completions(self.artifact.model, values, np.isnan(values), draws, seed)[:, 0]
        return [self._record(row) for row in drawn]

    def _values(self, record: Mapping[str, Value]) -> NDArray[np.float64]:
        """(1, F) readings, NaN where missing."""
        batch = self._batch([record])
        values = np.full((1, len(self.schema)), np.nan)
        values[0, batch.features] = batch.values
        return values

    def _record(self, row: NDArray[np.float64]) -> dict[str, float | str]:
        """(F,) as names and values; a label that training never saw is left out."""
        out: dict[str, float | str] = {}
        for feature, value in zip(self.schema.features, row.tolist(), strict=True):
            if feature.labels and value < len(feature.labels):
                out[feature.name] = feature.labels[int(value)]
            elif not feature.labels and value == value:
                out[feature.name] = value
        return out

    def _batch(self, records: Sequence[Mapping[str, Value]]) -> EventBatch:
        """Records named by their place, "0", "1", …, through the codec."""
        present = [{k: v for k, v in record.items() if not _missing(v)} for record in records]
        payloads = [_json({"record": str(i), "values": readings}) for i, readings in enumerate(present)]
        batch, rejected = self.codec.decode(_messages(payloads))
        for refusal in rejected:
            if present[refusal.message_index]:
                raise InputError(f"record {refusal.message_index}: {refusal.detail} ({refusal.reason.value})")
        return batch


def _microseconds(name: str, seconds: float | None) -> int | None:
    if seconds is not None and not 0 < seconds < 1e12:
        raise ValueError(f"{name} is a positive number of seconds, or None for never")
    return None if seconds is None else round(seconds * 1e6)


def _codec_of(schema: Schema, grace: float) -> Codec:
    windows = None if schema.window is None else WindowAssigner(schema.window.width, round(grace * 1e6))
    return Codec(schema, max_message_bytes=2**30, max_readings=max(4096, len(schema)), window_assigner=windows)


def _missing(value: object) -> bool:
    """Tables say NaN for what was not observed."""
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _json(document: dict[str, Any]) -> bytes:
    """A number that is not finite stays one (`NaN`), for the codec to refuse by name."""
    try:
        return json.dumps(document, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        owner = document.get("record", document.get("device"))
        raise InputError(f"record {owner!r}: {error}; give numbers, text or booleans") from None


def _plain(value: object) -> object:
    """NumPy's scalars as Python's, times as text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is no reading")


def _messages(payloads: Sequence[bytes]) -> Messages:
    n = len(payloads)
    return Messages(
        "library", [None] * n, list(payloads), np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n, dtype=np.int64)
    )


def load(directory: str | Path, device: str = "cpu") -> Detector:
    """Read and verify a model directory. Raises `ArtifactError` naming what is wrong and the remedy."""
    return Detector(model_store.read(Path(directory), device))
