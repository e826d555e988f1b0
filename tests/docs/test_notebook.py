"""The notebook of the documentation runs from top to bottom, and its stored outputs are complete."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial-python.ipynb"


def list_code_cells(notebook: Any) -> list[Any]:
    """Return the cells of a notebook that contain code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainings have a few epochs in place of a time limit."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    text, num_trainings = re.subn(r'max_time=\\"\d+s\\"', "epochs=3", NOTEBOOK.read_text())
    assert num_trainings >= 2
    short = tmp_path / NOTEBOOK.name
    short.write_text(text)
    executed = runpy.run_path(str(ROOT / "docs" / "execute_notebook.py"))["execute"](short)
    cells, stored_cells = list_code_cells(executed), list_code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert len(cells) > 8
    for cell, stored in zip(cells, stored_cells, strict=True):
        assert bool(cell.outputs) == bool(stored.outputs), "run `python docs/execute_notebook.py`"


def test_the_stored_outputs_have_no_errors_and_no_paths() -> None:
    text = NOTEBOOK.read_text()
    assert '"output_type": "error"' not in text
    assert "/tmp/" not in text
    assert "/home/" not in text
