"""Write the matrix of normalised values of a training table, and that of the arrival ranks of its readings.

This is the third pass over the input (`trainer.prepare`).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.codec.labels import are_numbers, find_spelling
from deformer_stream.codec.number_texts import is_no_value
from deformer_stream.engine.events import NO_TIME
from deformer_stream.model.schema import SECONDS_PER_DAY, Schema
from deformer_stream.tables.labels import encode_labels
from trainer.array_files import CHUNK_ROWS, create_array_file, fill_in_chunks, temporary_array_file
from trainer.repeated_readings import SlotCounts
from trainer.slot_values import FirstReadings, SlotAggregator
from trainer.tables import FeatureReadings, InputTables, convert_to_numbers


def encode_table(
    tables: InputTables,
    schema: Schema,
    folder: Path,
    ties: TiePolicy = "arrival",
    slot_counts: SlotCounts | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int16] | None]:
    """Write the matrix of normalised values to disk. This is the third pass over the input.

    Args:
        tables: The input with N records, which `index_records` has numbered.
        schema: The F features.
        folder: An existing folder, in which the files of the matrices are created.
        ties: "arrival" if readings of one record with the same time get different arrival ranks, "hold" if they get the
            same rank.
        slot_counts: The numbers of readings and of repeated ones are added to it.

    Returns:
        (values, ranks), both of shape (N, F). `values` are normalised numbers or label codes, NaN if missing. `ranks`
        are the positions of the readings in their record's order of arrival, −1 if missing. They are None if a row of
        the table is a record.
    """
    if tables.has_reading_rows:
        return _encode_readings_table(tables, schema, folder, ties, slot_counts or SlotCounts())
    values = create_array_file(folder / "values.npy", np.float32, (tables.num_records, len(schema)))
    fill_in_chunks(values, np.nan)
    for readings in tables.iterate_readings():
        code = schema.code_by_name.get(readings.feature_name)
        if code is not None:
            values[readings.rows, code] = encode_readings(schema, code, readings)
    values.flush()
    return values, None


def _encode_readings_table(
    tables: InputTables, schema: Schema, folder: Path, ties: TiePolicy, slot_counts: SlotCounts
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Write the matrices of values and arrival ranks of a table whose rows are not records.

    If a record has several readings of one feature, the first one in the input is used, as in a stream, or they are
    combined as `Window.per_slot` says. The number of readings that are left out is stored in
    `tables.skipped_by_reason`.

    Args:
        tables: The input with N records, which `index_records` has numbered.
        schema: The F features.
        folder: An existing folder, in which the files of the matrices are created.
        ties: "arrival" if readings of one record with the same time get different arrival ranks, "hold" if they get the
            same rank.
        slot_counts: The numbers of readings and of repeated ones are added to it.

    Returns:
        (values, ranks), both of shape (N, F). `values` are normalised numbers or label codes, NaN if missing. `ranks`
        are the positions of the readings in their record's order of arrival, −1 if missing.
    """
    shape = (tables.num_records, len(schema))
    values = create_array_file(folder / "values.npy", np.float32, shape)
    fill_in_chunks(values, np.nan)
    with ExitStack() as stack:

        def create_temporary(name: str, dtype: DTypeLike) -> NDArray[Any]:
            """Create a matrix that is deleted when all readings are written."""
            return stack.enter_context(temporary_array_file(folder / f"{name}.npy", dtype, shape))

        # Matrices from which the arrival ranks are computed: position in the input, and event time.
        event_indexes, times = create_temporary("events", np.int64), create_temporary("times", np.int64)
        fill_in_chunks(event_indexes, -1)  # −1: there is no reading yet
        first_readings = FirstReadings(schema, values, event_indexes, times, tables.has_unpivoted_rows)
        slots_by_sensor: dict[str, FirstReadings | SlotAggregator] = dict.fromkeys(schema.sensor_names, first_readings)
        aggregator: SlotAggregator | None = None
        combined_sensors = [name for name, rule in schema.per_slot_by_sensor.items() if rule != "first"]
        if combined_sensors:
            has_circular_means = any(cycle is not None for cycle in schema.slot_mean_cycles)
            aggregator = SlotAggregator(
                schema,
                values,
                event_indexes,
                times,
                numbers=create_temporary("slot_numbers", np.float64),
                counts=create_temporary("slot_counts", np.int32),
                sines=create_temporary("slot_sines", np.float64) if has_circular_means else None,
            )
            slots_by_sensor |= dict.fromkeys(combined_sensors, aggregator)
        for readings in tables.iterate_event_readings():
            slots = slots_by_sensor.get(readings.feature_name)
            if slots is None:  # it is no feature
                continue
            # The code (matrix column) of a sensor's feature for time slot k is first_code + k * code_step.
            first_code, code_step = schema.slot_layout_by_sensor[readings.feature_name]
            # All features of a sensor are normalised alike, so the first one is used to encode the readings.
            encoded = encode_readings(schema, first_code, readings)
            slots.add(readings, first_code + code_step * readings.time_slots, encoded)
            slot_counts.num_readings += len(encoded)
        slot_counts.num_repeated += first_readings.num_repeated
        if aggregator is not None:
            aggregator.finish(CHUNK_ROWS)
            slot_counts.num_repeated += aggregator.num_repeated
        if first_readings.num_repeated:
            tables.skipped_by_reason["repeated events (record and feature)"] = first_readings.num_repeated
        arrival_ranks = _rank_arrivals(values, event_indexes, times, folder, ties)
    values.flush()
    return values, arrival_ranks


