"""The notebook in examples/: small, and what its cells print is what they print today."""

import copy
import json

import pytest
from builders import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def texts(cells):
    """The text outputs of each code cell: what it prints, and the plain form of what it shows."""
    return [
        ["".join(out.get("text", "") or out["data"]["text/plain"]).rstrip() for out in cell["outputs"]]
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_the_notebook_was_executed_and_is_small():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    ran = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert ran == list(range(1, len(ran) + 1))
    assert all(texts(cells))
    assert sum("image/png" in out.get("data", {}) for cell in cells for out in cell.get("outputs", ())) == 3
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.slow
def test_the_notebook_s_cells_give_what_it_shows(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    shown = nbformat.read(NOTEBOOK, as_version=4)
    ran = copy.deepcopy(shown)
    NotebookClient(ran, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert texts(ran.cells) == texts(shown.cells)
