"""Lightning modules on two workers, which have to do what one process does on all the data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch.lab import Experiment, Findings, run_together
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, dataset

pytestmark = pytest.mark.integration

NUM_SAMPLES, NUM_VALIDATION_SAMPLES, LR = 18, 9, 0.05


class Line(lightning.pytorch.LightningModule):
    """The model and the data of `LinearOperator`, with everything that two workers could get wrong."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(0)
        self.line = torch.nn.Linear(NUM_FEATURES, 1)
        self.unused = torch.nn.Linear(1, 1)
        self.mean_number = MeanMetric()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.line(features)

    def prepare_data(self) -> None:
        if "folder" in self.config:
            time.sleep(0.5)  # long enough for the other worker to be there first, if it did not wait
            (Path(self.config["folder"]) / f"prepared by {self.trainer.global_rank}").touch()

    def setup(self, stage: str) -> None:
        if "folder" in self.config:
            self.found = [path.name for path in Path(self.config["folder"]).iterdir()]

    def loss(self, batch: Any) -> torch.Tensor:
        features, _, target = batch
        return torch.nn.functional.mse_loss(self(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean_number.update(batch[1].float())
        self.log("mean_number", self.mean_number)
        self.log("rank", self.global_rank)
        self.log("highest_number", batch[1].max(), reduce_fx="max")
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("rank_at_end", self.global_rank)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(NUM_SAMPLES), batch_size=self.config["batch_size"])

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(NUM_VALIDATION_SAMPLES, seed=1), batch_size=self.config["batch_size"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["bias"] = self.line.bias.item()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded_bias = checkpoint["bias"]


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def weights_of(operator: Any) -> list[float]:
    return weights(operator.get_model())


def train_alone(module_cls: type[Any], num_epochs: int) -> list[float]:
    """The weights after training in this process, on batches as large as those of two workers together."""
    operator_cls = TrainingOperator.from_ptl(module_cls)
    with TorchTrainer(training_operator_cls=operator_cls, config={"batch_size": 8}, use_local=True) as trainer:
        for _ in range(num_epochs):
            trainer.train()
        return weights(trainer.get_model())


def train_in(lab: TorchTrainer, module_cls: type[Any], num_epochs: int) -> Findings:
    """What comes of new replicas of a module in the workers of a running trainer, to spare a start for each."""
    operator_cls = TrainingOperator.from_ptl(module_cls)
    return run_together(lab, Experiment(operator_cls, {"batch_size": 4}, (("train", None),) * num_epochs))


def weights_found(findings: Findings) -> list[list[float]]:
    """On each rank."""
    return [torch.cat([values.reshape(-1) for values in state.values()]).tolist() for state in findings.model]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def started(ray_cluster: None, folder: Path) -> Iterator[tuple[TorchTrainer, Any]]:
    operator_cls = TrainingOperator.from_ptl(Line)
    config = {"batch_size": 4, "folder": str(folder)}
    with TorchTrainer(training_operator_cls=operator_cls, config=config, num_workers=2) as trainer:
        yield trainer, trainer.state_dict()


@pytest.fixture
def pair(started: tuple[TorchTrainer, Any]) -> TorchTrainer:
    """Two workers that have not trained yet."""
    trainer, state = started
    trainer.load_state_dict(state)
    return trainer


def test_nobody_goes_on_before_the_data_is_prepared_once(pair: TorchTrainer) -> None:
    assert pair.apply_all_operators(lambda operator: operator.get_model().found) == [["prepared by 0"]] * 2


def test_weights_and_metrics_are_those_of_a_plain_operator(pair: TorchTrainer) -> None:
    config = {
        "num_samples": NUM_SAMPLES,
        "num_validation_samples": NUM_VALIDATION_SAMPLES,
        "batch_size": 4,
        "lr": LR,
    }
    with TorchTrainer(training_operator_cls=LinearOperator, config=config, num_workers=2) as plain:
        for _ in range(2):
            expected, result = plain.train(), pair.train()
            assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-6)
            expected, result = plain.validate(), pair.validate()
            assert result == pytest.approx({name: expected[name] for name in result}, rel=1e-6)
        expected_weights = weights(plain.get_model())
    on_ranks = pair.apply_all_operators(weights_of)
    assert on_ranks[0] == on_ranks[1]
    assert on_ranks[0][: len(expected_weights)] == pytest.approx(expected_weights, abs=1e-6)
    assert on_ranks[0] == pytest.approx(train_alone(Line, num_epochs=2), abs=1e-6)


def test_what_is_logged_is_put_together_over_workers(pair: TorchTrainer) -> None:
    each = pair.train(reduce_results=False)
    result = pair.train()
    samples = [metrics["num_samples"] for metrics in each]
    share = samples[1] / NUM_SAMPLES
    assert sum(samples) == NUM_SAMPLES
    assert result["mean_number"] == pytest.approx((NUM_SAMPLES - 1) / 2)
    assert result["highest_number"] == NUM_SAMPLES - 1
    assert result["rank"] == pytest.approx(share)
    assert result["rank_at_end"] == pytest.approx(share), "and so the ends of epochs count by what they speak of"


class Adversaries(Line):
    """Two optimizers and manual optimization: several backward passes for each forward pass of the wrapper."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.automatic_optimization = False
        self.judge = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, _, target = batch
        line, judge = self.optimizers()
        with self.toggled_optimizer(judge):
            difference = self.judge(self(features).detach()) - self.judge(target)
            judge.zero_grad()
            self.manual_backward(difference.mean() + self.judge(target).pow(2).mean())
            judge.step()
        with self.toggled_optimizer(line):
            line.zero_grad()
            self.manual_backward(self.loss(batch) - self.judge(self(features)).mean())
            line.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(part.parameters(), lr=LR) for part in (self.line, self.judge)]
        return optimizers, [StepLR(optimizer, 1) for optimizer in optimizers]


def test_manual_optimization_averages_the_gradients_of_every_backward_pass(pair: TorchTrainer) -> None:
    first, second = weights_found(train_in(pair, Adversaries, num_epochs=3))
    assert first == second
    assert first == pytest.approx(train_alone(Adversaries, num_epochs=3), abs=1e-6)


class AtOdds(Line):
    """Rank 1 leaves out the first batch and wants to stop before the third; a metric gets worse on rank 0 only."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.global_rank == 1 and batch_idx == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("trouble", (1 + self.current_epoch) * (1 - self.global_rank))
        loss = self.loss(batch)
        return 0 * loss if self.global_rank == 1 and batch_idx == 0 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "trouble"}


