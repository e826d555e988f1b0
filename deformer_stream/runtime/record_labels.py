"""Labels of records, which a column of the input states: which records are normal, and which have a known fault.

The rows of tables hold the label of their record in the column `codec.tables.RECORD_LABEL_COLUMN`. The label of a
record is found when its rows are decoded, and is kept until the record is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.codec.tables import RECORD_LABEL_COLUMN
from deformer_stream.engine.events import Effects, EventBatch
from deformer_stream.tables.labels import encode_labels, normalize_label


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

    def observe(self, data: Payload, batch_by_model: Mapping[str, EventBatch]) -> None:
        """Take the labels of rows.

        Args:
            data: What a poll returned. JSON lines have no labels.
            batch_by_model: The events of these rows, by the name of the model.
        """
        if isinstance(data, Messages) or RECORD_LABEL_COLUMN not in data.table.schema.names:
            return
        label_indexes, labels = encode_labels(data.table.column(RECORD_LABEL_COLUMN))
        labels = [self.normal_label if normalize_label(text) == self.normal_label else text.strip() for text in labels]
        for model, batch in batch_by_model.items():
            indexes = label_indexes[batch.message_indices].tolist()
            for record_id, index in dict.fromkeys(zip(batch.record_ids, indexes, strict=True)):
                if index >= 0 and self._label_by_record.get((model, record_id), self.normal_label) == self.normal_label:
                    self._label_by_record[model, record_id] = labels[index]

    def list_labels(self, effects: Effects) -> list[str | None]:
        """Return the label of each of the R closed records of one batch; None for records without one."""
        return [self._label_by_record.get((effects.model_name, record_id)) for record_id in effects.closed.record_ids]

    def select_normal(self, effects: Effects) -> Effects:
        """Return the effects with the alerts and the closed records of normal records only."""
        is_normal = np.array([label == self.normal_label for label in self.list_labels(effects)], np.bool_)
        model, label_by_record = effects.model_name, self._label_by_record
        alerts, held_back_alerts = (
            [alert for alert in part if label_by_record.get((model, alert.record)) == self.normal_label]
            for part in (effects.alerts, effects.held_back_alerts)
        )
        closed = effects.closed.select(is_normal)
        return replace(effects, alerts=alerts, held_back_alerts=held_back_alerts, closed=closed)

    def forget(self, effects: Effects) -> None:
        """Forget the labels of the closed records of one batch."""
        for record_id in effects.closed.record_ids:
            self._label_by_record.pop((effects.model_name, record_id), None)
