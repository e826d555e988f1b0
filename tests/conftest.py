"""Fixtures that many tests need: a real Kafka, new topics, public data sets, models and commands.

A test fails if something it needs is not installed; it is never skipped.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import signal
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

from deformer_stream.kernels import library
from deformer_stream.runtime.process import limit_thread_spinning
from tests.effort import IS_LONG, num_examples

if TYPE_CHECKING:
    from connectors.kafka.ports import ClientLibrary, KafkaCluster
    from deformer_stream.model_store import Artifact

limit_thread_spinning()
# Without files of bytecode, each program that a test starts would compile the modules of the checkout again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The models of tests are small: one thread is as fast as two, and tests run beside each other (`make test`).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The duration of an example depends on the load of the machine, so it decides no test. CI repeats the same examples.
settings.register_profile(
    "invariants",
    max_examples=num_examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("invariants")
# A shell ignores SIGINT in commands that it starts in the background, and programs inherit that. Tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels of another build, such as one with sanitizers (`make test-kernels`).
if "DEFORMER_TEST_KERNELS" in os.environ:
    library.FOLDER = Path(os.environ["DEFORMER_TEST_KERNELS"]).resolve(strict=True)

ROOT = Path(__file__).resolve().parents[1]
_unfreeze = gc.unfreeze


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without a search for garbage, and exclude what the collection has created from later searches.

    The collection imports every library and creates millions of objects that stay. `consume` searches for garbage when
    it starts. It would search all of these objects each time that a test runs it in this process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.freeze = gc.unfreeze = lambda: None  # a command calls them at its start and at its end


def pytest_unconfigure() -> None:
    """Free what was excluded from garbage collection. Otherwise, libraries report leaks when the interpreter ends."""
    _unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files with tests of Kafka evenly over a run of several processes (`make test`).

    These tests mostly wait and others compute, so that the processors are idle if all processes run such files at once.
    Files with slow tests come first, and then those with many tests, so that no process is left with one of them at the
    end.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files = {path: list(group) for path, group in itertools.groupby(items, lambda item: item.path)}

    def has_marker(path: Path, name: str) -> bool:
        return any(item.get_closest_marker(name) for item in files[path])

    positions: dict[Path, float] = {}
    for uses_kafka in (True, False):
        paths = [path for path in files if has_marker(path, "kafka") == uses_kafka]
        paths.sort(key=lambda path: (not has_marker(path, "slow"), -len(files[path])))
        positions |= {path: i / len(paths) for i, path in enumerate(paths)}
    items[:] = [item for path in sorted(files, key=positions.__getitem__) for item in files[path]]


def load_broker_script() -> ModuleType:
    """Import `tests/kafka/broker.py`, a script outside of any package, whose folder must be on the import path."""
    folder = str(ROOT / "tests" / "kafka")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("broker")


CLIENT_LIBRARIES: tuple[ClientLibrary, ...] = ("kafka-python", "librdkafka")
CLIENT_VARIABLE = "DEFORMER_TEST_CLIENT"
"""The environment variable that names the client library of a test."""


def get_client_library() -> ClientLibrary:
    """Return the client library for Kafka with which a test runs.

    It is that of the environment variable DEFORMER_TEST_CLIENT, which the fixture `client_library` sets.
    """
    name = os.environ.get(CLIENT_VARIABLE, CLIENT_LIBRARIES[0])
    return next(library for library in CLIENT_LIBRARIES if library == name)


def make_cluster(bootstrap: str) -> KafkaCluster:
    """Return the settings of a connection to a broker of tests."""
    from connectors.kafka.ports import KafkaCluster

    return KafkaCluster(bootstrap, library=get_client_library())


@pytest.fixture(params=CLIENT_LIBRARIES)
def client_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ClientLibrary:
    """Run a test with each client library in turn, in this process and in the programs that it starts."""
    monkeypatch.setenv(CLIENT_VARIABLE, request.param)
    return get_client_library()


class KafkaOfTests:
    """A broker of tests.

    Attributes:
        bootstrap: Its address.
    """

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @property
    def cluster(self) -> KafkaCluster:
        """The settings of a connection to it."""
        return make_cluster(self.bootstrap)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[KafkaOfTests]:
    """Start a broker for the test session of this process.

    If the environment variable DEFORMER_TEST_BOOTSTRAP is set, the broker at that address is used instead.
    """
    if hasattr(request, "param"):  # pytest gives the parameters of a fixture of the same name to this one, too
        pytest.fail("a fixture `kafka` with parameters starts a broker for each test: use `client_library`")
    given = os.environ.get("DEFORMER_TEST_BOOTSTRAP")
    if given:
        yield KafkaOfTests(given)
        return
    with start_broker() as broker:
        yield KafkaOfTests(broker.bootstrap)


def find_free_port() -> int:
    """Return a free port below those that the operating system takes for outgoing connections."""
    (port,) = load_broker_script().free_ports(1)
    return int(port)


def start_broker(**options: object) -> Any:
    """Start a broker of its own, for tests that stop it or need special settings; fail with the remedy if that is
    impossible.
    """
    script = load_broker_script()
    try:
        return script.start(**options)
    except script.BrokerError as error:
        pytest.fail(f"{error} (`make kafka-jars` does it), or set DEFORMER_TEST_BOOTSTRAP=host:port", pytrace=False)


@pytest.fixture
def topic(kafka: SimpleNamespace) -> Callable[..., str]:
    """Return a function that creates a topic and returns its unique name: `topic(partitions=4, name="events")`."""
    from connectors.kafka import ensure_topics

    def make(partitions: int = 1, name: str = "events", **configs: str) -> str:
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        ensure_topics(kafka.cluster, {unique: {"num_partitions": partitions, "configs": configs}})
        return unique

    return make


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of the public data sets."""
    folder = Path(os.environ.get("DEFORMER_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "skab").is_dir():
        pytest.fail(f"no data sets at {folder}: set DEFORMER_DATA to the folder with skab/ in it", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small untrained model with continuous, discrete and context features. Tests must not
    write to it.
    """
    from tests.models import write_model

    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Artifact:
    """Return the model of `model_dir`."""
    from deformer_stream import model_store

    return model_store.read(model_dir)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Return a table of complete records, one per row."""
    from tests.commands import make_record_table

    return make_record_table()


@pytest.fixture
def wide(table: pa.Table, tmp_path: Path) -> Path:
    """Return the records of `table` as a Parquet file."""
    pq.write_table(table, tmp_path / "wide.parquet")
    return tmp_path / "wide.parquet"


@pytest.fixture
def lines(table: pa.Table, tmp_path: Path) -> Path:
    """Return the records of `table` as a file of JSON lines."""
    from tests.commands import list_events

    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in list_events(table)))
    return path


@pytest.fixture(autouse=True)
def leave_out_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the charts of reports in this process, unless a test has the marker `charts` or the run is a long one.

    To draw the charts of a report takes longer than to train a small model.
    """
    from deformer_stream.report import charts

    if not IS_LONG and request.node.get_closest_marker("charts") is None:
        monkeypatch.setattr(
            charts, "_render_chart", lambda title, *_: charts._render_without_drawing(title, "left out")
        )


@pytest.fixture(autouse=True)
def reset_log() -> Iterator[None]:
    """Reset the log after each test, because a command configures it with a standard error that is closed
    afterwards.
    """
    import structlog

    yield
    structlog.reset_defaults()


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., SimpleNamespace]]:
    """Return a function that runs a command in this process: `cli("inspect", DIR)`.

    Its result has the exit code `.code`, the outputs `.out` and `.err`, and the lines of `.err` as `.lines`.
    """
    import signal

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    library = get_client_library()
    for name in [name for name in os.environ if name.startswith("DEFORMER_") and name != CLIENT_VARIABLE]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DEFORMER_CLIENT", library)

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
