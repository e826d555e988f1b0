"""Tests of the exchange of paths. Those of `replace_file` are with its users."""

from __future__ import annotations

from pathlib import Path

from deformer_stream.durable_file import exchange_paths


def test_directories_exchange_their_names(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange_paths(tmp_path / "old", tmp_path / "new")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["old"]


def test_nothing_is_changed_if_one_path_is_missing(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    assert not exchange_paths(tmp_path / "old", tmp_path / "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
