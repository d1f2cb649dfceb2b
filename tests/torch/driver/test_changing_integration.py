"""Live changes of two workers, and what becomes of them when a worker is lost: one story on one trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import DropoutOperator, equal

pytestmark = pytest.mark.integration


class First(DropoutOperator):
    """Learns at the rate of the config."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.of_config = config["lr"]

    def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
        super().config_changed(config, changed)
        if config["lr"] == 13 and self.world_rank == 1:
            raise OverflowError("13 on rank 1")
        self.of_config = config["lr"]


class Second(First):
    """The edited class."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "edition": 2}


class FailsOnOne(First):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.world_rank == 1:
            raise ZeroDivisionError("while it was edited")


def place(operator: Any) -> tuple[int, Any, Any]:
    return os.getpid(), operator.of_config, operator.optimizer.param_groups[0]["lr"]


def draw(operator: Any) -> float:
    return float(torch.rand(()))


@pytest.fixture
def trainer(ray_cluster: None) -> Any:
    with TorchTrainer(
        training_operator_cls=First, config={"lr": 0.05}, num_workers=2, num_cpus_per_worker=0.5, seed=7
    ) as made:
        yield made


def test_changes_reach_all_workers_and_those_that_come_later(trainer: TorchTrainer) -> None:
    drawn = trainer.apply_all_operators(draw)
    assert drawn[0] != drawn[1], "each rank has random numbers of its own"
    trainer.train()
    pids = [pid for pid, *_ in trainer.apply_all_operators(place)]

    before = trainer.state_dict()
    with pytest.raises(ZeroDivisionError, match="while it was edited"):
        trainer.reload(FailsOnOne)
    assert equal(trainer.state_dict(), before), "the old class is kept on all workers, whatever it took"
    assert "edition" not in trainer.train()
    pids = [pid for pid, *_ in trainer.apply_all_operators(place)]

    trainer.update_config(lr=0.02)
    trainer.reload(Second)
    assert trainer.apply_all_operators(place) == [(pid, 0.02, 0.02) for pid in pids]
    assert trainer.train()["edition"] == 2

    with pytest.raises(OverflowError, match="13 on rank 1"):
        trainer.update_config(lr=13)
    trainer.train()
    pids = [pid for pid, *_ in trainer.apply_all_operators(place)]

    os.kill(pids[1], signal.SIGKILL)
    result = trainer.train()
    assert (result["edition"], result["epoch"], result["num_samples"]) == (2, 5, 20)
    after = trainer.apply_all_operators(place)
    assert [each[1:] for each in after] == [(0.02, 0.02)] * trainer.num_workers
    trainer.reload(First)
    assert "edition" not in trainer.train()
