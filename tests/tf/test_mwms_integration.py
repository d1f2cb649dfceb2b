"""`backend="mwms"`: TensorFlow's own strategy, for models of tf_keras."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.exceptions import IncompatibleModelError
from raysgd.tf import TFTrainer
from tests.helpers.stories import ROOT
from tests.tf.lab import forget_pytorch, largest_difference
from tests.tf.models import make_data, make_model

pytestmark = pytest.mark.integration

CONFIG = {"num_samples": 32, "num_test_samples": 16, "batch_size": 8, "optimizer": "adam"}


@pytest.fixture
def legacy_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")


def process_id() -> int:
    return os.getpid()


def task_of(operator: Any) -> dict[str, Any]:
    task: dict[str, Any] = json.loads(os.environ["TF_CONFIG"])["task"]
    return task


def hide_pytorch() -> None:
    """As on a machine without it."""
    assert not [name for name in sys.modules if name.startswith(("raysgd.torch", "raysgd.connections.torch"))]
    forget_pytorch()
    sys.modules["torch"] = None  # type: ignore[assignment]


def test_a_strategy_trains_restores_and_recovers(ray_cluster: None, legacy_keras: None, tmp_path: Path) -> None:
    from tf_keras import callbacks

    written = [callbacks.ModelCheckpoint(str(tmp_path / "model.keras")), callbacks.CSVLogger(tmp_path / "log.csv")]
    config = {**CONFIG, "fit_config": {"callbacks": written}}
    options: dict[str, Any] = {"config": config, "backend": "mwms", "initialization_hook": hide_pytorch}
    with TFTrainer(make_model, make_data, num_replicas=2, seed=1, **options) as trainer:
        assert [task["index"] for task in trainer.apply_all_operators(task_of)] == [0, 1]
        first = trainer.train()
        assert sorted(first) == ["loss", "mae", "train_loss", "train_mae"]
        assert (tmp_path / "model.keras").is_file()
        assert len((tmp_path / "log.csv").read_text().splitlines()) == 2
        path = trainer.save(tmp_path / "state.npz")
        second = trainer.train()
        trainer.load(path)
        assert trainer.train() == pytest.approx(second, rel=1e-5)  # in place, with the optimizer's variables
        trainer.load(path)
        before = trainer.state_dict()
        os.kill(trainer.apply_all_workers(process_id)[1], signal.SIGKILL)
        assert trainer.train() == pytest.approx(second, rel=1e-5)
        assert trainer.num_workers == 2
        assert largest_difference(trainer.state_dict(), before) > 0
        assert np.isfinite(trainer.validate()["validation_loss"])


TAKES_THE_PORT = """
import socket
from raysgd.connections.tensorflow import MultiWorkerConnection
from raysgd.engine.shared.types import World
from tests.helpers.fakes import meeting

connection = MultiWorkerConnection()
connection.load()
port = connection.open_endpoint("127.0.0.1", 0)
with socket.create_server(("127.0.0.1", port)):
    try:
        connection.join(meeting(port, 1), World(0, 2))
    except Exception as error:
        print(connection.is_connection_error(error), error)
"""


@pytest.mark.soak
def test_a_port_that_another_program_took_is_a_broken_connection_so_that_the_start_is_tried_again() -> None:
    done = subprocess.run([sys.executable, "-c", TAKES_THE_PORT], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("True Could not start gRPC server"), done.stdout + done.stderr


def test_a_model_of_keras_3_is_refused_with_the_reason(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    with pytest.raises(IncompatibleModelError, match=r'needs a model of tf_keras.*Use `backend="sockets"`'):
        TFTrainer(make_model, make_data, config=CONFIG, backend="mwms", num_replicas=2)
