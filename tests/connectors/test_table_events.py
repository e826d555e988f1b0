"""Tests of the conversion of tables to event streams: completeness, order of time, and reproducibility."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from connectors.files import iterate_events, table_events
from connectors.files.table_events import SendOptions, SkippedRows
from deformer_stream.codec import Codec
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.tables.filters import parse_where
from deformer_stream.tables.table import TableOptions
from deformer_stream.testing import MemorySource


def write_parquet(path: Path, **columns: Any) -> Path:
    """Write columns as a Parquet file."""
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table of 200 rows, one per second from second 1000 on, with an unknown time, a gap of an hour, and
    missing values.
    """
    seconds = [1000 + i + (3600 if i > 100 else 0) for i in range(200)]
    seconds[50] = None  # type: ignore[call-overload]
    return write_parquet(
        tmp_path / "pumps.parquet",
        when=pa.array(seconds, pa.timestamp("s")),
        pressure=[None if i % 10 == 3 else i / 8 for i in range(200)],
        state=["on", "off"] * 100,
        level=pa.array([1, 2] * 100, pa.int16()),
        blob=[b"x"] * 200,
        anomaly=[0] * 200,
        nan=[float("nan")] * 200,
    )


def test_every_cell_with_a_value_becomes_one_event_in_order_of_time(table: Path) -> None:
    sent = list(iterate_events([table], SendOptions(shuffle_within=5.0, seed=1, exclude=["anomaly"])))
    documents = [orjson.loads(value) for _, value, _ in sent]
    expected = {(str(i), "state") for i in range(200)} | {(str(i), "level") for i in range(200)}
    expected |= {(str(i), "pressure") for i in range(200) if i % 10 != 3}
    assert {(d["record"], d["feature"]) for d in documents} == expected
    assert len(sent) == len(expected)
    due = [time for _, _, time in sent]
    assert due == sorted(due)
    for (key, _, time), document in zip(sent, documents, strict=True):
        i = int(document["record"])
        assert key == document["record"].encode()
        assert round(document["time"] * 1e6) == time
        start = 1000 + (i if i != 50 else 49) + (3600 if i > 100 else 0)
        assert 0 <= time - start * 1_000_000 <= 5_000_000
    assert next(d["value"] for d in documents if (d["record"], d["feature"]) == ("4", "pressure")) == 0.5
    assert {d["value"] for d in documents if d["feature"] == "level"} == {1, 2}
    order = [d["record"] for d in documents]
    assert sum(a != b for a, b in pairwise(order)) > 300  # the records interleave


def test_equal_seeds_give_equal_streams(table: Path) -> None:
    first, again, other = (
        list(iterate_events([table], SendOptions(shuffle_within=5.0, seed=seed))) for seed in (1, 1, 2)
    )
    assert first == again != other
    calm = [orjson.loads(value) for _, value, _ in iterate_events([table], SendOptions(features=["state", "pressure"]))]
    assert [(d["record"], d["feature"]) for d in calm[:4]] == [
        ("0", "pressure"),
        ("0", "state"),
        ("1", "pressure"),
        ("1", "state"),
    ]


def test_codec_accepts_every_event(table: Path) -> None:
    schema = Schema((Feature("pressure", "continuous"), Feature("state", "discrete", labels=("on", "off"))))
    sent = iterate_events([table], SendOptions(shuffle_within=2.0, features=schema.names, prefix="line 1/"))
    data = MemorySource(((key, value) for key, value, _ in sent), chunk=10_000).poll(0).data
    assert data is not None
    batch, rejected = Codec(schema).decode(data)
    assert rejected == []
    assert len(batch) == 380
    assert batch.record_ids[0].startswith("line 1/")
    assert (np.diff(batch.times) >= 0).all()


def test_rows_without_time_column_are_one_second_apart(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "one.parquet", record=[7, 8], a=[1.0, 2.0])
    two = write_parquet(tmp_path / "two.parquet", a=[3.0])
    sent = list(iterate_events([one, two]))
    assert [(key, due) for key, _, due in sent] == [(b"7", 0), (b"8", 1_000_000), (b"two:0", 2_000_000)]


def test_labels_that_are_large_integers_are_sent_with_all_digits(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"record,feature,value\nx,a,{2**53 + 1}\ny,a,{2**64}\nz,a,2.50\nz,b,on\n")
    sent = [orjson.loads(value)["value"] for _, value, _ in iterate_events([tmp_path / "log.csv"])]
    assert sent == [2**53 + 1, str(2**64), 2.5, "on"]


def test_long_tables_are_sent_row_by_row(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "log.parquet",
        record=["x", "y", "x", "x"],
        feature=["a", "a", "b", "c"],
        value=[1.5, None, None, 2.0],
        label=[None, None, "on", None],
        time=[10.0, 11.0, 12.5, None],
    )
    sent = [(key, orjson.loads(value)) for key, value, _ in iterate_events([path], SendOptions(exclude=["d"]))]
    assert sent == [
        (b"x", {"record": "x", "feature": "a", "value": 1.5, "time": 10.0}),
        (b"x", {"record": "x", "feature": "b", "value": "on", "time": 12.5}),
        (b"x", {"record": "x", "feature": "c", "value": 2.0, "time": 12.5}),
    ]
    (tmp_path / "log.csv").write_text("record,feature,value\n007,a,1.5\n007,b,on\n")
    rows = [orjson.loads(value) for _, value, _ in iterate_events([tmp_path / "log.csv"])]
    assert [(d["record"], d["value"]) for d in rows] == [("007", 1.5), ("007", "on")]


