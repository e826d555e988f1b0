"""Tests of table preparation: both layouts give the same matrix, and kinds, splits and errors are as documented."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.windows import Window
from tests.trainer.tables import write
from trainer.data import DataOptions, PreparedTable, Split, assign_split
from trainer.feature_kinds import find_quantum
from trainer.prepare import prepare_table
from trainer.tables import parse_training_times

N = 400


def prepare_in(folder: Path, *tables: Path, **options: Any) -> PreparedTable:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return prepare_table(tables, DataOptions(**options), work)


def create_table_of_all_types(rng: np.random.Generator, n: int = N) -> dict[str, Any]:
    number = rng.normal(5.0, 2.0, n)
    number[3], number[7], number[11] = np.nan, np.inf, -np.inf
    start = dt.datetime(2026, 1, 1)
    return {
        "when": [start + dt.timedelta(seconds=i) for i in range(n)],
        "later": [start + dt.timedelta(seconds=i + 1) for i in range(n)],
        "record": [f"r{i}" for i in range(n)],
        "number": pa.array(number, mask=np.arange(n) % 50 == 0),
        "grid": np.round(rng.normal(20.0, 1.0, n) / 0.05) * 0.05,
        "coarse": rng.choice([-0.601143, -0.273216, 0.054711, 0.382638, 0.710565, 1.03849], n),
        "whole": rng.integers(0, 300, n),
        "code": pa.array(rng.integers(1, 4, n), pa.int8()),
        "flag": pa.array(rng.random(n) < 0.3),
        "text": pa.array(rng.choice(["on", "off", "idle"], n)),
        "category": pa.array(rng.choice(["x", "y"], n)).dictionary_encode(),
        "constant": np.full(n, 2.5),
        "empty": pa.nulls(n, pa.float64()),
        "nothing": pa.nulls(n),
        "serial": [f"SN{i:06d}" for i in range(n)],
        "list": [[1, 2]] * n,
        "decimal": pa.array(np.round(rng.normal(0, 0.3, n), 2).tolist()).cast(pa.decimal128(10, 2), safe=False),
        "label": rng.integers(0, 2, n),
    }


def test_kinds_of_a_table_with_every_type_of_column(tmp_path: Path, rng: np.random.Generator) -> None:
    table = write(tmp_path / "t.parquet", create_table_of_all_types(rng))
    data = prepare_in(tmp_path, table, label="label", normal="1", context=("text",))
    kinds = {f.name: f.kind for f in data.schema.features}
    assert kinds == {
        "number": "continuous",
        "grid": "continuous",
        "coarse": "continuous",
        "whole": "continuous",
        "code": "discrete",
        "flag": "discrete",
        "text": "discrete",
        "category": "discrete",
        "constant": "discrete",
        "decimal": "continuous",
    }
    feature = {f.name: f for f in data.schema.features}
    assert feature["number"].quantum is None
    assert feature["grid"].quantum == pytest.approx(0.05)
    assert feature["coarse"].quantum == pytest.approx(0.327926, rel=1e-4)
    assert feature["whole"].quantum == 1.0
    assert feature["decimal"].quantum == pytest.approx(0.01)
    assert feature["code"].labels == ("1", "2", "3")
    assert feature["flag"].labels == ("false", "true")
    assert feature["constant"].labels == ("2.5",)
    assert feature["text"].context
    assert all(f.reason for f in data.schema.features)
    reasons = {e.name: e.reason for e in data.excluded_columns}
    assert set(reasons) == {"when", "later", "record", "empty", "nothing", "serial", "list", "label"}
    assert reasons["when"] == "the record's time"
    assert data.time_column == "when"
    assert data.skipped_by_reason == {"rows that are not normal": N - len(data.values)}


def test_missing_and_infinite_readings_are_not_observed(tmp_path: Path, rng: np.random.Generator) -> None:
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", create_table_of_all_types(rng)))
    code = data.schema.code_by_name["number"]
    absent = np.flatnonzero(np.isnan(data.values[:, code]))
    assert sorted(absent) == sorted({3, 7, 11, *range(0, N, 50)})
    assert data.infinite_by_feature == {"number": 2}
    assert data.missing_by_feature == {"number": 1 + N // 50}
    others = np.delete(np.asarray(data.values), code, 1)
    assert np.isfinite(others).all()


def test_values_are_normalised_by_training_rows_only(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(5.0, 2.0, N)
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", {"x": x, "c": rng.choice(["a", "b"], N)}))
    train = data.select_rows(Split.TRAIN)
    feature = data.schema.features[0]
    ordered = np.sort(x[train])
    clipped = np.clip(ordered, ordered[1], ordered[-2])
    assert feature.location == pytest.approx(clipped.mean())
    assert feature.scale == pytest.approx(clipped.std())
    raw = data.schema.denormalise(np.zeros(N, int), data.values[:, 0].astype(float))
    np.testing.assert_allclose(raw, x, rtol=1e-5)
    assert (feature.low, feature.high) == (x[train].min(), x[train].max())


def test_extreme_outliers_do_not_compress_other_values(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(0.0, 1.0, 5000)
    x[[5, 900]] = 1e12, -1e15
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", {"x": x, "y": x}))
    assert data.schema.features[0].scale == pytest.approx(1.0, rel=0.05)
    assert np.isfinite(data.values).all()


def test_label_unseen_in_training_rows_gets_the_code_past_the_labels(tmp_path: Path, rng: np.random.Generator) -> None:
    text = rng.choice(["a", "b"], N).astype(object)
    held = np.flatnonzero(assign_split(N, 0.2, 0) == Split.CALIBRATION)[0]
    text[held] = "new"
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", {"x": rng.normal(size=N), "t": pa.array(text.tolist())}))
    assert data.schema.features[1].labels == ("a", "b")
    assert data.values[held, 1] == 2.0
    assert data.schema.features[1].unseen == pytest.approx(1 / (len(data.select_rows(Split.TRAIN)) + 2))


def long_of(columns: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return the readings of a wide table as a long one: in random order within nearby records, with values as text."""
    events = []
    for i in range(N):
        names = list(columns)
        for place, j in enumerate(rng.permutation(len(names))):
            value = columns[names[j]][i]
            value = value.as_py() if isinstance(value, pa.Scalar) else value
            if value is not None and value == value:
                text = str(value.item() if isinstance(value, np.generic) else value)
                events.append((f"r{i}", names[j], text, 1_700_000_000.0 + i + 0.001 * place))
    order = np.argsort([e[3] + 3.0 * rng.random() for e in events], kind="stable")
    record, feature, value, time = zip(*[events[k] for k in order], strict=True)
    return {"record": record, "feature": feature, "value": value, "time": time}