def test_workers_at_odds_neither_wait_forever_nor_drift_apart(pair: TorchTrainer) -> None:
    found = train_in(pair, AtOdds, num_epochs=2)
    for epoch, result in enumerate(found.results, start=1):
        assert (result["epoch"], result["batch_count"], result["num_samples"]) == (epoch, 2, 16)
    assert found.rates == [[LR / 2]] * 2
    first, second = weights_found(found)
    assert first == second
    assert first != weights(AtOdds({"batch_size": 4})), "they were trained"


class LeavesOut(Line):
    """Leaves out the second batch, on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.loss(batch)


def test_several_workers_have_to_return_a_loss_for_each_batch(pair: TorchTrainer) -> None:
    with pytest.raises(ValueError, match=r"`training_step` returned None.*Return `0 \* loss`"):
        train_in(pair, LeavesOut, num_epochs=1)


class OnItsPlateau(Line):
    """Notes what a scheduler of every step was given in the last one, in which the ranks' batches differ in size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("trouble", float(self.global_rank))
        self.log("size", len(batch[0]))
        return self.loss(batch)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.given = metric

    def on_train_epoch_end(self) -> None:
        self.log("given", self.given)

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(21), batch_size=self.config["batch_size"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        entry = {"scheduler": ReduceLROnPlateau(optimizer), "interval": "step", "monitor": "trouble"}
        return {"optimizer": optimizer, "lr_scheduler": entry}


def test_a_plateau_of_every_step_goes_by_the_samples_of_all_workers(pair: TorchTrainer) -> None:
    found = train_in(pair, OnItsPlateau, num_epochs=1)
    first, second = (each["last_size"] for each in found.single[0])
    assert first != second
    assert found.results[0]["given"] == pytest.approx(second / (first + second))
