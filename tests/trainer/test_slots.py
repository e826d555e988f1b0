"""Tests of records that are windows of a device's time: time slots, repeated readings and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Schema
from deformer_stream.model.time_slots import collapse_time_slots
from deformer_stream.model.windows import PerSlot, Window
from tests.series import draw_event_series, make_long_table
from trainer.data import DataOptions, PreparedTable
from trainer.prepare import prepare_table

SECOND = 1_000_000
MINUTE = Window(60 * SECOND, 6)


def prepared(folder: Path, events: list[dict[str, Any]], **options: Any) -> PreparedTable:
    (folder / "work").mkdir(exist_ok=True)
    pq.write_table(make_long_table(events), folder / "events.parquet", row_group_size=97)
    options = {"window": MINUTE, "once": ("site",)} | options
    return prepare_table([folder / "events.parquet"], DataOptions(**options), folder / "work")


def test_record_is_a_window_and_each_time_slot_a_feature(tmp_path: Path) -> None:
    events = draw_event_series(40, seed=0)
    data = prepared(tmp_path, events)
    assert data.values.shape == (40, 13)
    assert data.schema.slot_layout_by_sensor.keys() == {"flow", "pressure", "site"}
    assert data.schema.window == MINUTE
    row = {key: i for i, key in enumerate(dict.fromkeys((e["device"], e["time"] // 60) for e in events))}
    expected = np.full((40, 13), np.nan)
    for event in events:
        name = (
            event["feature"] if event["feature"] == "site" else f"{event['feature']}+{event['time'] % 60 // 10:.0f}0s"
        )
        code = data.schema.code_by_name[name.replace("+00s", "+0s")]
        value = "ab".index(event["value"]) if name == "site" else float(event["value"])
        expected[row[event["device"], event["time"] // 60], code] = value
    raw = data.schema.denormalise(np.arange(13), np.asarray(data.values, np.float64))
    np.testing.assert_allclose(raw, expected, atol=1e-5)
    assert data.arrival_ranks is not None
    assert (data.arrival_ranks[0] >= 0).sum() == np.isfinite(expected[0]).sum()
    flow = data.arrival_ranks[0, data.schema.slot_layout_by_sensor["flow"][0] + np.arange(6)]
    assert (np.diff(flow[flow >= 0]) > 0).all(), "slots of a sensor come in the order of time"


def test_all_time_slots_of_a_sensor_have_the_same_kind(tmp_path: Path) -> None:
    """The sensor `rare` reports in a different time slot of each window."""
    rare = [{"device": "d", "feature": "rare", "value": 0.5 * (w % 7), "time": w * 60 + w % 6 * 10} for w in range(60)]
    data = prepared(tmp_path, rare, once=())
    assert {(f.kind, f.quantum, f.low, f.high) for f in data.schema.features} == {("continuous", 0.5, 0.0, 3.0)}
    assert np.isfinite(data.values).sum(0).tolist() == [10] * 6


def test_window_without_time_slots_keeps_feature_names(tmp_path: Path) -> None:
    data = prepared(tmp_path, draw_event_series(40, seed=0), window=Window(60 * SECOND), once=())
    assert set(data.schema.names) == {"flow", "pressure", "site"}
    assert data.schema.window == Window(60 * SECOND)
    assert data.skipped_by_reason["repeated events (record and feature)"] > 300, "the first of a window counts"


def test_repeated_and_unassignable_readings_are_counted(tmp_path: Path) -> None:
    events = [*draw_event_series(40, seed=0), {"device": "p0", "feature": "flow", "value": 9, "time": 3000.0}]
    more = [{**events[0], "value": 7, "time": events[0]["time"] + 1e-3}, {**events[0], "device": None}]
    data = prepared(tmp_path, [*events, *more, {**events[0], "time": None}])
    assert data.values.shape[0] == 41
    assert data.skipped_by_reason == {
        "repeated events (record and feature)": 1,
        "events without device, time or feature": 2,
    }


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"record": "r"}, {}, "its column 'record' already defines them"),
        ({}, {"window": None, "once": ()}, "add --window, such as 60s, to make records of them"),
        (
            {},
            {"window": Window(60 * SECOND, 3000)},
            "--slots 3000 would give a record 6001 features, but it can have at most 4096",
        ),
        ({}, {"once": ("nope",)}, "no feature is called nope"),
    ],
)
def test_tables_that_cannot_be_cut_into_windows_are_rejected(
    tmp_path: Path, columns: dict[str, str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepared(tmp_path, [event | columns for event in draw_event_series(40, seed=0)], **options)


def test_sensors_that_report_once_do_not_count_in_each_slot(tmp_path: Path) -> None:
    """2001 slots give 2 + 2001 features, not 3 times 2001."""
    window = Window(60 * SECOND, 2001)
    data = prepared(tmp_path, draw_event_series(40, seed=0), window=window, once=("site", "pressure"))
    assert len(data.schema) == 2003


@pytest.mark.parametrize("rule", ["min", "max"])
def test_positions_on_a_cycle_have_no_smallest_or_largest(tmp_path: Path, rule: PerSlot) -> None:
    events, cycle = draw_event_series(40, seed=0), (("flow", 360.0),)
    window = Window(60 * SECOND, 6, rule)
    with pytest.raises(ConfigError, match=f"--per-slot {rule} cannot combine the readings of flow, because positions"):
        prepared(tmp_path, events, window=window, cycle=cycle)
    once = prepared(tmp_path, events, window=window, cycle=cycle, once=("site", "flow"))
    assert prepared(tmp_path, events, window=None, once=(), base=once.schema).schema == once.schema
    old = Schema(prepared(tmp_path, events, cycle=cycle).schema.features, window)
    assert prepared(tmp_path, events, window=None, once=(), base=old).schema == old, "an old model keeps its rule"


def test_long_layout_and_window_need_their_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column 'time' is missing"):
        prepared(tmp_path, [{"device": "d", "feature": "flow", "value": 1.0}] * 30, layout="long")
    with pytest.raises(ConfigError, match=r"contains dates or timestamps; name the column .*--time-col"):
        prepared(tmp_path, [{"device": "d", "flow": 1.0}] * 30)


def test_adaptation_requires_the_windows_of_the_old_model(tmp_path: Path) -> None:
    old = prepared(tmp_path, draw_event_series(40, seed=0)).schema
    events = [
        *draw_event_series(40, seed=1),
        *({"device": "p0", "feature": "new", "value": k % 40, "time": 7.0 * k} for k in range(170)),
    ]
    data = prepared(tmp_path, events, window=None, once=(), base=old)
    assert data.schema.features[: len(old)] == old.features
    assert data.schema.names[len(old) :] == tuple(f"new+{k}0s".replace("+00s", "+0s") for k in range(6))
    for window in (Window(60 * SECOND, 5), Window(30 * SECOND, 6)):
        with pytest.raises(ConfigError, match="windows of 1m in 6 slots; leave --window and --slots out"):
            prepared(tmp_path, events, window=window, base=old)
    with pytest.raises(ConfigError, match="identified by record ids"):
        prepared(tmp_path, events, base=collapse_time_slots(old), once=())