def test_wide_and_long_give_the_same_matrix(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = {
        "x": pa.array(rng.normal(size=N), mask=rng.random(N) < 0.1),
        "q": np.round(rng.normal(size=N), 1),
        "i": rng.integers(0, 3, N),
        "t": pa.array(rng.choice(["a", "b"], N)),
    }
    events = long_of(columns, rng)
    rows_in_order = list(dict.fromkeys(events["record"]))  # rows are numbered by first appearance
    take = [int(r[1:]) for r in rows_in_order]
    wide_table = pa.table(columns).take(take)
    wide = prepare_in(tmp_path, write(tmp_path / "w.parquet", dict(zip(columns, wide_table.columns, strict=True))))
    wide_values = np.array(wide.values)
    long = prepare_in(tmp_path, write(tmp_path / "l.parquet", events))
    assert long.layout == "long"
    by_name = [long.schema.code_by_name[n] for n in wide.schema.names]
    np.testing.assert_array_equal(long.values[:, by_name], wide_values)
    assert {f.name: f for f in wide.schema.features} == {f.name: f for f in long.schema.features}
    np.testing.assert_array_equal(long.split, wide.split)


def test_arrival_ranks_follow_time_then_input_order(tmp_path: Path, rng: np.random.Generator) -> None:
    n = 30
    record = np.repeat([f"r{i}" for i in range(n)], 3)
    feature = np.tile(["a", "b", "c"], n)
    time = np.tile([5.0, 1.0, 5.0], n) + np.repeat(np.arange(n), 3)
    table = {"record": record, "feature": feature, "value": rng.normal(size=3 * n), "time": time}
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", table))
    assert data.arrival_ranks is not None
    assert (data.arrival_ranks == [1, 0, 2]).all()
    data = prepare_in(tmp_path, write(tmp_path / "u.parquet", {k: v for k, v in table.items() if k != "time"}))
    assert data.arrival_ranks is not None
    assert (data.arrival_ranks == [0, 1, 2]).all()


def test_first_of_repeated_events_is_used(tmp_path: Path, rng: np.random.Generator) -> None:
    n = 40
    record = [f"r{i}" for i in range(n)] * 2 + ["r0", None]
    table = {
        "record": record,
        "feature": ["a"] * n + ["b"] * n + ["a", "a"],
        "value": np.append(rng.normal(size=2 * n), [99.0, 1.0]),
    }
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", table))
    assert data.skipped_by_reason == {"repeated events (record and feature)": 1, "events without record or feature": 1}
    first = data.schema.denormalise(np.zeros(1, int), data.values[:1, 0].astype(float))[0]
    assert first == pytest.approx(table["value"][0], abs=1e-5)


def test_long_records_are_normal_when_all_their_events_are(tmp_path: Path, rng: np.random.Generator) -> None:
    n = 50
    table = {
        "record": [f"r{i}" for i in range(n)] * 2,
        "feature": ["a"] * n + ["b"] * n,
        "value": rng.normal(size=2 * n),
        "fault": [False] * (2 * n - 5) + [True] * 5,
    }
    data = prepare_in(tmp_path, write(tmp_path / "t.parquet", table), label="fault", normal="false")
    assert len(data.values) == n - 5
    assert data.schema.names == ("a", "b")
    assert data.skipped_by_reason == {"records that are not normal": 5}


def test_several_files_and_folders_are_read_as_one_table(tmp_path: Path, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=N), rng.normal(size=N)
    whole = np.array(prepare_in(tmp_path, write(tmp_path / "t.parquet", {"x": x, "y": y})).values)
    folder = tmp_path / "parts" / "deeper"
    folder.mkdir(parents=True)
    write(folder.parent / "0.parquet", {"x": x[:100], "y": y[:100]})
    write(folder / "1.parquet", {"x": x[100:], "y": y[100:]})
    write(folder / "_hidden.parquet", {"z": x})
    np.testing.assert_array_equal(prepare_in(tmp_path, folder.parent).values, whole)


@pytest.mark.parametrize(
    ("other", "column"),
    [
        ({"x": ["a", "b"], "y": [1.0, 2.0]}, "'x'"),
        ({"x": [1.0, 2.0]}, "'y'"),
        ({"x": [1.0], "y": [1.0], "z": [1.0]}, "'z'"),
    ],
)
def test_files_with_different_columns_are_rejected_by_name(tmp_path: Path, other: dict[str, Any], column: str) -> None:
    first = write(tmp_path / "a.parquet", {"x": [1.0, 2.0], "y": [1, 2]})
    second = write(tmp_path / "b.parquet", other)
    with pytest.raises(InputError, match=column) as caught:
        prepare_in(tmp_path, first, second)
    assert str(second) in str(caught.value)


@pytest.mark.parametrize("normal", ["0", "0.0"])
def test_label_filter_compares_as_text(tmp_path: Path, rng: np.random.Generator, normal: str) -> None:
    label = rng.integers(0, 2, N)
    for kind in (pa.int8(), pa.float32(), pa.bool_()):
        if kind == pa.bool_():
            normal = "false"
        table = write(tmp_path / "t.parquet", {"x": np.arange(N) + 100.5, "y": pa.array(label).cast(kind)})
        data = prepare_in(tmp_path, table, label="y", normal=normal)
        raw = data.schema.denormalise(np.zeros(len(data.values), int), data.values[:, 0].astype(float))
        np.testing.assert_allclose(raw, np.flatnonzero(label == 0) + 100.5, rtol=1e-5)


def test_label_filter_ignores_white_space(tmp_path: Path, rng: np.random.Generator) -> None:
    label = rng.integers(0, 3, N)
    names = np.array(["none", " none", "leak "])[label]
    table = write(tmp_path / "t.parquet", {"x": np.arange(N) + 100.5, "y": pa.array(names.tolist())})
    data = prepare_in(tmp_path, table, label="y", normal="none ")
    raw = data.schema.denormalise(np.zeros(len(data.values), int), data.values[:, 0].astype(float))
    np.testing.assert_allclose(raw, np.flatnonzero(label < 2) + 100.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"label": "y", "normal": "7"}, InputError, r"y = 7; the column contains"),
        ({"label": "nope", "normal": "1"}, ConfigError, "no such column"),
        ({"label": "y"}, ConfigError, "--normal is missing; set it to the value of the column 'y'"),
        ({"normal": "0"}, ConfigError, "--label is missing; set it to the name of the column that contains '0'"),
        ({"exclude": ("nope",)}, ConfigError, "--exclude nope"),
        ({"exclude": ("x", "y")}, InputError, "can be a feature"),
        ({"context": ("x", "y")}, InputError, "--context"),
        ({"continuous": ("t",), "exclude": ()}, ConfigError, "--continuous t"),
        ({"discrete": ("x",), "continuous": ("x",)}, ConfigError, "both name x"),
        ({"layout": "long"}, InputError, "'record' is missing"),
        ({"calibration_share": 0.95}, ConfigError, "calibration-share"),
    ],
)
def test_options_that_do_not_fit_the_table_are_rejected(
    tmp_path: Path, rng: np.random.Generator, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    columns: dict[str, Any] = {"x": rng.normal(size=60), "y": rng.integers(0, 2, 60)}
    if "t" in options.get("continuous", ()):
        columns["t"] = ["a", "b"] * 30
    with pytest.raises(error, match=text):
        prepare_in(tmp_path, write(tmp_path / "t.parquet", columns), **options)


def test_unreadable_files_are_rejected_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 this is not one")
    (tmp_path / "none").mkdir()
    for path in (broken, tmp_path / "missing.parquet", tmp_path / "none"):
        with pytest.raises(InputError, match=path.name):
            prepare_in(tmp_path, path)
    with pytest.raises(InputError, match="too few"):
        prepare_in(tmp_path, write(tmp_path / "few.parquet", {"x": [1.0, 2.0]}))


def test_truncated_file_is_rejected_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    table = write(tmp_path / "t.parquet", {"x": rng.normal(size=N)})
    data = bytearray(table.read_bytes())
    data[4:300] = b"\xff" * 296
    table.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"t\.parquet"):
        prepare_in(tmp_path, table)


