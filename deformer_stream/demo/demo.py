"""The whole job in three minutes, with Python only: simulate pumps, train, stream, alert, report.

The readings take the same road as those of a real consumer (`runtime.Road`); only the source is embedded. What kind of
fault a record has is known to the simulator alone and is put beside the alerts for the reader's sake.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import webbrowser
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deformer_stream import model_store
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Payload
from deformer_stream.demo.report import Outcome, Reading, Summary, headline, reasons, report, summarise
from deformer_stream.demo.simulate import FEATURES, SPREAD, Fleet, simulate
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Alert, Effects
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema
from deformer_stream.report import html
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import EventClock, Pipeline, Totals
from deformer_stream.testing import MemorySource

ALPHA = 0.01
TRAINING_RECORDS = 12_000
NORMAL_RECORDS, FAULTY_RECORDS = 1_500, 150
CHUNK = 64  # readings in one poll


class Watch:
    """A sink that prints alerts as they fall and remembers what the summary needs. faults: of every record, by id."""

    def __init__(self, console: Console, schema: Schema, faults: dict[str, str]) -> None:
        self.console, self.schema, self.faults = console, schema, faults
        self.traces: dict[str, list[Reading]] = defaultdict(list)
        self.alerts: dict[str, Alert] = {}

    def write(self, effects: Effects, data: Payload | None) -> None:
        batch, scored = effects.batch, effects.scored
        for i, event in enumerate(scored.event_indices.tolist()):
            feature = self.schema.features[int(batch.features[event])]
            value = float(batch.values[event])
            shown = batch.unseen_labels.get(event) or feature.labels[int(value)] if feature.labels else value
            reading = Reading(feature.name, shown, float(scored.score[i]), float(scored.p_value[i]))
            self.traces[batch.record_ids[event]].append(reading)
        for alert in effects.alerts:
            self.alerts[alert.record] = alert
            self.console.print(alert_line(alert, self.faults[alert.record]), soft_wrap=True)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is held open."""

    def outcomes(self) -> list[Outcome]:
        """Of every record, in the order given."""
        return [
            Outcome(record, fault, len(self.traces[record]), self.alerts.get(record))
            for record, fault in self.faults.items()
        ]


def alert_line(alert: Alert, fault: str) -> Text:
    """An alert on one line of the terminal."""
    pump = alert.record.split("/")[0]
    kind = Text(f"{fault:17s}", "bold red") if fault else Text(f"{'— false alarm':17s}", "yellow")
    seen = f"after {alert.features_seen:2d} of {alert.features_expected} readings"
    first = reasons(alert)[0] if alert.contributions else ""
    return Text.assemble(f"  {pump}  ", kind, f"  {seen}  p = {alert.p_value:<7.4f} ", Text(first, "dim"))


def run(output: Path, seed: int, train_time: str = "60s", open_report: bool = False) -> int:
    """Run the demo; writes `normal.parquet`, `model/`, `pumps.parquet` (the records that are streamed) and
    `report.html` under `output`. Returns the exit status: 0, or the trainer's where it fails. Raises `ConfigError`
    where `output` cannot be written."""
    console = Console(highlight=False)
    table, model = output / "normal.parquet", output / "model"

    step(console, 1, f"Simulate twelve pumps: {TRAINING_RECORDS:,} normal records of {len(FEATURES)} sensors")
    try:
        output.mkdir(parents=True, exist_ok=True)
        pq.write_table(simulate(TRAINING_RECORDS, seed=2 * seed).normals(), table)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written ({error.strerror or error}); name another") from None
    console.print(f"  wrote {table}")

    step(console, 2, f"Learn what is normal ({train_time} on this machine)")
    code = train(console, table, model, seed, train_time)
    if code:
        return code

    total = NORMAL_RECORDS + FAULTY_RECORDS
    step(
        console,
        3,
        f"Stream {NORMAL_RECORDS:,} normal and {FAULTY_RECORDS} faulty records, reading by reading, shuffled",
    )
    detector = model_store.read(model)
    fleet = simulate(total, seed=2 * seed + 1, fault_share=FAULTY_RECORDS / total)
    pq.write_table(fleet.table.drop_columns(["fault"]), output / "pumps.parquet")
    started = time.monotonic()
    watch, totals = stream(console, detector, fleet)
    seconds = time.monotonic() - started
    rate = totals.events / max(seconds, 1e-9)
    console.print(f"  {totals.events:,} readings in {seconds:.1f} s ({rate:,.0f} a second)")

    step(console, 4, "What the alerts were worth")
    outcomes = watch.outcomes()
    summary = summarise(outcomes, ALPHA, len(detector.calibration.scores))
    show(console, summary)
    path = (output / "report.html").resolve()
    path.write_text(report(summary, outcomes, watch.traces, detector.calibration.compute_threshold(ALPHA)), encoding="utf-8")
    console.print(f"\nReport to open in a browser: {path}", soft_wrap=True)
    console.print(f"For a try of your own (README, Quick start): {table}, {output / 'pumps.parquet'}", soft_wrap=True)
    if open_report:
        webbrowser.open(path.as_uri())
    return 0


def step(console: Console, number: int, words: str) -> None:
    console.print(Text(f"\n{number}  {words}", "bold"), soft_wrap=True)


def train(console: Console, table: Path, model: Path, seed: int, train_time: str) -> int:
    """Run the trainer as a child process, its output shown; returns its exit status."""
    options = [
        "--out",
        str(model),
        "--preset",
        "tiny",
        "--max-time",
        train_time,
        "--exclude",
        "record,time",
        "--seed",
        str(seed),
    ]
    console.print(Text("  $ " + " ".join(["deformer-train", str(table), *options]), "cyan"), soft_wrap=True)
    sys.stdout.flush()
    command = [sys.executable, "-m", "trainer.cli", str(table), *options]
    # Threads that wait by spinning lose a factor of ten where other programs want the processors, too.
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode  # noqa: S603 - ours


def stream(console: Console, detector: model_store.Artifact, fleet: Fleet) -> tuple[Watch, Totals]:
    """All readings of the fleet, in order of arrival, down the road."""
    faults = dict(zip(fleet.table["record"].to_pylist(), fleet.table["fault"].to_pylist(), strict=True))
    watch = Watch(console, detector.schema, faults)
    # A reading is under way for `SPREAD` seconds at most, so a record that is silent for longer will get no more.
    limits = Limits(record_timeout=round((SPREAD + 1) * 1e6))
    road = Pipeline(
        source=MemorySource(fleet.messages(), chunk=CHUNK),
        codec=Codec(detector.schema),
        engine=Engine(detector.model, detector.calibration, detector.fingerprint, ALPHA, limits),
        sinks=[watch],
        clock=EventClock(),
        metrics=Metrics(),
        finite=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a poll brings a few dozen readings: too little work to share
    try:
        return watch, road.run(threading.Event())
    finally:
        torch.set_num_threads(threads)


def show(console: Console, summary: Summary) -> None:
    """The summary on the terminal."""
    table = Table("fault", "records", "detected", "seen at the alert", box=None, pad_edge=False, padding=(0, 2))
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, (records, detected, share) in summary.by_kind.items():
        table.add_row(kind, str(records), html.percent(detected / records, 0), html.percent(share, 0))
    overall = html.percent(summary.detected / max(summary.faulty, 1), 0), html.percent(summary.mean_share, 0)
    table.add_row("all", str(summary.faulty), *overall, style="bold")
    console.print(table)
    console.print()
    for name, value in headline(summary).items():
        console.print(f"  {name}: [bold]{value}[/bold]", soft_wrap=True)
