"""The alerts of a batch: which readings raised them, at which alphas, and why."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import Alert, EventBatch, Explanation, ScoredReadings
from deformer_stream.engine.explain import Effort, explain
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.engine.scoring import ModelVersion

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
ByGeneration = Callable[[Ints], Iterator[tuple[ModelVersion, Ints]]]
"""What scores the records in these slots, and the places of those that it scores."""


def compute_alert_id(record: str, model: str, alpha: float) -> str:
    """Deterministic, so that a sink without transactions can drop what it has already: 32 hex digits."""
    return hashlib.sha256(f"{record}\0{model}\0{alpha!r}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def raised(
    records: RecordTable,
    alphas: Floats,
    effort: Effort,
    by_generation: ByGeneration,
    batch: EventBatch,
    accepted: AcceptedReadings,
    scored: ScoredReadings,
    passed: Ints,
) -> list[Alert]:
    """The alerts of a batch, in order, at one reading the mildest first. passed: (M,) from `Generation.score`."""
    raising = np.flatnonzero(scored.is_alert)
    if not len(raising):
        return []
    slots, seen = accepted.record_indices[raising], accepted.seq[raising] + 1
    names = [batch.record_ids[event] for event in accepted.event_indices[raising].tolist()]
    reasons = _explained(records, alphas, effort, by_generation, slots, seen, names)
    alerts = []
    for i, slot, count, (model, why) in zip(raising.tolist(), slots.tolist(), seen.tolist(), reasons, strict=True):
        event = int(accepted.event_indices[i])
        record = batch.record_ids[event]
        reached = int((scored.p_value[i] <= alphas).sum())
        for level in range(reached - int(passed[i]), reached):
            alpha = float(alphas[level])
            alerts.append(
                Alert(
                    id=compute_alert_id(record, model, alpha),
                    record=record,
                    raised_at=count,
                    features_seen=count,
                    features_expected=len(records.schema) - int(records.num_declared_missing[slot]),
                    time=int(batch.times[event]),
                    p_value=float(scored.p_value[i]),
                    alpha=alpha,
                    score=float(scored.score[i]),
                    running_log_likelihood=float(scored.running_log_likelihood[i]),
                    model=model,
                    message_index=int(batch.message_indices[event]),
                    contributions=why.contributions,
                    partition=int(batch.partitions[event]),
                    is_record_closed=slot in accepted.close_reasons,
                    severity=level + 1,
                    silenced_by=why.silenced_by,
                )
            )
    return alerts


def _explained(
    records: RecordTable,
    alphas: Floats,
    effort: Effort,
    by_generation: ByGeneration,
    slots: Ints,
    seen: Ints,
    names: list[str],
) -> list[tuple[str, Explanation]]:
    """The model that judged each of A records, and why it raised its alert when it had so many readings, (A,); together
    by model."""
    reasons = [("", Explanation(()))] * len(slots)
    for generation, rows in by_generation(slots):
        places = np.arange(int(seen[rows].max()))
        codes, values = records.gather_readings(slots[rows], np.broadcast_to(places, (len(rows), len(places))))
        codes = np.where(places < seen[rows, None], codes, -1)
        ends = _ends(records, slots[rows], seen[rows]) if records.holds_ties else None
        unseen = [records.unseen_labels.get(slot, {}) for slot in slots[rows].tolist()]
        ids = [names[row] for row in rows.tolist()]
        alarming = generation.calibration.make_alert_rule(float(alphas[0]))
        found = explain(generation.model, codes, values, unseen, ids, alarming, effort, generation.kernels, ends)
        for row, why in zip(rows.tolist(), found, strict=True):
            reasons[row] = generation.fingerprint, why
    return reasons


def _ends(records: RecordTable, slots: Ints, seen: Ints) -> Bools:
    """Which of the first readings of A records, (A, most of `seen`), are the last ones of their blocks of ties."""
    following = np.arange(int(seen.max())) + 1
    tied = records.log_tied[slots[:, None], np.minimum(following, records.log_tied.shape[1] - 1)]
    ends: Bools = ~(tied & (following < seen[:, None]))
    return ends
