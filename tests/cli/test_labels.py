"""`replay --label`: how many records of each label have alerted, in every layout of tables and in shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from tests.cli.shard_examples import OUTPUTS
from tests.commands import RunCommand, assert_command_failed, list_events
from tests.models import SCHEMA, copy_model_with_label

LABEL = ("--label", "fault", "--normal", "none")
ALPHAS = (0.5, 0.2)
OPTIONS = ("--alpha", "0.5,0.2")


def label(table: pa.Table) -> pa.Table:
    """Return a table with the column `fault`: every third record has a leak, every tenth no label."""
    faults = [
        "leak" if i % 3 == 0 else "wear" if i == 1 else None if i % 10 == 7 else "none" for i in range(len(table))
    ]
    return table.append_column("fault", pa.array(faults))


def count_by_label(records: pa.Table) -> dict[str | None, tuple[int, list[int]]]:
    """Return, by label, the number of records and how many have alerted at each of `ALPHAS`."""
    counts: dict[str | None, tuple[int, list[int]]] = {}
    labels = np.array(records["label"].to_pylist(), object)
    alphas = records["alert_alpha"].fill_null(1.0).to_numpy()
    for name in ("none", "leak", "wear", None):
        is_chosen = labels == name
        counts[name] = int(is_chosen.sum()), [int((alphas[is_chosen] <= alpha).sum()) for alpha in ALPHAS]
    return counts


def read_report(lines: list[str]) -> dict[str, tuple[int, list[int]]]:
    """Return the table that the command prints in the form of `count_by_label`."""
    start = next(i for i, line in enumerate(lines) if line.startswith("label "))
    header = lines[start].split("  ")
    assert [cell.strip() for cell in header if cell] == [
        "label",
        "records",
        "alerted at 0.5",
        "alerted at 0.2",
        "first alert after",
    ]
    found = {}
    for line in lines[start + 1 :]:
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) != 5:
            break
        found[cells[0]] = int(cells[1]), [int(cell.split(" ")[0]) for cell in cells[2:4] if cell != "-"]
    return found


def test_every_layout_gives_the_same_table(cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path) -> None:
    labelled = label(table)
    pq.write_table(labelled, tmp_path / "wide.parquet")
    pacsv.write_csv(labelled, tmp_path / "wide.csv")
    fault_by_record = dict(zip(labelled["record"].to_pylist(), labelled["fault"].to_pylist(), strict=True))
    readings = [{**event, "fault": fault_by_record[event["record"]]} for event in list_events(table)]
    for reading in readings:
        reading["value"] = str(reading["value"])
    pq.write_table(pa.Table.from_pylist(readings), tmp_path / "long.parquet")
    for name, order in (("wide.parquet", ()), ("wide.csv", ()), ("long.parquet", ("--order", "random"))):
        records = tmp_path / "records.parquet"
        words = ("replay", tmp_path / name, "--model", model_dir, *OPTIONS, *order)
        result = cli(*words, *LABEL, "--records", records)
        assert result.code == 0, result.err
        counts = count_by_label(pq.read_table(records))
        assert [counts[name][0] for name in ("none", "leak", "wear", None)] == [46, 27, 1, 6]
        found = read_report(result.lines)
        assert list(found) == ["none", "leak", "wear", "all faults"]
        assert [found[name] for name in ("none", "leak", "wear")] == [counts[name] for name in ("none", "leak", "wear")]
        assert found["all faults"] == (28, [a + b for a, b in zip(counts["leak"][1], counts["wear"][1], strict=True)])
        assert "6 records have no label" in result.lines
        assert sum(line.startswith("AUROC of anomaly_score") for line in result.lines) == 1
        assert not any('"columns_ignored"' in line and '"fault"' in line for line in result.lines)
        plain = cli(*words, "--records", tmp_path / "plain.parquet")
        assert pq.read_table(tmp_path / "plain.parquet").equals(pq.read_table(records).drop_columns(["label"]))
        assert not any(line.startswith("label ") for line in plain.lines)


@pytest.mark.parametrize("shard_by", ["records", "files"])
@pytest.mark.usefixtures("in_this_process")
def test_shards_give_the_same_table(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path, shard_by: str
) -> None:
    labelled, folder = label(table), tmp_path / "tables"
    folder.mkdir()
    pq.write_table(labelled[:50], folder / "a.parquet")
    pq.write_table(labelled[50:], folder / "b.parquet")
    words = ("replay", folder, "--model", model_dir, *OPTIONS, *LABEL)
    whole = cli(*words, "--records", tmp_path / "records.parquet")
    in_shards = cli(*words, "--output-dir", tmp_path / "shards", "--shard-by", shard_by, "--shards", 2)
    assert in_shards.code == 0, in_shards.err
    assert read_report(in_shards.lines) == read_report(whole.lines)
    paths = sorted((tmp_path / "shards" / "shards").glob(f"*/{OUTPUTS['records']}"))
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    expected = pq.read_table(tmp_path / "records.parquet").to_pylist()
    assert sorted(map(repr, rows)) == sorted(map(repr, expected))


def test_a_window_is_faulty_if_one_of_its_rows_is(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    rows = [
        {"device": "pump-1", "time": 0, "temperature": 20.0, "pressure": 1.0, "state": "none"},
        {"device": "pump-1", "time": 4, "temperature": None, "pressure": None, "vibration": 0.2, "state": "leak"},
        {"device": "pump-2", "time": 5, "temperature": 20.0, "pressure": 1.0, "state": "none"},
        {"device": "pump-1", "time": 12, "temperature": 20.0, "pressure": 1.0, "state": "none"},
        {"device": "pump-2", "time": 13, "temperature": 20.0, "pressure": 1.0, "state": None},
    ]
    path = tmp_path / "history.parquet"
    columns = {
        name: [row.get(name) for row in rows] for name in ("device", "temperature", "pressure", "vibration", "state")
    }
    start = 1_583_750_070
    times = pa.array([(start + int(str(row["time"]))) * 10**6 for row in rows], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table(columns).append_column("time", times), path)
    words = ("replay", path, "--model", model_dir, "--window", "10s", "--records", tmp_path / "records.parquet")
    result = cli(*words, "--label", "state", "--normal", "none")
    assert result.code == 0, result.err
    records = pq.read_table(tmp_path / "records.parquet", columns=["record", "label"]).to_pylist()
    assert {row["record"]: row["label"] for row in records} == {
        "pump-1@2020-03-09T10:34:30Z": "leak",
        "pump-2@2020-03-09T10:34:30Z": "none",
        "pump-1@2020-03-09T10:34:40Z": "none",
        "pump-2@2020-03-09T10:34:40Z": None,
    }


def test_the_label_of_the_training_is_the_default(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    copy_model_with_label(model_dir, tmp_path / "m", "fault", "none")
    pq.write_table(label(table), tmp_path / "labelled.parquet")
    pq.write_table(table, tmp_path / "plain.parquet")
    words = ("replay", tmp_path / "labelled.parquet", *OPTIONS)
    result = cli(*words, "--model", tmp_path / "m")
    assert read_report(result.lines) == read_report(cli(*words, "--model", model_dir, *LABEL).lines)
    for options in ((tmp_path / "labelled.parquet", "--label", ""), (tmp_path / "plain.parquet",)):
        result = cli("replay", *options, *OPTIONS, "--model", tmp_path / "m", "--records", tmp_path / "records.parquet")
        assert result.code == 0, result.err
        assert not any(line.startswith("label ") for line in result.lines)
        assert "label" not in pq.read_schema(tmp_path / "records.parquet").names


def test_the_column_label_of_long_tables_stays_the_label_of_readings(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    """In training on wide tables, the column of labels had the name that long tables use for labels of readings."""
    copy_model_with_label(model_dir, tmp_path / "m", "label", "none")
    numeric = {feature.name for feature in SCHEMA.features if not feature.labels}
    readings = [
        {
            "record": event["record"],
            "feature": event["feature"],
            "value": float(event["value"]) if event["feature"] in numeric else None,
            "label": None if event["feature"] in numeric else str(event["value"]),
        }
        for event in list_events(table)
    ]
    pq.write_table(pa.Table.from_pylist(readings), tmp_path / "long.parquet")
    words = ("replay", tmp_path / "long.parquet", "--model", tmp_path / "m")
    result = cli(*words)
    assert result.code == 0, result.err
    assert not any(line.startswith("label ") for line in result.lines)
    result = cli(*words, "--label", "label", "--normal", "none")
    assert_command_failed(result, 3, "no table of the input has a column 'label' with labels of records")


def test_only_normal_records_are_compared_with_alpha(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    """Records far outside the range alert. The last line warns, unless they are labelled as faults."""
    far = table.set_column(table.schema.get_field_index("temperature"), "temperature", pa.array([1e4] * len(table)))
    both = pa.concat_tables([table, far]).drop_columns(["record"])
    faults = ["none"] * len(table) + ["hot"] * len(table)
    pq.write_table(both.append_column("fault", pa.array(faults)), tmp_path / "right.parquet")
    pq.write_table(both.append_column("fault", pa.array(faults[::-1])), tmp_path / "wrong.parquet")
    words = ("--model", model_dir, "--alpha", "0.1", "--drift", "off")
    last = cli("replay", tmp_path / "right.parquet", *words).lines[-1]
    assert "of records alerted, 10% is allowed" in last
    last = cli("replay", tmp_path / "right.parquet", *words, *LABEL).lines[-1]
    assert "is allowed" not in last
    last = cli("replay", tmp_path / "wrong.parquet", *words, *LABEL).lines[-1]
    assert "100% of records without a known fault alerted, 10% is allowed; `temperature` is blamed first" in last
    assert "80 of 80 records without a known fault" in last
    unlabelled = far.append_column("fault", pa.nulls(len(far), pa.string()))
    pq.write_table(unlabelled, tmp_path / "unlabelled.parquet")
    result = cli("replay", tmp_path / "unlabelled.parquet", *words, *LABEL)
    assert "none of 80 records has a label" in result.lines
    assert "100% of records without a known fault alerted" in result.lines[-1]


def test_a_column_that_is_missing_is_refused_on_the_command_line_and_reported_otherwise(
    cli: RunCommand, model_dir: Path, wide: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model_dir)
    result = cli("replay", wide, *words, *LABEL)
    assert_command_failed(
        result, 3, "no table of the input has a column 'fault'", "(the columns without a feature are note"
    )
    assert_command_failed(cli("replay", lines, *words, *LABEL), 3, "no table of the input has a column 'fault'")
    assert_command_failed(cli("replay", wide, *words, *LABEL[:2]), 2, "--label and --normal belong together")
    assert_command_failed(cli("replay", wide, *words, *LABEL[2:]), 2, "--label and --normal belong together")
    monkeypatch.setenv("DEFORMER_LABEL", "fault")
    monkeypatch.setenv("DEFORMER_NORMAL", "none")
    result = cli("replay", lines, *words)
    assert result.code == 0, result.err
    assert sum('"label_missing"' in line for line in result.lines) == 1


def test_rows_that_come_too_late_give_no_label(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """A window is closed by a later reading of its device; another row of the window follows."""
    path = tmp_path / "history.csv"
    seconds, faults = (1, 25, 2, 30), ("none", "none", "leak", "none")
    rows = [f"pump-1,2026-01-01T00:00:{s:02d}Z,{20 + s},{fault}" for s, fault in zip(seconds, faults, strict=True)]
    path.write_text("\n".join(["device,time,temperature,fault", *rows]) + "\n")
    result = cli("replay", path, "--model", model_dir, "--window", "10s", "--alpha", "0.2,0.5", *LABEL)
    assert result.code == 0, result.err
    assert "1 refused (1 late)" in result.lines[-1]
    assert {name: count for name, (count, _) in read_report(result.lines).items()} == {"none": 3}


@pytest.mark.usefixtures("in_this_process")
def test_shards_report_labels_without_an_output_of_records(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    """The files of records are then an output, too. A number is the normal label in every spelling."""
    labels = [1.0 if i % 4 == 0 else 0.0 for i in range(len(table))]
    pq.write_table(table.append_column("fault", pa.array(labels)), tmp_path / "labelled.parquet")
    words = (
        "replay",
        tmp_path / "labelled.parquet",
        "--model",
        model_dir,
        *OPTIONS,
        "--label",
        "fault",
        "--normal",
        "0",
    )
    shards = ("--output-dir", tmp_path / "shards", "--shards", 2, "--output", "scores.parquet")
    in_csv = ("--output-dir", tmp_path / "csv", "--shards", 2, "--records", "records.csv")
    assert read_report(cli(*words, *in_csv).lines) == read_report(cli(*words).lines)
    result = cli(*words, *shards)
    assert result.code == 0, result.err
    assert read_report(result.lines) == read_report(cli(*words).lines)
    assert {name: count for name, (count, _) in read_report(result.lines).items()} == {"0": 60, "1": 20}
    assert len(list((tmp_path / "shards" / "shards").glob("*/records.parquet"))) == 2
    assert_command_failed(cli(*words, *shards[:-1], "records.parquet"), 2, "--output records.parquet", "name another")
    pq.write_table(table, tmp_path / "plain.parquet")
    words = ("replay", tmp_path / "plain.parquet", "--model", model_dir, "--output-dir", tmp_path / "others")
    assert_command_failed(cli(*words, *LABEL), 3, "no table of the input has a column 'fault'")
    assert cli(*words).code == 0  # the folder does not hold a run with other options


@pytest.mark.usefixtures("in_this_process")
def test_a_normal_label_that_no_record_has_is_an_error(
    cli: RunCommand, model_dir: Path, table: pa.Table, tmp_path: Path
) -> None:
    """Outputs are complete. If the label is that of the training, it is a warning."""
    pq.write_table(label(table), tmp_path / "labelled.parquet")
    records, other = tmp_path / "records.parquet", ("--label", "fault", "--normal", "None")
    words = ("replay", tmp_path / "labelled.parquet", *OPTIONS)
    found = "the labels are none (46 records), leak (27 records), wear (1 record)"
    result = cli(*words, *other, "--model", model_dir, "--records", records)
    assert result.code == 3
    assert "no record has fault = None, so the 74 records with labels count as faults" in result.lines[-1]
    assert found in result.lines[-1]
    assert len(pq.read_table(records)) == len(table)
    assert read_report(result.lines)["None"] == (0, [])
    shards = ("--output-dir", tmp_path / "shards", "--shards", 2)
    result = cli(*words, *other, "--model", model_dir, *shards)
    assert result.code == 3
    assert found in result.lines[-1]
    assert (tmp_path / "shards" / "summary.json").exists()
    copy_model_with_label(model_dir, tmp_path / "m", "fault", "None")
    for options in ((), ("--output-dir", tmp_path / "more", "--shards", 2)):
        result = cli(*words, "--model", tmp_path / "m", *options)
        assert result.code == 0, result.err
        assert found in result.lines[-1]