@pytest.mark.parametrize("records", [30, 101, 5000])
def test_split_is_disjoint_complete_and_stable(records: int) -> None:
    split = assign_split(records, 0.2, 7)
    counts = np.bincount(split, minlength=3)
    assert counts.sum() == records
    assert counts[Split.CALIBRATION] == round(0.2 * records)
    assert counts[Split.VALIDATION] >= 4
    np.testing.assert_array_equal(split, assign_split(records, 0.2, 7))
    assert (split != assign_split(records, 0.2, 8)).any()


def test_default_split_calibrates_with_all_of_alpha() -> None:
    assert np.bincount(assign_split(635, None, 7), minlength=3)[Split.CALIBRATION] == 99


def test_fingerprint_changes_with_the_data(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(size=N)
    table = write(tmp_path / "t.parquet", {"x": x})
    first = prepare_in(tmp_path, table).fingerprint
    assert prepare_in(tmp_path, table).fingerprint == first
    x[17] += 1e-3
    assert prepare_in(tmp_path, write(tmp_path / "t.parquet", {"x": x})).fingerprint != first


@pytest.mark.parametrize(
    ("step", "single"),
    [(1.0, False), (0.001, False), (1 / 256, False), (1e-6, False), (0.327926, False), (0.05, True), (0.01, True)],
)
def test_quantum_of_gridded_readings(rng: np.random.Generator, step: float, single: bool) -> None:
    x = 20.0 + step * np.round(rng.normal(0, 500, 5000))
    x = x.astype(np.float32).astype(float) if single else x
    assert find_quantum(np.sort(x)) == pytest.approx(step, rel=1e-3)


def test_no_quantum_if_readings_lie_on_no_grid(rng: np.random.Generator) -> None:
    assert find_quantum(np.sort(rng.normal(size=5000))) is None
    stuck = rng.random(5000)
    stuck[:2000] = 0.0  # repeats, but between its saturations it is continuous
    assert find_quantum(np.sort(stuck)) is None
    assert find_quantum(np.zeros(50)) is None


def test_quantum_of_sparse_integers(rng: np.random.Generator) -> None:
    assert find_quantum(np.sort(rng.choice([0.0, 2.0, 5.0, 9.0], 500)), is_integer=True) == 1.0
    assert find_quantum(np.sort(4.0 * rng.integers(0, 50, 500)), is_integer=True) == 4.0


def test_times_are_parsed_in_every_supported_format() -> None:
    expected = [1_583_750_073_000_000, int(np.iinfo(np.int64).min)]
    for values in (
        pa.array([1_583_750_073.0, None]),
        pa.array(["2020-03-09T10:34:33Z", None]),
        pa.array([dt.datetime(2020, 3, 9, 10, 34, 33), None], pa.timestamp("ms")),
        pa.array([dt.datetime(2020, 3, 9, 10, 34, 33), None], pa.timestamp("ns", "UTC")),
    ):
        times, error_by_row = parse_training_times(values, "t.parquet: column 'time'")
        assert (times.tolist(), error_by_row) == (expected, {})


LONG = {"record": ["r1"] * 3, "feature": ["a", "b", "c"], "value": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (["2020-03-09T10:34:33", "2020-03-09T10:34:34", None], "row 0: .*2020-03-09T10:34:33.* with a zone"),
        (["yesterday", None, "2020-03-09 10:34"], "row 0: .*yesterday.* such as 2020-03-09T10:34:33Z"),
        ([True, False, True], "of type bool, which cannot be converted to times; convert it"),
        ([b"10:34", b"10:35", b"10:36"], "of type binary, which cannot be converted to times; convert it"),
    ],
)
@pytest.mark.parametrize("window", [None, Window(60_000_000)])
def test_column_without_a_valid_time_is_reported_with_file_column_and_row(
    tmp_path: Path, times: list[Any], message: str, window: Window | None
) -> None:
    columns = {name: values * 20 for name, values in LONG.items()}
    columns["record" if window is None else "device"] = [f"r{i // 3}" for i in range(60)]
    if window is not None:
        del columns["record"]
    table = write(tmp_path / "log.parquet", columns | {"time": times * 20})
    with pytest.raises(InputError, match=r"log\.parquet: column 'time'.* " + message):
        prepare_in(tmp_path, table, window=window)


