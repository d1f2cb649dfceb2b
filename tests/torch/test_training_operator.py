"""The class that users subclass, alone and without a trainer."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections import defaultdict, namedtuple
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raysgd.engine.types import World
from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch import CreatorOperator, TrainingOperator
from raysgd.torch.constants import NUM_STEPS, SCHEDULER_STEP, USE_FP16
from raysgd.torch.options import ModelOptions
from raysgd.torch.precision import NativeAmp, Precision, make_precision
from raysgd.torch.settings import TorchSettings
from raysgd.torch.training_operator import (
    OperatorContext,
    get_test_metrics_operator,
    get_test_operator,
    to_device,
)
from raysgd.utils import IS_PADDING
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, dataset

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1)
Operator = Any  # what user code hangs on an operator is unknown to type checkers


def make(
    operator_cls: type[TrainingOperator],
    config: dict[str, Any] | None = None,
    *,
    world: World = ALONE,
    precision: Precision | None = None,
    **options: Any,
) -> Operator:
    settings = TorchSettings(operator_cls, config or {}, **options)
    return operator_cls(config or {}, OperatorContext(settings, world, CPU, precision or Precision()))


class Bare(TrainingOperator):
    """Registers only when a test says so."""

    def setup(self, config: dict[str, Any]) -> None: ...


def a_model() -> torch.nn.Module:
    return torch.nn.Linear(NUM_FEATURES, 1)


def an_optimizer(model: torch.nn.Module | None = None, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or a_model()).parameters(), lr=lr)


def batches(num: int = 3, size: int = 2) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(size, NUM_FEATURES), torch.randn(size, 1)) for _ in range(num)]


# ------------------------------------------------------------------------------------------------ what it is


def test_the_place_among_the_replicas_can_be_read() -> None:
    operator = make(
        Bare,
        {"a": 1},
        world=World(rank=3, size=4, local_rank=1),
        use_tqdm=True,
        scheduler_step_freq="manual",
    )
    assert (operator.world_rank, operator.local_rank, operator.config) == (3, 1, {"a": 1})
    assert (operator.device, operator.device_ids, operator.use_gpu) == (CPU, None, False)
    assert (operator.use_tqdm, operator.scheduler_step_freq) == (True, "manual")
    assert operator.global_step == 0


@pytest.mark.parametrize(
    "name", ["config", "world_rank", "local_rank", "device", "device_ids", "use_gpu", "use_fp16", "use_tqdm"]
)
def test_what_the_library_decides_cannot_be_assigned(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(make(Bare), name, 1)


def test_private_names_that_subclasses_in_the_wild_read_are_there() -> None:
    operator = make(Bare, {"a": 1})
    found = {
        name: getattr(operator, name)
        for name in (
            "_world_rank",
            "_local_rank",
            "_config",
            "_is_distributed",
            "_device",
            "_use_gpu",
            "_use_fp16",
            "_use_tqdm",
            "_wrap_ddp",
            "_add_dist_sampler",
            "_scheduler_step_freq",
        )
    }
    assert found == {
        "_world_rank": 0,
        "_local_rank": 0,
        "_config": {"a": 1},
        "_is_distributed": False,
        "_device": CPU,
        "_use_gpu": False,
        "_use_fp16": False,
        "_use_tqdm": False,
        "_wrap_ddp": False,
        "_add_dist_sampler": True,
        "_scheduler_step_freq": None,
    }


def test_setup_has_to_be_overridden() -> None:
    with pytest.raises(NotImplementedError, match="setup"):
        make(TrainingOperator)


def test_the_default_state_is_nothing() -> None:
    operator = make(Bare)
    assert operator.state_dict() is None
    assert operator.load_state_dict({"ignored": 1}) is None


# ------------------------------------------------------------------------------------------------ register


def test_components_come_back_as_they_were_given() -> None:
    operator = make(Bare, scheduler_step_freq="manual")
    model, optimizer, criterion = a_model(), an_optimizer(), torch.nn.MSELoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert operator.register(models=model, optimizers=optimizer) == (model, optimizer)
    assert operator.register(models=[model], optimizers=(optimizer,)) == ([model], (optimizer,))
    assert operator.register(models=model, optimizers=optimizer, criterion=criterion) == (
        model,
        optimizer,
        criterion,
    )
    assert operator.register(models=model, optimizers=optimizer, schedulers=scheduler) == (
        model,
        optimizer,
        scheduler,
    )
    assert operator.register(models=(model,), optimizers=[optimizer], criterion=criterion, schedulers=[scheduler]) == (
        (model,),
        [optimizer],
        criterion,
        [scheduler],
    )


def test_what_is_registered_has_the_names_of_old() -> None:
    operator = make(LinearOperator)
    assert operator._original_models == [operator.model]
    assert operator._models == [operator.model]
    assert operator._optimizers == [operator.optimizer]
    assert operator._schedulers == []
    assert operator._criterion is operator.criterion
    assert operator._train_loader is operator.train_loader
    assert operator._validation_loader is operator.validation_loader


def test_an_iterable_model_is_one_model() -> None:
    operator = make(Bare)
    model = torch.nn.Sequential(a_model(), torch.nn.ReLU())
    registered, _ = operator.register(models=model, optimizers=an_optimizer(model))
    assert registered is model
    assert operator._original_models == [model]


def test_models_that_a_second_registration_leaves_out_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    operator, first, second = make(Bare), a_model(), a_model()
    operator.register(models=first, optimizers=an_optimizer(first))
    operator.register(models=(first, second), optimizers=an_optimizer(first))
    assert not caplog.records
    operator.register(models=second, optimizers=an_optimizer(second))
    assert "`register` was called again" in caplog.text


def test_a_dict_of_models_is_refused_as_what_it_is() -> None:
    with pytest.raises(InvalidRegistrationError, match="got `dict`"):
        make(Bare).register(models={"a": a_model()}, optimizers=an_optimizer())


def test_schedulers_need_to_know_when_to_step() -> None:
    with pytest.raises(ValueError, match="scheduler_step_freq"):
        make(Bare).register(
            models=a_model(),
            optimizers=an_optimizer(),
            schedulers=torch.optim.lr_scheduler.StepLR(an_optimizer(), 1),
        )


def test_an_empty_container_of_schedulers_is_registered() -> None:
    operator = make(Bare, scheduler_step_freq="manual")
    assert operator.register(models=a_model(), optimizers=an_optimizer(), schedulers=())[2] == ()
    with pytest.raises(ValueError, match="scheduler_step_freq"):
        make(Bare).register(models=a_model(), optimizers=an_optimizer(), schedulers=[])


@pytest.mark.parametrize("name", ["ddp_args", "apex_args"])
def test_options_are_a_dict(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}="):
        make(Bare).register(models=a_model(), optimizers=an_optimizer(), **{name: ["O1"]})
    make(Bare).register(models=a_model(), optimizers=an_optimizer(), **{name: None})


def test_what_is_no_module_is_refused() -> None:
    for kind in (AssertionError, TypeError, ValueError):
        with pytest.raises(kind, match="models"):
            make(Bare).register(models=[a_model(), "model"], optimizers=an_optimizer())


def test_unknown_keywords_are_refused_and_loaders_are_shown_their_place() -> None:
    with pytest.raises(TypeError, match="`schedule`"):
        make(Bare).register(models=a_model(), optimizers=an_optimizer(), schedule=1)
    with pytest.raises(TypeError, match="register_data"):
        make(Bare).register(models=a_model(), optimizers=an_optimizer(), train_loader=[1])


def test_an_optimizer_needs_no_more_than_steps() -> None:
    class Duck:
        def step(self) -> None: ...

    operator = make(Bare)
    duck = Duck()
    assert operator.register(models=a_model(), optimizers=duck)[1] is duck
    assert operator._optimizers == [duck]


def test_mixed_precision_is_at_work_after_registering_only() -> None:
    operator = make(Bare, precision=make_precision(True, CPU))
    assert (operator.use_fp16, operator.use_fp16_native, operator._amp) == (False, False, None)
    operator.register(models=a_model(), optimizers=an_optimizer())
    assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == (True, True, False)
    with operator._amp.autocast():
        assert operator._amp_scaler.scale(torch.ones(1)) == 1


def test_without_mixed_precision_there_is_none() -> None:
    operator = make(LinearOperator)
    assert (operator.use_fp16, operator._amp_scaler) == (False, None)
    with operator._amp.autocast(), operator._amp.autocast(enabled=True), operator.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_is_that_of_the_precision() -> None:
    operator = make(LinearOperator, precision=make_precision(False, CPU, "bf16"))
    with operator.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert operator.model(torch.ones(1, NUM_FEATURES)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# ------------------------------------------------------------------------------------------------ register_data


@pytest.mark.parametrize("loader", [[1, 2], range(3), iter([1]), {"a": 1}.values()])
def test_any_iterable_may_be_a_loader(loader: Any) -> None:
    operator = make(Bare)
    operator.register_data(train_loader=loader, validation_loader=loader)
    assert operator.train_loader is operator.validation_loader is loader


def test_loaders_may_be_missing() -> None:
    operator = make(Bare)
    operator.register_data()
    assert (operator.train_loader, operator.validation_loader) == (None, None)


def test_loaders_can_be_looked_into_by_hand_before_the_first_pass() -> None:
    class Looks(Bare):
        def setup(self, config: dict[str, Any]) -> None:
            loader = DataLoader(torch.arange(12), batch_size=2, shuffle=True)
            self.register_data(train_loader=loader, validation_loader=loader)
            self.first = next(iter(self.train_loader))

    ranks = [make(Looks, world=World(rank=rank, size=2)) for rank in range(2)]
    assert [len(operator.first) for operator in ranks] == [2, 2]
    for name in ("train_loader", "validation_loader"):
        seen = [number for operator in ranks for batch in getattr(operator, name) for number in batch.tolist()]
        assert sorted(seen) == list(range(12))


def test_a_loader_that_user_code_keeps_under_the_same_name_stays() -> None:
    class Keeps(Bare):
        def setup(self, config: dict[str, Any]) -> None:
            self.train_loader = ["mine"]
            self.register_data(train_loader=[1, 2])

    operator = make(Keeps)
    assert operator.train_loader == ["mine"]
    operator.train_loader = ["changed"]
    assert operator.train_loader == ["changed"]


def test_the_loader_of_a_rank_has_the_length_of_its_share() -> None:
    operator = make(LinearOperator, world=World(rank=1, size=2))
    assert (len(operator.train_loader), len(operator.validation_loader)) == (3, 2)
    whole = make(LinearOperator, world=World(rank=1, size=2), add_dist_sampler=False)
    assert (len(whole.train_loader), len(whole.validation_loader)) == (5, 4)


def test_whoever_expects_a_division_and_does_not_get_it_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    class Indivisible(Bare):
        def setup(self, config: dict[str, Any]) -> None:
            self.register_data(train_loader=DataLoader(TensorDataset(torch.zeros(4)), batch_size=None))

    for rank in range(2):
        make(Indivisible, world=World(rank=rank, size=2))
    make(Indivisible)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the train loader is not divided" in caplog.text


# ------------------------------------------------------------------------------------------------ training loop


@pytest.mark.parametrize("missing", ["model", "optimizer", "criterion"])
def test_the_stock_loop_says_what_it_needs(missing: str) -> None:
    operator = make(LinearOperator)
    delattr(operator, missing)
    with pytest.raises(RuntimeError, match=rf"self\.{missing}.*`LinearOperator`"):
        operator.train_epoch(dataset_batches())


def dataset_batches() -> Iterable[Any]:
    return DataLoader(dataset(6), batch_size=2)


class Spy(LinearOperator):
    """Notes what the rungs are given."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.infos: list[dict[str, Any]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.infos.append(batch_info)
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.infos.append(batch_info)
        return super().validate_batch(batch, batch_info)


