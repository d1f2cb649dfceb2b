"""The notebook runs from top to bottom, and what it shows is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture
def cells() -> list[Any]:
    import nbformat

    found: list[Any] = nbformat.read(NOTEBOOK, as_version=4).cells
    return found


def test_it_is_kept_without_outputs_and_says_on_what_it_trains(cells: list[Any]) -> None:
    assert "Data: " in cells[0].source
    assert not any(cell.outputs or cell.execution_count for cell in cells if cell.cell_type == "code")


@pytest.mark.soak
@pytest.mark.integration
def test_it_runs(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    source = notebook.cells[1].source
    notebook.cells[1].source = source.replace("ray.init(num_cpus=2, include_dashboard=False, ", "ray.init(")
    assert notebook.cells[1].source != source
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "\n".join(output.get("text", "") for output in outputs)
    [accuracy] = re.findall(r"accuracy after 6 epochs: ([\d.]+)", text)
    assert float(accuracy) > 0.9
    assert "predicted" in text
    assert sum("text/html" in output.get("data", {}) for output in outputs) >= 1, "no card"
