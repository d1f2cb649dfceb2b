"""What a user sees of the workers without having set up anything."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator, testing

pytestmark = pytest.mark.integration

PATIENCE_S = 120.0


class Talks(TrainingOperator):
    """Logs a line in `setup`, one in training, and one right before it fails."""

    def setup(self, config: dict[str, Any]) -> None:
        logging.getLogger("raysgd.user").warning("setting up")
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        x = torch.linspace(0, 1, 64).reshape(-1, 1)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x), batch_size=4))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        logging.getLogger("raysgd.user").warning("rank %s trains", self.world_rank)
        if batch_info.get("fails"):
            raise ValueError("on purpose")
        if "until" in batch_info:
            wait_for(batch_info["until"])
        return super().train_batch(batch, batch_info)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, "the driver shows no line before the call is over"
        time.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("raysgd.")]


def test_warnings_of_workers_and_recoveries_reach_the_driver_and_no_message_of_ray_about_them(
    ray_cluster: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with TorchTrainer(training_operator_cls=Talks, num_workers=2, min_workers=1) as trainer:
        ours = {each.pid for each in trainer.status().workers}
        assert lines(caplog) == ["ranks 0, 1: setting up"]
        caplog.clear()
        testing.kill_worker(trainer, 1, at="step:2")
        trainer.train()
        text = "\n".join(lines(caplog))
        assert "rank 0: rank 0 trains" in text
        # A broken connection may be seen before the death that broke it is told.
        assert re.search(r"lost rank 1( \(its process died\)|; rank 0 reports: .*); resumed with ", text)
        assert "no sample lost" in text
        assert text.count("setting up") == 0  # said before
        with pytest.raises(ValueError, match="on purpose"):
            trainer.train(info={"fails": True})
        ours |= {each.pid for each in trainer.status().workers}
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == "raysgd.user")
    said = words_of_ray_about_another_actor(capsys)
    assert ours.isdisjoint(named_in(said))


def words_of_ray_about_another_actor(capsys: pytest.CaptureFixture[str]) -> str:
    """What Ray has printed when it tells of a killed actor of the user's, which it does after any earlier deaths.

    Of messages that differ in numbers alone, it keeps those of the next five seconds until a later one.
    """
    deadline, pids, said = time.monotonic() + PATIENCE_S, list[int](), ""
    while not named_in(said) & {*pids}:
        assert time.monotonic() < deadline, "Ray prints nothing any more"
        other = ray.remote(num_cpus=0)(Other).remote()
        pids.append(ray.get(other.pid.remote()))
        os.kill(pids[-1], signal.SIGKILL)
        time.sleep(1)
        said += capsys.readouterr().out
    return said


def named_in(said: str) -> set[int]:
    return {int(pid) for pid in re.findall(r"Worker PID: (\d+)", said)}


class Other:
    """An actor of the user's."""

    def pid(self) -> int:
        return os.getpid()


class Marks(logging.Handler):
    """Makes a file once a line says that a rank trains."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if "trains" in record.getMessage():
            self._path.touch()


def test_lines_of_a_long_call_arrive_while_it_runs(ray_cluster: None, tmp_path: Path) -> None:
    shown, logger = tmp_path / "shown", logging.getLogger("raysgd.user")
    handler = Marks(shown)
    logger.addHandler(handler)
    try:
        with TorchTrainer(training_operator_cls=Talks, num_workers=2) as trainer:
            trainer.train(num_steps=2, info={"until": shown})
    finally:
        logger.removeHandler(handler)
