"""The notebook runs from top to bottom, and what it shows is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture
def cells() -> list[Any]:
    nbformat = pytest.importorskip("nbformat", reason="`make test-all` installs it")
    found: list[Any] = nbformat.read(NOTEBOOK, as_version=4).cells
    return found


def test_it_is_kept_without_outputs_and_says_on_what_it_trains(cells: list[Any]) -> None:
    assert "Data: " in cells[0].source
    assert not any(cell.outputs or cell.execution_count for cell in cells if cell.cell_type == "code")


@pytest.mark.soak
@pytest.mark.integration
def test_it_runs_and_prints_the_same_with_1_2_and_4_workers(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    accuracies = [run(num_workers, tmp_path) for num_workers in (1, 2, 4)]
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=1e-3)
    assert accuracies[0] > 0.9


def run(num_workers: int, folder: Path) -> float:
    """Run it with another number of workers in the cluster that is there, and return the accuracy that it prints."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    replace(notebook.cells[1], "ray.init(num_cpus=2, include_dashboard=False, ", "ray.init(")
    replace(notebook.cells[2], "num_workers=2", f"num_workers={num_workers}")
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "\n".join(output.get("text", "") for output in outputs)
    [accuracy] = re.findall(r"accuracy after 6 epochs: ([\d.]+)", text)
    assert "predicted" in text
    assert sum("text/html" in output.get("data", {}) for output in outputs) >= 1, "no card"
    return float(accuracy)


def replace(cell: Any, old: str, new: str) -> None:
    assert cell.source.count(old) == 1
    cell.source = cell.source.replace(old, new)