def test_row_of_a_malformed_time_is_counted_from_the_start_of_its_file(tmp_path: Path) -> None:
    good = ["2020-03-09T10:34:33Z"] * 70_000
    for name, times in (("1.parquet", good), ("2.parquet", [*good[:-1], "2020-03-09 10:34"])):
        columns = {"record": [f"r{i % 30}" for i in range(70_000)], "feature": ["a"] * 70_000}
        write(tmp_path / name, columns | {"value": [1.0] * 70_000, "time": times})
    data = prepare_in(tmp_path, tmp_path / "1.parquet", tmp_path / "2.parquet")
    ((code, warning),) = data.warnings
    assert code == "unreadable_times"
    assert "1 row is left out, because its time cannot be read, the first: " in warning
    assert "2.parquet: column 'time', row 69999: " in warning


def test_leap_second_in_a_text_is_the_second_after_it_as_in_a_stream() -> None:
    values = pa.array(["2016-12-31T23:59:60Z", "2017-01-01T00:00:00+00:00"])
    first, second = parse_training_times(values, "t.parquet: column 'time'")[0].tolist()
    assert first == second


def test_parts_of_the_split_have_different_codes() -> None:
    assert len({int(part) for part in Split}) == len(Split) == 6


def test_long_boolean_feature_counts_its_missing_values(tmp_path: Path) -> None:
    columns = {"record": [f"r{i // 2}" for i in range(60)], "feature": ["open", "closed"] * 30}
    values = [True, False, None, True] * 15
    data = prepare_in(tmp_path, write(tmp_path / "log.parquet", columns | {"value": values}), layout="long")
    assert data.missing_by_feature == {"open": 15}