def encode_readings(schema: Schema, feature_code: int, readings: FeatureReadings) -> NDArray[np.float32]:
    """Convert M readings of one feature to normalised numbers or label codes, (M,) float32, NaN if missing.

    The arguments are those of `parse_readings`.
    """
    values = parse_readings(schema, feature_code, readings)
    return schema.normalise(np.full(len(values), feature_code), values).astype(np.float32)


def parse_readings(schema: Schema, feature_code: int, readings: FeatureReadings) -> NDArray[np.float64]:
    """Convert M readings of one feature to numbers in raw units or label codes.

    Args:
        schema: The features.
        feature_code: Index of the feature in the schema.
        readings: The M readings. Numbers may be written as text.

    Returns:
        (M,) numbers (measurements) or label codes, NaN if missing. A label's code is its index among the feature's
        labels. A label that is not among them has the number of labels as its code.
    """
    feature = schema.features[feature_code]
    if feature.kind == "continuous":
        numbers, _ = convert_to_numbers(readings.values, feature.period == SECONDS_PER_DAY)
        numbers[np.isinf(numbers)] = np.nan  # infinite readings are treated as missing
        return numbers
    # `labels` are the distinct labels of these readings, and `label_indexes` the index of each reading's label in them.
    label_indexes, labels = encode_labels(readings.values)
    code_by_label, unseen_code = schema.code_by_label[feature_code], len(feature.labels)
    labels_are_numbers = are_numbers(feature.labels)
    codes: list[float] = []  # the feature's code of each distinct label
    for label in labels:
        code = code_by_label.get(find_spelling(label, code_by_label))
        # An infinite number is treated as missing, and so is a text for "no value" among numbers.
        if code is None and (label in ("inf", "-inf") or (labels_are_numbers and is_no_value(label))):
            codes.append(np.nan)
        else:
            codes.append(unseen_code if code is None else code)
    # A missing value has the index −1, which selects the last element.
    return np.array([*codes, np.nan])[label_indexes]


def _rank_arrivals(
    values: NDArray[np.float32],
    event_indexes: NDArray[np.int64],
    times: NDArray[np.int64],
    folder: Path,
    ties: TiePolicy,
) -> NDArray[np.int16]:
    """Write to disk the arrival rank of each reading: its position in its record's order of arrival.

    Readings are ranked by time, and readings of the same time by their order in the input. Readings without a time come
    last, in the order of the input.

    Args:
        values: (N, F) values of N records and F features, NaN if missing.
        event_indexes: (N, F) position of each reading in the input, −1 if missing.
        times: (N, F) times in microseconds since 1970, `NO_TIME` if unknown.
        folder: The folder in which the file is created.
        ties: With "hold", readings of a record with the same time get the same rank. Readings without a time get
            different ranks in any case.

    Returns:
        (N, F) int16 ranks from 0, −1 if missing.
    """
    ranks = create_array_file(folder / "ranks.npy", np.int16, values.shape)
    # Sort keys that are later than any real time: readings without a time come last, then missing readings.
    missing_key = np.iinfo(np.int64).max
    unknown_time_key = missing_key - 1
    for start in range(0, len(values), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        is_present = np.isfinite(values[chunk])
        time_keys = np.where(times[chunk] == NO_TIME, unknown_time_key, times[chunk])
        sort_keys = np.where(is_present, time_keys, missing_key)
        # In each row: the columns (features) of the record in order of arrival. `lexsort` sorts by its last key first,
        # so the position in the input decides only between equal times.
        columns_by_arrival = np.lexsort((event_indexes[chunk], sort_keys), axis=1)
        # In each row: the ranks of the readings in order of arrival, 0, 1, 2, ... if all ranks are different.
        ranks_by_arrival = np.broadcast_to(np.arange(columns_by_arrival.shape[1]), columns_by_arrival.shape)
        if ties == "hold":
            # The rank increases at each new time, and at each reading without a time. `prepend` makes the first time a
            # new one, so that the first rank is 0. Ranks of missing readings, which are last, are replaced below.
            times_by_arrival = np.take_along_axis(time_keys, columns_by_arrival, 1)
            is_new_time = np.diff(times_by_arrival, axis=1, prepend=times_by_arrival[:, :1] - 1) != 0
            ranks_by_arrival = np.cumsum(is_new_time | (times_by_arrival == unknown_time_key), 1) - 1
        chunk_ranks = np.empty_like(columns_by_arrival)
        np.put_along_axis(chunk_ranks, columns_by_arrival, ranks_by_arrival, 1)  # back to the order of features
        ranks[chunk] = np.where(is_present, chunk_ranks, -1)
    ranks.flush()
    return ranks
