"""`calibrate` refuses records that the model has seen in training or in the calibration in force."""

from __future__ import annotations

import json
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deformer_stream import model_store
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.calibration.seen_records import RecordSet, SeenRecords
from tests.commands import RunCommand, assert_command_failed
from tests.series import draw_event_series, make_long_table
from trainer.job import train
from trainer.settings import TrainConfig

OPTIONS: dict[str, Any] = {"preset": "tiny", "epochs": 1, "d_model": 32, "layers": 1, "gaussians": 1, "exemplars": 0}
ORDER = ("--order", "schema")


def make_table(count: int, seed: int) -> pa.Table:
    """Return records with numbers of several types, labels, booleans and missing readings."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    return pa.table(
        {
            "flow": pa.array(120 + 4 * x[:, 0], mask=rng.random(count) < 0.1),
            "power": pa.array((9 + x[:, 0] + x[:, 1]).astype(np.float32)),
            "speed": np.round(50 * x[:, 2]).astype(np.int64) * 10,
            "mode": np.where(x[:, 1] > 0, "run", "idle").tolist(),
            "valve": rng.random(count) < 0.5,
        }
    )


def write(path: Path, *tables: pa.Table) -> Path:
    pq.write_table(pa.concat_tables(tables), path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model and the table of 600 records that it was trained on."""
    folder = tmp_path_factory.mktemp("seen")
    table = write(folder / "train.parquet", make_table(600, 0))
    train([table], TrainConfig(out=folder / "model", **OPTIONS))
    return folder / "model", table


def test_the_training_table_is_refused(cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path) -> None:
    """Every record is recognised: of 600 records, 501 determined the weights and 99 the calibration."""
    model, table = trained
    result = cli("calibrate", table, "--model", model, "--out", tmp_path / "m")
    words = "600 of 600 records were used to train or to calibrate this model", "--seen-records drop"
    data_fingerprint = model_store.read_manifest(model)["training"]["fingerprint"]
    assert_command_failed(result, 3, *words, data_fingerprint)
    assert not (tmp_path / "m").exists()


