"""`deformer-stream init`: what it sees in a table or a topic, what it asks, and the configuration that it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner

from connectors.kafka.ports import KafkaCluster
from deformer_stream.cli.init import command as init
from deformer_stream.cli.init.config_file import needs_folds
from deformer_stream.cli.init.label_columns import choose_normal_value
from deformer_stream.cli.init.messages import convert_to_table
from deformer_stream.cli.init.table_view import look_at_tables
from deformer_stream.errors import InputError
from deformer_stream.settings import SETTINGS_BY_COMMAND, load_settings
from deformer_stream.tables.table import TableOptions
from tests.commands import RunCommand, assert_command_failed, list_events
from trainer.settings import TrainConfig

NUM_ROWS = 1000

COMMANDS_OF_A_TOPIC = ("consume", "incidents", "serve", "feedback", "dead-letters", "produce")
"""Commands that need --topic."""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of `plant.csv` in the current folder: a counter, times, two measurements, and two labels."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    is_faulty = np.arange(NUM_ROWS) >= 900
    table = pd.DataFrame(
        {
            "order_no": rng.permutation(NUM_ROWS) // 3,
            "at": pd.Timestamp("2026-01-01") + pd.to_timedelta(10 * np.arange(NUM_ROWS), unit="s"),
            "flow": np.round(rng.normal(120, 5, NUM_ROWS), 3),
            "pressure": np.round(rng.normal(3, 0.1, NUM_ROWS), 4),
            "state": np.where(is_faulty, "broken", "running"),
            "fault": is_faulty.astype(int),
            "changepoint": np.diff(is_faulty.astype(int), prepend=0),
        }
    )
    table.to_csv("plant.csv", sep=";", decimal=",", index=False)
    return tmp_path / "plant.csv"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command take its input for a terminal, so that it asks."""

    class Terminal(click.testing._NamedTextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(click.testing, "_NamedTextIOWrapper", Terminal)


def read_config(path: Path = Path("deformer.toml")) -> dict[str, Any]:
    """Return the configuration file, after checking that every command accepts it."""
    required = {
        **{command: {"topic": "sensors"} for command in COMMANDS_OF_A_TOPIC},
        "bridge": {"source": "mqtt://broker/plant/#", "topic": "sensors"},
        "propose": {"out": "candidate"},
        "impute": {"output": "filled.parquet"},
        "sample": {"output": "samples.parquet"},
    }
    for command, cls in SETTINGS_BY_COMMAND.items():
        load_settings(cls, required.get(command, {}), path, command)
    load_settings(TrainConfig, {}, path, "train")
    return tomllib.loads(path.read_text("utf-8"))


def test_defaults_of_a_table_with_labels(cli: RunCommand, plant: Path) -> None:
    result = cli("init", "plant.csv", "--yes")
    assert (result.code, result.err) == (0, "")
    assert "delimiter ';', decimal comma" in result.out
    assert "1,000 rows" in result.out
    assert "a row every 10 s" in result.out
    assert "fault: 0 (900 rows), 1 (100 rows)" in result.out
    assert result.out.splitlines()[-2:] == [
        "    deformer-train plant.csv",
        "    deformer-stream replay plant.csv",
    ]
    assert read_config() == {
        "model": "model",
        "alpha": 0.01,
        "train": {
            "out": "model",
            "label": "fault",
            "normal": "0",
            "exclude": ["order_no", "changepoint"],
            "max-time": "5m",
        },
        "replay": {"records": "records.parquet", "alerts": "alerts.jsonl"},
        "consume": {},
    }
    assert "8,649 records a day" in Path("deformer.toml").read_text()
    assert "86.5 false alerts" in Path("deformer.toml").read_text()


def test_every_question_has_an_option(cli: RunCommand, plant: Path) -> None:
    options = "--record window --window 2m --slots 6 --label state --normal running --exclude order_no,changepoint"
    others = "--per-slot last --timezone Europe/Berlin --alpha 0.5% --max-time 90s --output plant.toml"
    result = cli("init", "plant.csv", *options.split(), *others.split())
    assert result.code == 0
    assert "    deformer-train plant.csv --config plant.toml" in result.out.splitlines()
    config = read_config(Path("plant.toml"))
    assert (config["alpha"], config["timezone"]) == (0.005, "Europe/Berlin")
    assert config["train"] == {
        "out": "model",
        "window": "2m",
        "slots": 6,
        "per-slot": "last",
        "label": "state",
        "normal": "running",
        "exclude": ["order_no", "changepoint"],
        "max-time": "90s",
    }
    # 10,000 seconds are 83 windows of two minutes, of which 90% are normal.
    assert "alpha 0.005 is out of reach: it needs at least 199 normal records, and there are about 75" in result.out
    assert config["consume"] == {"grace": "2s"}


def test_answers_of_a_user(plant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user takes some defaults, and corrects an answer that is not valid."""

    class Terminal(click.testing._NamedTextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(click.testing, "_NamedTextIOWrapper", Terminal)
    answers = [
        "window",
        "",
        "5",
        "median",
        "mean",
        "-",
        "3%",
        "nothing",
        "order_no,state,fault,changepoint",
        "",
        "0,02",
        "2%",
        "10m",
    ]
    result = CliRunner().invoke(init.build_init(), ["plant.csv"], input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert "What is a record? row = a row, window = a time window of a device [row]" in result.output
    assert "17% of the readings share a time slot with an earlier reading of their sensor" in result.output
    assert "'median' is not a choice; answer one of: first, last, mean, min, max" in result.output
    assert "there is no column 'nothing'" in result.output
    assert "decimal comma; write 0.02 or 2%" in result.output
    config = read_config()
    assert config["alpha"] == 0.02
    assert config["train"] == {
        "out": "model",
        "window": "1m",
        "slots": 5,
        "per-slot": "mean",
        "contamination": 0.03,
        "exclude": ["order_no", "state", "fault", "changepoint"],
        "max-time": "10m",
        "folds": 5,
    }


def test_an_existing_configuration_is_kept(cli: RunCommand, plant: Path) -> None:
    Path("deformer.toml").write_text("alpha = 0.2\n")
    assert_command_failed(cli("init", "plant.csv", "--yes"), 2, "deformer.toml exists", "--force")
    assert Path("deformer.toml").read_text() == "alpha = 0.2\n"
    assert cli("init", "plant.csv", "--yes", "--force").code == 0
    assert read_config()["alpha"] == 0.01


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "either tables or --topic"),
        (["plant.csv", "--topic", "sensors"], 2, "either tables or --topic"),
        (["missing.csv"], 3, "missing.csv"),
        (["plant.csv", "--record", "id"], 2, "choose one of: row, window"),
        (["plant.csv", "--label", "faulty"], 2, "--label faulty: there is no such column"),
        (["plant.csv", "--label", "flow"], 2, "needs --normal"),
        (["plant.csv", "--label", "", "--normal", "0"], 2, "--normal needs --label"),
        (["plant.csv", "--exclude", "flwo"], 2, "there is no column 'flwo'"),
        (["plant.csv", "--per-slot", "mean"], 2, "--per-slot combines readings of one window; add --record window"),
        (["plant.csv", "--contamination", "2%"], 2, "--contamination"),
        (["plant.csv", "--time-column", "time"], 3, "there is no time column 'time'"),
    ],
)
def test_wrong_options_are_reported_in_one_line(
    cli: RunCommand, plant: Path, words: list[str], code: int, message: str
) -> None:
    result = cli("init", *words, "--yes")
    assert (result.code, len(result.lines)) == (code, 1), result.err
    assert message in result.lines[0]
    assert not Path("deformer.toml").exists()


def test_pytorch_is_not_imported(plant: Path) -> None:
    """PyTorch takes seconds to import; without it the command takes about one second."""
    script = (
        "import sys; from deformer_stream.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'matplotlib', 'kafka'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", script, "init", "plant.csv", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=plant.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_long_table_has_windows_of_its_devices(plant: Path) -> None:
    times = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(np.repeat(np.arange(300), 4), unit="s")
    table = pd.DataFrame(
        {
            "device": np.tile(["p1", "p1", "p2", "p2"], 300),
            "feature": np.tile(["flow", "mode"], 600),
            "value": np.tile(["20.5", "auto"], 600),
            "time": times,
        }
    )
    table.to_parquet("long.parquet", index=False)
    result = CliRunner().invoke(init.build_init(), ["long.parquet"])
    assert result.exit_code == 0, result.output
    assert "devices  2 in the column device: p1, p2" in result.output
    assert "a reading of each sensor every 1 s" in result.output
    config = read_config()
    assert config["train"] == {"out": "model", "window": "10s", "slots": 10, "exclude": [], "max-time": "5m"}


@pytest.mark.parametrize("layout", ["long", "wide"])
def test_shared_time_slots_are_mentioned_in_the_configuration(plant: Path, layout: str) -> None:
    """Each sensor reports every second, so every second reading shares a slot of two seconds."""
    times = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(np.repeat(np.arange(300), 2), unit="s")
    # In the wide table, each row has a reading of one sensor.
    numbers = np.random.default_rng(0).normal(size=600).round(4)
    rows: dict[str, Any] = {"device": "p1", "time": times}
    if layout == "long":
        rows |= {"feature": np.tile(["flow", "speed"], 300), "value": numbers}
    else:
        is_flow = np.tile([True, False], 300)
        rows |= {"flow": np.where(is_flow, numbers, np.nan), "speed": np.where(is_flow, np.nan, numbers)}
    pd.DataFrame(rows).to_parquet("series.parquet", index=False)
    words = ["series.parquet", "--yes", "--force", "--record", "window", "--window", "20s", "--slots"]
    runner = CliRunner()
    assert runner.invoke(init.build_init(), [*words, "10"]).exit_code == 0
    text = Path("deformer.toml").read_text()
    assert "# 50% of the readings share a time slot with an earlier reading of their sensor." in text
    assert '# Only the first reading of a time slot counts. To use all of them: per-slot = "mean"' in text
    assert "per-slot" not in read_config()["train"], "the default is that of the training"
    assert runner.invoke(init.build_init(), [*words, "10", "--per-slot", "max"]).exit_code == 0
    assert read_config()["train"]["per-slot"] == "max"
    assert runner.invoke(init.build_init(), [*words, "20"]).exit_code == 0
    assert "of the readings share" not in Path("deformer.toml").read_text(), "each reading has a slot of its own"


def write_irregular_table(id_column: str, num_sensors: int = 3) -> None:
    """Write the readings of four devices or records, at irregular times, to `log.csv`."""
    rng = np.random.default_rng(0)
    seconds = np.sort(rng.uniform(0, 7200, 1200)).round(2)
    table = pd.DataFrame(
        {
            id_column: rng.choice(["b1", "b2", "b3", "b4"], 1200),
            "feature": rng.choice([f"tag{i}" for i in range(num_sensors)], 1200),
            "value": rng.normal(20, 2, 1200).round(3),
            "time": (pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(seconds, unit="s")),
        }
    )
    table.to_csv("log.csv", index=False)


def test_irregular_readings_are_proposed_for_devices(cli: RunCommand, plant: Path) -> None:
    write_irregular_table("device")
    result = cli("init", "log.csv", "--yes")
    assert (result.code, result.err) == (0, "")
    assert "at irregular times, usually a reading of a sensor every" in result.out
    train = read_config()["train"]
    assert train["irregular"] is True
    assert "slots" not in train
    assert "per-slot" not in train
    assert "contamination" not in Path("deformer.toml").read_text()
    # Half of the gaps between readings of a sensor are below 50 s. The table is short: a window has four of them.
    assert train["window"] == "2m"
    # Options that need time slots are another answer.
    assert cli("init", "log.csv", "--yes", "--force", "--slots", "6").code == 0
    assert "irregular" not in read_config()["train"]


def test_irregular_readings_are_proposed_for_records_whose_sensors_report_several_times(
    cli: RunCommand, plant: Path
) -> None:
    write_irregular_table("record")
    assert cli("init", "log.csv", "--yes").code == 0
    train = read_config()["train"]
    assert train["irregular"] is True
    assert "window" not in train
    # With one reading of each sensor in a record, nothing is proposed.
    table = pd.read_csv("log.csv").drop_duplicates(["record", "feature"])
    table.to_csv("log.csv", index=False)
    assert cli("init", "log.csv", "--yes", "--force").code == 0
    assert "irregular" not in read_config()["train"]


def test_the_user_can_decline_irregular_readings(plant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(click.testing._NamedTextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(click.testing, "_NamedTextIOWrapper", Terminal)
    write_irregular_table("device")
    answers = ["no", "5m", "5", "", "", "", "", ""]
    result = CliRunner().invoke(init.build_init(), ["log.csv"], input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert "The times of the readings are irregular. Learn each reading with its own time (irregular)?" in result.output
    train = read_config()["train"]
    assert (train["window"], train["slots"]) == ("5m", 5)
    assert "irregular" not in train


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slots", "5"], ["--irregular", "--slots"]),
        (["--contamination", "1%"], ["--contamination", "irregular"]),
        (["--record", "row"], ["--irregular", "time"]),
    ],
)
def test_irregular_is_refused_with_options_that_contradict_it(
    cli: RunCommand, plant: Path, options: list[str], words: list[str]
) -> None:
    record = [] if "--record" in options else ["--record", "window"]
    label = ["--label", ""]
    result = cli("init", "plant.csv", "--yes", "--irregular", *label, *record, *options)
    assert (result.code, len(result.lines)) == (2, 1)
    assert all(word in result.err for word in words)
    assert cli("init", "plant.csv", "--yes", "--irregular", *label, "--record", "window", "--window", "2m").code == 0
    assert read_config()["train"]["irregular"] is True


def write_batches(result: str = "result", normal: str = "OK", other: str = "Schaum") -> None:
    """Write 600 batches to `batches.csv`: an id, times, a measurement, a total, a product, and the result."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "batch_id": [f"B{i:05d}" for i in range(600)],
            "started": pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(np.arange(600), unit="h"),
            "flow": rng.normal(20, 1, 600).round(3),
            "energy_total": np.cumsum(rng.uniform(5, 15, 600)).round(2),
            "product": rng.choice(["A", "B"], 600),
            result: np.where(np.arange(600) % 20 < 19, normal, other),
        }
    )
    table.to_csv("batches.csv", index=False)


