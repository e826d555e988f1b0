"""The demo with the operator's page: simulated pumps in real time, and their incidents in a browser.

Everything runs in one process without Kafka: a source in memory, the pipeline, the tracker of incidents, and the page.
Logs of incidents, labels and suspicious records are in memory. These are the parts that `consume`, `incidents` and
`serve` use.
"""

from __future__ import annotations

import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.text import Text

from deformer_stream import model_store
from deformer_stream.codec import Codec
from deformer_stream.demo.operation import NUM_PUMPS, RECORD_TIMEOUT, RealTimeSource, iterate_operation
from deformer_stream.demo.run import ALPHA, NUM_TRAINING_RECORDS, create_output, map_output_errors
from deformer_stream.demo.simulate import FEATURES, INTERVAL, simulate
from deformer_stream.demo.training import run_trainer
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.engine.next_reading import DEFAULT_SUSPICIOUS
from deformer_stream.errors import ConfigError
from deformer_stream.incidents.events import Incident
from deformer_stream.page.app import Page, PageOptions
from deformer_stream.page.followers import follow_logs
from deformer_stream.page.server import PageServer, bind
from deformer_stream.page.store import IncidentStore
from deformer_stream.page.texts import describe_suspect, name_incident
from deformer_stream.page.views import Notice
from deformer_stream.runtime.incident_plan import load_detection_plan
from deformer_stream.runtime.incident_sink import IncidentSink
from deformer_stream.runtime.memory_logs import MemoryFeedbackLog, MemoryIncidentLog, MemoryNextReadingLog
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.timing import EventClock
from deformer_stream.settings.incident_rule import IncidentRuleSettings

PREFERRED_PORT = 8080
HISTORY_SECONDS = 900.0
"""Operation before the start that is scored first, as fast as possible, so that the history has something to show."""
TRAINING_EXTRA_SECONDS = 12.0
"""Time that the trainer takes beside its time limit: start, reading, calibration, report."""
LATE_SECONDS = 3.0
"""The history has been scored if the next reading is late by less than this."""

NUM_RANKED = 4
"""Largest number of records of a poll for which the reading to take next is stated."""

RECORDS_PER_DAY = 86_400 / INTERVAL / NUM_PUMPS
"""Number of records of one pump in a day. Successive records are independent in this simulation, as the e-detector
assumes; calibrating by segments would take 29 days of operation."""

LIVE_TEXT = "Demo: twelve simulated pumps, live. Labels are kept until the demo ends."