def test_readings_of_the_training_table_are_recognised_in_json_lines(
    cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    model, table = trained
    rows = pq.read_table(table).to_pylist()[:100]
    shuffled = (dict(reversed([item for item in row.items() if item[1] is not None])) for row in rows)
    events = ({"record": f"r{i}", "values": values} for i, values in enumerate(shuffled))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    result = cli("calibrate", tmp_path / "log.jsonl", "--model", model, "--out", tmp_path / "m")
    assert_command_failed(result, 3, "100 of 100 records were used")


def test_windows_with_time_slots_are_recognised(cli: RunCommand, tmp_path: Path) -> None:
    """The table is a list of readings of devices, whose windows are the records."""
    pq.write_table(make_long_table(draw_event_series(100, seed=0)), tmp_path / "train.parquet")
    words: dict[str, Any] = {"window": 60.0, "slots": 6, "once": "site"}
    train([tmp_path / "train.parquet"], TrainConfig(out=tmp_path / "model", **words, **OPTIONS))
    rows = model_store.read_manifest(tmp_path / "model")["training"]["rows"]
    count = rows["train"] + rows["validation"] + rows["calibration"]
    result = cli("calibrate", tmp_path / "train.parquet", "--model", tmp_path / "model", "--out", tmp_path / "m")
    assert_command_failed(result, 3, f"{count} of {count} records were used to train or to calibrate this model")


def test_times_of_day_are_recognised(cli: RunCommand, tmp_path: Path) -> None:
    """Values on a cycle are normalised like other numbers."""
    seconds = np.random.default_rng(0).integers(0, 86_400, 200)
    table = make_table(200, 8).append_column("shift_start", pa.array(seconds, pa.int32()).cast(pa.time32("s")))
    write(tmp_path / "train.parquet", table)
    train([tmp_path / "train.parquet"], TrainConfig(out=tmp_path / "model", **OPTIONS))
    result = cli("calibrate", tmp_path / "train.parquet", "--model", tmp_path / "model", "--out", tmp_path / "m")
    assert_command_failed(result, 3, "200 of 200 records were used to train or to calibrate this model")


def test_new_records_are_accepted_once(cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path) -> None:
    """A second calibration with the same file is refused; the model that was calibrated first still accepts it."""
    model, new, out = trained[0], write(tmp_path / "new.parquet", make_table(300, 1)), tmp_path / "m"
    first = cli("calibrate", new, "--model", model, "--out", out)
    assert first.code == 0, first.err
    assert "were used" not in first.err
    again = cli("calibrate", new, "--model", out)
    assert_command_failed(again, 3, "300 of 300 records were used to calibrate this model")
    assert cli("calibrate", new, "--model", model, "--out", tmp_path / "other").code == 0
    # The records of the training are still known after a calibration.
    assert_command_failed(cli("calibrate", trained[1], "--model", out), 3, "501 of 600 records were used to train")


def test_drop_gives_the_calibration_of_the_new_records(
    cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """The guarantee is that of a calibration with the new records only."""
    model, new = trained[0], make_table(500, 2)
    mixed = write(tmp_path / "mixed.parquet", pq.read_table(trained[1]), new)
    result = cli("calibrate", mixed, "--model", model, "--out", tmp_path / "m", "--seen-records", "drop", *ORDER)
    assert result.code == 0, result.err
    assert "calibrated on 500 records" in result.lines[-1]
    assert "600 of 1,100 records were used to train or to calibrate this model" in result.lines[-1]
    assert "600 records were left out" in result.lines[-1]
    write(tmp_path / "new.parquet", new)
    assert cli("calibrate", tmp_path / "new.parquet", "--model", model, "--out", tmp_path / "n", *ORDER).code == 0
    dropped, direct = (model_store.read(tmp_path / name).calibration for name in "mn")
    np.testing.assert_allclose(dropped.scores, direct.scores, rtol=1e-4)
    held_out = write(tmp_path / "held-out.parquet", make_table(2000, 3))
    records = tmp_path / "records.parquet"
    words = ["replay", held_out, "--model", tmp_path / "m", "--records", records, "--alpha", 0.05, "--drift", "off"]
    assert cli(*words, "--explanations", "off").code == 0
    num_alerts = sum(pq.read_table(records).column("alerted").to_pylist())
    assert 0 < num_alerts <= bound_false_alarms(0.05, 500, 2000, 0.999)


def test_drop_without_new_records_is_refused(cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["--model", trained[0], "--out", tmp_path / "m", "--seen-records", "drop"]
    assert_command_failed(cli("calibrate", trained[1], *words), 3, "none of the records is known to be new")


def test_confirmed_anomalies_are_not_new_to_the_next_calibration(
    cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """Otherwise the same command, repeated with drop, would calibrate with the anomalies alone."""
    new, review, out = write(tmp_path / "new.parquet", make_table(120, 4)), tmp_path / "review.csv", tmp_path / "m"
    listed = cli("calibrate", new, "--model", trained[0], "--out", out, "--review", 10)
    assert listed.code == 0, listed.err
    lines = listed.out.splitlines()
    review.write_text("\n".join([lines[0], *(f"{line}yes" for line in lines[1:])]) + "\n")
    first = cli("calibrate", new, "--model", trained[0], "--out", out, "--anomalous", review)
    assert first.code == 0, first.err
    assert len(model_store.read(out).calibration.scores) == 110
    again = cli("calibrate", new, "--model", out, "--seen-records", "drop")
    assert_command_failed(again, 3, "120 of 120 records", "none of the records is known to be new")


def test_records_that_training_left_out_are_not_new(cli: RunCommand, tmp_path: Path) -> None:
    table = write(tmp_path / "train.parquet", make_table(200, 5))
    train([table], TrainConfig(out=tmp_path / "model", contamination=0.1, **OPTIONS))
    assert model_store.read_manifest(tmp_path / "model")["training"]["rows"]["left_out"] > 10
    result = cli("calibrate", table, "--model", tmp_path / "model", "--out", tmp_path / "m", "--seen-records", "drop")
    assert_command_failed(result, 3, "200 of 200 records", "none of the records is known to be new")


def test_allow_uses_all_records_and_says_what_is_lost(
    cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ["--model", trained[0], "--out", tmp_path / "m", "--seen-records", "allow"]
    result = cli("calibrate", trained[1], *words)
    assert result.code == 0, result.err
    assert "calibrated on 600 records" in result.lines[-1]
    assert "the false-alarm rate is not guaranteed" in result.lines[-1]


def test_records_that_repeat_by_nature_are_accepted(cli: RunCommand, tmp_path: Path) -> None:
    """Three labels with four values each have 64 combinations, so nearly every new record equals a training record."""

    def make_labels(seed: int) -> pa.Table:
        labels = np.random.default_rng(seed).choice(list("abcd"), (3, 500))
        return pa.table(dict(starmap(lambda i, column: (f"label{i}", column.tolist()), enumerate(labels))))

    table = write(tmp_path / "train.parquet", make_labels(0))
    train([table], TrainConfig(out=tmp_path / "model", **OPTIONS))
    result = cli("calibrate", write(tmp_path / "new.parquet", make_labels(1)), "--model", tmp_path / "model")
    assert result.code == 0, result.err
    assert "were used" not in result.err


def test_adapted_model_has_seen_the_records_of_both_tables(
    cli: RunCommand, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    table = write(tmp_path / "more.parquet", make_table(200, 5))
    train([table], TrainConfig(out=tmp_path / "adapted", init_from=trained[0], epochs=1))
    words = ["--model", tmp_path / "adapted", "--out", tmp_path / "m"]
    assert_command_failed(cli("calibrate", trained[1], *words), 3, "501 of 600 records were used to train")
    assert_command_failed(cli("calibrate", table, *words), 3, "200 of 200 records were used to train or to calibrate")


def test_folds_count_every_record(cli: RunCommand, tmp_path: Path) -> None:
    table = write(tmp_path / "train.parquet", make_table(200, 6))
    train([table], TrainConfig(out=tmp_path / "model", folds=3, **OPTIONS))
    result = cli("calibrate", table, "--model", tmp_path / "model", "--out", tmp_path / "m")
    assert_command_failed(result, 3, "200 of 200 records were used to train or to calibrate this model")


def test_model_of_an_earlier_release_can_be_calibrated(cli: RunCommand, model_dir: Path, tmp_path: Path) -> None:
    """Its directory has no fingerprints; the new one has those of the calibration."""
    rows = {"temperature": np.random.default_rng(0).normal(20, 5, 50)}
    pq.write_table(pa.table(rows), tmp_path / "new.parquet")
    assert model_store.read_seen_records(model_dir, model_store.read_manifest(model_dir)) is None
    result = cli("calibrate", tmp_path / "new.parquet", "--model", model_dir, "--out", tmp_path / "m")
    assert result.code == 0, result.err
    assert "does not say which records the model was trained on" in result.lines[-1]
    assert_command_failed(cli("calibrate", tmp_path / "new.parquet", "--model", tmp_path / "m"), 3, "50 of 50 records")


# The file of fingerprints


def write_with_seen_records(loaded: model_store.Artifact, directory: Path) -> SeenRecords:
    records = [RecordSet.from_fingerprints(np.arange(n, dtype=np.uint64)) for n in (5, 0, 7)]
    seen = SeenRecords((records[0], records[1]), records[2])
    training = loaded.manifest["training"]
    assert model_store.write(directory, loaded.model, loaded.calibration, training, "", seen) == loaded.fingerprint
    return seen


def test_fingerprints_are_read_as_they_were_written(loaded: model_store.Artifact, tmp_path: Path) -> None:
    """They do not change the fingerprint of the model or the format version, because they do not affect scores."""
    seen = write_with_seen_records(loaded, tmp_path / "m")
    manifest = model_store.read_manifest(tmp_path / "m")
    assert manifest["format_version"] == loaded.manifest["format_version"]
    found = model_store.read_seen_records(tmp_path / "m", manifest)
    assert found is not None
    assert found.calibration is not None
    assert seen.calibration is not None
    assert len(found.training) == 2
    for a, b in zip((*found.training, found.calibration), (*seen.training, seen.calibration), strict=True):
        np.testing.assert_array_equal(a.fingerprints, b.fingerprints)
        assert (a.num_records, a.num_different) == (b.num_records, b.num_different)


@pytest.mark.parametrize("damage", ["missing", "short", "long", "altered"])
def test_damaged_file_is_refused_by_name_but_the_model_still_scores(
    loaded: model_store.Artifact, tmp_path: Path, damage: str
) -> None:
    from deformer_stream.errors import ArtifactError

    write_with_seen_records(loaded, tmp_path / "m")
    path = tmp_path / "m" / model_store.SEEN_RECORDS
    content = path.read_bytes()
    changed = {"short": content[:-1], "long": content + b"x", "altered": content[:-1] + b"\x7f"}
    path.unlink() if damage == "missing" else path.write_bytes(changed[damage])
    with pytest.raises(ArtifactError, match=model_store.SEEN_RECORDS):
        model_store.read_seen_records(tmp_path / "m", model_store.read_manifest(tmp_path / "m"))
    assert model_store.read(tmp_path / "m").fingerprint == loaded.fingerprint
