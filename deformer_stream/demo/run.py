"""Run the demo: simulate pumps, train a model, stream readings, raise alerts, and write a report.

It takes three minutes and needs Python only. The readings pass through the same pipeline as those of a real consumer
(`runtime.pipeline`), but from a source in memory. The model and the engine are not given the faults that the simulator
put into the records; the demo shows these faults next to the alerts.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deformer_stream import model_store
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Payload
from deformer_stream.demo.report import (
    Outcome,
    Reading,
    Summary,
    explain_alert,
    format_key_figures,
    render_report,
    summarize,
)
from deformer_stream.demo.simulate import FEATURES, MAX_DELAY, SimulatedFleet, simulate
from deformer_stream.demo.training import run_trainer
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import Alert, Effects
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema
from deformer_stream.report import pages
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.pipeline_report import Totals
from deformer_stream.runtime.timing import EventClock
from deformer_stream.testing import MemorySource

ALPHA = 0.01
"""False-alarm rate of the demo: an alert is raised if a record's p-value is at most this."""

NUM_TRAINING_RECORDS = 12_000
NUM_NORMAL_RECORDS = 1_500
NUM_FAULTY_RECORDS = 150

READINGS_PER_POLL = 64
"""Number of readings that the source in memory returns at once."""


class AlertPrinter:
    """A sink of the pipeline that prints alerts when they are raised, and keeps all scored readings for the report.

    Attributes:
        console: The terminal to print on.
        schema: The features of the model. The sink needs it to convert label codes (integers) back to labels.
        fault_by_record: Kind of the simulated fault by record id for all records, "" for normal records.
        readings_by_record: Scored readings by record id, in order of arrival.
        alert_by_record: Alerts by record id, for the records that raised one.
    """

    def __init__(self, console: Console, schema: Schema, fault_by_record: dict[str, str]) -> None:
        self.console, self.schema, self.fault_by_record = console, schema, fault_by_record
        self.readings_by_record: dict[str, list[Reading]] = defaultdict(list)
        self.alert_by_record: dict[str, Alert] = {}

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Keep the scored readings of one batch, and print its alerts.

        Args:
            effects: What the engine returned for the batch: scored readings and alerts.
            data: The messages from which the batch was decoded. They are not used.
        """
        batch, scored = effects.batch, effects.scored
        # `event_index` is the position of a scored reading in the batch, `i` its position among the scored readings.
        for i, event_index in enumerate(scored.event_indices.tolist()):
            feature = self.schema.features[int(batch.features[event_index])]
            value: float | str = float(batch.values[event_index])
            if feature.labels:
                # A label that the training data did not have has no code, so the batch stores its text. Otherwise the
                # value is the label's code: its index in `feature.labels`.
                value = batch.unseen_labels.get(event_index) or feature.labels[int(value)]
            reading = Reading(feature.name, value, float(scored.score[i]), float(scored.p_value[i]))
            self.readings_by_record[batch.record_ids[event_index]].append(reading)
        for alert in effects.alerts:
            self.alert_by_record[alert.record] = alert
            self.console.print(format_alert(alert, self.fault_by_record[alert.record]), soft_wrap=True)

    def flush(self) -> None:
        """Do nothing: `write` prints alerts immediately, so nothing is buffered."""

    def close(self) -> None:
        """Do nothing: the sink has no files or connections to close."""

    def get_outcomes(self) -> list[Outcome]:
        """Return the outcome (fault, number of readings, alert) of every record, in the order of `fault_by_record`."""
        return [
            Outcome(record, fault, len(self.readings_by_record[record]), self.alert_by_record.get(record))
            for record, fault in self.fault_by_record.items()
        ]


def format_alert(alert: Alert, fault: str) -> Text:
    """Return an alert as one coloured line for the terminal.

    The line names the pump, the simulated fault, how many readings had arrived, the p-value and the most suspicious
    reading.

    Args:
        alert: The alert.
        fault: Kind of fault of its record, "" if the record is normal and the alert is false.
    """
    pump = alert.record.split("/")[0]  # a record id is PUMP/NUMBER
    kind = Text(f"{fault:17s}", "bold red") if fault else Text(f"{'— false alarm':17s}", "yellow")
    progress = f"after {alert.features_seen:2d} of {alert.features_expected} readings"
    explanation = explain_alert(alert)[0] if alert.contributions else ""
    return Text.assemble(f"  {pump}  ", kind, f"  {progress}  p = {alert.p_value:<7.4f} ", Text(explanation, "dim"))


def run_demo(output: Path, seed: int, train_time: str = "60s") -> int:
    """Run the demo: simulate pumps, train a model, stream readings through it, and write a report.

    Args:
        output: Folder to which `normal.parquet` (the training records), `model/`, `pumps.parquet` (the streamed
            records), `labelled-pumps.parquet` (the same with the column `fault`) and `report.html` are written.
        seed: Seed of the simulated records and of the training.
        train_time: Time limit of the training, such as "60s".

    Returns:
        The exit code of the demo: 0, or the exit code of the trainer if the training fails.

    Raises:
        ConfigError: If the folder cannot be written.
    """
    console = Console(highlight=False)
    table, model = output / "normal.parquet", output / "model"
    create_output(output)

    _print_step(
        console, 1, f"Simulate twelve pumps: {NUM_TRAINING_RECORDS:,} normal records of {len(FEATURES)} sensors"
    )
    # Even seeds are for training records and odd seeds for streamed records, so that they always differ.
    normal_records = simulate(NUM_TRAINING_RECORDS, seed=2 * seed).select_normal_records()
    with map_output_errors(output):
        pq.write_table(normal_records, table)
    console.print(f"  wrote {table}")

    _print_step(console, 2, f"Train on normal records ({train_time} on this machine)")
    exit_code = run_trainer(console, table, model, seed, train_time)
    if exit_code:
        return exit_code

    num_records = NUM_NORMAL_RECORDS + NUM_FAULTY_RECORDS
    _print_step(
        console,
        3,
        f"Stream {NUM_NORMAL_RECORDS:,} normal and {NUM_FAULTY_RECORDS} faulty records, reading by reading, shuffled",
    )
    detector = model_store.read(model)
    fleet = simulate(num_records, seed=2 * seed + 1, fault_share=NUM_FAULTY_RECORDS / num_records)
    with map_output_errors(output):
        pq.write_table(fleet.table.drop_columns(["fault"]), output / "pumps.parquet")
        pq.write_table(name_normal_records(fleet.table), output / "labelled-pumps.parquet")
    started_at = time.monotonic()
    printer, totals = stream_readings(console, detector, fleet)
    seconds = time.monotonic() - started_at
    rate = totals.events / max(seconds, 1e-9)
    console.print(f"  {totals.events:,} readings in {seconds:.1f} s ({rate:,.0f} a second)")

    _print_step(console, 4, "Results")
    outcomes = printer.get_outcomes()
    summary = summarize(outcomes, ALPHA, len(detector.calibration.scores))
    print_summary(console, summary)
    path = (output / "report.html").resolve()
    threshold = detector.calibration.compute_threshold(ALPHA)
    text = render_report(summary, outcomes, printer.readings_by_record, threshold)
    with map_output_errors(output):
        path.write_text(text, encoding="utf-8")
    console.print(f"\nReport to open in a browser: {path}", soft_wrap=True)
    console.print(
        f"Tables to try commands on (README, Quick start): {table}, {output / 'pumps.parquet'}, "
        f"{output / 'labelled-pumps.parquet'}",
        soft_wrap=True,
    )
    return 0


def name_normal_records(table: pa.Table) -> pa.Table:
    """Return a table of simulated records whose column `fault` is "none", and not empty, for normal records."""
    faults = table.column("fault")
    named = pc.if_else(pc.equal(faults, ""), "none", faults)
    return table.set_column(table.schema.get_field_index("fault"), "fault", named)


def create_output(output: Path) -> None:
    """Create the folder of the demo, if it does not exist.

    Raises:
        ConfigError: It cannot be created.
    """
    with map_output_errors(output):
        output.mkdir(parents=True, exist_ok=True)


@contextmanager
def map_output_errors(output: Path) -> Iterator[None]:
    """Return a context manager that replaces an `OSError` by `ConfigError`, for code that writes to the folder.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the folder --output {output} cannot be written ({error.strerror or error}); choose another folder"
        ) from None


