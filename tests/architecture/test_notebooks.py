"""The notebooks in examples/notebooks compile, store no outputs, and run from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, object]]:
    """Return the code cells of a notebook, their source joined."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return [{**c, "source": "".join(c["source"])} for c in cells if c["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_compiles_and_has_no_outputs(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert cells
    for cell in cells:
        compile(str(cell["source"]), notebook.name, "exec")
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells in order, in one name space and an empty directory."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(code_cells(notebook)):
        exec(compile(str(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
