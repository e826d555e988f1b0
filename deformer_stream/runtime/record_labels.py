"""Labels of records, which a column of the input states: which records are normal, and which have a known fault.

The rows of tables hold the label of their record in the column `codec.tables.RECORD_LABEL_COLUMN`. The label of a
record is found when its rows are decoded, and is kept until the record is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.codec.tables import RECORD_LABEL_COLUMN
from deformer_stream.engine.events import Effects, EventBatch, RejectionReason
from deformer_stream.tables.labels import normalize_label


class RecordLabels:
    """The labels of the open records, found from the rows of tables.

    A record is faulty if one of its rows is: it has the label of the first such row. Otherwise it is normal if one of
    its rows is. A record whose rows have no label has none.

    Attributes:
        normal_label: The label of normal records.
    """

    def __init__(self, normal_label: str) -> None:
        """Create labels of no record.

        Args:
            normal_label: The label of normal records. A number matches in every spelling.
        """
        self.normal_label = normalize_label(normal_label)
        self._label_by_record: dict[tuple[str, str], str] = {}  # by the names of the model and of the record

    def observe(self, data: Payload, batch_by_model: Mapping[str, EventBatch], all_effects: Iterable[Effects]) -> None:
        """Take the labels of rows.

        Args:
            data: What a poll returned. JSON lines have no labels.
            batch_by_model: The events of these rows, by the name of the model.
            all_effects: The results of the engines. Rows that came too late for their record give it no label.
        """
        if isinstance(data, Messages) or RECORD_LABEL_COLUMN not in data.table.schema.names:
            return
        labels = [
            None if text is None else self._simplify(text)
            for text in data.table.column(RECORD_LABEL_COLUMN).to_pylist()
        ]
        for effects in all_effects:
            for rejection in effects.rejections:
                if rejection.reason is RejectionReason.LATE:
                    labels[rejection.message_index] = None
        for model, batch in batch_by_model.items():
            for record_id, row in dict.fromkeys(zip(batch.record_ids, batch.message_indices.tolist(), strict=True)):
                label, key = labels[row], (model, record_id)
                if label is not None and self._label_by_record.get(key, self.normal_label) == self.normal_label:
                    self._label_by_record[key] = label

    def _simplify(self, text: str) -> str | None:
        """Return a label without white space around it; the normal one in one spelling; None if nothing is left."""
        return self.normal_label if normalize_label(text) == self.normal_label else text.strip() or None

    def list_labels(self, effects: Effects) -> list[str | None]:
        """Return the label of each of the R closed records of one batch; None for records without one."""
        return [self._label_by_record.get((effects.model_name, record_id)) for record_id in effects.closed.record_ids]

    def find_faulty(self, effects: Effects) -> frozenset[str]:
        """Return the ids of the records with an alert, and of the closed records, that are labelled as faults."""
        record_ids = {*effects.closed.record_ids, *(alert.record for alert in effects.raised_alerts)}
        labels = {record_id: self._label_by_record.get((effects.model_name, record_id)) for record_id in record_ids}
        return frozenset(name for name, label in labels.items() if label not in (None, self.normal_label))

    def forget(self, effects: Effects) -> None:
        """Forget the labels of the closed records of one batch."""
        for record_id in effects.closed.record_ids:
            self._label_by_record.pop((effects.model_name, record_id), None)
