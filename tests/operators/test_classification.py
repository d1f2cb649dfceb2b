from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.operators.supervised import SupervisedOperator
from raysgd.utils import BATCH_SIZE


def two_bands(size: int = 90) -> TensorDataset:
    """Points whose class is the half of the interval that they are in."""
    x = torch.linspace(-1, 1, size).reshape(-1, 1)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Bands(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(1, 2)

    def build_data(self, config: dict[str, Any]) -> tuple[Dataset[Any], Dataset[Any]]:
        return two_bands(), two_bands(30)


def local_trainer(operator_cls: type[ClassificationOperator], config: dict[str, Any], **options: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=operator_cls, config=config, use_local=True, **options)


def operator_of(operator_cls: type[ClassificationOperator], **config: Any) -> Any:
    with local_trainer(operator_cls, config) as trainer:
        return trainer.get_local_operator()


def train_losses(config: dict[str, Any], operator_cls: type[ClassificationOperator] = Bands) -> list[float]:
    with local_trainer(operator_cls, config) as trainer:
        return [trainer.train()["train_loss"] for _ in range(2)]


class TestTraining:
    def test_it_learns_and_reports_loss_and_accuracy(self) -> None:
        with local_trainer(Bands, {"lr": 0.1, "batch_size": 10, "seed": 0}) as trainer:
            trained = [trainer.train() for _ in range(10)]
            validated = trainer.validate()
        assert trained[-1]["train_loss"] < trained[0]["train_loss"] / 2
        assert (trained[-1]["num_samples"], trained[-1]["batch_count"]) == (90, 9)
        assert validated["num_samples"] == 30
        assert validated["val_accuracy"] > 0.9

    def test_a_seed_decides_everything_and_another_seed_differently(self) -> None:
        assert train_losses({"seed": 1}) == train_losses({"seed": 1})
        assert train_losses({"seed": 1}) != train_losses({"seed": 2})

    def test_without_a_seed_the_random_numbers_of_the_program_go_on(self) -> None:
        torch.manual_seed(5)
        first = operator_of(Bands).model.weight.clone()
        second = operator_of(Bands).model.weight.clone()
        assert not torch.equal(first, second)


class TestParts:
    @pytest.mark.parametrize(
        ("named", "expected"),
        [
            ("adam", torch.optim.Adam),
            ("AdamW", torch.optim.AdamW),
            ("rmsprop", torch.optim.RMSprop),
            ("sgd", torch.optim.SGD),
            (torch.optim.Adagrad, torch.optim.Adagrad),
        ],
    )
    def test_the_optimizer_is_the_one_named_with_the_options_given(self, named: Any, expected: type) -> None:
        optimizer = operator_of(Bands, optimizer=named, lr=0.25, weight_decay=0.125).optimizer
        assert type(optimizer) is expected
        assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.25, 0.125)

    def test_a_scheduler_is_stepped_by_the_library(self) -> None:
        class Halving(Bands):
            def build_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
                return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        with local_trainer(Halving, {"lr": 0.8}, scheduler_step_freq="epoch") as trainer:
            trainer.train()
            trainer.train()
            operator = trainer.get_local_operator()
            assert operator.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)  # type: ignore[attr-defined]

    def test_the_loss_can_be_exchanged_alone(self) -> None:
        class Squares(Bands):
            def build_criterion(self, config: dict[str, Any]) -> Any:
                return lambda output, target: (output[:, 0] - target).square().mean()

        class Zero(Squares):
            def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
                model = torch.nn.Linear(1, 2)
                return model.requires_grad_(True).apply(lambda layer: torch.nn.init.zeros_(layer.weight.data))

        with local_trainer(Zero, {"lr": 1e-9, "seed": 0}) as trainer:
            bias = trainer.get_model().bias[0].item()
            expected = (bias**2 + (bias - 1) ** 2) / 2  # half of the targets are 0, half are 1
            assert trainer.validate()["val_loss"] == pytest.approx(expected, rel=1e-4)


def test_numbers_of_any_type_are_options() -> None:
    config = {"lr": np.float32(0.5), "weight_decay": 0, "batch_size": np.int64(8), "seed": np.int64(5)}
    operator = operator_of(Bands, **config)
    assert (operator.optimizer.defaults["lr"], len(operator.train_loader)) == (0.5, 12)  # of 90 samples


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"optimizer": "adma"}, "'adma'.*allowed are 'adam', 'adamw'"),
            ({"optimizer": None}, "allowed are 'adam'"),
            *[
                ({"lr": lr}, r"`config\['lr'\]=.*`: need a positive number\. The default is 0.001")
                for lr in (0, None, "0.1", True, math.nan, math.inf, -1, [0.1])
            ],
            ({"weight_decay": -1}, "need a number of 0 or more"),
            *[
                ({"batch_size": size}, r"`config\['batch_size'\]=.*`: need an integer of at least 1")
                for size in (None, "8", True, 0, -1, 2.0)
            ],
            ({BATCH_SIZE: 0}, "need an integer of at least 1"),
            ({BATCH_SIZE: 4, "batch_size": 4}, "keep one"),
            *[({"seed": seed}, r"`config\['seed'\]=") for seed in (True, -1, 1.5, "1", 2**63)],
        ],
    )
    def test_a_config_that_makes_no_sense(self, config: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            local_trainer(Bands, config)

    @pytest.mark.parametrize("name", ["build_model", "build_data"])
    def test_a_part_that_is_not_there(self, name: str) -> None:
        without = type("Without", (Bands,), {name: getattr(SupervisedOperator, name)})
        with pytest.raises(NotImplementedError, match=f"Override `Without.{name}` to return"):
            local_trainer(without, {})

    def test_a_model_that_is_none(self) -> None:
        class Listed(Bands):
            def build_model(self, config: dict[str, Any]) -> Any:
                return [torch.nn.Linear(1, 2)]

        with pytest.raises(TypeError, match="`build_model` returned a `list`"):
            local_trainer(Listed, {})