def test_record_whose_readings_name_no_feature_is_not_counted(tmp_path: Path) -> None:
    columns = {"record": ["empty", *(f"r{i}" for i in range(30))], "feature": [None] + ["a"] * 30}
    data = prepare_in(tmp_path, write(tmp_path / "log.parquet", columns | {"value": [i % 7 / 2 for i in range(31)]}))
    assert len(data.values) == 30
    assert data.skipped_by_reason == {"events without record or feature": 1}


@pytest.mark.parametrize("times", [pa.array([2**60] * 90, pa.timestamp("ms")), pa.array([1e15] * 90)])
def test_time_outside_the_years_1_to_9999_is_rejected(tmp_path: Path, times: pa.Array) -> None:
    """In microseconds, such a time could overflow to another one."""
    columns = {name: values * 30 for name, values in LONG.items()}
    columns["record"] = [f"r{i // 3}" for i in range(90)]
    with pytest.raises(InputError, match=r"column 'time', row 0: .* outside the years 1 to 9999"):
        prepare_in(tmp_path, write(tmp_path / "log.parquet", columns | {"time": times}))


def test_too_few_records_are_reported_for_all_files_together(tmp_path: Path) -> None:
    tables = [write(tmp_path / f"{i}.parquet", {"x": [1.0 * i, 2.0, 3.0]}) for i in range(3)]
    with pytest.raises(InputError, match=r"0\.parquet and 2 other files: 9 records to train on are too few"):
        prepare_in(tmp_path, *tables)
