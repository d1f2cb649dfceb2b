"""What the tests of the old library asserted of `TorchTrainer`, retold: with one worker, and two in `make soak`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd.data.examples import mlp_identity
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.constants import SCHEDULER_STEP
from raysgd.torch.examples.train_example import LinearDataset, data_creator, model_creator, optimizer_creator
from raysgd.torch.training_operator import get_test_metrics_operator, get_test_operator
from raysgd.utils import BATCH_COUNT, BATCH_SIZE, NUM_SAMPLES

pytestmark = pytest.mark.integration

from_creators = partial(TrainingOperator.from_creators, model_creator, optimizer_creator, loss_creator=nn.MSELoss)
Linear = from_creators(data_creator)
Make = Callable[..., TorchTrainer]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.soak)])
def num_workers(request: pytest.FixtureRequest, ray_cluster: None) -> int:
    return int(request.param)


@pytest.fixture
def make(num_workers: int) -> Iterator[Make]:
    """Makes trainers of so many workers, and ends them."""
    made: list[TorchTrainer] = []

    def new(operator: type[TrainingOperator] = Linear, **options: Any) -> TorchTrainer:
        place = {"use_local": True} if num_workers == 1 else {"num_workers": num_workers}
        made.append(TorchTrainer(training_operator_cls=operator, **place, **options))
        return made[-1]

    yield new
    for trainer in made:
        trainer.shutdown()


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_functions_run_on_all_workers(make: Make, num_workers: int) -> None:
    assert make().apply_all_workers(lambda: 1) == [1] * num_workers


class Scheduled(TrainingOperator):
    """Has as many of each component as the config says, and the epoch that it has."""

    def setup(self, config: dict[str, Any]) -> None:
        models = [nn.Linear(1, 1) for _ in range(config.get("models", 1))]
        optimizers = [torch.optim.SGD(models[0].parameters(), lr=1e-4) for _ in range(config.get("optimizers", 1))]
        steps = torch.optim.lr_scheduler.StepLR
        schedulers = [steps(optimizers[0], step_size=30) for _ in range(config.get("schedulers", 1))]
        parts: list[Any] = [each[0] if len(each) == 1 else each for each in (models, optimizers, schedulers)]
        self.models, self.optimizers, self.criterion, self.schedulers = self.register(
            models=parts[0], optimizers=parts[1], schedulers=parts[2], criterion=nn.MSELoss()
        )
        train_loader, validation_loader = data_creator(config)
        self.register_data(train_loader=train_loader, validation_loader=validation_loader)


@pytest.mark.parametrize("frequency", ["epoch", "batch", "manual"])
def test_an_epoch_knows_when_schedulers_step(make: Make, frequency: str) -> None:
    def train_epoch(self: Any, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        return {"is_told": float(info[SCHEDULER_STEP] == frequency)}

    config = {"custom_func": train_epoch}
    trainer = make(get_test_operator(Scheduled), config=config, scheduler_step_freq=frequency)
    assert [trainer.train()["is_told"] for _ in range(2)] == [1, 1]


def test_a_scheduler_needs_a_frequency(make: Make) -> None:
    with pytest.raises(ValueError, match="scheduler_step_freq"):
        make(Scheduled)


def test_a_scheduler_that_is_stepped_by_hand_takes_a_metric(make: Make) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    trainer = make(
        from_creators(data_creator, scheduler_creator=lambda optimizer, config: plateau(optimizer)),
        scheduler_step_freq="manual",
    )
    trainer.update_scheduler(0.5)
    trainer.update_scheduler(0.5)
    assert all(trainer.apply_all_operators(lambda operator: operator._schedulers[0].last_epoch == 2))


def test_a_profile_comes_with_both_calls(make: Make) -> None:
    trainer = make()
    assert "profile" in trainer.train(profile=True)
    assert "profile" in trainer.validate(profile=True)


def test_the_batch_size_of_all_is_lowered_to_what_workers_can_divide(make: Make, num_workers: int) -> None:
    def loader(config: dict[str, Any]) -> Any:
        return DataLoader(LinearDataset(2, 5, size=600), batch_size=config[BATCH_SIZE])

    trainer = make(from_creators(loader), config={BATCH_SIZE: 21})
    stats, size = trainer.train(), 21 - 21 % num_workers
    assert trainer.config[BATCH_SIZE] == size
    assert (stats[NUM_SAMPLES], stats[BATCH_COUNT]) == (600, math.ceil(600 / size))


def test_results_of_each_worker_come_unreduced(make: Make, num_workers: int) -> None:
    trainer = make(config={"batch_size": 4, "data_size": 400, "val_size": 400})
    for call in (trainer.train, trainer.validate):
        each = call(reduce_results=False, profile=True)
        assert [stats[BATCH_COUNT] for stats in each] == [100 // num_workers] * num_workers


@pytest.mark.parametrize("first", [1.0, math.nan])
def test_a_metric_has_its_mean_over_samples_and_its_last_value(make: Make, num_workers: int, first: float) -> None:
    scores = [first] + [0.0] * 100
    config = {"scores": scores, "val_scores": scores, "key": "score", "batch_size": 4, "data_size": 400}
    trainer = make(get_test_metrics_operator(Linear), config={**config, "val_size": 400})
    for call in (trainer.train, trainer.validate):
        stats = call()
        assert stats[NUM_SAMPLES] == 400
        assert stats["last_score"] == 0
        assert stats["score"] == pytest.approx(first * num_workers / 400, nan_ok=True)


@pytest.mark.parametrize("wrap_ddp", [True, False])
def test_a_file_brings_the_model_into_another_trainer(make: Make, tmp_path: Path, wrap_ddp: bool) -> None:
    one, path = make(wrap_ddp=wrap_ddp), str(tmp_path / "checkpoint")
    one.train()
    one.save(path)
    other = make(wrap_ddp=wrap_ddp)
    other.load(path)
    assert_alike(one.get_model(), other.get_model())


class IterableOptimizer(torch.optim.SGD):
    def __iter__(self) -> Any:
        return self.param_groups


class OfIterables(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(1, 1))
        optimizer = IterableOptimizer(model.parameters(), lr=1e-2)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        train_loader, validation_loader = data_creator(config)
        self.register_data(train_loader=train_loader, validation_loader=validation_loader)


def test_components_that_can_be_iterated_over_are_one_each(make: Make) -> None:
    trainer = make(OfIterables)
    losses = [(trainer.train()["train_loss"], trainer.validate()["val_loss"]) for _ in range(4)]
    assert losses[-1] <= losses[0]


def test_a_trainer_that_was_shut_down_trains_no_more(make: Make) -> None:
    trainer = make()
    trainer.train(num_steps=1)
    trainer.shutdown()
    with pytest.raises(RuntimeError):
        trainer.train()


def test_several_models_train_in_an_own_epoch_and_travel_in_the_state(make: Make) -> None:
    def train_epoch(self: Any, iterator: Any, info: Any) -> dict[str, Any]:
        for x, y in iterator:
            self.optimizers[0].zero_grad()
            self.criterion(self.models[1](self.models[0](x)), y).backward()
            self.optimizers[0].step()
        return {"model_0": {"accuracy": 1.0}}

    config = {"models": 2, "optimizers": 2, "custom_func": train_epoch}
    options: dict[str, Any] = {"config": config, "scheduler_step_freq": "epoch"}
    one, other = (make(get_test_operator(Scheduled), **options) for _ in range(2))
    one.train()
    other.load_state_dict(one.state_dict())
    for model, copy in zip(one.get_model(), other.get_model(), strict=True):
        assert_alike(model, copy)


@pytest.mark.parametrize("numbers", list(itertools.product([1, 2], repeat=3)))
def test_an_operator_has_as_many_components_as_it_registers(make: Make, numbers: tuple[int, ...]) -> None:
    several = {name: n for name, n in zip(("models", "optimizers", "schedulers"), numbers, strict=True) if n > 1}

    def train_epoch(self: Any, iterator: Any, info: Any) -> dict[str, Any]:
        return {"done": 1, **{name: len(getattr(self, name)) for name in several}}

    config = {**several, "custom_func": train_epoch}
    stats = make(get_test_operator(Scheduled), config=config, scheduler_step_freq="epoch").train()
    assert {name: stats[name] for name in several} == several


def test_an_own_epoch_may_not_know_its_number_of_samples(make: Make) -> None:
    def train_epoch(self: Any, iterator: Any, info: Any) -> dict[str, Any]:
        return {NUM_SAMPLES: math.nan, "done": 1}

    assert make(get_test_operator(Linear), config={"custom_func": train_epoch}).train()["done"] == 1


def test_a_dataset_of_the_call_is_divided_and_continued(make: Make) -> None:
    creators = mlp_identity.model_creator, mlp_identity.optimizer_creator
    trainer = make(TrainingOperator.from_creators(*creators, loss_creator=nn.MSELoss))
    dataset = mlp_identity.dataset_creator()
    for _ in range(5):
        trainer.train(dataset=dataset, num_steps=100)
    assert trainer.get_model()(mlp_identity.to_mat(0.5)).item() == pytest.approx(0.5, abs=0.1)


def test_steps_continue_where_the_last_call_stopped_and_a_call_without_them_ends_the_epoch(make: Make) -> None:
    def loaders(config: dict[str, Any]) -> Any:
        return tuple(DataLoader([0] * 5 + [1] * 5, batch_size=1) for _ in range(2))  # type: ignore[arg-type]

    def average(self: Any, iterator: Any, info: Any) -> dict[str, Any]:
        items = [int(each) for each in iterator]
        return {"average": sum(items) / len(items)}

    operator = get_test_operator(TrainingOperator.from_creators(model_creator, optimizer_creator, loaders))
    trainer = make(operator, add_dist_sampler=False, config={"custom_func": average})
    for num_steps, expected, epoch in ((None, 0.5, 1), (5, 0, 2), (3, 1, 2), (5, 0.4, 3), (None, 5 / 7, 3)):
        stats = trainer.train(num_steps=num_steps)
        assert (stats["average"], stats["epoch"]) == (pytest.approx(expected), epoch)
        assert trainer.validate(num_steps=num_steps)["average"] == pytest.approx(expected)
