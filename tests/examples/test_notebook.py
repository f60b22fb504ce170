"""The notebook runs from its first cell to its last, draws its plots, and is stored without outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
EPOCHS = "epochs = 40"
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_no_outputs_are_stored(path: Path) -> None:
    """They would be those of an older version, on an unknown machine."""
    for cell in code(read(path)):
        assert not cell.outputs
        assert cell.execution_count is None


@each_notebook
def test_links_lead_to_files(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert [link for link in links if not (path.parent / link).is_file()] == []


@pytest.mark.slow
def test_the_quick_start_runs(tmp_path: Path) -> None:
    notebook = read(ROOT / "examples" / "quickstart.ipynb")
    (training,) = (cell for cell in notebook.cells if cell.source.startswith(EPOCHS))
    training.source = "epochs = 5"
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")})
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert "8 of 9 linear layers lowered" in printed
    fp32, int8 = (float(percent) for percent in re.findall(r"([\d.]+) % of", printed))
    assert fp32 > 60
    assert abs(fp32 - int8) < 1.5
