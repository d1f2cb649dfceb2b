"""Operators made of creator functions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raysgd.torch import CreatorOperator, TrainingOperator
from tests.torch.operators_for_tests import (
    a_model,
    an_optimizer,
    batches,
    make,
)


def create_model(config: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    return a_model()


def create_models(config: dict[str, Any]) -> Any:
    return config.get("container", list)([a_model(), a_model()])


def create_optimizer(model: Any, config: dict[str, Any]) -> Any:
    return an_optimizer(model, lr=config.get("lr", 0.1))


def create_optimizers(models: Any, config: dict[str, Any]) -> Any:
    return tuple(an_optimizer(model) for model in models)


def create_loaders(config: dict[str, Any]) -> Any:
    return batches(3), batches(2)


def create_scheduler(optimizer: Any, config: dict[str, Any]) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)


def create_schedulers(optimizers: Any, config: dict[str, Any]) -> Any:
    return [create_scheduler(optimizer, config) for optimizer in optimizers]


def test_creators_make_an_operator_that_trains() -> None:
    operator_cls = TrainingOperator.from_creators(
        create_model, create_optimizer, create_loaders, torch.nn.MSELoss, create_scheduler
    )
    assert issubclass(operator_cls, CreatorOperator)
    operator = make(operator_cls, {"lr": 0.25}, scheduler_step_freq="epoch")
    assert operator.optimizer.param_groups[0]["lr"] == 0.25
    assert (len(operator.train_loader), len(operator.validation_loader)) == (3, 2)
    assert operator.train_epoch(operator.train_loader)["num_samples"] == 6
    assert operator.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert operator.validate(operator.validation_loader)["batch_count"] == 2


def test_only_several_models_are_said_to_be_several(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "raysgd")
    stack = TrainingOperator.from_creators(
        lambda config: torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()), create_optimizer
    )
    make(stack)
    assert "several models" not in caplog.text
    pair = TrainingOperator.from_creators(
        lambda config: [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)],
        lambda models, config: [create_optimizer(each, config) for each in models],
    )
    make(pair)
    assert "several models" in caplog.text


def test_single_components_are_found_under_both_names() -> None:
    operator_cls = TrainingOperator.from_creators(
        create_model, create_optimizer, loss_creator=torch.nn.MSELoss, scheduler_creator=create_scheduler
    )
    operator = make(operator_cls, scheduler_step_freq="manual")
    assert operator.model is operator.models
    assert operator.optimizer is operator.optimizers
    assert operator.scheduler is operator.schedulers
    assert isinstance(operator.criterion, torch.nn.MSELoss)


@pytest.mark.parametrize("container", [list, tuple])
def test_of_several_components_the_first_is_the_one(container: type, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="raysgd")
    operator_cls = TrainingOperator.from_creators(create_models, create_optimizers, scheduler_creator=create_schedulers)
    operator = make(operator_cls, {"container": container}, scheduler_step_freq="manual")
    assert type(operator.models) is container
    assert (type(operator.optimizers), type(operator.schedulers)) == (tuple, list)
    assert operator.model is operator.models[0]
    assert operator.optimizer is operator.optimizers[0]
    assert operator.scheduler is operator.schedulers[0]
    assert "use the first" in caplog.text


class Counting(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        if config.get("calls_super"):
            super().setup(config)
        self.found = self.model, self.optimizer
        self.num_batches = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.num_batches += 1
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("config", [{}, {"calls_super": True}])
def test_an_own_class_keeps_its_methods_and_finds_what_the_creators_made(config: dict[str, Any]) -> None:
    operator_cls = Counting.from_creators(create_model, create_optimizer, create_loaders, torch.nn.MSELoss)
    assert issubclass(operator_cls, Counting)
    operator = make(operator_cls, config)
    operator.train_epoch(operator.train_loader)
    assert operator.num_batches == 3
    assert operator.found == (operator.model, operator.optimizer)


def test_what_no_creator_made_is_absent() -> None:
    operator = make(TrainingOperator.from_creators(create_model, create_optimizer))
    for name in ("criterion", "scheduler", "schedulers"):
        assert not hasattr(operator, name)
    for name in ("model", "optimizer", "models", "optimizers"):
        assert hasattr(operator, name)


def test_a_dataset_in_the_place_of_a_loader_is_refused() -> None:
    def create_dataset(config: dict[str, Any]) -> Any:
        return TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1))

    operator_cls = TrainingOperator.from_creators(create_model, create_optimizer, create_dataset)
    with pytest.raises(ValueError, match=r"`data_creator` returned a `TensorDataset`.*`DataLoader\(dataset"):
        make(operator_cls)


def test_a_loss_is_a_class_of_torch_or_what_a_function_makes_of_the_config() -> None:
    def create_loss(config: dict[str, Any]) -> Any:
        return torch.nn.MSELoss(reduction=config["reduction"])

    made = make(
        TrainingOperator.from_creators(create_model, create_optimizer, loss_creator=create_loss),
        {"reduction": "sum"},
    )
    assert made.criterion.reduction == "sum"
    plain = make(TrainingOperator.from_creators(create_model, create_optimizer, loss_creator=torch.nn.L1Loss))
    assert isinstance(plain.criterion, torch.nn.L1Loss)


@pytest.mark.parametrize("name", ["model_creator", "optimizer_creator"])
def test_creators_are_functions(name: str) -> None:
    creators = {"model_creator": create_model, "optimizer_creator": create_optimizer, name: "not a function"}
    with pytest.raises(ValueError, match=f"`{name}='not a function'`"):
        TrainingOperator.from_creators(**creators)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("model_creator", torch.nn.Linear(1, 1), r"an object of `Linear`: need a function of `config`"),
        (
            "model_creator",
            torch.nn.Linear,
            r"the class `Linear`.*Write:\n    def model_creator\(config\):\n        return Linear\(...\)$",
        ),
        (
            "model_creator",
            lambda: None,
            r"is `<lambda>`, which does not accept what workers pass: `config`",
        ),
        (
            "optimizer_creator",
            torch.optim.SGD(torch.nn.Linear(1, 1).parameters()),
            r"an object of `SGD`: need a function",
        ),
        ("optimizer_creator", torch.optim.SGD, r"the class `SGD`.*\n    def optimizer_creator\(model, config\):\n"),
        ("data_creator", torch.utils.data.TensorDataset(torch.zeros(1)), r"an object of `TensorDataset`: need a fun"),
        ("loss_creator", torch.nn.MSELoss(), r"an object of `MSELoss`: need a function of `config`"),
        ("loss_creator", torch.nn.functional.mse_loss, r"is `mse_loss`, which does not accept .*: `config`"),
        (
            "scheduler_creator",
            torch.optim.lr_scheduler.StepLR,
            r"the class `StepLR`.*\n    def .*\(optimizer, config\):\n",
        ),
    ],
)
def test_what_a_creator_would_make_is_refused_in_its_place(name: str, given: Any, line: str) -> None:
    creators: dict[str, Any] = {"model_creator": create_model, "optimizer_creator": create_optimizer, name: given}
    words = rf"`{name}` is {line}" if "is `" not in line else rf"`{name}` {line}"
    with pytest.raises(ValueError, match=words) as caught:
        TrainingOperator.from_creators(**creators)
    assert max(map(len, str(caught.value).splitlines())) < 140


class NoLength(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(batches(2))


@pytest.mark.parametrize(
    ("returned", "train", "validation"),
    [
        (DataLoader(NoLength(), batch_size=None), 2, None),
        ([batches(3)], 3, None),
        ((batches(3),), 3, None),
        ((batches(3), batches(2)), 3, 2),
        ([batches(3), None], 3, None),
        (DataLoader(TensorDataset(torch.zeros(0, 1)), batch_size=1), 0, None),
        ((DataLoader(NoLength(), batch_size=None), DataLoader(NoLength(), batch_size=None)), 2, 2),
    ],
    ids=["no length", "list of one", "tuple of one", "two", "two, one of them None", "empty", "two without length"],
)
def test_data_may_be_one_loader_or_two(returned: Any, train: int, validation: int | None) -> None:
    operator = make(TrainingOperator.from_creators(create_model, create_optimizer, lambda config: returned))
    assert num_batches(operator.train_loader) == train
    if validation is None:
        assert operator.validation_loader is None
    else:
        assert num_batches(operator.validation_loader) == validation


def num_batches(loader: Any) -> int:
    is_divided = getattr(loader, "batch_sampler", None) is not None
    return len(loader) if is_divided else len(list(loader))


@pytest.mark.parametrize(
    ("returned", "kind"),
    [(None, AssertionError), (False, AssertionError), ([], AssertionError), ([[1], [2], [3]], ValueError)],
)
def test_data_creators_that_return_something_else_are_refused(returned: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="data_creator"):
        make(TrainingOperator.from_creators(create_model, create_optimizer, lambda config: returned))


@pytest.mark.parametrize("serialize", [True, False])
def test_workers_of_a_node_create_their_data_one_after_the_other(serialize: bool, private_temp_dir: Path) -> None:
    found = []

    def create_data(config: dict[str, Any]) -> Any:
        try:
            with filelock.FileLock(private_temp_dir / f".raydata-{os.getuid()}.lock", timeout=0):
                found.append("free")
        except filelock.Timeout:
            found.append("held")
        return [[1]]

    operator_cls = TrainingOperator.from_creators(
        create_model, create_optimizer, create_data, serialize_data_creation=serialize
    )
    make(operator_cls)
    assert found == ["held" if serialize else "free"]


def test_the_lock_of_another_user_of_the_node_shuts_nobody_out(private_temp_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with filelock.FileLock(private_temp_dir / ".raydata-4712.lock"):
        (private_temp_dir / ".raydata.lock").mkdir()  # as little to be opened as another user's file
        try:
            operator_cls = TrainingOperator.from_creators(
                create_model, create_optimizer, create_loaders, torch.nn.MSELoss, serialize_data_creation=True
            )
            assert make(operator_cls).train_loader is not None
        finally:
            (private_temp_dir / ".raydata.lock").rmdir()


def test_an_own_class_needs_no_setup_beside_creators() -> None:
    class Own(TrainingOperator):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {"mine": 2, "num_samples": 1}

    operator = make(Own.from_creators(create_model, create_optimizer, create_loaders))
    assert operator.train_epoch(operator.train_loader)["mine"] == 2


def test_an_operator_of_creators_can_be_subclassed() -> None:
    base = TrainingOperator.from_creators(create_model, create_optimizer, create_loaders, torch.nn.MSELoss)

    class Doubles(base):  # type: ignore[valid-type, misc]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {"mine": 2, "num_samples": 1}

    operator = make(Doubles)
    assert operator.train_epoch(operator.train_loader)["mine"] == 2