class DemoProgress:
    """What the demo is doing, as a notice on the page.

    Args:
        store: The store whose listeners are notified when the notice changes.
    """

    def __init__(self, store: IncidentStore) -> None:
        self._store = store
        self._notice: Notice | None = None

    def get_notice(self) -> Notice | None:
        """Return what the demo is doing."""
        return self._notice

    def set(self, text: str, share: float | None = None, is_warning: bool = False) -> None:
        """Show a notice.

        Args:
            text: The text.
            share: Share of the task that is done, None if that is unknown.
            is_warning: Whether something is wrong.
        """
        self._notice = Notice(text, share, is_warning)
        self._store.touch()

    def count_down(self, text: str, seconds: float) -> Callable[[], None]:
        """Show the progress of a task that takes about this many seconds; return a function that ends this."""
        ended = threading.Event()
        started_at = time.monotonic()

        def run() -> None:
            while not ended.is_set():
                elapsed = time.monotonic() - started_at
                share = min(elapsed / seconds, 0.99)
                self.set(f"{text}: {elapsed:.0f} of about {seconds:.0f} seconds.", share)
                ended.wait(1.0)

        thread = threading.Thread(target=run, name="demo-progress", daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        return end


class LoggedIncidents:
    """Appends incidents to a log in memory, and prints those that open and are resolved.

    Args:
        console: The terminal.
        incident_log: The log.
    """

    def __init__(self, console: Console, incident_log: MemoryIncidentLog) -> None:
        self._console, self._log = console, incident_log

    def add(self, incident: Incident) -> None:
        """Append a message about an incident."""
        self._log.append(incident)
        if incident.state == "updated":
            return
        cause = ""
        if incident.suspects:
            cause = f"{incident.suspects[0].feature} {describe_suspect(incident, incident.suspects[0])}".strip()
        moment = time.strftime("%H:%M:%S", time.localtime((incident.resolved or incident.opened) / 1e6))
        style = "bold red" if incident.state == "open" else "green"
        line = Text.assemble(
            f"  {moment}  ", (f"{incident.state:9s}", style), f"{name_incident(incident):10s}  ", (cause, "dim")
        )
        self._console.print(line, soft_wrap=True)


def run_page_demo(
    output: Path,
    seed: int,
    train_time: float,
    stop_on_signals: Callable[[], threading.Event],
    open_browser: bool,
    port: int = PREFERRED_PORT,
) -> int:
    """Run the demo with the operator's page until a signal ends it.

    Args:
        output: Folder to which `normal.parquet` (the training records) and `model/` are written.
        seed: Seed of the simulated records and of the training.
        train_time: Time limit of the training in seconds.
        stop_on_signals: Called after the training; returns an event that is set to end the demo. During the training, a
            signal ends the process.
        open_browser: Whether to open the page in the default browser.
        port: Port of the page on this machine. If it is in use, a free one is taken.

    Returns:
        The exit code: 0, or that of the trainer if the training fails.

    Raises:
        ConfigError: The folder cannot be written, or the page cannot listen.
    """
    console = Console(highlight=False)
    table, model, time_limit = output / "normal.parquet", output / "model", f"{train_time:.12g}s"
    create_output(output)
    store, incident_log, feedback_log = IncidentStore(), MemoryIncidentLog(), MemoryFeedbackLog()
    next_reading_log = MemoryNextReadingLog()
    progress = DemoProgress(store)
    try:
        listener = bind("127.0.0.1", port)
    except ConfigError:  # in use
        listener = bind("127.0.0.1", 0)
    options = PageOptions(topic="demo pumps", port=listener.getsockname()[1], operator="demo", model=model)
    page = Page(options, store, feedback_log, get_notice=progress.get_notice)
    page.followers = follow_logs(store, incident_log, feedback_log, next_reading_log)
    server = PageServer(page, listener)
    progress.set("The demo simulates normal operation of twelve pumps.")
    server.start()
    try:
        console.print(Text.assemble("The operator's page: ", (server.url, "bold")), soft_wrap=True)
        if open_browser:
            webbrowser.open(server.url)
        console.print(f"\n1  Simulate twelve pumps: {NUM_TRAINING_RECORDS:,} normal records of {len(FEATURES)} sensors")
        normal_records = simulate(NUM_TRAINING_RECORDS, seed=2 * seed).select_normal_records()
        with map_output_errors(output):
            pq.write_table(normal_records, table)
        console.print(f"\n2  Train on normal records (about {train_time:.0f} seconds)")
        sys.stdout.flush()
        end = progress.count_down("The demo trains a model on normal operation", train_time + TRAINING_EXTRA_SECONDS)
        try:
            exit_code = run_trainer(console, table, model, seed, time_limit)
        finally:
            end()
        if exit_code:
            return exit_code
        stop = stop_on_signals()
        console.print(f"\n3  Live: incidents appear below and at {server.url} (Ctrl-C ends the demo)", soft_wrap=True)
        _run_pipeline(console, model, seed, stop, progress, incident_log, next_reading_log)
        return 0
    finally:
        server.stop()
        for follower in page.followers:
            follower.stop()


def _run_pipeline(
    console: Console,
    directory: Path,
    seed: int,
    stop: threading.Event,
    progress: DemoProgress,
    incident_log: MemoryIncidentLog,
    next_reading_log: MemoryNextReadingLog,
) -> None:
    """Score the simulated pumps in real time, and append what the page shows to logs, until `stop` is set."""
    detector = model_store.read(directory)
    detection = load_detection_plan(
        directory, IncidentRuleSettings.model_validate({"records_per_day": RECORDS_PER_DAY})
    )
    now = time.time_ns() // 1000
    source = RealTimeSource(iterate_operation(now, HISTORY_SECONDS, 2 * seed + 1), stop)
    progress.set(f"The last {HISTORY_SECONDS / 60:.0f} minutes of operation are scored first.", 0.0)

    def report(num_messages: int) -> None:
        """Show how much of the history has been scored, then that the demo is live."""
        notice = progress.get_notice()
        if notice is None or notice.share is None:
            return
        share = 1 - source.delay / HISTORY_SECONDS
        if source.delay < LATE_SECONDS:
            progress.set(LIVE_TEXT)
        elif share > notice.share + 0.1:
            progress.set(notice.text, share)

    logged = LoggedIncidents(console, incident_log)
    pipeline = Pipeline(
        source=source,
        codec=Codec(detector.schema),
        engines=EngineSet.of_only_model(
            Engine(
                detector.scoring_model,
                detector.calibration,
                detector.fingerprint,
                ALPHA,
                Limits(record_timeout=round(RECORD_TIMEOUT * 1e6)),
                max_suggested=NUM_RANKED,
                suspicious=DEFAULT_SUSPICIOUS,
            )
        ),
        sinks=[IncidentSink({ONLY_MODEL: detection}, logged.add), next_reading_log],
        clock=EventClock(),
        metrics=Metrics(),
        is_finite=False,
        report_progress=report,
        log_alerts=False,
        log_alert_share=False,  # some of the pumps are faulty for minutes, so more than alpha of the records alert
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a poll has a few dozen readings, which is too little work for several threads
    try:
        pipeline.run(stop)
    finally:
        torch.set_num_threads(num_threads)
