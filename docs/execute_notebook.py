"""Execute the notebook of the documentation and store its outputs in it: `python docs/execute_notebook.py`.

The documentation site shows the stored outputs. A test executes the notebook again, without storing anything.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "tutorial-python.ipynb"
TIMEOUT = 300
"""Seconds after which a cell fails."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of a new execution, whose working folder is that of the notebook.

    Warnings and progress on standard error are left out, because they contain paths of the machine. Without metadata of
    the execution, equal outputs are equal files.

    Args:
        path: The notebook.

    Raises:
        CellExecutionError: A cell raises an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            is_shown = [output.get("name") != "stderr" for output in cell.outputs]
            cell.outputs = [output for output, shown in zip(cell.outputs, is_shown, strict=True) if shown]
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec}
    return notebook


if __name__ == "__main__":
    nbformat.write(execute(NOTEBOOK), NOTEBOOK)
