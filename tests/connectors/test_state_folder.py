"""The folder with the state of open records: what a later run finds after each kind of end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from connectors.files import StateFolder
from deformer_stream.codec.state import encode_decisions
from deformer_stream.engine.events import Decisions
from deformer_stream.errors import ConfigError, StateError
from deformer_stream.runtime.plant_source import SavedEvent, SavedState
from deformer_stream.runtime.ports import PartitionState
from tests.conftest import ROOT

SNAPSHOT = (ROOT / "tests" / "golden" / "snapshot.v2").read_bytes()
DECISIONS = encode_decisions(Decisions())
EVENTS = [SavedEvent(i, 10**15 + i, b'{"device":"p","feature":"x","value":%d}' % i) for i in range(6)]


def load(folder: Path) -> SavedState:
    """Return what a new process finds."""
    store = StateFolder(folder)
    try:
        return store.load()
    finally:
        store.close()


def save_three_commits(folder: Path) -> None:
    """Save a snapshot and two later commits."""
    store = StateFolder(folder)
    assert store.load() == SavedState()
    store.save(2, EVENTS[:2], PartitionState(snapshot=SNAPSHOT), {"g/n": b"birth"})
    store.save(4, EVENTS[2:4], PartitionState(decisions=DECISIONS), {"g/n#seq": b"1"})
    store.save(6, EVENTS[4:], PartitionState(), {"g/n#seq": b"2"})
    store.close()


def test_commits_are_restored(tmp_path: Path) -> None:
    save_three_commits(tmp_path)
    states = {"g/n": b"birth", "g/n#seq": b"2"}
    assert load(tmp_path) == SavedState(6, SNAPSHOT, [DECISIONS], EVENTS[2:], states)


def test_a_snapshot_replaces_the_journal(tmp_path: Path) -> None:
    save_three_commits(tmp_path)
    journal = (tmp_path / "journal").read_bytes()
    store = StateFolder(tmp_path)
    store.load()
    store.save(6, [], PartitionState(snapshot=SNAPSHOT), {})
    store.close()
    expected = SavedState(6, SNAPSHOT, [], [], {"g/n": b"birth", "g/n#seq": b"2"})
    assert (tmp_path / "journal").read_bytes() == b""
    assert load(tmp_path) == expected
    (tmp_path / "journal").write_bytes(journal)  # as if it was killed before it emptied the journal
    assert load(tmp_path) == expected


def test_a_commit_that_was_cut_is_removed(tmp_path: Path) -> None:
    save_three_commits(tmp_path)
    path = tmp_path / "journal"
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for length in range(first, len(content), 13):
        path.write_bytes(content[:length])
        saved = load(tmp_path)
        assert (saved.next_offset, saved.events) == (4, EVENTS[2:4])
        assert path.read_bytes() == content[:first]
    store = StateFolder(tmp_path)
    store.load()
    store.save(6, EVENTS[4:], PartitionState(), {})
    store.close()
    assert load(tmp_path).events == EVENTS[2:]


def test_a_commit_that_fails_is_not_written_later(tmp_path: Path) -> None:
    """A file that may not grow fails as a full disk does. The limit is that of a process, so another one writes."""
    save_three_commits(tmp_path)
    script = f"""
import resource, signal
from pathlib import Path
from connectors.files import StateFolder
from deformer_stream.errors import Unavailable
from deformer_stream.runtime.plant_source import SavedEvent
from deformer_stream.runtime.ports import PartitionState
store = StateFolder(Path({str(tmp_path)!r}))
store.load()
size = Path({str(tmp_path / "journal")!r}).stat().st_size
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, unlimited[1]))
try:
    store.save(7, [SavedEvent(6, 0, b'{{}}')], PartitionState(), {{}})
except Unavailable:
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    store.close()
    StateFolder(Path({str(tmp_path)!r})).close()
    print("unavailable")
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("unavailable\n", "")
    assert load(tmp_path).next_offset == 6


@pytest.mark.parametrize("name", ["snapshot", "journal"])
def test_damage_is_an_error(tmp_path: Path, name: str) -> None:
    save_three_commits(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    end = len(content) if name == "snapshot" else content.index(b"\n")  # a damaged last line looks like a cut one
    for index in range(0, end, 31):
        damaged = bytearray(content)
        damaged[index] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StateError, match="move it away"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"v": 2}, "later release"),
        ({"v": "1"}, "`int`"),
        ({"commit": 2.5}, "`int`"),
        ({"next_offset": -1}, ">= 0"),
        ({"next_offset": 2**70}, "<= 4611686018427387903"),
        ({"events": {}}, "`array`"),
        ({"events": [[0, 0]]}, "length"),
        ({"decisions": 5}, "`bytes"),
        ({"decisions": "no base64"}, "base64"),
        ({"states": []}, "`object`"),
        ({"states": {"g/n": None}}, "`bytes`"),
    ],
)
def test_a_line_with_a_checksum_and_wrong_content_is_an_error(
    tmp_path: Path, change: dict[str, Any], cause: str
) -> None:
    save_three_commits(tmp_path)
    path = tmp_path / "journal"
    first, _, rest = path.read_bytes().partition(b"\n")
    text = json.dumps(json.loads(first.partition(b" ")[2]) | change).encode()
    path.write_bytes(b"%08x %b\n%b" % (crc32(text), text, rest))
    with pytest.raises(StateError, match="move it away") as refused:
        load(tmp_path)
    assert cause in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_commit_is_an_error(tmp_path: Path) -> None:
    save_three_commits(tmp_path)
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    with pytest.raises(StateError, match="is missing"):
        load(tmp_path)


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "state")
    with pytest.raises(ConfigError, match="in use by another process"):
        StateFolder(tmp_path / "state")
    first.close()
    StateFolder(tmp_path / "state").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state-dir"):
        StateFolder(tmp_path / "file")
