"""What many tests need: a real Kafka, fresh topics, the public data sets. Missing means are failures, never skips."""

from __future__ import annotations

import importlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

from deformer_stream.runtime.process import limit_thread_spinning

if TYPE_CHECKING:
    from deformer_stream.model_store import Artifact

limit_thread_spinning()
# The models of tests are small: one thread is as fast as two, and tests run beside each other (`make test`).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says how busy the machine is, not whether a law holds. CI repeats the same examples.
settings.register_profile(
    "laws", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("laws")

ROOT = Path(__file__).resolve().parents[1]


def load_broker_script() -> ModuleType:
    """`tests/kafka/broker.py`, a script that is no part of any package, and `means.py` beside it."""
    folder = str(ROOT / "tests" / "kafka")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("broker")


@pytest.fixture(scope="session")
def kafka() -> Iterator[SimpleNamespace]:
    """A broker for the whole run, one for each process of it: `.bootstrap` is its address. The one at
    DEFORMER_TEST_BOOTSTRAP serves them all."""
    given = os.environ.get("DEFORMER_TEST_BOOTSTRAP")
    if given:
        yield SimpleNamespace(bootstrap=given)
        return
    with start_broker() as broker:
        yield SimpleNamespace(bootstrap=broker.bootstrap)


def free_port() -> int:
    """A port for a server of a test: not one of those that outgoing connections, of tests beside this one, take."""
    (port,) = load_broker_script().free_ports(1)
    return int(port)


def start_broker(**options: object) -> Any:
    """A broker of one's own, for tests that stop it or need it special. Fails with the remedy where none can be had."""
    script = load_broker_script()
    try:
        return script.start(**options)
    except script.BrokerError as error:
        pytest.fail(f"{error} (`make kafka-jars` does it), or set DEFORMER_TEST_BOOTSTRAP=host:port", pytrace=False)


@pytest.fixture
def topic(kafka: SimpleNamespace) -> Callable[..., str]:
    """Makes a new topic: `topic(partitions=4, name="events")` gives its unique name."""
    from connectors.kafka import ensure_topics

    def make(partitions: int = 1, name: str = "events", **configs: str) -> str:
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        ensure_topics(kafka.bootstrap, {unique: {"num_partitions": partitions, "configs": configs}})
        return unique

    return make


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data sets."""
    folder = Path(os.environ.get("DEFORMER_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "skab").is_dir():
        pytest.fail(f"no data sets at {folder}: set DEFORMER_DATA to the folder with skab/ in it", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained model with continuous, discrete and context features. Shared: read it, never write to it."""
    from tests.models import write_model

    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Artifact:
    """The same, read."""
    from deformer_stream import model_store

    return model_store.read(model_dir)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Whole records, a row each."""
    from tests.commands import make_record_table

    return make_record_table()


@pytest.fixture
def wide(table: pa.Table, tmp_path: Path) -> Path:
    pq.write_table(table, tmp_path / "wide.parquet")
    return tmp_path / "wide.parquet"


@pytest.fixture
def lines(table: pa.Table, tmp_path: Path) -> Path:
    from tests.commands import list_events

    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in list_events(table)))
    return path


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A command that a test runs configures the log, with a standard error that is closed when the test has ended."""
    import structlog

    yield
    structlog.reset_defaults()


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., SimpleNamespace]]:
    """Runs a command in this process: `cli("inspect", DIR)` → `.code`, `.out`, `.err`, and `.lines` of the latter."""
    import signal

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name in [name for name in os.environ if name.startswith("DEFORMER_")]:
        monkeypatch.delenv(name)

    def run(*words: object, program: str = "deformer-stream") -> SimpleNamespace:
        from deformer_stream.cli import main as command_line
        from trainer import cli as training

        mains = {
            "deformer-stream": command_line.main,
            "deformer-replay": command_line.replay_main,
            "deformer-train": training.main,
        }
        monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            mains[program]()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=end.value.code, out=out, err=err, lines=err.splitlines())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
