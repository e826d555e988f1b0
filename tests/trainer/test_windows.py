"""Tests of wide tables whose rows are cut into windows, and of several readings of a sensor in one time slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.windows import PerSlot, Window
from trainer import tables
from trainer.data import DataOptions, PreparedTable, Split
from trainer.prepare import prepare_table

SECOND = 1_000_000
MINUTE = Window(60 * SECOND, 6)
START = 1_583_750_040  # a full minute


def prepare_in(folder: Path, source: Path, **options: Any) -> PreparedTable:
    (folder / "work").mkdir(exist_ok=True)
    return prepare_table([source], DataOptions(**{"window": MINUTE} | options), folder / "work")


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=211)
    return path


def draw_history(rng: np.random.Generator, seconds: float, count: int) -> dict[str, list[Any]]:
    """Return a historian's table of two pumps: numbers, labels and gaps, some rows without any reading."""
    times = np.repeat(START + seconds * np.arange(count), 2)
    flow, valve = rng.normal(30.0, 2.0, 2 * count), rng.choice(["open", "closed"], 2 * count)
    is_row_empty = rng.random(2 * count) < 0.02

    def drop(values: list[Any], share: float) -> list[Any]:
        is_missing = is_row_empty | (rng.random(2 * count) < share)
        return [None if missing else value for value, missing in zip(values, is_missing, strict=True)]

    return {
        "time": times.tolist(),
        "flow": drop(flow.tolist(), 0.1),
        "device": ["p1", "p2"] * count,
        "valve": drop(valve.tolist(), 0.2),
        "level": drop(np.round(flow + rng.normal(size=2 * count), 1).tolist(), 0.1),
    }


