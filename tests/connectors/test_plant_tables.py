"""Tests of tables as plants export them: patterns, columns of paths, numbers and times as text, and wide windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.files import FileSource, ReadOptions, SendOptions, iterate_events, open_source
from deformer_stream.codec import Codec, TimeFormat, WindowAssigner, get_position
from deformer_stream.engine.events import EventBatch, Rejection
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.windows import Window
from deformer_stream.tables.csv_dialect import CsvOptions
from deformer_stream.tables.table import TableOptions
from tests.connectors.data_files import SCHEMA, read_events, write_parquet

SECOND = 1_000_000
WINDOWS = WindowAssigner(10 * SECOND)
BERLIN = TableOptions(time_format=TimeFormat.from_names("s", "Europe/Berlin"))
WIDE = (
    "Zeit;device;b;a;state;note\n"
    "09.03.2020 11:34:31;p;1,5;;on;x\n"
    "09.03.2020 11:34:31;q;2,5;Bad;off;x\n"
    "09.03.2020 11:34:39,5;p;No Data;3;;x\n"
    "09.03.2020 11:34:40;p;4;;;x\n"
)
AT_30, AT_40 = "2020-03-09T10:34:30Z", "2020-03-09T10:34:40Z"
WIDE_EVENTS = [
    (f"p@{AT_30}", "b", 1.5),
    (f"p@{AT_30}", "state", "on"),
    (f"q@{AT_30}", "b", 2.5),
    (f"q@{AT_30}", "state", "off"),
    (f"p@{AT_30}", "a", 3.0),
    (f"p@{AT_40}", "b", 4.0),
]


def test_wide_rows_of_devices_are_assigned_to_windows(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text(WIDE)
    path = tmp_path / "wide.csv"
    for layout in (None, "wide"):
        options: dict[str, Any] = {"window_assigner": WINDOWS, "table_options": BERLIN, "layout": layout}
        events, rejections, places = read_events([path], **options)
        assert events == WIDE_EVENTS
        assert [rejection.reason.value for rejection in rejections] == ["wrong_type"]
        assert "'Bad'" in rejections[0].detail
        assert places == [("wide.csv", 0, row) for row in (0, 0, 1, 1, 2, 3)]  # the rows of the file
    source = open_source([path], [SCHEMA], ReadOptions(**options))
    assert isinstance(source, FileSource)
    assert (source.ignored_columns, source.num_rows) == (("note",), None)
    with pytest.raises(ConfigError, match="arrival"):
        open_source([path], [SCHEMA], ReadOptions(order="random", **options))
    with pytest.raises(
        InputError, match=r"wide\.csv: the times in column 'Zeit', such as 09.03.2020 11:34:31.*--timezone"
    ):
        open_source([path], [SCHEMA], ReadOptions(window_assigner=WINDOWS))
    with pytest.raises(InputError, match="no device column 'pump'"):
        open_source([path], [SCHEMA], ReadOptions(device_column="pump", **options))


def test_a_wide_table_gives_the_events_of_the_same_table_written_long(tmp_path: Path) -> None:
    times = pa.array([31, 31, 40], pa.timestamp("s", "UTC"))
    wide = write_parquet(
        tmp_path / "w.parquet",
        time=times,
        device=["p", "q", "p"],
        a=[1.0, None, 3.0],
        b=[4.0, 5.0, None],
        state=["on"] * 3,
    )
    rows = [
        (31, "p", "a", "1.0"),
        (31, "p", "b", "4.0"),
        (31, "p", "state", "on"),
        (31, "q", "b", "5.0"),
        (31, "q", "state", "on"),
        (40, "p", "a", "3.0"),
        (40, "p", "state", "on"),
    ]
    columns = dict(zip(("time", "device", "feature", "value"), map(list, zip(*rows, strict=True)), strict=True))
    long = write_parquet(tmp_path / "l.parquet", **columns)

    def decode(path: Path) -> tuple[EventBatch, list[Rejection]]:
        """Return the events and the rejections of a file."""
        data = open_source([path], [SCHEMA], ReadOptions(window_assigner=WINDOWS)).poll(0).data
        assert data is not None
        return Codec(SCHEMA, window_assigner=WINDOWS).decode(data)

    (from_wide, bad_wide), (from_long, bad_long) = decode(wide), decode(long)
    assert bad_wide == bad_long == []
    for name in ("record_ids", "features", "values", "times"):
        assert list(getattr(from_wide, name)) == list(getattr(from_long, name)), name
    assert from_wide.windows is not None
    assert from_long.windows is not None
    assert list(from_wide.windows.devices) == list(from_long.windows.devices)


def test_the_device_of_a_wide_table_without_devices_is_its_file(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "pump-1.parquet", time=[31.0], a=[1.0])
    (tmp_path / "pump-2.csv").write_text("time,a\n31,2\n")
    events, _, _ = read_events([one, tmp_path / "pump-2.csv"], window_assigner=WINDOWS)
    start = "1970-01-01T00:00:30Z"
    assert events == [(f"pump-1@{start}", "a", 1.0), (f"pump-2@{start}", "a", 2.0)]
    other = write_parquet(tmp_path / "other.parquet", at=pa.array([31], pa.timestamp("s")), a=[1.0], pump=["p9"])
    events, _, _ = read_events([other], window_assigner=WINDOWS, device_column="pump", time_column="at")
    assert events == [(f"p9@{start}", "a", 1.0)]


def test_sensors_with_time_slots_are_found_by_their_name(tmp_path: Path) -> None:
    slots = tuple(Feature(name, "continuous", coordinates=(i,), sensor="flow") for i, name in enumerate(("f0", "f1")))
    mode = Feature("mode", "discrete", labels=("on",), coordinates=(0.0,))
    schema = Schema((*slots, mode), Window(10 * SECOND, slots=2))
    path = write_parquet(tmp_path / "p.parquet", time=[31.0, 36.0], flow=[1.0, 2.0], mode=["on", None])
    data = open_source([path], [schema], ReadOptions(window_assigner=WINDOWS)).poll(0).data
    assert data is not None
    batch, rejections = Codec(schema, window_assigner=WINDOWS).decode(data)
    assert rejections == []
    assert [schema.names[code] for code in batch.features] == ["f0", "mode", "f1"]
    assert [get_position(data, int(i)) for i in batch.message_indices][-1] == (str(path), 0, 1)


def test_columns_of_paths_and_patterns_are_read(tmp_path: Path) -> None:
    for state in ("on", "off"):
        write_parquet(tmp_path / "log" / f"state={state}" / "x.parquet", a=["1,5"], b=["2"])
    events, rejections, _ = read_events([tmp_path / "log" / "*" / "*.parquet"])
    assert rejections == []
    assert events == [
        ("state=off/x:0", "a", 1.5),
        ("state=off/x:0", "b", 2.0),
        ("state=off/x:0", "state", "off"),
        ("state=on/x:0", "a", 1.5),
        ("state=on/x:0", "b", 2.0),
        ("state=on/x:0", "state", "on"),
    ]


def test_a_bad_cell_of_a_wide_table_rejects_one_reading(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,high\n4,\n5,No Data\n")
    events, rejections, _ = read_events([tmp_path / "t.csv"])
    assert [value for _, name, value in events if name == "a"] == [1.0, 3.0, 4.0, 5.0]
    assert [value for _, name, value in events if name == "b"] == [2.0, None, None]
    assert [(r.message_index, r.reason.value) for r in rejections] == [(1, "wrong_type")]


@pytest.mark.parametrize("window_assigner", [None, WINDOWS])
def test_labels_with_a_decimal_comma_are_those_of_training(
    tmp_path: Path, window_assigner: WindowAssigner | None
) -> None:
    schema = Schema((Feature("level", "discrete", labels=("0.5", "1.5")), Feature("a", "continuous")))
    (tmp_path / "t.csv").write_text("time;level;a\n31;1,5;2,25\n45;0,5;3,75\n60;2,5;4,25\n")
    data = open_source([tmp_path / "t.csv"], [schema], ReadOptions(window_assigner=window_assigner)).poll(0).data
    assert data is not None
    batch, rejections = Codec(schema, window_assigner=window_assigner).decode(data)
    assert rejections == []
    assert batch.values[batch.features == 0].tolist() == [1.0, 0.0, 2.0]
    assert list(batch.unseen_labels.values()) == ["2.5"]


def test_times_of_day_are_numbers_if_training_made_them_a_measurement(tmp_path: Path) -> None:
    schema = Schema((Feature("tod", "continuous"), Feature("a", "continuous")))
    (tmp_path / "t.csv").write_text("tod,a\n13:45,1\n00:01,2\n")
    data = open_source([tmp_path / "t.csv"], [schema], ReadOptions()).poll(0).data
    assert data is not None
    batch, rejections = Codec(schema).decode(data)
    assert rejections == []
    assert batch.values[batch.features == 0].tolist() == [13.75 * 3600, 60.0]


def test_long_csv_files_have_decimal_commas_and_labels(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(
        "record;feature;value;time\n01;a;59,1;31.12.2025 23:59:59\n01;state;3,0;31.12.2025 23:59:59\n01;b;Bad;noon\n"
    )
    events, rejections, _ = read_events([tmp_path / "l.csv"], table_options=BERLIN)
    assert events == [("01", "a", 59.1), ("01", "state", "3")]
    assert [(r.message_index, r.reason.value) for r in rejections] == [(2, "wrong_type")]
    with pytest.raises(InputError, match="--timezone"):
        read_events([tmp_path / "l.csv"])


def test_the_index_of_a_data_frame_is_read_if_the_model_has_it(tmp_path: Path) -> None:
    table = pa.table({"b": [1.0], "a": [7.0]})
    metadata = {"pandas": orjson.dumps({"index_columns": ["a"]})}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "t.parquet")
    assert [event for event in read_events([tmp_path / "t.parquet"])[0] if event[2] is not None] == [
        ("0", "b", 1.0),
        ("0", "a", 7.0),
    ]


def test_events_of_plant_tables_have_numbers_and_times(tmp_path: Path) -> None:
    folder = tmp_path / "site=north"
    folder.mkdir()
    (folder / "w.csv").write_text("Zeit;a;s\n31.12.2025 23:59:59;59,1;on\n01.01.2026 00:00:00;Bad;off\n")
    (tmp_path / "l.csv").write_text("device,feature,value,time\np,a,1.5,2026-01-01 00:00:01\n")
    inputs = [tmp_path / "*" / "w.csv", tmp_path / "l.csv"]
    documents = [orjson.loads(message) for _, message, _ in iterate_events(inputs, SendOptions(table_options=BERLIN))]
    start = 1767221999.0
    assert documents == [
        {"record": "w:0", "feature": "a", "value": 59.1, "time": start},
        {"record": "w:0", "feature": "s", "value": "on", "time": start},
        {"record": "w:0", "feature": "site", "value": "north", "time": start},
        {"record": "w:1", "feature": "a", "value": "Bad", "time": start + 1},
        {"record": "w:1", "feature": "s", "value": "off", "time": start + 1},
        {"record": "w:1", "feature": "site", "value": "north", "time": start + 1},
        {"device": "p", "feature": "a", "value": 1.5, "time": start + 2},
    ]
    with pytest.raises(InputError, match="--timezone"):
        list(iterate_events([tmp_path / "l.csv"]))
    options = TableOptions(CsvOptions(has_header=False, delimiter="|"))
    (tmp_path / "n.csv").write_text("1|2\n")
    names = [
        orjson.loads(message)["feature"]
        for _, message, _ in iterate_events([tmp_path / "n.csv"], SendOptions(table_options=options))
    ]
    assert names == ["column_1", "column_2"]