def test_json_lines_are_passed_on_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    content = [
        b'{"record":"x","feature":"a","value":1,"time":5}',
        b"junk",
        b'{"record":3,"time":"1970-01-01T00:00:06Z"}',
        b'{"time":1e99}',
        b'{"record":true,"time":true}',
    ]
    path.write_bytes(b"\n".join([*content, b""]))
    sent = list(iterate_events([path], SendOptions(shuffle_within=9.0)))
    assert [value for _, value, _ in sent] == content
    assert [(key, due) for key, _, due in sent] == [
        (b"x", 5_000_000),
        (b"", NO_TIME),
        (b"3", 6_000_000),
        (b"", NO_TIME),
        (b"", NO_TIME),
    ]


def test_number_of_delayed_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_events, "MAX_DELAYED", 100)
    path = write_parquet(tmp_path / "t.parquet", time=pa.array([0] * 5000, pa.timestamp("s")), a=np.arange(5000.0))
    sent = iterate_events([path], SendOptions(shuffle_within=1000.0))
    held = []
    for _ in range(4000):
        next(sent)
        held.append(len(sent.gi_frame.f_locals["delayed"]))  # type: ignore[attr-defined]
    assert max(held) <= 101
    assert len(list(sent)) == 1000


def test_missing_table_or_column_is_reported_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        iterate_events([tmp_path / "none.parquet"])
    wide = write_parquet(tmp_path / "wide.parquet", a=[1.0], b=[2.0])
    with pytest.raises(ConfigError, match=r"--exclude c: .*wide\.parquet has no such column"):
        iterate_events([wide], SendOptions(exclude=["b", "c"]))
    other = write_parquet(tmp_path / "other.parquet", c=[1.0], d=[2.0])
    assert len(list(iterate_events([wide, other], SendOptions(exclude=["b", "c"])))) == 2


def test_input_errors_are_reported(tmp_path: Path) -> None:
    labels = write_parquet(tmp_path / "labels.parquet", anomaly=[1])
    with pytest.raises(InputError, match=r"labels\.parquet: there is no column to send"):
        list(iterate_events([labels], SendOptions(exclude=["anomaly"])))
    with pytest.raises(InputError, match=r"there is no column 'record', which a long table"):
        list(iterate_events([labels], SendOptions(layout="long")))
    with pytest.raises(InputError, match="no time column 'noon'"):
        list(iterate_events([labels], SendOptions(time_column="noon")))
    with pytest.raises(InputError, match="must be finite and at least 0"):
        list(iterate_events([labels], SendOptions(shuffle_within=-1.0)))


@pytest.mark.parametrize("layout", ["wide", "long"])
def test_rows_without_a_valid_time_or_id_are_left_out_and_counted(tmp_path: Path, layout: str) -> None:
    columns: dict[str, Any] = {"record": ["x", "y", None, "z"], "time": ["1970-01-01T00:00:05Z", "noon", None, None]}
    values = {"a": [1.0, 2.0, 3.0, 4.0]} if layout == "wide" else {"feature": ["a"] * 4, "value": [1.0, 2.0, 3.0, 4.0]}
    path = write_parquet(tmp_path / "t.parquet", **columns, **values)
    skipped = SkippedRows()
    sent = [
        orjson.loads(value)
        for _, value, _ in iterate_events([path], SendOptions(time_column="time"), skipped_rows=skipped)
    ]
    assert [(d["record"], d["value"], d["time"]) for d in sent] == [("x", 1.0, 5.0), ("z", 4.0, 5.0)]
    assert skipped.num_rows == 2
    assert skipped.first.startswith(f"{path}: row 1, column 'time', holds no valid time (")


def test_malformed_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("record,a\nx,1\ny\nz,2\n")
    assert [key for key, _, _ in iterate_events([tmp_path / "t.csv"])] == [b"x", b"z"]


def test_a_condition_does_not_change_the_ids_of_records(tmp_path: Path) -> None:
    files = [write_parquet(tmp_path / f"{line}.parquet", line=[line] * 3, flow=[1.0, 2.0, 3.0]) for line in ("a", "b")]
    where = parse_where("line = 'b'")
    sent = iterate_events(files, SendOptions(features=["flow"], table_options=TableOptions(where=where)))
    assert [key for key, _, _ in sent] == [b"b:0", b"b:1", b"b:2"]


def test_rows_of_a_wide_table_name_the_device_if_records_are_windows(tmp_path: Path) -> None:
    columns = {"time": [5.0, 65.0], "a": [1.0, 2.0]}
    with_pumps = write_parquet(tmp_path / "p.parquet", pump=["p1", "p2"], **columns)
    sent = list(iterate_events([with_pumps], SendOptions(device_column="pump", has_windows=True, prefix="north/")))
    assert [(key, orjson.loads(value)) for key, value, _ in sent] == [
        (b"north/p1", {"device": "north/p1", "feature": "a", "value": 1.0, "time": 5.0}),
        (b"north/p2", {"device": "north/p2", "feature": "a", "value": 2.0, "time": 65.0}),
    ]
    alone = write_parquet(tmp_path / "pump-7.parquet", **columns)
    assert [key for key, _, _ in iterate_events([alone], SendOptions(has_windows=True))] == [b"pump-7", b"pump-7"]
    named = write_parquet(tmp_path / "named.parquet", record=["x", "y"], **columns)
    records = [
        orjson.loads(value) for _, value, _ in iterate_events([named], SendOptions(features=["a"], has_windows=True))
    ]
    assert [d["record"] for d in records] == ["x", "y"]
    with pytest.raises(InputError, match="no device column 'pump'"):
        list(iterate_events([alone], SendOptions(device_column="pump", has_windows=True)))
