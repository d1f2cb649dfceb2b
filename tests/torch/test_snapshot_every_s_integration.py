"""Snapshots that are not taken after each call, with real workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.messages.recovery import Recovery
from raysgd.torch import TorchTrainer
from tests.doors import controller_of
from tests.torch.operators_for_tests import LinearOperator, equal

pytestmark = pytest.mark.integration


class Heavy(LinearOperator):
    """Its state is too large to travel with an answer."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.ballast = torch.zeros(2**18)

    def state_dict(self) -> Any:
        return {"ballast": self.ballast}

    def load_state_dict(self, state_dict: Any) -> None:
        self.ballast = state_dict["ballast"]


def load_up(operator: Heavy) -> None:
    operator.ballast = operator.ballast + 1


@pytest.mark.usefixtures("ray_cluster")
def test_what_no_snapshot_covers_is_run_again_and_a_file_is_written_from_the_copy(tmp_path: Path) -> None:
    with TorchTrainer(
        training_operator_cls=Heavy,
        num_workers=2,
        min_workers=2,  # one by itself would not come to the same weights
        recovery="rebuild",
        recovery_options=Recovery(snapshot_every_s=3600),
        use_gpu=False,
    ) as trainer:
        start = trainer.state_dict()
        for _ in range(3):
            trainer.train()
        expected = trainer.state_dict()
        trainer.load_state_dict(start)
        for _ in range(2):
            trainer.train()
        os.kill(trainer.status().workers[1].pid, signal.SIGKILL)
        assert trainer.train()["epoch"] == 3
        assert trainer.status().losses == ("from the last snapshot, with 2 completed calls since run again",)
        assert "every 3600 s" in str(trainer.status())
        assert equal(trainer.state_dict()["models"], expected["models"])
        trainer.apply_all_operators(load_up)
        trainer.save(tmp_path / "last.pt", blocking=False)
        trainer.apply_all_operators(load_up)
    saved = torch.load(tmp_path / "last.pt", weights_only=False)
    assert saved["epoch"] == 3
    assert bool((saved["operator"]["ballast"] == 1).all())
    assert controller_of(trainer).snapshots.last_file == str(tmp_path / "last.pt")
