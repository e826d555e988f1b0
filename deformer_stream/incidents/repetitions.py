"""Evidence without what it repeats, for logs that were written at least once and for exports that overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from deformer_stream.engine.id_set import BoundedIdSet
from deformer_stream.incidents.events import EvidenceBatch

MAX_REMEMBERED_ROWS = 1_000_000
"""Number of records and alerts that `leave_out_repetitions` remembers, the latest ones. They take up to 0.15 GB."""


def leave_out_repetitions(batches: Iterable[EvidenceBatch]) -> Iterator[EvidenceBatch]:
    """Yield batches of evidence without the records and alerts that were in an earlier batch.

    A record is repeated if the same model has closed it at the same time before. Of alerts, the ids must be equal, too.
    A repetition is found among the latest `MAX_REMEMBERED_ROWS` records and alerts.

    Args:
        batches: The batches of a log.
    """
    seen = BoundedIdSet(MAX_REMEMBERED_ROWS)

    def is_new(*parts: object) -> bool:
        """Add the id that consists of some parts, and return whether it was not there."""
        id_ = "\0".join(map(str, parts))
        if id_ in seen:
            return False
        seen.add(id_)
        return True

    for batch in batches:
        closed, model = batch.closed, (batch.model_name, batch.model)
        rows = zip(closed.record_ids, closed.times.tolist(), strict=True)
        is_new_record = np.array([is_new(*model, record, time) for record, time in rows], bool)
        alerts = tuple([one for one in batch.alerts if is_new(*model, one.record, one.time, one.id)])
        if not is_new_record.all():
            closed = closed.select(is_new_record)
        yield replace(batch, closed=closed, alerts=alerts)
