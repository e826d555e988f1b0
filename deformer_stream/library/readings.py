"""Readings with times as data scientists have them, for models of irregular readings: rows of a table, or dicts.

A row or a dict is one reading, as in a long table: `record` (or `device`, if records are windows of time), `feature`,
`value`, perhaps `label`, and `time`. Without `record` and `device`, all readings belong to one record. A row without a
value requests the value of its sensor at its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import LongRows
from deformer_stream.engine.events import NO_TIME
from deformer_stream.engine.irregular_imputation import (
    ObservedReadings,
    Targets,
    draw_at_times,
    impute_at_times,
    impute_quantiles_at_times,
)
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.library.frames import (
    FrameRecords,
    TabularRecords,
    convert_cells,
    read_single_record,
    read_tabular,
)
from deformer_stream.library.results import Imputation, to_nullable
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

COLUMNS = ("record", "device", "feature", "value", "label", "time")
"""The columns of a table of readings. All others are copied."""

DRAW_COLUMN = "draw"
"""The column that numbers the copies of each row in the result of `complete_readings`, from 0."""


@dataclass(frozen=True, slots=True)
class RequestingReadings:
    """N rows, some of which are observed readings, and the others request values.

    Attributes:
        table: The rows, if they are in a table.
        dicts: The rows, if they are dicts.
        codes: (N,) feature code of each row.
        requested: (T,) the rows that request a value, ascending.
        observed: The observed readings of all records.
        targets: What the T rows request.
    """

    table: TabularRecords | None
    dicts: Sequence[Mapping[str, Any]]
    codes: Ints
    requested: Ints
    observed: ObservedReadings
    targets: Targets

    def spread(self, values: Floats) -> Floats:
        """Return values of the T requests as values of all rows, NaN for the others.

        Args:
            values: (…, T) values.

        Returns:
            (…, N) values.
        """
        spread = np.full((*values.shape[:-1], len(self.codes)), np.nan)
        spread[..., self.requested] = values
        return spread

    def fill_columns(
        self, table: TabularRecords, schema: Schema, values: Floats, rows: Ints | None = None
    ) -> dict[str, pa.Array]:
        """Return the columns `value` and perhaps `label` of the table with requested values.

        Args:
            table: The table.
            schema: The features of the model.
            values: (M,) values in raw units or label codes, NaN for rows that request nothing.
            rows: (M,) the row of the table that each row repeats; None if M is N and the rows correspond.

        Raises:
            InputError: A label must be written, but the table has no column for texts.
        """
        from connectors.files.reading_imputation import RequestedValues, get_filled_type

        index = np.arange(len(self.codes)) if rows is None else rows
        names = [name for name in table.column_names if name in ("value", "label")]
        cells = {name: table.get_column(name).take(pa.array(index)) for name in names}
        requests = RequestedValues(self.codes[index], ~np.isnan(values), values)
        return requests.fill_columns(cells, schema, get_filled_type(cells["value"].type), "column 'value'")

    def fill_dicts(self, schema: Schema, values: Floats) -> list[dict[str, Any]]:
        """Return copies of the dicts with requested values.

        Args:
            schema: The features of the model.
            values: (N,) values in raw units or label codes, NaN for rows that request nothing.
        """
        filled = [dict(row) for row in self.dicts]
        for row in np.flatnonzero(~np.isnan(values)).tolist():
            feature = schema.features[self.codes[row]]
            filled[row]["value"] = feature.labels[int(values[row])] if feature.labels else float(values[row])
        return filled

    def describe(self, schema: Schema, statistics: Floats) -> list[Imputation | None]:
        """Return the prediction of each row, None for rows that request nothing.

        Args:
            schema: The features of the model.
            statistics: (5, T) the attributes of `ImputedValues` in their order.
        """
        imputations: list[Imputation | None] = [None] * len(self.codes)
        for i, row in enumerate(self.requested.tolist()):
            feature = schema.features[self.codes[row]]
            if feature.context:
                continue
            numbers = statistics[:, i].tolist()
            imputations[row] = (
                Imputation(feature.labels[int(numbers[0])], None, None) if feature.labels else Imputation(*numbers)
            )
        return imputations


def read_readings(records: Any, codec: Codec, columns: Sequence[str] | None = None) -> RequestingReadings:
    """Return readings with times, and the requests among them.

    Args:
        records: A data frame, an Arrow table, a structured NumPy array, or a list of dicts. Each row is a reading.
        codec: The decoder of the readings of a model of irregular readings.
        columns: The names of the columns of a NumPy matrix.

    Raises:
        ConfigError: The rows are not readings.
        InputError: A row cannot be accepted; the message names it.
    """
    schema = codec.schema
    table = read_tabular(records, schema, columns)
    dicts: list[Mapping[str, Any]] = []
    cells: dict[str, pa.Array] = {}
    if table is not None:
        cells = {name: table.get_column(name) for name in COLUMNS if name in table.column_names}
        num_rows = table.num_records
    else:
        items = [records] if isinstance(records, Mapping) or not hasattr(records, "__iter__") else list(records)
        dicts = [row for item in items if (row := read_single_record(item)) is not None]
        names = [name for name in COLUMNS if any(name in row for row in dicts)]
        if len(dicts) == len(items):
            cells = {name: convert_cells([row.get(name) for row in dicts], name) for name in names}
        num_rows = len(dicts)
    if not {"feature", "value", "time"} <= set(cells):
        raise ConfigError(
            "the model is for irregular readings, so values are imputed at given times: give a list of dicts or a data "
            "frame whose rows are readings with record, feature, value and time, where a row without a value requests "
            "it (deformer-stream impute fills a file)"
        )
    if "record" not in cells and "device" in cells and schema.window is None:
        raise InputError(
            "the readings name a device, but the records of this model are not time windows of devices: name the "
            "record of each reading (record)"
        )
    if "record" not in cells and "device" not in cells:
        cells["record"] = pa.repeat("0", num_rows)
    batch, rejections = codec.decode_requests(LongRows("the readings", pa.RecordBatch.from_pydict(cells), 0))
    for rejection in rejections[:1]:
        raise InputError(
            f"row {rejection.message_index} cannot be accepted: {rejection.detail} ({rejection.reason.value})"
        )
    untimed = np.flatnonzero(batch.times == NO_TIME)
    if len(untimed):
        raise InputError(f"row {untimed[0]} cannot be accepted: it has no time, which the model needs")
    # There is one event for each row, because none was rejected.
    codes, is_requested = batch.features.astype(np.int64), np.isnan(batch.values)
    names_of_records, record = np.unique(np.array(batch.record_ids, object), return_inverse=True)
    origins = _find_origins(batch.times, record, len(names_of_records), is_requested)
    if batch.windows is not None and batch.windows.starts is not None:
        is_window = np.array(batch.windows.devices, object) != ""
        origins[record[is_window]] = batch.windows.starts[is_window]
    ages = (batch.times - origins[record]) / 1e6
    is_observed = ~is_requested
    observed = ObservedReadings.sort(
        record[is_observed], codes[is_observed], batch.values[is_observed], ages[is_observed], len(names_of_records)
    )
    targets = Targets(record[is_requested], codes[is_requested], ages[is_requested])
    return RequestingReadings(table, dicts, codes, np.flatnonzero(is_requested), observed, targets)


def _find_origins(times: Ints, record: Ints, num_records: int, is_requested: NDArray[np.bool_]) -> Ints:
    """Return the time of the earliest observed reading of each record, or else of its earliest request."""
    no_time = np.iinfo(np.int64).max
    earliest = {kind: np.full(num_records, no_time) for kind in (False, True)}
    for kind, origins in earliest.items():
        np.minimum.at(origins, record[is_requested == kind], times[is_requested == kind])
    return np.where(earliest[False] < no_time, earliest[False], earliest[True])


def impute_readings(
    model: DEformer, codec: Codec, records: Any, interval: float, bounds: bool, columns: Sequence[str] | None
) -> Any:
    """Return what `Detector.impute` returns for a model of irregular readings. It has the same arguments."""
    readings = read_readings(records, codec, columns)
    table = readings.table
    if bounds and not isinstance(table, FrameRecords):
        raise ValueError("bounds=True adds columns and needs a data frame or an Arrow table; pass one, or leave it out")
    imputed = impute_at_times(model, readings.observed, readings.targets, interval)
    if table is None:
        statistics = (imputed.median, imputed.low, imputed.high, imputed.mean, imputed.mode)
        return readings.describe(model.schema, np.stack(statistics))
    filled = readings.fill_columns(table, model.schema, readings.spread(imputed.median))
    if bounds:
        filled |= {
            f"value__{name}": to_nullable(readings.spread(statistic))
            for name, statistic in (("low", imputed.low), ("high", imputed.high))
        }
    return table.replace_columns(filled)


def compute_reading_quantiles(
    model: DEformer, codec: Codec, records: Any, qs: Sequence[float], columns: Sequence[str] | None
) -> Any:
    """Return what `Detector.quantiles` returns for a model of irregular readings. It has the same arguments."""
    readings = read_readings(records, codec, columns)
    quantiles = impute_quantiles_at_times(model, readings.observed, readings.targets, qs)
    spread = readings.spread(quantiles)
    if readings.table is None:
        return [None if np.isnan(row).any() else tuple(row.tolist()) for row in spread.T]
    return readings.table.make_table(
        {f"value__q{q:g}": to_nullable(column) for q, column in zip(qs, spread, strict=True)}
    )


def complete_readings(
    model: DEformer, codec: Codec, records: Any, draws: int, seed: int, columns: Sequence[str] | None
) -> Any:
    """Return what `Detector.complete` returns for a model of irregular readings. It has the same arguments."""
    readings = read_readings(records, codec, columns)
    drawn = readings.spread(draw_at_times(model, readings.observed, readings.targets, draws, seed))
    table = readings.table
    if table is None:
        return [readings.fill_dicts(model.schema, values) for values in drawn]
    num_rows = len(readings.codes)
    rows = np.repeat(np.arange(num_rows), draws)  # the copies of a row are adjacent
    filled = readings.fill_columns(table, model.schema, drawn.T.reshape(-1), rows)
    if isinstance(table, FrameRecords):
        filled[DRAW_COLUMN] = pa.array(np.tile(np.arange(draws), num_rows))
    return table.replace_columns(filled, rows)