def melt(history: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the same readings as a long table, row by row."""
    readings: dict[str, list[Any]] = {"device": [], "feature": [], "value": [], "time": []}
    for row, (device, time) in enumerate(zip(history["device"], history["time"], strict=True)):
        for name in ("flow", "valve", "level"):
            if history[name][row] is not None:
                value = history[name][row]
                for column, cell in zip(readings.values(), (device, name, str(value), time), strict=True):
                    column.append(cell)
    return readings


def assert_equal_tables(left: PreparedTable, right: PreparedTable) -> None:
    assert left.schema.fingerprint == right.schema.fingerprint
    assert np.array_equal(left.values, right.values, equal_nan=True)
    assert left.arrival_ranks is not None
    assert right.arrival_ranks is not None
    assert np.array_equal(left.arrival_ranks, right.arrival_ranks)
    assert left.fingerprint == right.fingerprint


@pytest.mark.parametrize("window", [MINUTE, Window(60 * SECOND), Window(60 * SECOND, 3, "mean")])
@pytest.mark.parametrize("batch_cells", [2000, tables.BATCH_CELLS])
def test_wide_table_gives_the_same_matrix_as_the_long_one(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, window: Window, batch_cells: int
) -> None:
    history = draw_history(rng, 7.0, 800)
    long = prepare_in(tmp_path, write(tmp_path / "long.parquet", melt(history)), window=window)
    values = long.values.copy()
    monkeypatch.setattr(tables, "BATCH_CELLS", batch_cells)
    wide = prepare_in(tmp_path, write(tmp_path / "wide.parquet", history), window=window)
    assert np.array_equal(wide.values, values, equal_nan=True)
    assert_equal_tables(wide, prepare_in(tmp_path, tmp_path / "long.parquet", window=window))
    assert set(wide.schema.sensor_names) == {"flow", "valve", "level"}
    reasons = {column.name: column.reason for column in wide.excluded_columns}
    assert reasons == {"time": "the reading's time", "device": "the device"}


def test_options_name_the_columns_of_time_and_device(tmp_path: Path, rng: np.random.Generator) -> None:
    history = draw_history(rng, 10.0, 300)
    expected = prepare_in(tmp_path, write(tmp_path / "a.parquet", history))
    renamed = {{"time": "t", "device": "pump"}.get(name, name): values for name, values in history.items()}
    path = write(tmp_path / "b.parquet", renamed)
    assert prepare_in(tmp_path, path, time_column="t", device_column="pump").fingerprint == expected.fingerprint
    with pytest.raises(ConfigError, match=r"--time-column when: .* has no such column"):
        prepare_in(tmp_path, path, time_column="when")
    with pytest.raises(ConfigError, match=r"contains dates or timestamps; name the column .* in --time-column"):
        prepare_in(tmp_path, path)


def test_device_is_the_name_of_the_file_without_a_column_of_devices(tmp_path: Path, rng: np.random.Generator) -> None:
    history = draw_history(rng, 10.0, 300)
    is_first = np.array(history["device"]) == "p1"
    table = pa.table(history)
    folder = tmp_path / "pumps"
    folder.mkdir()
    for device, mask in (("p1", is_first), ("p2", ~is_first)):
        pq.write_table(table.filter(pa.array(mask)).drop_columns(["device"]), folder / f"{device}.parquet")
    order = np.argsort(~is_first, kind="stable")  # the files are read one after the other
    whole = prepare_in(tmp_path, write(tmp_path / "whole.parquet", table.take(pa.array(order)).to_pydict()))
    values = whole.values.copy()
    assert np.array_equal(prepare_in(tmp_path, folder).values, values, equal_nan=True)
    assert len(values) == 100


def test_abnormal_rows_and_rows_without_device_or_time_are_left_out(tmp_path: Path, rng: np.random.Generator) -> None:
    history = draw_history(rng, 10.0, 300)
    history["fault"] = [int(time >= START + 2400) for time in history["time"]]
    history["device"][5], history["time"][8] = None, None
    history["flow"][5] = history["flow"][8] = 1.0
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", history), label="fault", normal="0")
    assert len(data.values) == 80
    assert data.skipped_by_reason["rows without device or time"] == 2
    assert data.skipped_by_reason["records that are not normal"] == 20


def draw_repeated_readings(rng: np.random.Generator) -> dict[str, list[Any]]:
    """Return readings of two devices at irregular times, several in a time slot, not in the order of time."""
    count = 4000
    times = START + np.sort(rng.uniform(0, 3600, count)).round(1)
    swapped = np.arange(count) + rng.integers(0, 5, count)
    return {
        "device": rng.choice(["p1", "p2"], count).tolist(),
        "time": times[np.argsort(swapped, kind="stable")].tolist(),
        "feature": (features := rng.choice(["flow", "valve", "site"], count).tolist()),
        "value": [str(rng.normal()) if feature == "flow" else str(rng.choice(["a", "b"])) for feature in features],
    }


@pytest.mark.parametrize("rule", ["first", "last", "mean", "min", "max"])
@pytest.mark.parametrize("batch_cells", [500, tables.BATCH_CELLS])
def test_readings_of_a_time_slot_are_combined(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rule: PerSlot, batch_cells: int
) -> None:
    """The expected values are computed reading by reading; `site` reports once, so its first reading counts."""
    monkeypatch.setattr(tables, "BATCH_CELLS", batch_cells)
    readings = draw_repeated_readings(rng)
    readings["value"][17] = readings["value"][18] = None  # a missing reading is not combined
    path = write(tmp_path / "t.parquet", readings)
    window = Window(60 * SECOND, 3, rule)
    data = prepare_in(tmp_path, path, window=window, once=("site",))
    schema = data.schema
    row_by_key: dict[tuple[str, int], int] = {}
    cells: dict[tuple[int, int], list[tuple[int, int, Any]]] = {}
    for event, (device, time, name, value) in enumerate(zip(*readings.values(), strict=True)):
        micros = round(time * SECOND)
        row = row_by_key.setdefault((device, micros // window.width), len(row_by_key))
        first_code, step = schema.slot_layout_by_sensor[name]
        code = first_code + step * window.time_slot_index(micros)
        cells.setdefault((row, code), []).append((micros, event, value))
    expected = np.full(data.values.shape, np.nan, np.float32)
    for (row, code), entries in cells.items():
        sensor = schema.features[code].sensor_name
        sensor_rule = schema.per_slot_by_sensor[sensor]
        assert (sensor == "site") == (sensor_rule == "first" and rule != "first") or rule == "first"
        values = [value for _, _, value in entries]
        if sensor_rule == "first":
            value = values[0]
        else:
            present = [entry for entry in entries if entry[2] is not None]
            values = [value for _, _, value in present]
            value = max(present)[2] if present else None
            if values and sensor_rule == "mean":
                value = sum(float(text) for text in values) / len(values)
            elif values and sensor_rule in ("min", "max"):
                value = (min if sensor_rule == "min" else max)(float(text) for text in values)
        if value is not None and sensor == "flow":
            expected[row, code] = schema.normalise(np.array([code]), np.array([float(value)]))[0]
        elif value is not None:
            expected[row, code] = schema.features[code].labels.index(value)
    assert np.array_equal(data.values, expected, equal_nan=True)
    assert not list((tmp_path / "work").glob("slot_*.npy"))


def test_combined_reading_arrives_with_the_last_reading_of_its_slot(tmp_path: Path) -> None:
    """The flow's second reading comes after the level's only one."""
    rows = [(w * 60 + offset, name) for w in range(40) for offset, name in ((1, "flow"), (2, "level"), (3, "flow"))]
    readings = {
        "device": ["d"] * len(rows),
        "time": [float(START + time) for time, _ in rows],
        "feature": [name for _, name in rows],
        "value": [float(i * 7 % 13) for i in range(len(rows))],
    }
    path = write(tmp_path / "t.parquet", readings)
    ranks_by_rule: dict[PerSlot, list[int]] = {"first": [0, 1], "mean": [1, 0]}
    for rule, ranks in ranks_by_rule.items():
        data = prepare_in(tmp_path, path, window=Window(60 * SECOND, 1, rule))
        assert data.schema.names == ("flow", "level")
        assert data.arrival_ranks is not None
        assert np.unique(data.arrival_ranks, axis=0).tolist() == [ranks]


def test_reading_that_a_stream_refuses_is_not_the_first_of_its_slot(tmp_path: Path) -> None:
    """A null says that the reading will not be observed, so it is the first reading."""
    values: list[list[str | None]] = [
        [text, f"{i * 7 % 13}.5"] for i in range(40) for text in ("Bad" if i % 3 == 0 else "inf",)
    ]
    values[5][0] = None
    readings = {
        "device": ["d"] * 80,
        "time": [float(START + 60 * i + second) for i in range(40) for second in (1, 2)],
        "feature": ["flow"] * 80,
        "value": [value for pair in values for value in pair],
    }
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", readings), window=Window(60 * SECOND))
    assert np.isnan(data.values[:, 0]).nonzero()[0].tolist() == [5]
    assert data.skipped_by_reason == {
        "repeated events (record and feature)": 1,
        "records without a usable reading": 1,
    }


def test_text_for_no_value_is_not_the_first_reading_of_its_slot(tmp_path: Path) -> None:
    """In a wide table it is an empty cell, as in a stream."""
    times = [float(START + 60 * i + second) for i in range(40) for second in (1, 2)]
    flow = [text for i in range(40) for text in ("No Data" if i % 3 == 0 else f"{i * 7 % 13}.5", f"{i % 13}.25")]
    history = {"device": ["d"] * 80, "time": times, "flow": flow}
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", history), window=Window(60 * SECOND))
    assert np.isfinite(data.values).all()
    assert data.skipped_by_reason == {"repeated events (record and feature)": 26}


@pytest.mark.parametrize("layout", ["wide", "long"])
@pytest.mark.parametrize("is_excluded", [True, False])
def test_records_without_readings_of_features_are_in_no_part(tmp_path: Path, layout: str, is_excluded: bool) -> None:
    """A stream never opens them. Their anomaly scores of 0 would lower the threshold of alerts."""
    times, rng = [float(START + 60 * i) for i in range(400)], np.random.default_rng(0)
    counter = np.arange(400) * 17 + rng.integers(0, 9, 400)
    flow = np.where(np.arange(400) % 4 == 0, rng.normal(10, 1, 400), np.nan)
    columns: dict[str, Any] = {
        "device": ["d"] * 400,
        "time": times,
        "counter": counter,
        "flow": pa.array(flow, from_pandas=True),
    }
    if layout == "long":
        readings = [("counter", float(value), time) for value, time in zip(counter, times, strict=True)]
        readings += [("flow", value, time) for value, time in zip(flow, times, strict=True) if not np.isnan(value)]
        features, values, reading_times = zip(*sorted(readings, key=lambda reading: reading[2]), strict=True)
        columns = {"device": ["d"] * 500, "feature": features, "value": values, "time": reading_times}
    options = {"exclude": ("counter",)} if is_excluded else {}
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", columns), window=Window(60 * SECOND), **options)
    assert data.schema.names == ("flow",)
    used = np.concatenate([data.select_rows(part) for part in (Split.TRAIN, Split.VALIDATION, Split.CALIBRATION)])
    assert len(used) == 100
    assert np.isfinite(data.values[used]).all()
    # Windows with readings of excluded features only are no records. The counter is recognised later.
    expected = {} if is_excluded else {"records without a usable reading": 300}
    assert data.skipped_by_reason == expected


@pytest.mark.parametrize("seed", range(4))
def test_validation_records_are_left_if_most_records_are_empty(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    flow = np.where(np.isin(np.arange(1000), rng.choice(1000, 30, replace=False)), rng.normal(size=1000), np.nan)
    columns = {"flow": pa.array(flow, from_pandas=True), "power": pa.array(flow * 2, from_pandas=True)}
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", columns), window=None, seed=seed)
    assert len(data.select_rows(Split.VALIDATION)) >= 4
    assert len(data.select_rows(Split.CALIBRATION)) >= 1
    assert int(data.is_used.sum()) == 30


def test_columns_that_a_long_table_does_not_use_may_differ(tmp_path: Path, rng: np.random.Generator) -> None:
    readings = melt(draw_history(rng, 10.0, 400))
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "a.parquet", readings)
    write(tmp_path / "parts" / "b.parquet", readings | {"quality": ["good"] * len(readings["time"])})
    whole = prepare_in(tmp_path, tmp_path / "parts")
    (tmp_path / "b").mkdir()
    assert_equal_tables(prepare_in(tmp_path / "b", tmp_path / "parts", exclude=("quality",)), whole)


def test_a_device_that_only_one_file_has_is_reported_although_it_is_excluded(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    history = draw_history(rng, 10.0, 400)
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts" / "a.parquet", history)
    write(tmp_path / "parts" / "b.parquet", {name: values for name, values in history.items() if name != "device"})
    with pytest.raises(InputError, match="column 'device' is missing"):
        prepare_in(tmp_path, tmp_path / "parts", exclude=("device",))


def test_missing_readings_are_counted_by_sensor(tmp_path: Path, rng: np.random.Generator) -> None:
    """A reading that never came has no cell, but it is missing in its record."""
    history = draw_history(rng, 10.0, 400)
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", history), window=Window(10 * SECOND))
    used = data.values[data.is_used]
    assert data.missing_by_feature == dict(zip(data.schema.names, np.isnan(used).sum(0).tolist(), strict=True))
    assert data.missing_by_feature["valve"] > 100


def test_rows_with_the_newest_first_are_a_warning(tmp_path: Path, rng: np.random.Generator) -> None:
    history = draw_history(rng, 10.0, 400)
    for columns, is_warned in ((history, False), ({name: values[::-1] for name, values in history.items()}, True)):
        data = prepare_in(tmp_path, write(tmp_path / "t.parquet", columns))
        assert ("newest_first" in dict(data.warnings)) == is_warned


def test_columns_of_labels_may_be_the_device_of_repeated_readings(tmp_path: Path, rng: np.random.Generator) -> None:
    history = draw_history(rng, 10.0, 400)
    history["pump"] = history.pop("device")
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", history))
    assert "such as valve, pump names" in dict(data.warnings)["repeated_readings"]
    assert "--device-column" in dict(data.warnings)["repeated_readings"]


def test_the_device_of_windows_is_no_feature(tmp_path: Path, rng: np.random.Generator) -> None:
    source = write(tmp_path / "t.parquet", draw_history(rng, 10.0, 400))
    with pytest.raises(
        ConfigError, match=r"--context device: the column is the device of the windows.*--group-by device"
    ):
        prepare_in(tmp_path, source, context=("device",))


def test_a_wrong_name_of_an_excluded_feature_is_reported(tmp_path: Path, rng: np.random.Generator) -> None:
    source = write(tmp_path / "t.parquet", melt(draw_history(rng, 10.0, 400)))
    with pytest.raises(ConfigError, match="--exclude flw: no feature is called so; give one of these names: flow, lev"):
        prepare_in(tmp_path, source, exclude=("flw",))


def test_timestamps_and_not_dates_are_the_times_of_the_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    """As in a stream."""
    history = draw_history(rng, 10.0, 400)
    moments = pa.array(np.array(history.pop("time")) * SECOND, pa.float64()).cast(pa.int64())
    stamps = moments.cast(pa.timestamp("us", "UTC"))
    source = write(tmp_path / "t.parquet", {"day": stamps.cast(pa.date32()), "stamp": stamps} | history)
    data = prepare_in(tmp_path, source)
    assert data.time_column == "stamp"
    dates_only = write(tmp_path / "d.parquet", {"day": stamps.cast(pa.date32()), **history})
    with pytest.raises(InputError, match="too few"):  # the windows of days, of which there is one
        prepare_in(tmp_path, dates_only, window=Window(86_400 * SECOND))


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_rows_whose_time_cannot_be_read_are_left_out(tmp_path: Path, rng: np.random.Generator, layout: str) -> None:
    history = draw_history(rng, 10.0, 400)
    if layout == "long":
        history = melt(history)
    stamps = pa.array((np.array(history["time"]) * SECOND).astype(np.int64)).cast(pa.timestamp("us", "UTC"))
    texts = [f"{stamp:%Y-%m-%dT%H:%M:%SZ}" for stamp in stamps.to_pylist()]
    whole = {name: values[:100] + values[101:] for name, values in history.items()}
    expected = prepare_in(tmp_path, write(tmp_path / "whole.parquet", whole | {"time": texts[:100] + texts[101:]}))
    history["time"] = [*texts[:100], "31/12/2025", *texts[101:]]
    source = write(tmp_path / "t.parquet", history)
    (tmp_path / "b").mkdir()
    data = prepare_in(tmp_path / "b", source)
    assert_equal_tables(data, expected)
    assert data.skipped_by_reason == expected.skipped_by_reason | {"rows whose time cannot be read": 1}
    assert ("unreadable_times", 1) in [(code, text.count("row 100: the time")) for code, text in data.warnings]
    with pytest.raises(InputError, match=r"row 0: .* no time of the table can be read: .* --timezone"):
        prepare_in(tmp_path, write(tmp_path / "t.parquet", history | {"time": ["31/12/2025"] * len(texts)}))


def write_fast_sensors(folder: Path, rng: np.random.Generator) -> Path:
    """Write a table of two sensors that report each second for 24 minutes."""
    times = (START + np.arange(1440.0)).tolist()
    return write(folder / "t.parquet", {"time": times, "a": rng.normal(size=1440), "b": rng.normal(size=1440)})


def test_warning_about_repeated_readings_suggests_time_slots(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_fast_sensors(tmp_path, rng)
    data = prepare_in(tmp_path, path, window=Window(60 * SECOND, 30), time_column="time")
    assert data.warnings == (
        (
            "repeated_readings",
            "half of the readings (1,440 of 2,880) share a time slot of 2s with an earlier reading of their sensor and "
            "are left out: train with --slots 60, or --per-slot last|mean|min|max",
        ),
    )
    data = prepare_in(tmp_path, path, window=Window(60 * SECOND), time_column="time")
    assert "98% of the readings" in data.warnings[0][1]
    assert "share a window of 1m with an earlier" in data.warnings[0][1]
    for window in (Window(60 * SECOND, 60), Window(60 * SECOND, 30, "mean")):
        data = prepare_in(tmp_path, path, window=window, time_column="time")
        assert not data.warnings
        assert not data.skipped_by_reason


def test_time_slots_are_not_suggested_if_there_would_be_too_many_features(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    times = (START + np.arange(2880.0)).tolist()
    columns = {f"x{i}": rng.normal(size=2880) for i in range(100)}
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", {"time": times, **columns}), time_column="time")
    assert "are left out: train with --per-slot last|mean|min|max" in data.warnings[0][1]


def test_adaptation_requires_the_rule_of_the_old_model(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_fast_sensors(tmp_path, rng)
    mean = Window(60 * SECOND, 30, "mean")
    old = prepare_in(tmp_path, path, window=mean, time_column="time").schema
    assert prepare_in(tmp_path, path, window=None, base=old, time_column="time").schema.window == mean
    with pytest.raises(ConfigError, match="windows of 1m in 30 slots with --per-slot mean"):
        prepare_in(tmp_path, path, window=Window(60 * SECOND, 30), base=old, time_column="time")