@pytest.mark.parametrize(
    ("name", "normal"),
    [("result", "OK"), ("Bewertung", "i.O."), ("Prüfergebnis", "gut"), ("Störung", "keine"), ("Fehlercode", "0")],
)
def test_a_label_is_recognised_by_name_and_values(cli: RunCommand, plant: Path, name: str, normal: str) -> None:
    write_batches(name, normal, "7" if normal == "0" else "n.i.O.")
    result = cli("init", "batches.csv", "--yes")
    assert result.code == 0, result.err
    assert f"labels   {name}: {normal} (570 rows)" in result.out
    train = read_config()["train"]
    assert (train["label"], train["normal"]) == (name, normal)
    assert "note: the column" not in result.out


@pytest.mark.parametrize(("name", "normal", "other"), [("check", "ok", "Schaum"), ("Ergebnis", "A", "B")])
def test_a_label_is_not_chosen_on_weak_evidence_but_mentioned(
    cli: RunCommand, plant: Path, name: str, normal: str, other: str
) -> None:
    write_batches(name, normal, other)
    result = cli("init", "batches.csv", "--yes")
    assert result.code == 0, result.err
    assert f"labels?  {name}: {normal} (570 rows), {other} (30 rows)" in result.out
    note = f"note: the column {name} may say whether a row is normal ({normal} (570 rows), {other} (30 rows)): "
    assert f"{note}if so, add --label {name} --normal {normal}" in result.out.splitlines()
    assert "label" not in read_config()["train"]
    assert "may say" not in cli("init", "batches.csv", "--yes", "--force", "--label", "").out


