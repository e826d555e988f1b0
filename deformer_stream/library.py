"""The package as a library: `deformer_stream.load(DIR)` gives a `Detector`.

    >>> detector = deformer_stream.load("model")                              # doctest: +SKIP
    >>> scorer = detector.scorer(alpha=0.01)                                  # doctest: +SKIP
    >>> scorer.update("pump-7/10:34:33", "Pressure", 9.1).p_value             # doctest: +SKIP
    0.0008
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from deformer_stream import artifact
from deformer_stream.codec import Codec
from deformer_stream.core.batch import NO_TIME, AlertRaised, Contribution, EventBatch, Rejected
from deformer_stream.core.cache import tensor
from deformer_stream.core.engine import Engine, Limits
from deformer_stream.core.explain import contributions
from deformer_stream.core.schema import Schema
from deformer_stream.errors import InputError
from deformer_stream.ports import Messages
from deformer_stream.runtime import WallClock

Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Update:
    """What one reading did to its record.

    log_likelihood: ln p(value | earlier readings), normalised units, a mass for discrete features; NaN if the reading
    was refused, declares a feature as never coming, or is context. running_log_likelihood: the record's sum so far.
    score: running statistic, larger is more anomalous. p_value: anytime-valid, never rises within a record. alert: set
    on the reading that raised it. rejected: why the reading was refused, None if it was accepted.
    """

    log_likelihood: float
    running_log_likelihood: float
    score: float
    p_value: float
    alert: AlertRaised | None = None
    rejected: Rejected | None = None


@dataclass(frozen=True, slots=True)
class RecordScores:
    """Whole records in the order given, each (N,): ln p of the record, a score that ranks (larger is more anomalous), the
    p-value, and the place of the reading that raised the alert (−1: none)."""

    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Imputed:
    """A missing reading: conditional median and an interval (continuous), or the likeliest label (discrete)."""

    value: float | str
    low: float | None
    high: float | None


class Scorer:
    """Scores readings as they come, many records interleaved. Not safe for use from several threads at once."""

    def __init__(self, detector: Detector, alpha: float, record_timeout: float | None) -> None:
        timeout = None if record_timeout is None else round(record_timeout * 1e6)
        self._codec = detector.codec
        self._clock = WallClock()
        self._engine = Engine(
            detector.artifact.model, detector.artifact.calibration, detector.fingerprint, alpha, Limits(timeout)
        )

    def update(self, record: str, feature: str, value: Value, time: float | datetime | None = None) -> Update:
        """Add one reading. value: None says that the feature will not be observed. time: epoch seconds or a datetime with
        its zone. A reading that cannot be accepted changes nothing and comes back with `rejected` set."""
        document: dict[str, object] = {"record": record, "feature": feature, "value": value}
        if time is not None:
            document["time"] = time
        try:
            payload = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise InputError(f"record {record!r}, feature {feature!r}: {error}; give a number, text or a boolean") from None
        batch, refused = self._codec.decode(_messages([payload]))
        effects = self._engine.handle(batch, self._clock.at(batch.times))
        rejected = [*refused, *effects.rejected]
        nan = float("nan")
        if not len(effects.scored):
            return Update(nan, nan, nan, nan, rejected=rejected[0] if rejected else None)
        s = effects.scored
        alert = effects.alerts[0] if effects.alerts else None
        return Update(float(s.log_likelihood[0]), float(s.running[0]), float(s.score[0]), float(s.p_value[0]), alert)

    def finish(self) -> None:
        """Close all open records."""
        self._engine.finish()


class Detector:
    """A trained model with its calibration."""

    def __init__(self, loaded: artifact.Artifact) -> None:
        self.artifact = loaded
        self.codec = Codec(loaded.schema)

    @property
    def schema(self) -> Schema:
        return self.artifact.schema

    @property
    def fingerprint(self) -> str:
        """Names the model in alerts."""
        return self.artifact.fingerprint

    def scorer(self, alpha: float = 0.01, record_timeout: float | None = None) -> Scorer:
        """A fresh event-by-event scorer. alpha: largest share of normal records that may ever raise an alert.
        record_timeout: seconds without a reading after which a record is closed, None for never."""
        if not 0 < alpha < 1:
            raise ValueError("alpha lies between 0 and 1")
        return Scorer(self, alpha, record_timeout)

    def score(self, records: Sequence[Mapping[str, Value]], alpha: float = 0.01) -> RecordScores:
        """Score whole records; each mapping's order is the arrival order, an absent or None feature is not observed.

        Raises `InputError` that names record and feature for a reading that cannot be accepted."""
        loaded = self.artifact
        engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, alpha)
        batch = self._batch(records)
        effects = engine.handle(batch, 0)
        rest = engine.finish().closed
        row = {record: i for i, record in enumerate([*effects.closed.records, *rest.records])}
        order = np.array([row.get(str(i), -1) for i in range(len(records))], np.int64)

        def column(name: str, empty: float) -> NDArray[np.float64]:
            values = np.concatenate([getattr(effects.closed, name), getattr(rest, name), [empty]])
            return values[order]

        alert_seq = column("alert_seq", -1).astype(np.int32)
        return RecordScores(column("log_likelihood", 0.0), column("anomaly_score", 0.0), column("p_value", 1.0), alert_seq)

    def explain(self, record: Mapping[str, Value]) -> tuple[Contribution, ...]:
        """Each reading's surprise given the ones before it (the mapping's order), most surprising first."""
        batch = self._batch([record])
        if not len(batch):
            return ()
        return contributions(self.artifact.model, batch.features.astype(np.int64), batch.values, batch.unseen)

    def impute(self, record: Mapping[str, Value], interval: float = 0.9) -> dict[str, Imputed]:
        """Each missing feature given all present ones: median or likeliest label, and the central interval."""
        if not 0 < interval < 1:
            raise ValueError("interval lies between 0 and 1")
        model, schema = self.artifact.model, self.schema
        batch = self._batch([record])
        known = batch.features.astype(np.int64)
        missing = np.setdiff1d(np.arange(len(schema)), known)
        if not len(missing):
            return {}
        # One row per missing feature: the known readings, then the feature asked for; its value is never looked at.
        codes = np.concatenate([np.tile(known, (len(missing), 1)), missing[:, None]], 1)
        values = np.concatenate([np.tile(schema.normalise(known, batch.values), (len(missing), 1)), np.zeros((len(missing), 1))], 1)
        with torch.inference_mode():
            asked = model.conditionals(tensor(codes, model), tensor(values, model))[:, -1]
            low, middle, high = (
                schema.denormalise(missing, asked.quantile(q).double().cpu().numpy())
                for q in ((1 - interval) / 2, 0.5, (1 + interval) / 2)
            )
            modes = asked.mode_code().long().cpu().numpy()
        out = {}
        for i, code in enumerate(missing):
            feature = schema.features[code]
            if feature.kind == "continuous":
                out[feature.name] = Imputed(float(middle[i]), float(low[i]), float(high[i]))
            else:
                out[feature.name] = Imputed(feature.labels[min(int(modes[i]), len(feature.labels) - 1)], None, None)
        return out

    def _batch(self, records: Sequence[Mapping[str, Value]]) -> EventBatch:
        """Records named by their place, "0", "1", …, through the codec."""
        payloads = []
        for i, record in enumerate(records):
            present = {k: v for k, v in record.items() if v is not None}
            try:
                payloads.append(orjson.dumps({"record": str(i), "values": present}, option=orjson.OPT_SERIALIZE_NUMPY))
            except TypeError as error:
                raise InputError(f"record {i}: {error}; give numbers, text or booleans by feature name") from None
        batch, rejected = self.codec.decode(_messages(payloads))
        empty = {i for i, record in enumerate(records) if all(v is None for v in record.values())}
        for refusal in rejected:
            if refusal.message not in empty:
                raise InputError(f"record {refusal.message}: {refusal.detail} ({refusal.reason.value})")
        return batch


def _messages(payloads: Sequence[bytes]) -> Messages:
    n = len(payloads)
    return Messages(
        "library", [None] * n, list(payloads), np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n, dtype=np.int64)
    )


def load(directory: str | Path, device: str = "cpu") -> Detector:
    """Read and verify a model directory. Raises `ArtifactError` naming what is wrong and the remedy."""
    return Detector(artifact.read(Path(directory), device))
