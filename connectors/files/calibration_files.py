"""Files of what `calibrate` keeps of the records of a shard."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import feather

from deformer_stream.errors import InputError, map_write_errors
from deformer_stream.runtime.calibration_sink import CollectedRecords

_RECORDS_FILE, _READINGS_FILE = "records.arrow", "readings.arrow"
_FLAGS = b"flags"  # key of the metadata of the file of records


def write_collected_records(folder: Path, records: CollectedRecords) -> None:
    """Write records to files of a folder.

    Raises:
        Unavailable: Writing fails.
    """
    scores = records.record_scores
    flags = [scores is not None, records.has_wide_rows, records.has_ordered_readings]
    table = pa.table(
        {
            "record": _encode_ids(records.record_ids),
            "max_statistic": records.max_statistics,
            "record_score": np.full(len(records.record_ids), np.nan) if scores is None else scores,
            "fingerprint": records.fingerprints,
        }
    )
    readings = records.readings_by_record
    kept = pa.table(
        {
            "record": _encode_ids(list(readings)),
            "features": pa.array([[code for code, _ in row] for row in readings.values()], pa.list_(pa.int64())),
            "values": pa.array([[value for _, value in row] for row in readings.values()], pa.list_(pa.float64())),
        }
    )
    with map_write_errors(folder):
        feather.write_feather(table.replace_schema_metadata({_FLAGS: json.dumps(flags)}), folder / _RECORDS_FILE)
        feather.write_feather(kept, folder / _READINGS_FILE)


def read_collected_records(folder: Path) -> CollectedRecords:
    """Return the records that `write_collected_records` wrote.

    Raises:
        InputError: A file cannot be read.
    """
    try:
        table = feather.read_table(folder / _RECORDS_FILE)
        kept = feather.read_table(folder / _READINGS_FILE)
        has_scores, has_wide_rows, has_ordered_readings = json.loads(table.schema.metadata[_FLAGS])
    except (OSError, pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{folder} cannot be read ({error}); delete it, and start again") from error
    features, values = kept["features"].to_pylist(), kept["values"].to_pylist()
    return CollectedRecords(
        _decode_ids(table["record"]),
        table["max_statistic"].to_numpy(),
        table["record_score"].to_numpy() if has_scores else None,
        table["fingerprint"].to_numpy(),
        {
            record: list(zip(*row, strict=True))
            for record, *row in zip(_decode_ids(kept["record"]), features, values, strict=True)
        },
        has_wide_rows,
        has_ordered_readings,
    )


def _encode_ids(record_ids: list[str]) -> pa.Array:
    """Return record ids as bytes: they can have lone surrogates, which stand for bytes that are not UTF-8."""
    return pa.array([record_id.encode("utf-8", "surrogatepass") for record_id in record_ids], pa.binary())


def _decode_ids(column: pa.ChunkedArray) -> list[str]:
    """Return the record ids of `_encode_ids`."""
    return [record_id.decode("utf-8", "surrogatepass") for record_id in column.to_pylist()]