def test_columns_with_few_texts_are_offered_as_labels(
    plant: Path, monkeypatch: pytest.MonkeyPatch, terminal: None
) -> None:
    write_batches("check", "fine", "foam")
    answers = ["row", "flow", "check", "", "", "", ""]
    result = CliRunner().invoke(init.build_init(), ["batches.csv"], input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    question = "Column that says whether a row is normal, such as product, check (- for none) [-]"
    assert question in result.output
    assert "'flow' is not a choice; answer one of: product, check, -" in result.output
    assert "Value of check in normal rows [fine]" in result.output
    train = read_config()["train"]
    assert (train["label"], train["normal"]) == ("check", "fine")


def test_the_value_of_normal_rows_is_checked(cli: RunCommand, plant: Path) -> None:
    write_batches()
    ended = cli("init", "batches.csv", "--yes", "--label", "result", "--normal", "ok")
    message = "--normal ok: no row has result = ok; the column contains OK (570 rows), Schaum (30 rows): give one of"
    assert (ended.code, len(ended.lines)) == (2, 1)
    assert message in ended.err
    ended = cli("init", "plant.csv", "--yes", "--label", "fault", "--normal", "okay")
    assert ended.code == 2
    assert "no row has fault = okay; the column contains 0 (900 rows), 1 (100 rows)" in ended.err
    assert cli("init", "plant.csv", "--yes", "--label", "fault", "--normal", " 0.0").code == 0
    assert read_config()["train"]["normal"] == "0"


def test_values_of_rows_that_were_not_read_are_permitted(
    cli: RunCommand, plant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_batches()
    monkeypatch.setattr("deformer_stream.cli.init.table_view.MAX_ROWS", 200)
    result = cli("init", "batches.csv", "--yes", "--label", "result", "--normal", "later")
    assert result.code == 0, result.err
    assert (
        "note: none of the first 200 rows has result = later; they have OK (190 rows), Schaum (10 rows)" in result.out
    )
    assert read_config()["train"]["normal"] == "later"


def test_totals_are_left_out_as_in_training(cli: RunCommand, plant: Path) -> None:
    write_batches()
    result = cli("init", "batches.csv", "--yes")
    line = next(line for line in result.out.splitlines() if line.startswith("energy_total"))
    assert line.split()[1:3] == ["left", "out"]
    assert "only rises in the course of time" in line
    assert Path("deformer.toml").read_text().startswith("# batches.csv: 600 rows, 2 features.")
    # Without times the rows may be sorted by the column.
    table = pd.read_csv("batches.csv").drop(columns="started")
    table.to_csv("batches.csv", index=False)
    result = cli("init", "batches.csv", "--yes", "--force")
    assert next(line for line in result.out.splitlines() if line.startswith("energy_total")).split()[1] == "continuous"


def read_proposed_id_column() -> str | None:
    """Return the column that a comment of the configuration proposes to name records by; None if there is none."""
    proposed = re.search(r'^# record-column = "(.*)"$', Path("deformer.toml").read_text(), re.MULTILINE)
    assert "record-column" not in read_config()
    return None if proposed is None else proposed[1]


def test_a_column_of_ids_is_proposed_to_name_the_records(cli: RunCommand, plant: Path, model_dir: Path) -> None:
    write_batches()
    assert cli("init", "batches.csv", "--yes").code == 0
    assert read_proposed_id_column() == "batch_id"
    table = pd.read_csv("batches.csv")
    table.rename(columns={"flow": "x", "batch_id": "order"}).to_csv("batches.csv", index=False)
    assert cli("init", "batches.csv", "--yes", "--force").code == 0
    assert read_proposed_id_column() == "order"
    for other in (
        table.assign(lot_no=table["batch_id"]),  # two columns of ids
        table.assign(batch_id=table["batch_id"].where(table.index != 5)),  # a row without id
        table.assign(batch_id=table["batch_id"].where(table.index != 5, "B00001")),  # a repeated id
        table.rename(columns={"batch_id": "row_id"}),
        table.rename(columns={"batch_id": "remark"}),
    ):
        other.to_csv("batches.csv", index=False)
        assert cli("init", "batches.csv", "--yes", "--force").code == 0
        assert read_proposed_id_column() is None
    table.to_csv("batches.csv", index=False)
    window = ["--record", "window", "--window", "2h", "--slots", "1"]
    assert cli("init", "batches.csv", "--yes", "--force", *window).code == 0
    assert read_proposed_id_column() is None


def write_local_readings() -> None:
    """Write readings with the quality of each one, and times without a zone, to `log.csv`."""
    n = 800
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "device": "pump-7",
            "feature": np.tile(["flow", "power"], n // 2),
            "value": rng.normal(20, 1, n).round(3),
            "time": pd.date_range("2026-01-01", periods=n // 2, freq="s").repeat(2).strftime("%d.%m.%Y %H:%M:%S"),
            "Quality": np.where(np.arange(n) % 50 == 0, "Bad", "Good"),
        }
    )
    table.loc[table["Quality"] == "Bad", "value"] = 99999
    table.to_csv("log.csv", index=False)


def test_times_without_a_zone_quality_and_fill_values_are_mentioned(
    cli: RunCommand, plant: Path, terminal: None
) -> None:
    write_local_readings()
    result = CliRunner().invoke(init.build_init(), ["log.csv", "--yes"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "note: the times have no zone and are taken as UTC; set --timezone, such as Europe/Berlin" in lines
    quality = "note: the column Quality is not Good for 2.0% of the readings; to leave these readings out, add "
    assert f"{quality}--where \"Quality = 'Good'\"" in lines
    assert (
        "warning  99999 occurs 16 times in sensor flow, far from all other values: is it a fill value?" in result.output
    )
    assert read_config()["timezone"] == "UTC"
    assert '\n# fill-values = ["99999"]\n' in Path("deformer.toml").read_text()
    options = ["--force", "--where", "Quality = 'Good'"]
    result = CliRunner().invoke(init.build_init(), ["log.csv", *options], input="\n" * 12)
    assert result.exit_code == 0, result.output
    assert "Time zone of the times, which state none, such as Europe/Berlin (UTC = the hours are those of UTC)" in (
        result.output
    )
    assert "note: the" not in result.output
    assert "99999" not in result.output
    assert read_config()["where"] == "Quality = 'Good'"
    assert "whether a row is normal" not in result.output


def test_a_table_of_readings_under_other_names_is_explained(cli: RunCommand, plant: Path) -> None:
    Path("log.csv").write_text("ts,tag,val\n2026-01-01 00:00:00,flow,20.5\n2026-01-01 00:00:01,flow,20.6\n")
    assert_command_failed(
        cli("init", "log.csv", "--yes"),
        3,
        "'tag'",
        "rename tag to feature, ts to time, val to value; add a column device",
    )


def test_large_files_are_estimated_from_their_beginning(plant: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"flow": rng.normal(120, 5, 60_000).round(3), "pressure": rng.normal(3, 1, 60_000).round(4)})
    Path("days").mkdir()
    table.to_csv("days/1.csv", index=False)
    table.to_csv("days/2.csv", index=False)
    view = look_at_tables(["days"], TableOptions())
    assert (view.num_files, view.num_rows_read, view.is_exact) == (2, 20_000, False)
    assert view.num_rows == pytest.approx(120_000, rel=0.05)


def test_the_order_the_times_and_the_device_of_rows_are_explained(cli: RunCommand, plant: Path) -> None:
    times = pd.date_range("2026-03-02", periods=600, freq="min")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"time": times.repeat(2), "device": ["P-1", "P-2"] * 600, "flow": rng.normal(size=1200)})
    table[::-1].to_csv("plant.csv", index=False)
    result = cli("init", "plant.csv", "--yes")
    assert "most rows are earlier than the row before: sort the table by time" in result.out
    assert "with --record window --window 1m --slots 1 each row is a record of its device" in result.out
    table["time"] = table["time"].dt.strftime("%m/%d/%Y %I:%M %p")
    table.to_csv("plant.csv", index=False)
    result = cli("init", "plant.csv", "--yes", "--force")
    assert "warning  not all times in the column time can be read: the time '03/02/2026 12:00 AM'" in result.out


def test_text_for_no_value_is_a_label_among_codes(plant: Path) -> None:
    pd.DataFrame({"flow": np.arange(1000) * 0.37 % 5, "fault": ["none"] * 980 + ["12", "13"] * 10}).to_csv(
        "plant.csv", index=False
    )
    view = look_at_tables(["plant.csv"], TableOptions())
    assert view.label_counts == {"fault": {"none": 980, "12": 10, "13": 10}}


def test_rows_after_a_column_has_changed_its_type_are_counted(plant: Path) -> None:
    table = pd.DataFrame(
        {"note": "x" * 80, "flow": ["120"] * 15_000 + ["broken"] * 4000, "time": pd.date_range("2026", periods=19_000)}
    )
    table.to_csv("plant.csv", index=False)
    view = look_at_tables(["plant.csv"], TableOptions())
    assert view.num_rows_read < 19_000  # the first rows, in which the column contains numbers
    assert (view.num_rows, view.is_exact) == (19_000, True)
    assert view.span == pytest.approx(19_000 * 86_400, rel=1e-3)


@pytest.mark.parametrize(
    ("column", "values", "normal"),
    [
        ("fault", ["0", "1"], "0"),
        ("is_normal", ["0", "1"], "1"),
        ("label", ["Leak", "Normal"], "Normal"),
        ("anomaly", ["false", "true"], "false"),
        ("fault", ["bearing", "none"], "none"),
        ("label", ["a", "b"], "b"),
        ("result", ["i. O.", "n.i.O."], "i. O."),
        ("Befund", ["x", "o.B."], "o.B."),
        ("result", ["OK", "ok"], "ok"),
        ("Fehler", ["Leck", "kein Fehler"], "kein Fehler"),
    ],
)
def test_normal_values_are_guessed(column: str, values: list[str], normal: str) -> None:
    assert choose_normal_value(column, {values[0]: 10, values[1]: 20}) == normal


@pytest.mark.parametrize(
    ("num_records", "expected"), [(None, False), (90, False), (100, True), (296, True), (297, False)]
)
def test_small_tables_get_folds(num_records: int | None, expected: bool) -> None:
    assert needs_folds(num_records, 0.01) is expected


# deformer.toml


def test_a_configuration_in_the_current_folder_is_read_by_default(cli: RunCommand, plant: Path) -> None:
    Path("deformer.toml").write_text("alpha = 0.2\n")
    Path("other.toml").write_text("alpha = 0.3\n")
    assert "alpha = 0.2   # from deformer.toml" in cli("config", "replay").out
    assert "alpha = 0.3   # from other.toml" in cli("config", "replay", "--config", "other.toml").out
    assert "alpha = 0.01" in cli("config", "replay", "--config", "").out.replace('"', "")


def test_flags_and_environment_precede_the_configuration(
    cli: RunCommand, plant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("deformer.toml").write_text('model = "nowhere"\n')
    assert_command_failed(cli("replay", "plant.csv"), 3, "nowhere")
    monkeypatch.setenv("DEFORMER_MODEL", "elsewhere")
    assert_command_failed(cli("replay", "plant.csv"), 3, "elsewhere")
    assert_command_failed(cli("replay", "plant.csv", "--model", "here"), 3, "here")


# topics


def encode(*objects: dict[str, Any]) -> list[tuple[bytes, int]]:
    """Return JSON objects as messages with the timestamp of the broker."""
    return [(json.dumps(entry).encode(), 1_767_225_600_000) for entry in objects]


def test_fields_of_messages_are_guessed() -> None:
    messages = encode({"machine": "p1", "Sensor": "flow", "val": 20.5, "ts": 1_767_225_600}, {"hello": "world"})
    converted = convert_to_table([*messages, (b"\xff not json", 0)], "sensors")
    assert converted.table.to_pylist() == [{"device": "p1", "feature": "flow", "value": 20.5, "time": 1_767_225_600.0}]
    assert (converted.num_messages, converted.num_left_out) == (3, 2)
    assert converted.field_by_option == {
        "device_field": "machine",
        "feature_field": "Sensor",
        "value_field": "val",
        "time_field": "ts",
    }


def test_messages_with_several_readings() -> None:
    messages = encode({"record": "r1", "values": {"flow": 20.5, "mode": "auto"}})
    converted = convert_to_table(messages, "sensors")
    assert converted.field_by_option == {}
    table = converted.table
    assert table.column("value").to_pylist() == ["20.5", "auto"]
    assert table.column("time").to_pylist() == [1_767_225_600.0] * 2


def test_values_and_times_of_all_messages_have_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are converted in chunks, of which one may have numbers and another one texts."""
    monkeypatch.setattr("deformer_stream.cli.init.messages.ROWS_PER_CHUNK", 2)
    readings = [
        ("r1", 20.5, 1),
        ("r1", True, 2),
        ("r2", 7, 3),
        ("r2", "auto", "2026-01-01"),
        ("r2", None, 4),
        ("r3", 12345678901, 1767225609999),
    ]
    lines = [{"record": record, "feature": "x", "value": value, "time": time} for record, value, time in readings]
    table = convert_to_table([(json.dumps(line).encode(), None) for line in lines], "file").table
    assert table.column_names == ["record", "feature", "value", "time"]
    assert table["value"].to_pylist() == ["20.5", "true", "7", "auto", "12345678901"]
    assert table["time"].to_pylist() == ["1", "2", "3", "2026-01-01", "1767225609999"]
    large = [{"record": "r", "feature": "x", "value": 2**60 + 1, "time": 1_767_225_600_000_000_001}]
    row = convert_to_table([(json.dumps(line).encode(), None) for line in large], "file").table.to_pylist()[0]
    assert (row["value"], row["time"]) == (2.0**60, 1_767_225_600_000_000_001.0)
    untimed = [(json.dumps({"record": "a", "feature": "x", "value": i}).encode(), None) for i in range(3)]
    assert convert_to_table(untimed, "file").table.column_names == ["record", "feature", "value"]


def test_json_lines_are_converted_to_a_table_to_train_on(cli: RunCommand, plant: Path) -> None:
    readings = [
        {"machine": f"pump-{i % 2}", "tag": tag, "v": value, "ts": 1_767_225_600 + i // 2}
        for i in range(600)
        for tag, value in (("flow", 20 + 0.1 * (i % 7)), ("mode", "auto" if i % 3 else "manual"))
    ]
    Path("log.jsonl").write_text("".join(json.dumps(reading) + "\n" for reading in readings) + "\nbroken\n")
    result = cli("init", "log.jsonl", "--yes")
    assert result.code == 0, result.err
    assert "1 of 1,201 messages of log.jsonl are left out, because they are no readings" in result.err
    assert "devices  2 in the column device: pump-0, pump-1" in result.out
    assert [line.strip() for line in result.out.splitlines()[-2:]] == [
        "deformer-train log.parquet",
        "deformer-stream replay log.jsonl",
    ]
    config = read_config()
    assert (config["feature-field"], config["value-field"], config["device-field"]) == ("tag", "v", "machine")
    table = pd.read_parquet("log.parquet")
    assert list(table.columns) == ["device", "feature", "value", "time"]
    assert table["value"].tolist()[:2] == ["20", "manual"]
    assert_command_failed(
        cli("init", "log.jsonl", "--yes", "--output", "other.toml"), 2, "log.parquet exists", "--save"
    )
    assert cli("init", "log.jsonl", "--yes", "--force", "--save", "other.parquet").code == 0
    assert pd.read_parquet("other.parquet").equals(table)
    Path("log.parquet").unlink()
    Path("deformer.toml").unlink()
    assert cli("init", "log.jsonl", "--yes", "--label", "nosuch").code == 2
    assert not Path("log.parquet").exists()
    result = cli("init", "log.jsonl", "--yes", "--force", "--save", "log.jsonl")
    assert_command_failed(result, 2, "--save", "log.jsonl")
    assert Path("log.jsonl").read_bytes().startswith(b"{")


def test_a_table_of_json_lines_is_read_with_the_options_for_the_lines(
    cli: RunCommand, plant: Path, model_dir: Path, table: pa.Table
) -> None:
    """The lines have other names of fields than the table, and both give the same scores."""
    events = [{"id": e["record"], "Tag": e["feature"], "v": e["value"], "ts": e["time"]} for e in list_events(table)]
    lines = [json.dumps({"run": event["id"], **event}) for event in events]
    Path("log.jsonl").write_text("\n".join(lines) + "\n")
    assert cli("init", "log.jsonl", "--yes").code == 0
    assert {"record-field", "feature-field", "value-field", "time-field"} <= read_config().keys()
    for name in ("log.jsonl", "log.parquet"):
        result = cli("replay", name, "--model", model_dir, "--records", f"{name}.records", "--alerts", "alerts.jsonl")
        assert result.code == 0, result.err
    lines_records, table_records = (pd.read_parquet(f"log.{ending}.records") for ending in ("jsonl", "parquet"))
    assert len(table_records) > 0
    pd.testing.assert_frame_equal(lines_records, table_records)


def test_times_in_milliseconds_are_recognised(cli: RunCommand, plant: Path, model_dir: Path, table: pa.Table) -> None:
    """Lines with milliseconds give the same records as those with seconds, and so do the tables of their readings."""
    events = list_events(table)
    for name, factor in (("s", 1), ("ms", 1000)):
        lines = [json.dumps({**event, "time": event["time"] * factor}) for event in events]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        result = cli("init", f"{name}.jsonl", "--yes", "--force")
        assert result.code == 0, result.err
        assert read_config().get("time-unit", "s") == name
        assert any(line.split()[:3] == ["time", "time", "2023-11-14"] for line in result.out.splitlines())
        for ending in ("jsonl", "parquet"):
            records = f"{name}-{ending}.records"
            result = cli(
                "replay", f"{name}.{ending}", "--model", model_dir, "--records", records, "--alerts", "a.jsonl"
            )
            assert result.code == 0, result.err
    first, *others = [pd.read_parquet(f"{name}-{end}.records") for name in ("s", "ms") for end in ("jsonl", "parquet")]
    assert len(first) > 0
    for other in others:
        pd.testing.assert_frame_equal(first, other)


def test_messages_without_a_time_get_their_timestamp_in_the_unit_of_the_others() -> None:
    event = {"device": "p", "feature": "x", "value": 1}
    messages = [({**event, "time": 1_767_225_600_500}, None), (event, 1_767_225_601_500)]
    converted = convert_to_table([(json.dumps(message).encode(), time) for message, time in messages], "topic")
    assert converted.time_unit == "ms"
    assert converted.table["time"].to_pylist() == [1_767_225_600_500.0, 1_767_225_601_500.0]


def test_a_column_of_unix_times_is_the_time_of_a_wide_table(cli: RunCommand, plant: Path) -> None:
    rng = np.random.default_rng(3)
    rows = pd.DataFrame({"n": rng.integers(0, 5, 400), "flow": rng.normal(20, 1, 400), "power": rng.normal(9, 1, 400)})
    rows["clock"] = 1_767_225_600_000 + 1000 * np.arange(400) + rng.integers(0, 900, 400)
    rows.to_csv("wide.csv", index=False)
    result = cli("init", "wide.csv", "--yes", "--record", "window", "--window", "10s", "--slots", "1")
    assert result.code == 0, result.err
    config = read_config()
    assert (config["time-unit"], config["time-column"]) == ("ms", "clock")
    result = cli("produce", "wide.csv", "--output", "events.jsonl")
    assert result.code == 0, result.err
    first = json.loads(Path("events.jsonl").read_text().splitlines()[0])
    assert first["time"] == rows["clock"][0]  # in the unit that the configuration states for all commands
    # A meter that rises is no clock.
    rows.rename(columns={"clock": "energy_wh"}).assign(energy_wh=rows["clock"] // 1000).to_csv("wide.csv", index=False)
    result = cli("init", "wide.csv", "--yes", "--force")
    assert not {"time-unit", "time-column"} & read_config().keys()


def test_the_unit_of_times_of_json_lines_can_be_set(cli: RunCommand, plant: Path) -> None:
    """Times that count from the start of a test are small in any unit."""
    lines = [json.dumps({"device": "p", "feature": "x", "value": i % 7, "time": 1000 * i}) for i in range(200)]
    Path("e.jsonl").write_text("\n".join(lines) + "\n")
    result = cli("init", "e.jsonl", "--yes", "--time-unit", "ms")
    assert "a reading of each sensor every 1 s" in result.out
    assert read_config()["time-unit"] == "ms"
    refused = cli("init", "e.jsonl", "--yes", "--force", "--where", "value > 0")
    assert_command_failed(refused, 2, "--where chooses rows of tables")


def test_readings_that_are_not_finite_are_left_out() -> None:
    """The other readings of their message stay. A message may precede those with readings."""
    line = b'{"record": "r", "values": {"x": NaN, "y": 1.5, "z": Infinity}}'
    converted = convert_to_table(
        [(b'{"time": 1, "status": "up"}', None), (line, None), (b'{"record": "\\ud800"}', None)], "f"
    )
    assert converted.table.to_pylist() == [{"record": "r", "feature": "y", "value": 1.5}]
    assert (converted.num_messages, converted.num_left_out) == (3, 2)


def test_json_lines_without_readings_are_refused(cli: RunCommand, plant: Path) -> None:
    Path("log.jsonl").write_text('{"a": 1}\n')
    assert_command_failed(cli("init", "log.jsonl", "--yes"), 3, "log.jsonl: the messages have the fields a")
    assert not Path("log.parquet").exists()
    Path("log.jsonl").write_text("")
    assert_command_failed(cli("init", "log.jsonl", "--yes"), 3, "log.jsonl: there is no message")


@pytest.mark.parametrize(
    ("messages", "words"),
    [([], "there is no message"), ([(b"[1]", 0)], "no message is a JSON object"), (encode({"a": 1}), "fields a")],
)
def test_topics_without_readings_are_refused(messages: list[tuple[bytes, int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        convert_to_table(messages, "sensors")


@pytest.mark.kafka
def test_a_topic(cli: RunCommand, plant: Path, kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    from connectors.kafka import produce

    name = topic(partitions=2)
    readings = [
        {"device": f"pump-{i % 3}", "sensor": sensor, "value": 20 + 0.1 * (i % 7), "time": 1_767_225_600 + i // 3}
        for i in range(300)
        for sensor in ("flow", "power")
    ]
    messages = [(str(entry["device"]).encode(), json.dumps(entry).encode(), None) for entry in readings]
    produce(kafka.cluster, name, messages)
    words = ["--topic", name, "--bootstrap-servers", kafka.bootstrap, "--yes"]
    # The messages that are there are enough, so the command does not wait for others.
    result = cli("init", *words, "--listen", "1h")
    assert result.code == 0, result.err
    assert "devices  3 in the column device: pump-0, pump-1, pump-2" in result.out
    config = read_config()
    assert config["feature-field"] == "sensor"
    assert config["bootstrap-servers"] == kafka.bootstrap
    assert config["consume"]["topic"] == name
    assert config["train"]["window"] == "10s"
    assert "    deformer-stream consume" in result.out.splitlines()


def test_the_connection_is_written_without_secrets(
    cli: RunCommand, plant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters: list[KafkaCluster] = []

    def read_messages(cluster: KafkaCluster, *_: Any) -> list[tuple[bytes, int]]:
        clusters.append(cluster)
        readings = ({"device": "a", "feature": "flow", "value": i, "time": 1_767_225_600 + i} for i in range(300))
        return [(json.dumps(reading).encode(), 0) for reading in readings]

    monkeypatch.setattr("connectors.kafka.sample.read_messages", lambda *_: [])
    result = cli("init", "--topic", "t", "--yes")
    assert result.code == 3
    assert result.lines[-1].endswith("topic t: no message has arrived within 5 s; add --listen 1m")
    monkeypatch.setattr("connectors.kafka.sample.read_messages", read_messages)
    Path("token").write_text("hunter2\n")
    login = ["--sasl-mechanism", "OAUTHBEARER", "--sasl-oauth-token-file", "token"]
    client = ["--client", "kafka-python", "--client-option", "client_id=hunter2"]
    words = ["--topic", "t", "--yes", "--security-protocol", "SASL_SSL", *login, *client]
    result = cli("init", *words)
    assert result.code == 0, result.err
    config = read_config()
    assert config["client"] == "kafka-python"
    assert config["sasl-mechanism"] == "OAUTHBEARER"
    assert config["sasl-oauth-token-file"] == "token"
    assert config["security-protocol"] == "SASL_SSL"
    assert not {"client-option", "sasl-username", "ssl-cafile"} & config.keys()
    assert "hunter2" not in Path("deformer.toml").read_text()
    (cluster,) = clusters
    assert cluster.options == {"client_id": "hunter2"}
    assert cluster.security["sasl_oauth_token_file"] == "token"
    assert "hunter2" not in repr(cluster)


@pytest.mark.kafka
def test_readings_of_a_topic_are_saved_as_a_table_to_train_on(
    cli: RunCommand, plant: Path, kafka: SimpleNamespace, topic: Callable[..., str]
) -> None:
    from connectors.kafka import produce

    name = topic()
    has_ended = threading.Event()

    def send() -> None:
        """Send readings until the command has ended, because it reads only those that arrive while it runs."""
        second = 0
        while not has_ended.is_set():
            readings = [
                {
                    "device": "pump-7",
                    "feature": feature,
                    "value": 20 + 0.1 * (second % 7),
                    "time": 1_767_225_600 + second,
                }
                for feature in ("flow", "power")
            ]
            produce(kafka.cluster, name, [(b"pump-7", json.dumps(entry).encode(), None) for entry in readings])
            second += 1

    sender = threading.Thread(target=send)
    sender.start()
    try:
        words = ["--topic", name, "--bootstrap-servers", kafka.bootstrap, "--yes"]
        result = cli("init", *words, "--listen", "10s", "--save", "readings.parquet")
    finally:
        has_ended.set()
        sender.join()
    assert result.code == 0, result.err
    assert "    deformer-train readings.parquet" in result.out.splitlines()
    table = pd.read_parquet("readings.parquet")
    assert list(table.columns) == ["device", "feature", "value", "time"]
    assert set(table["feature"]) == {"flow", "power"}
    assert read_config()["consume"]["topic"] == name