def test_each_training_batch_is_told_where_it_is() -> None:
    operator = make(Spy, scheduler_step_freq="manual")
    operator.train_epoch(dataset_batches(), num_steps=3, epoch_idx=4)
    operator.train_epoch(dataset_batches(), {"mine": 1, "batch_idx": -1})
    common = {IS_PADDING: False, NUM_STEPS: 3, USE_FP16: False, "epoch_idx": 4, SCHEDULER_STEP: "manual"}
    assert operator.infos[:3] == [{"batch_idx": i, "global_step": i, **common} for i in range(3)]
    assert [info["global_step"] for info in operator.infos[3:]] == [3, 4, 5]
    assert [(info["mine"], info["batch_idx"]) for info in operator.infos[3:]] == [(1, -1)] * 3
    assert operator.global_step == 6


def test_each_validation_batch_is_told_less() -> None:
    operator = make(Spy)
    operator.validate(dataset_batches())
    operator.validate(dataset_batches(), {"mine": 1})
    assert operator.infos[:3] == [{"batch_idx": i} for i in range(3)]
    assert operator.infos[3:] == [{"batch_idx": i, "mine": 1} for i in range(3)]


def test_training_and_validation_set_the_mode_of_the_model() -> None:
    operator = make(LinearOperator)
    operator.validate(dataset_batches())
    assert not operator.model.training
    operator.train_epoch(dataset_batches())
    assert operator.model.training


