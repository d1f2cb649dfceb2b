"""Workers that part, in what they do or in what they are: an error on all of them, and no harm to the replicas."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raysgd import Recovery
from raysgd.exceptions import RanksDifferError, UnevenStepsError
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator, dataset

pytestmark = pytest.mark.integration


class Branches(LinearOperator):
    """In a batch that `info` names rank 1 leaves something out, or does it twice, or all compute past DDP."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = self.prepare_batch(batch)
        what = batch_info.get(batch_info["batch_idx"])
        model = self.model.module if what == "past DDP" else self.model
        what = what if self.world_rank else ""
        for _ in range(2 if what == "twice" else 1):
            loss = self.criterion(model(*features), target)
            self.backward(loss)
        if what != "no step":
            self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(target)}


class Turns(LinearOperator):
    """Trains two models of different sizes in turns; in the batch that `info` names rank 1 takes the wrong one."""

    def setup(self, config: dict[str, Any]) -> None:
        models = [torch.nn.Linear(3, 1), torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        self.turns, self.steppers, self.criterion = self.register(
            models=models, optimizers=optimizers, criterion=torch.nn.MSELoss()
        )
        self.model, self.seen = self.turns[0], []
        self.register_data(train_loader=self.make_loader(dataset(20)), validation_loader=None)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = self.prepare_batch(batch)
        is_wrong = self.world_rank == 1 and batch_info.get("wrong") == batch_info["batch_idx"]
        turn = (batch_info["batch_idx"] + is_wrong) % 2
        loss = self.criterion(self.turns[turn](*features), target)
        self.steppers[turn].zero_grad()
        loss.backward()
        self.steppers[turn].step()
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def weights_of(operator: Any) -> dict[str, Any]:
    state: dict[str, Any] = operator._original_models[0].state_dict()
    return state


def compares(operator: Any, value: Any) -> None:
    operator.compares_ranks = (operator.model,) if value is None else value


def test_workers_that_parted_are_told_and_go_back_to_where_they_were_equal(ray_cluster: None) -> None:
    cases = {
        "no step": (UnevenStepsError, "rank 0 optimizer 1 stepped 3 times; on rank 1 optimizer 1 stepped 2 times"),
        "twice": (UnevenStepsError, r"on rank 0 model 1 exchanged gradients 3 times, .*; on rank 1 .* 4 times"),
        "past DDP": (RanksDifferError, r"`weight` of model 1 \(`Linear`\) on rank 1, .*with `self.model.module\("),
    }
    recovery = Recovery(snapshot_every_s=0)  # each is of workers that are equal, so each call compares them
    with TorchTrainer(
        training_operator_cls=Branches, num_workers=2, num_cpus_per_worker=0.5, recovery=recovery
    ) as trainer:
        trainer.train()
        before = trainer.state_dict()["models"]
        for what, (kind, told) in cases.items():
            with pytest.raises(kind, match=told):
                trainer.train(info={2: what})
            torch.testing.assert_close(trainer.apply_all_operators(weights_of), before * 2, rtol=0, atol=0)
        for value in ((), False):
            trainer.apply_all_operators(partial(compares, value=value))
            trainer.train(info={2: "past DDP"})
        trainer.apply_all_operators(partial(compares, value=None))
        with pytest.raises(RanksDifferError):
            trainer.train()


@pytest.mark.parametrize(
    ("operator_cls", "info", "told"),
    [
        (Branches, {2: "twice"}, "on rank 0 .* 3 times, .*; on rank 1 model 1 exchanged gradients 4 times"),
        (
            Turns,
            {"wrong": 1},
            r"rank 0 .*model 2 exchanged gradients once; on rank 1 .*2 exchanged gradients 0 times",
        ),
    ],
    ids=["waits for the driver", "exchanges another size"],
)
def test_the_driver_as_a_worker_is_told_too(
    ray_cluster: None, operator_cls: type[LinearOperator], info: dict[Any, Any], told: str
) -> None:
    with TorchTrainer(
        training_operator_cls=operator_cls, num_workers=2, num_cpus_per_worker=0.5, use_local=True
    ) as trainer:
        for _ in range(2):  # each model twice: DDP exchanges its buckets in the second forward pass
            trainer.train()
        with pytest.raises(UnevenStepsError, match=told):
            trainer.train(info=info)
        trainer.train()
