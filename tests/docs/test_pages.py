"""The documentation is true: links resolve, code blocks run, generated pages are up to date, names exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from packaging.version import Version

from deformer_stream.codec.encode_alerts import encode_storm
from deformer_stream.codec.encode_evidence import decode_evidence
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.codec.encode_next_readings import decode_suspicious_record, encode_suspicious_record
from deformer_stream.codec.feedback_messages import decode_label
from deformer_stream.codec.sparkplug import SparkplugTranslator
from deformer_stream.demo.simulate import simulate
from deformer_stream.engine.events import RejectionReason, StormNotice
from deformer_stream.runtime.bridge_metrics import BridgeMetrics, SourceMetrics
from deformer_stream.runtime.detection_metrics import DetectionMetrics
from deformer_stream.runtime.metrics import Metrics
from tests.commands import RunCommand
from tests.conftest import ROOT
from tests.first_hours.plant_data import write_historian_csv
from tests.series import draw_event_series, make_long_table

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
LONG_ALERT = {"id", "record", "p_value", "contributions", "source"}


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command in the shell blocks of a page."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of a page get."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_belongs_to_one(page: Path) -> None:
    """A blank line in a table turns the rows after it into text."""
    lines = ["", *without_code(page.read_text()).splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.match(r"\|[\s:|-]+\|$", after), line


def test_the_demo_is_installed_with_what_it_imports() -> None:
    """The demo trains a model, for which the extra of training is needed."""
    num_found = 0
    for page in PAGES:
        for block in blocks(page, "sh"):
            if "deformer-stream demo" in block and "pip install" in block and "'.[" in block:
                num_found += 1
                extras = re.findall(r"\.\[([\w,]+)\]", block)
                assert any("train" in one.split(",") for one in extras), block
    assert num_found


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    listed = {DOCS / name for name in re.findall(r"(?:: |- )([\w/-]+\.md)$", navigation, re.MULTILINE)}
    indexes = [page for page in listed if page.name == "README.md"]
    for page in listed:
        assert page.exists(), page
    for page in DOCS.rglob("*.md"):
        reachable = any(page.parent == index.parent and f"({page.name})" in index.read_text() for index in indexes)
        assert page in listed or reachable, f"{page} is not reachable"


@pytest.mark.skipif(Version(version("click")) < Version("8.5"), reason="earlier versions format usage lines otherwise")
def test_the_reference_of_commands_is_up_to_date() -> None:
    generator = runpy.run_path(str(DOCS / "generate_reference.py"))
    page = (DOCS / "reference" / "commands.md").read_text()
    assert page == generator["render"](), "run `python docs/generate_reference.py`"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_option_that_is_mentioned_exists() -> None:
    known = set(re.findall(r"^\| `(--[\w-]+)`", (DOCS / "reference" / "commands.md").read_text(), re.MULTILINE))
    known |= {"--help", "--version", "--debug", "--nproc-per-node"}
    known |= {"--no-cache-dir", "--index-url", "--extra-index-url", "--torch-backend", "--build-arg"}  # pip, uv, docker
    known |= {"--target", "--build-context"}  # of docker
    known |= {"--from-literal", "--set", "--image", "--overrides", "--replicas", "--for"}  # of helm and kubectl
    known |= {"--timeout", "--selector"}  # of kubectl wait
    known |= {"--readings", "--members"}  # of benchmarks.capacity
    known |= {"--reset-offsets", "--to-datetime"}  # of kafka-consumer-groups
    pages = [ROOT / "README.md", *(page for page in PAGES if {"how-to", "tutorial.md"} & set(page.parts))]
    for page in pages:
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()):
            assert option in known, f"{page.name}: {option}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in set(re.findall(r"`make ([a-z0-9-]+)|^    make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)):
            name = target[0] or target[1]
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{page.name}: make {name}"


def test_reasons_are_explained() -> None:
    for page in (DOCS / "reference" / "formats.md", DOCS / "how-to" / "troubleshoot.md"):
        for reason in RejectionReason:
            assert f"`{reason.value}`" in page.read_text()


def test_metrics_are_explained() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    bridge = BridgeMetrics()
    SourceMetrics(bridge, SparkplugTranslator())
    for registry in (Metrics().registry, DetectionMetrics().registry, bridge.registry):
        for metric in registry.collect():
            name = metric.name.removeprefix("deformer_")
            assert re.search(rf"`{name}(_total)?[`{{]", page), name


def test_examples_of_formats_are_json() -> None:
    events, alert, storm, evidence, suspicious, incident, labels = blocks(DOCS / "reference" / "formats.md", "json")
    for line in events.splitlines():
        assert {"record", "device"} & json.loads(line).keys()
    assert json.loads(alert).keys() >= LONG_ALERT
    notice = StormNotice("0c1f", 3, 0, {0: 2650, 3: 2662}, ("pump-7",), 1000.0, "m")
    assert json.loads(storm).keys() == json.loads(encode_storm(notice)).keys()
    assert json.loads(storm)["held_back"] == notice.num_held_back
    assert len(decode_evidence(evidence.encode()).closed) == 1
    record = decode_suspicious_record(suspicious.encode())
    assert json.loads(encode_suspicious_record(record)).keys() == json.loads(suspicious).keys()
    assert decode_incident(incident.encode()).device == "pump-7"
    for label in re.split(r"(?<=})\n", labels.strip()):
        decode_label(label.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the commands of the documentation name."""
    folder = tmp_path_factory.mktemp("pages")
    pq.write_table(simulate(600, seed=1).select_normal_records(), folder / "normal.parquet")
    pq.write_table(simulate(60, seed=2, fault_share=0.3).table, folder / "pumps.parquet")
    pq.write_table(make_long_table(draw_event_series(100, seed=3)), folder / "events.parquet")
    export = simulate(600, seed=4, fault_share=0.1).table.drop_columns(["record"]).to_pandas()
    write_historian_csv(export.assign(fault=export["fault"].replace("", "none")), folder / "export.csv")
    return folder


