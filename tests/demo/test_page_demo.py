"""The demo with the operator's page: the schedule of faults, readings in real time, and a short run with a model."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path

import httpx
import orjson
import pytest
from rich.console import Console

from deformer_stream.demo import page_demo
from deformer_stream.demo.operation import (
    FAULT_PERIODS,
    LATER_DURATION,
    LATER_PERIOD,
    LATER_START,
    MICROS,
    NUM_PUMPS,
    RealTimeSource,
    find_fault,
    iterate_operation,
)
from deformer_stream.demo.simulate import FEATURES, MAX_DELAY, MEANING_BY_FAULT
from deformer_stream.errors import ConfigError
from deformer_stream.page.store import IncidentStore
from trainer.job import train
from trainer.settings import TrainConfig

START = 1_783_750_073_000_000


def test_faults_begin_and_end_and_later_ones_go_on_for_ever() -> None:
    period = FAULT_PERIODS[2]
    assert find_fault(period.pump, period.start) == period.fault
    assert find_fault(period.pump, period.end) == ""
    assert find_fault(period.pump, period.start - 0.001) == ""
    for number in range(30):
        seconds = LATER_START + number * LATER_PERIOD
        faults = [find_fault(pump, seconds) for pump in range(NUM_PUMPS)]
        assert sum(fault != "" for fault in faults) == 1
        assert set(faults) - {""} <= set(MEANING_BY_FAULT)
        assert not any(find_fault(pump, seconds + LATER_DURATION) for pump in range(NUM_PUMPS))


def test_readings_come_in_order_of_arrival_and_belong_to_their_records() -> None:
    history = 30.0
    messages = list(itertools.islice(iterate_operation(START, history, seed=1), 3000))
    times = [time for time, _ in messages]
    assert times == sorted(times)
    assert START - history * MICROS <= times[0] < START
    events = [orjson.loads(message) for _, message in messages]
    assert {event["feature"] for event in events} == set(FEATURES)
    first_time: dict[str, float] = {}
    for event in events:
        started = first_time.setdefault(event["record"], event["time"])
        assert event["time"] - started <= MAX_DELAY
    keys = [(event["record"], event["feature"]) for event in events]
    assert len(set(keys)) == len(keys)
    again = list(itertools.islice(iterate_operation(START, history, seed=1), 3000))
    assert again == messages


def test_the_source_gives_each_reading_when_its_time_has_come() -> None:
    now = [START]
    messages = iter([(START - 5, b"a"), (START, b"b"), (START + 10, b"c"), (START + 10**12, b"d")])
    source = RealTimeSource(messages, stop := threading.Event(), chunk=2, now=lambda: now[0])

    def poll() -> list[bytes | None]:
        data = source.poll(0.001).data
        return [] if data is None else data.payloads  # type: ignore[union-attr]

    assert poll() == [b"a", b"b"]
    assert poll() == []
    now[0] = START + 10
    assert poll() == [b"c"]
    assert not source.is_exhausted
    stop.set()
    assert source.is_exhausted


def test_the_progress_of_a_task_is_shown_and_ends() -> None:
    store = IncidentStore()
    progress = page_demo.DemoProgress(store)
    changed = threading.Semaphore(0)
    store.subscribe(changed.release)
    end = progress.count_down("Training", 60)
    assert changed.acquire(timeout=60)
    notice = progress.get_notice()
    assert notice is not None
    assert notice.text.startswith("Training: 0 of about 60 seconds")
    assert notice.share is not None
    assert 0 <= notice.share < 1
    end()
    progress.set("Live")
    assert progress.get_notice() == page_demo.Notice("Live")


def test_a_table_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_demo, "NUM_TRAINING_RECORDS", 50)
    (tmp_path / "normal.parquet").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        page_demo.run_page_demo(tmp_path, 0, 20.0, threading.Event, open_browser=False, port=0)


@pytest.mark.slow
def test_a_short_run_shows_incidents_and_suspicious_records_and_takes_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole demo with a training of few steps. It ends when the page has shown both, and stored a label."""
    stop, found = threading.Event(), {}
    monkeypatch.setattr(page_demo, "NUM_TRAINING_RECORDS", 800)

    def train_few_steps(console: Console, table: Path, model: Path, seed: int, train_time: str) -> int:
        """Train in this process, with a number of steps that does not depend on the speed of the machine."""
        assert train_time == "20s"
        train([table], TrainConfig(out=model, preset="tiny", epochs=4, exclude="record,time", seed=seed))
        return 0

    monkeypatch.setattr(page_demo, "run_trainer", train_few_steps)

    def look(console: Console, *arguments: object) -> None:
        """Look at the page beside the pipeline, as a person with a browser would."""
        url = capsys.readouterr().out.split("The operator's page: ")[1].split()[0]
        with httpx.Client(base_url=url, headers={"Sec-Fetch-Site": "same-origin"}, timeout=60) as client:
            while not stop.wait(0.5):
                page = client.get("/").text
                if "Take next: " in page:
                    found["suspicious"] = page
                if 'id="row-' in page and "suspicious" in found:
                    found["incident"] = page.split('id="row-')[1].split('"')[0]
                    address = f"/incidents/{found['incident']}"
                    token = client.get(address).text.split('name="token" value="')[1].split('"')[0]
                    client.post(f"{address}/feedback", data={"label": "true", "name": "found", "token": token})
                    found["page"] = client.get(address).text
                    stop.set()

    run_pipeline = page_demo._run_pipeline

    def run_and_look(console: Console, *arguments: object) -> None:
        """Run the pipeline, and look at the page in another thread."""
        viewer = threading.Thread(target=look, args=(console,))
        viewer.start()
        run_pipeline(console, *arguments)  # type: ignore[arg-type]
        viewer.join()

    monkeypatch.setattr(page_demo, "_run_pipeline", run_and_look)
    code = page_demo.run_page_demo(tmp_path, 0, 20.0, lambda: stop, open_browser=False, port=0)
    assert code == 0
    assert "Real fault: <bdi>found</bdi>" in found["page"]
    assert re.search(r"<bdi>pump-\d\d/\d{6}</bdi>", found["suspicious"].split("Suspicious records")[1])
    assert (tmp_path / "model" / "manifest.json").exists()
