"""Branches on which workers part: an error on all of them, and no harm to the replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd.exceptions import UnevenStepsError
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration


class Branches(LinearOperator):
    """Rank 1 leaves something out of the step, or does it twice, as `info` says for a batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = self.prepare_batch(batch)
        what = batch_info.get(batch_info["batch_idx"]) if self.world_rank else ""
        for _ in range(2 if what == "twice" else 1):
            loss = self.criterion(self.model(*features), target)
            self.backward(loss)
        if what != "no step":
            self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def weights_of(operator: Any) -> dict[str, Any]:
    state: dict[str, Any] = operator._original_models[0].state_dict()
    return state


def test_workers_that_did_not_do_the_same_are_told_and_go_back_to_where_they_were_equal(ray_cluster: None) -> None:
    cases = {
        "no step": "on rank 0 optimizer 1 stepped 3 times; on rank 1 optimizer 1 stepped 2 times",
        "twice": r"on rank 0 model 1 exchanged gradients 3 times, .*; on rank 1 model 1 exchanged gradients 4 times",
    }
    with TorchTrainer(training_operator_cls=Branches, num_workers=2, num_cpus_per_worker=0.5) as trainer:
        trainer.train()
        before = trainer.state_dict()["models"]
        for what, told in cases.items():
            with pytest.raises(UnevenStepsError, match=told):
                trainer.train(info={2: what})
            torch.testing.assert_close(trainer.apply_all_operators(weights_of), before * 2, rtol=0, atol=0)