def test_validation_computes_no_gradients() -> None:
    operator = make(LinearOperator)
    before = [parameter.clone() for parameter in operator.model.parameters()]
    operator.validate(dataset_batches())
    assert all(parameter.grad is None for parameter in operator.model.parameters())
    assert all(map(torch.equal, before, operator.model.parameters()))


def test_the_summary_averages_by_samples() -> None:
    operator = make(LinearOperator)
    operator.optimizer = torch.optim.SGD(operator.model.parameters(), lr=0.0)
    data = dataset(5)
    result = operator.train_epoch(DataLoader(data, batch_size=4))
    features, _, target = data.tensors
    loss = torch.nn.functional.mse_loss(operator.model(features), target).item()
    assert list(result) == ["batch_count", "num_samples", "train_loss", "last_train_loss"]
    assert result["train_loss"] == pytest.approx(loss)
    assert (result["batch_count"], result["num_samples"]) == (2, 5)
    last = torch.nn.functional.mse_loss(operator.model(features[4:]), target[4:]).item()
    assert result["last_train_loss"] == pytest.approx(last)


def test_an_empty_iterator_is_counted_as_nothing() -> None:
    operator = make(LinearOperator)
    assert operator.train_epoch([]) == {"batch_count": 0, "num_samples": 0}
    assert operator.validate([]) == {"batch_count": 0, "num_samples": 0}


