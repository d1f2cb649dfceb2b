"""What goes to MLflow. `tests/callbacks/test_loggers.py` and `tests/train` have whole runs with it.

Covers `raysgd.writers.services`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raysgd.utils import BATCH_SIZE
from raysgd.writers.services import MLflowRun
from raysgd.writers.sink import RunInFolder
from tests.helpers.run_if import RunIf


@pytest.fixture(autouse=True)
def mlflow_is_not_set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import mlflow

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # MLflow and we set them; so they are taken away again
        monkeypatch.delenv(name)
    yield
    mlflow.set_tracking_uri(None)


@RunIf(modules=["mlflow"])
def test_names_that_mlflow_does_not_allow_become_others(tmp_path: Path) -> None:
    import mlflow

    run = MLflowRun(None, None, None, "names")
    run.open(RunInFolder(tmp_path, {BATCH_SIZE: 64, "lr": 0.1}))
    run.write({"top@5": 0.5, "loss": {"a": 0.25}}, step=1)
    run.close()
    found = mlflow.MlflowClient(str(tmp_path / "mlruns")).get_run(run.run_id)
    assert found.data.params == {"_batch_size": "64", "lr": "0.1"}
    assert found.data.metrics == {"top_5": 0.5, "loss/a": 0.25}