@pytest.fixture
def run(cli: RunCommand, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], Path], None]:
    """Return a function that runs a command of the documentation in a folder, in this process; it must succeed.

    Training for minutes becomes one epoch of the smallest preset.
    """

    def run_command(words: list[str], folder: Path) -> None:
        program, *options = shlex.split(re.sub(r"--max-time \d+m", "--preset tiny --epochs 1", shlex.join(words)))
        monkeypatch.chdir(folder)
        done = cli(*options, program=program)
        assert done.code == 0, done.err

    return run_command


def offline(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page that need no broker."""
    for words in commands(page):
        if words[0] == "deformer-train" or words[:2] in (["deformer-stream", "init"], ["deformer-stream", "replay"]):
            yield words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/how-to/windows-and-series.md"])
def test_commands_and_examples_run(
    name: str, folder: Path, tmp_path: Path, run: Callable[[list[str], Path], None]
) -> None:
    page = ROOT / name
    # Each page has a folder of its own, because `init` writes a configuration that later commands would read.
    folder = Path(shutil.copytree(folder, tmp_path / "page"))
    ran = 0
    for words in offline(page):
        run(words, folder)
        ran += 1
    assert ran
    for example in blocks(page, "python"):
        (folder / "example.py").write_text(example)
        command = [sys.executable, "example.py"]
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "p-value" in done.stdout
        assert "Imputation(value=" in done.stdout


@pytest.mark.slow
@pytest.mark.kafka
def test_the_tutorial_runs_on_a_live_topic(
    folder: Path, kafka: SimpleNamespace, run: Callable[[list[str], Path], None]
) -> None:
    """Run the tutorial's `produce` and `consume` against a real broker, and end `consume` as Ctrl-C does."""
    live = [words for words in commands(DOCS / "tutorial.md") if words[1] in ("produce", "consume")]
    produce, consume = ([word.replace("localhost:9092", kafka.bootstrap) for word in words] for words in live)
    if not (folder / "model").exists():
        run(["deformer-train", "normal.parquet", "--out", "model", "--max-time", "1m"], folder)
    run(produce, folder)
    command = [sys.executable, "-m", "deformer_stream.cli", *consume[1:]]
    with subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(first).keys() >= LONG_ALERT