@pytest.mark.parametrize(
    ("scheduler_step_freq", "lr"), [("batch", 0.1 * 0.5**6), ("epoch", 0.1 * 0.5**2), ("manual", 0.1)]
)
def test_the_scheduler_steps_when_the_user_says(scheduler_step_freq: str, lr: float) -> None:
    operator = make(LinearOperator, scheduler_step_freq=scheduler_step_freq)
    operator.optimizer = torch.optim.SGD(operator.model.parameters(), lr=0.1)
    operator.scheduler = torch.optim.lr_scheduler.StepLR(operator.optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        operator.train_epoch(dataset_batches())
    assert operator.scheduler.get_last_lr() == [pytest.approx(lr)]


class Scripted(LinearOperator):
    """Reports metrics from a list."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return batch  # type: ignore[no-any-return]


def test_metrics_may_be_tensors_and_differ_from_batch_to_batch() -> None:
    result = make(Scripted).train_epoch(
        [
            {"a": torch.tensor(1.0), "num_samples": 1},
            {"a": torch.tensor([4.0]), "b": 2, "num_samples": 2},
        ]
    )
    assert result == {"batch_count": 2, "num_samples": 3, "a": 3.0, "last_a": 4.0, "b": 2, "last_b": 2}


def test_a_batch_without_a_number_of_samples_counts_once() -> None:
    assert make(Scripted).train_epoch([{"a": 1}, {"a": 2}])["num_samples"] == 2


def test_nan_stays_nan_in_the_mean_while_the_last_value_is_the_last() -> None:
    result = make(Scripted).train_epoch([{"a": float("nan")}, {"a": 0.0}])
    assert math.isnan(result["a"])
    assert result["last_a"] == 0


# ------------------------------------------------------------------------------------------------ the rungs


class Halves(LinearOperator):
    """Overrides each rung a little."""

    calls: list[str]

    def setup(self, config: dict[str, Any]) -> None:
        self.calls = []
        super().setup(config)

    def prepare_batch(self, batch: Any) -> Any:
        self.calls.append("prepare_batch")
        return super().prepare_batch(batch)

    def forward(self, features: Any, target: Any) -> Any:
        self.calls.append("forward")
        output, loss = super().forward(features, target)
        return output, loss / 2

    def backward(self, loss: torch.Tensor) -> None:
        self.calls.append("backward")
        super().backward(loss)

    def optimizer_step(self) -> None:
        self.calls.append("optimizer_step")
        super().optimizer_step()


def test_each_rung_can_be_overridden_by_itself() -> None:
    operator, plain = make(Halves), make(LinearOperator)
    batch = next(iter(dataset_batches()))
    assert operator.train_batch(batch, {})["train_loss"] == plain.train_batch(batch, {})["train_loss"] / 2
    assert operator.calls == ["prepare_batch", "forward", "backward", "optimizer_step"]
    torch.testing.assert_close(operator.model.weight.grad * 2, plain.model.weight.grad)
    operator.calls.clear()
    operator.validate_batch(batch, {})
    assert operator.calls == ["prepare_batch", "forward"]


class Two(Bare):
    """Two models in a row, each with an optimizer."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        models = [torch.nn.Linear(NUM_FEATURES, 2), torch.nn.Linear(2, 1)]
        self.models, self.optimizers, self.criterion = self.register(
            models=models, optimizers=[an_optimizer(model) for model in models], criterion=torch.nn.MSELoss()
        )
        self.model, self.optimizer = torch.nn.Sequential(*self.models), self.optimizers[0]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.take_step(self.forward(batch[:1], batch[1])[1])
        return {}

    def take_step(self, loss: torch.Tensor) -> None:
        self.backward(loss, optimizer=self.optimizers)
        self.optimizer_step(self.optimizers)


class ClearsByHand(Two):
    def take_step(self, loss: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


class OneByOne(Two):
    def take_step(self, loss: torch.Tensor) -> None:
        self.optimizers[1].zero_grad()
        self.backward(loss, optimizer=self.optimizers[0])
        for optimizer in self.optimizers:
            self.optimizer_step(optimizer)


class OldRungs(Two):
    """The stock `train_batch`, which steps one optimizer, and rungs without arguments that step the other, too."""

    train_batch = TrainingOperator.train_batch

    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        super().backward(loss)

    def optimizer_step(self) -> None:  # type: ignore[override]
        super().optimizer_step()
        self.optimizers[1].step()


class WeightedOldRungs(OldRungs):
    def forward(self, features: Any, target: Any) -> Any:
        return *super().forward(features, target), 5.0

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        TrainingOperator.backward(self, loss, **options)


@pytest.mark.parametrize("operator_cls", [Two, OneByOne, OldRungs, WeightedOldRungs])
def test_gradients_of_several_optimizers_never_add_up(operator_cls: type[Two]) -> None:
    found, expected = make(operator_cls), make(ClearsByHand)
    for batch in batches(4):
        for operator in (found, expected):
            operator.train_batch(batch, {})
        for model, other in zip(found.models, expected.models, strict=True):
            torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)


def test_with_several_optimizers_a_rung_needs_to_know_which() -> None:
    operator = make(Two)
    loss = operator.model(torch.ones(1, NUM_FEATURES)).sum()
    with pytest.raises(ValueError, match=r"`self.backward` was called without `optimizer`, and 2 .* add up"):
        operator.backward(loss)
    with pytest.raises(ValueError, match=r"as in `self.optimizer_step\(optimizer=self.optimizer\)`, or a list"):
        operator.optimizer_step()
    for wrong in (0, "generator", [], [operator.optimizer, None]):
        for call in (lambda: operator.backward(loss, optimizer=wrong), lambda: operator.optimizer_step(wrong)):  # noqa: B023
            with pytest.raises(ValueError, match=r"(?s)`optimizer=.*`: pass an optimizer that `register` returned"):
                call()


@pytest.mark.parametrize(
    "weight", [-1, -0.5, math.nan, math.inf, torch.tensor(-1.0), torch.ones(2), numpy.float64("nan")]
)
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    operator = make(LinearOperator)
    loss = operator.model(torch.ones(1, NUM_FEATURES)).sum()
    with pytest.raises(ValueError, match=r"`weight=.*`: need a number from 0 on"):
        operator.backward(loss, weight=weight)
    with pytest.raises(ValueError, match=r"`batch_weight=.*`: need a number from 0 on"):
        operator._new_meters().update({"loss": 1.0, "batch_weight": weight})


@pytest.mark.parametrize("weight", ["5", True, [5], object()])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    operator = make(LinearOperator)
    with pytest.raises(TypeError, match=r"`weight=.*`: need a number from 0 on"):
        operator.backward(operator.model(torch.ones(1, NUM_FEATURES)).sum(), weight=weight)


class Counting(LinearOperator):
    """The weight of a batch is what the config says."""

    def forward(self, features: Any, target: Any) -> Any:
        return *super().forward(features, target), self.config["weight"]


def test_a_step_in_which_nothing_counts_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Momentum, weight decay and schedulers stay where they are, too."""
    operator = make(Counting, {"weight": 1, "optimizer": "adam"}, scheduler_step_freq="batch")
    operator.scheduler = torch.optim.lr_scheduler.StepLR(operator.optimizer, step_size=1)
    loader = dataset_batches()
    operator.train_epoch(loader)
    before = copy.deepcopy((operator.model.state_dict(), operator.optimizer.state_dict()))
    last_epoch = operator.scheduler.last_epoch
    operator.config["weight"] = 0
    result = operator.train_epoch(loader)
    torch.testing.assert_close((operator.model.state_dict(), operator.optimizer.state_dict()), before, rtol=0, atol=0)
    assert operator.scheduler.last_epoch == last_epoch
    assert math.isnan(result["train_loss"])
    assert caplog.text.count("nothing counts in a step") == 1


def test_a_backward_that_takes_no_weight_is_told_how() -> None:
    class Old(Counting):
        def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
            super().backward(loss)

    with pytest.raises(TypeError, match=r"`Old.forward` returned a weight.*`def backward\(self, loss, \*\*options\)`"):
        make(Old, {"weight": 2}).train_epoch(dataset_batches())


def test_a_weight_of_metrics_that_gradients_do_not_have_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Counting):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {**super().train_batch(batch, batch_info), "batch_weight": self.config["told"]}

    for told, num_warnings in ((2.0, 0), (torch.tensor(2), 0), (3, 1)):
        caplog.clear()
        operator = make(Mine, {"weight": 2, "told": told})
        operator.train_epoch(dataset_batches())
        operator.train_epoch(dataset_batches())
        assert caplog.text.count("averages metrics, not gradients") == num_warnings


def test_a_model_may_have_several_inputs() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.scale * (left + right)

    operator = make(Bare)
    model = Sum()
    operator.model, operator.optimizer, operator.criterion = operator.register(
        models=model, optimizers=an_optimizer(model), criterion=torch.nn.MSELoss()
    )
    batch = (torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 1))
    metrics = operator.train_batch(batch, {})
    assert (float(metrics["train_loss"]), metrics["num_samples"]) == (4.0, 2)


def test_nested_structures_are_moved_as_a_whole() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    given = {"a": [torch.ones(1), (torch.ones(1), "text")], "b": Pair(torch.ones(1), 3)}
    moved = to_device(given, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].left.device.type == "meta"
    assert (type(moved["a"][1]), type(moved["b"])) == (tuple, Pair)
    assert (moved["a"][1][1], moved["b"].right) == ("text", 3)


def test_dicts_of_any_class_are_moved_and_left_as_they_were() -> None:
    given = defaultdict(list, {"a": torch.ones(1)})
    moved = to_device(given, torch.device("meta"))
    assert (type(moved), moved["a"].device.type, moved["missing"]) == (defaultdict, "meta", [])
    assert given["a"].device.type == "cpu"


def test_batch_norms_become_synchronized_ones_with_the_same_parameters() -> None:
    for world, kind in ((World(0, 2), torch.nn.SyncBatchNorm), (World(0, 1), torch.nn.BatchNorm1d)):
        operator = make(Bare, world=world, model_options=ModelOptions(sync_batchnorm=True))
        model = torch.nn.Sequential(a_model(), torch.nn.BatchNorm1d(1))
        names = list(model.state_dict())
        optimizer = an_optimizer(model)
        registered, _ = operator.register(models=model, optimizers=optimizer)
        assert type(registered[1]) is kind
        assert list(registered.state_dict()) == names
        stepped = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(registered.parameters(), stepped, strict=True))


@pytest.mark.parametrize(
    ("output", "target", "accuracy"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0, 0], 0.5),
        ([[1.0, 0.0], [0.0, 1.0]], [[0], [1]], 1.0),
        ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], math.nan),
        ([1.0, 0.0], [1.0, 0.0], math.nan),
        ([[1.0], [0.0]], [[1.0], [0.0]], math.nan),
        ([[1.0, 0.5], [0.0, 0.5]], [0.0, 1.0], math.nan),
    ],
    ids=["vector", "column", "another shape", "no classes", "values", "value and spread"],
)
def test_accuracy_compares_classes_sample_by_sample(output: Any, target: Any, accuracy: float) -> None:
    class Fixed(LinearOperator):
        def forward(self, features: Any, target: Any) -> Any:
            return torch.tensor(output), torch.tensor(1.0)

        def prepare_batch(self, batch: Any) -> Any:
            return (), batch[-1]

    metrics = make(Fixed).validate_batch((torch.tensor(target),), {})
    assert list(metrics) == ["val_loss", "val_accuracy", "num_samples"]
    assert float(metrics["val_accuracy"]) == pytest.approx(accuracy, nan_ok=True)
    assert metrics["num_samples"] == 2


def test_accuracy_counts_pixels_like_samples_where_each_has_a_class() -> None:
    class Fixed(LinearOperator):
        def forward(self, features: Any, target: Any) -> Any:
            output = torch.zeros(2, 3, 4, 4)
            output[:, 1] = 1.0
            return output, torch.tensor(1.0)

        def prepare_batch(self, batch: Any) -> Any:
            return (), batch[-1]

    target = torch.ones(2, 4, 4, dtype=torch.int64)
    assert float(make(Fixed).validate_batch((target,), {})["val_accuracy"]) == 1.0


class OneLogit(LinearOperator):
    """A binary classifier with integer targets, which its criterion does not take as they are."""

    loss: Any = torch.nn.BCEWithLogitsLoss()

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.criterion = self.loss

    def prepare_batch(self, batch: Any) -> Any:
        (features,), target = super().prepare_batch(batch)
        return (features,), (target > 0).long()

    def forward(self, features: Any, target: Any) -> Any:
        output = self.model(*features)
        return output, self.criterion(output, target.float())


def test_one_logit_is_compared_with_the_threshold_of_its_criterion() -> None:
    operator = make(OneLogit)
    with torch.no_grad():
        operator.model.weight.fill_(1.0)
    right = [(operator.model(x) > 0) == (y > 0) for x, _, y in dataset_batches()]
    accuracy = operator.validate(dataset_batches())["val_accuracy"]
    assert accuracy == pytest.approx(torch.cat(right).double().mean().item())
    assert accuracy > 0.8


def test_an_accuracy_that_nobody_can_tell_is_nan_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class OwnLoss(OneLogit):
        loss = staticmethod(lambda output, target: (output - target).square().mean())

    operator = make(OwnLoss)
    for _ in range(2):
        assert math.isnan(operator.validate(dataset_batches())["val_accuracy"])
    assert caplog.text.count("`val_accuracy` is NaN: the shapes of outputs and targets do not tell") == 1


def test_mixed_precision_is_used_in_both_loops() -> None:
    class Sees(LinearOperator):
        def forward(self, features: Any, target: Any) -> Any:
            output, loss = super().forward(features, target)
            self.dtypes.append(output.dtype)
            return output, loss

    operator = make(Sees, precision=NativeAmp(torch.bfloat16, CPU))
    operator.dtypes = []
    operator.train_epoch(dataset_batches())
    operator.validate(dataset_batches())
    assert operator.dtypes == [torch.bfloat16] * 6


# ------------------------------------------------------------------------------------------------ from_creators


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


def test_what_no_creator_made_is_absent() -> None:
    operator = make(TrainingOperator.from_creators(create_model, create_optimizer))
    for name in ("criterion", "scheduler", "schedulers"):
        assert not hasattr(operator, name)
    for name in ("model", "optimizer", "models", "optimizers"):
        assert hasattr(operator, name)


def test_a_scheduler_without_a_loss_is_not_taken_for_the_loss() -> None:
    operator_cls = TrainingOperator.from_creators(create_model, create_optimizer, scheduler_creator=create_scheduler)
    operator = make(operator_cls, scheduler_step_freq="manual")
    assert not hasattr(operator, "criterion")
    assert isinstance(operator.scheduler, torch.optim.lr_scheduler.StepLR)


def test_several_optimizers_can_train() -> None:
    operator_cls = TrainingOperator.from_creators(create_models, create_optimizers, create_loaders, torch.nn.MSELoss)
    operator = make(operator_cls)
    assert operator.train_epoch(operator.train_loader)["batch_count"] == 3


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


def test_without_a_data_creator_the_data_comes_with_the_call() -> None:
    assert make(TrainingOperator.from_creators(create_model, create_optimizer)).train_loader is None


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


def test_an_operator_of_creators_can_be_subclassed() -> None:
    base = TrainingOperator.from_creators(create_model, create_optimizer, create_loaders, torch.nn.MSELoss)

    class Doubles(base):  # type: ignore[valid-type, misc]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {"mine": 2, "num_samples": 1}

    operator = make(Doubles)
    assert operator.train_epoch(operator.train_loader)["mine"] == 2


# ------------------------------------------------------------------------------------------------ helpers for tests


def test_a_test_operator_calls_the_function_of_its_config() -> None:
    operator_cls = get_test_operator(LinearOperator)
    assert make(operator_cls).train_epoch([1], {}, num_steps=2) == {"done": 1}
    custom = make(operator_cls, {"custom_func": lambda self, iterator, info: {"n": len(list(iterator)), **info}})
    assert custom.train_epoch([1, 2], {"a": 1}) == {"n": 2, "a": 1}
    assert custom.validate([1, 2, 3], {"a": 2}) == {"n": 3, "a": 2}


def test_a_test_metrics_operator_reports_its_scores() -> None:
    operator_cls = get_test_metrics_operator(LinearOperator)
    scores, val_scores = [4, 0, 0], [2, 2, 2]
    operator = make(operator_cls, {"key": "score", "scores": scores, "val_scores": val_scores})
    trained = operator.train_epoch(dataset_batches())
    assert (trained["score"], trained["last_score"], trained["num_samples"]) == (pytest.approx(4 / 6), 0, 6)
    validated = operator.validate(dataset_batches())
    assert (validated["score"], validated["last_score"]) == (1, 1)
    assert (scores, val_scores) == ([4, 0, 0], [2, 2, 2]), "the config stays as it is"