def _print_step(console: Console, number: int, words: str) -> None:
    """Print the heading of a step of the demo: the number of the step and the given words."""
    console.print(Text(f"\n{number}  {words}", "bold"), soft_wrap=True)


def stream_readings(
    console: Console, detector: model_store.Artifact, fleet: SimulatedFleet
) -> tuple[AlertPrinter, Totals]:
    """Score all readings of the simulated pumps in order of arrival, and print alerts.

    The readings pass through the same pipeline as those of a real consumer.

    Args:
        console: The terminal on which alerts are printed.
        detector: The trained model with its calibration.
        fleet: The simulated records, with the time at which each reading arrives.

    Returns:
        A pair. First, the sink, which has kept the scored readings and the alerts. Second, the totals of the pipeline,
        such as the number of events.
    """
    fault_by_record = dict(zip(fleet.table["record"].to_pylist(), fleet.table["fault"].to_pylist(), strict=True))
    printer = AlertPrinter(console, detector.schema, fault_by_record)
    # A reading arrives at most MAX_DELAY seconds after its measurement. So a record that has received no reading for
    # this time and a margin of 1 s is complete and can be closed. The engine counts in microseconds.
    limits = Limits(record_timeout=round((MAX_DELAY + 1) * 1e6))
    pipeline = Pipeline(
        source=MemorySource(fleet.iterate_messages(), chunk=READINGS_PER_POLL),
        codec=Codec(detector.schema),
        engines=EngineSet.of_only_model(
            Engine(detector.scoring_model, detector.calibration, detector.fingerprint, ALPHA, limits)
        ),
        sinks=[printer],
        clock=EventClock(),  # timeouts follow the event times, because the stream is replayed as fast as possible
        metrics=Metrics(),
        is_finite=True,  # the pipeline ends when the source has no more messages
        log_alert_share=False,  # many of the simulated records are faulty, so more than alpha of them alert
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a poll has a few dozen readings, which is too little work for several threads
    try:
        return printer, pipeline.run(threading.Event())
    finally:
        torch.set_num_threads(num_threads)


def print_summary(console: Console, summary: Summary) -> None:
    """Print a table of how many faults of each kind were detected and how early, and the key figures of the demo."""
    table = Table("fault", "records", "detected", "seen at the alert", box=None, pad_edge=False, padding=(0, 2))
    for column in table.columns[1:]:
        column.justify = "right"
    for fault, detection in summary.detection_by_fault.items():
        detected_share = detection.num_detected / detection.num_records
        table.add_row(
            fault,
            str(detection.num_records),
            pages.format_percent(detected_share, 0),
            pages.format_percent(detection.mean_share_seen, 0),
        )
    detected_share = summary.num_detected / max(summary.num_faulty, 1)  # 0 if there are no faulty records
    table.add_row(
        "all",
        str(summary.num_faulty),
        pages.format_percent(detected_share, 0),
        pages.format_percent(summary.mean_share_seen, 0),
        style="bold",
    )
    console.print(table)
    console.print()
    for name, value in format_key_figures(summary).items():
        console.print(f"  {name}: [bold]{value}[/bold]", soft_wrap=True)
