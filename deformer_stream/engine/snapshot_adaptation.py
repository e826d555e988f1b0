"""The adaptation of a snapshot to a model with other features, labels or rules than the model that made it."""

from __future__ import annotations

from dataclasses import dataclass

from deformer_stream.engine.snapshot import Snapshot, Vocabulary
from deformer_stream.model.schema import Schema


@dataclass(frozen=True, slots=True)
class AdaptedSnapshot:
    """A snapshot that has the features, labels and rules of a model.

    Attributes:
        snapshot: The snapshot.
        num_dropped: Number of readings that were dropped, because the model cannot have them.
        is_translated: Whether the records have other readings or features than before, so that they may be complete.
        has_valid_scores: Whether the scores of the records are still those that their models would compute.
    """

    snapshot: Snapshot
    num_dropped: int
    is_translated: bool
    has_valid_scores: bool


def adapt_snapshot(snapshot: Snapshot, schema: Schema, holds_ties: bool) -> AdaptedSnapshot:
    """Return a snapshot in the form that a model needs.

    Args:
        snapshot: The snapshot, possibly of another model.
        schema: The schema of the model.
        holds_ties: Whether readings of one record with the same event time are scored together as a tie group.
    """
    has_ties = snapshot.ties is not None
    vocabulary, is_irregular = Vocabulary.from_schema(schema), schema.reading_times is not None
    num_dropped, is_translated = 0, False
    if snapshot.waiting is not None and not _can_wait(snapshot, schema):
        # The model does not combine the readings of a time slot in the same way. So the readings that wait for the end
        # of their slot are added to their records now.
        snapshot, is_translated = snapshot.accept_waiting(snapshot.waiting), True
    if snapshot.vocabulary != vocabulary:
        # The snapshot has other features or labels. Its codes are translated to those of the model.
        snapshot, num_dropped = snapshot.translate(vocabulary)
        is_translated = True
    if is_irregular != (snapshot.event_times is not None):
        # Only one of the two models lets a sensor report any number of times in a record.
        snapshot, num_without_time = snapshot.drop_readings_without_times() if is_irregular else snapshot.remove_times()
        num_dropped += num_without_time
        is_translated = True
    # No earlier score of translated records is valid, and no record may be scored partly with and partly without ties.
    has_valid_scores = not is_translated and has_ties == holds_ties
    return AdaptedSnapshot(snapshot, num_dropped, is_translated, has_valid_scores)


def _can_wait(snapshot: Snapshot, schema: Schema) -> bool:
    """Return whether readings of a snapshot that wait for the end of their time slot can do so with a model.

    Args:
        snapshot: The snapshot, which has such readings.
        schema: The schema of the model, which must have the same features and the same rules for a time slot.
    """
    waiting, window = snapshot.waiting, schema.window
    return (
        waiting is not None
        and snapshot.vocabulary == Vocabulary.from_schema(schema)
        and window is not None
        and schema.reading_times is None
        and window.per_slot == waiting.rule
        and waiting.list_cycles() == [schema.slot_mean_cycles[code] for code in waiting.feature.tolist()]
    )
