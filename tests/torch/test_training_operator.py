"""The class that users subclass, alone and without a trainer."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from raysgd.core.engine.shared.types import World
from raysgd.exceptions import NotRegisteredError
from raysgd.torch import TrainingOperator
from raysgd.torch.constants import NUM_STEPS, SCHEDULER_STEP, USE_FP16
from raysgd.torch.objects.precision import NativeAmp
from raysgd.utils import IS_PADDING
from tests.torch.operators_for_tests import (
    CPU,
    NUM_FEATURES,
    Bare,
    LinearOperator,
    an_optimizer,
    batches,
    dataset,
    dataset_batches,
    make,
)


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
    expected = {
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
    assert {name: getattr(operator, name) for name in expected} == expected


def test_the_default_state_is_nothing() -> None:
    operator = make(Bare)
    assert operator.state_dict() is None
    assert operator.load_state_dict({"ignored": 1}) is None


@pytest.mark.parametrize("missing", ["model", "optimizer", "criterion"])
def test_the_stock_loop_says_what_it_needs(missing: str) -> None:
    operator = make(LinearOperator)
    delattr(operator, missing)
    with pytest.raises(RuntimeError, match=rf"`LinearOperator` has no `self\.{missing}`"):
        operator.train_epoch(dataset_batches())


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


class Measured(LinearOperator):
    """Measures how far predictions are off, and counts how often the model is called."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.num_calls = 0
        self.model.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_calls += 1

    def measure_batch(self, output: Any, target: Any) -> dict[str, Any]:
        return {"error": (output.detach() - target).abs().mean()}


class MeasuredByItself(Measured):
    """Does the same in its own `validate_batch`."""

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        output, target, metrics = self.evaluate_batch(batch)
        return {**metrics, **self.measure_batch(output, target)}


@pytest.mark.parametrize("operator_cls", [Measured, MeasuredByItself])
def test_further_metrics_of_a_validation_need_no_second_forward_pass(operator_cls: type[Measured]) -> None:
    operator = make(operator_cls)
    batches = [*dataset_batches()]
    result = operator.validate(batches)
    assert operator.num_calls == len(batches)
    with torch.no_grad():
        errors = [(operator.model(features) - target).abs().mean() for features, *_, target in batches]
        weights = torch.tensor([float(len(target)) for *_, target in batches])
    assert result["error"] == pytest.approx(float((torch.stack(errors) * weights).sum() / weights.sum()))
    assert result["val_loss"] == pytest.approx(make(LinearOperator).validate(dataset_batches())["val_loss"])


def test_training_and_validation_set_the_mode_of_the_model() -> None:
    operator = make(LinearOperator)
    operator.validate(dataset_batches())
    assert not operator.model.training
    operator.train_epoch(dataset_batches())
    assert operator.model.training


class OwnNames(Bare):
    """Two models, neither of which is `self.model`."""

    def setup(self, config: dict[str, Any]) -> None:
        networks = [torch.nn.Linear(NUM_FEATURES, 1), torch.nn.Linear(1, 1)]
        (self.first, self.second), self.optimizers = self.register(
            models=networks, optimizers=[an_optimizer(each) for each in networks]
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.second(self.first(batch[0])).square().mean()
        self.backward(loss, optimizer=self.optimizers)
        self.optimizer_step(self.optimizers)
        return {"loss": loss.detach()}


def test_models_may_have_names_of_their_own() -> None:
    class Validates(OwnNames):
        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {"loss": self.second(self.first(batch[0])).square().mean()}

    operator = make(Validates)
    operator.validate(dataset_batches())
    assert not operator.first.training
    assert not operator.second.training
    operator.train_epoch(dataset_batches())
    assert operator.first.training
    assert operator.second.training
    with pytest.raises(NotRegisteredError, match=r"has no `self.model`"):
        make(OwnNames).validate(dataset_batches())


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
    ("weights", "kind"),
    [
        ([-1, -0.5, math.nan, math.inf, torch.tensor(-1.0), torch.ones(2), numpy.float64("nan")], ValueError),
        (["5", True, [5], object()], TypeError),
    ],
)
def test_a_weight_that_is_none_is_refused(weights: list[Any], kind: type[Exception]) -> None:
    operator = make(LinearOperator)
    loss = operator.model(torch.ones(1, NUM_FEATURES)).sum()
    for weight in weights:
        with pytest.raises(kind, match=r"`weight=.*`: need a number from 0 on"):
            operator.backward(loss, weight=weight)
        with pytest.raises(kind, match=r"`batch_weight=.*`: need a number from 0 on"):
            operator._raysgd.new_meters().update({"loss": 1.0, "batch_weight": weight})


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


class WeighsItsOutput(LinearOperator):
    """Notes in each backward pass whether the model's output still takes memory."""

    kept: list[bool]

    def forward(self, features: Any, target: Any) -> Any:
        output = self.model(*features)
        self.output = weakref.ref(output)
        return output, (output - target).sum()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.kept.append(self.output() is not None)
        super().backward(loss, **options)


def test_an_output_that_the_backward_pass_does_not_need_is_freed_before_it() -> None:
    operator = make(WeighsItsOutput)
    operator.kept = []
    operator.train_epoch(dataset_batches())
    assert operator.kept
    assert not any(operator.kept)


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
    assert caplog.text.count("`val_accuracy` is NaN: the shapes of outputs and targets do not show") == 1


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


class TestTheRecord:
    """What is registered stands in a record that attributes of users do not reach."""

    @pytest.mark.parametrize(
        ("name", "way_out"),
        [
            ("_models", "self.register"),
            ("_original_models", "self.register"),
            ("_optimizers", "self.register"),
            ("_schedulers", "self.register"),
            ("_criterion", "self.register"),
            ("_train_loader", "self.register_data"),
            ("_validation_loader", "self.register_data"),
            ("_amp", "precision="),
            ("_amp_scaler", "precision="),
            ("_use_fp16", "precision="),
            ("_config", "comes from the trainer"),
            ("_device", "comes from the trainer"),
            ("_world_rank", "comes from the trainer"),
            ("_scheduler_step_freq", "comes from the trainer"),
        ],
    )
    def test_an_assignment_to_a_name_of_it_is_refused(self, name: str, way_out: str) -> None:
        class Careless(LinearOperator):
            def setup(self, config: dict[str, Any]) -> None:
                setattr(self, name, {"mine": 1})
                super().setup(config)

        with pytest.raises(
            AttributeError, match=rf"`self\.{name}` belongs to the library.*{way_out}.*`self\.my{name}`"
        ):
            make(Careless)

    @pytest.mark.parametrize("name", ["_precision", "_context", "_registered", "_trained", "_place"])
    def test_any_other_private_name_is_free(self, name: str) -> None:
        class Careless(LinearOperator):
            def setup(self, config: dict[str, Any]) -> None:
                setattr(self, name, {"mine": 1})
                super().setup(config)
                setattr(self, name, {"mine": 2})

        operator = make(Careless)
        plain = make(LinearOperator)
        assert operator.train_epoch(dataset_batches()) == plain.train_epoch(dataset_batches())
        assert operator.validate(dataset_batches()).keys() == plain.validate(dataset_batches()).keys()
        assert getattr(operator, name) == {"mine": 2}

    def test_attributes_of_the_class_do_not_hide_what_is_registered(self) -> None:
        class Hides(LinearOperator):
            _models = _optimizers = _schedulers = None

        registered = make(Hides)._raysgd.registered
        assert (len(registered.models), len(registered.optimizers), registered.schedulers) == (1, 1, [])
