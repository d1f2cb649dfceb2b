"""Operators on several workers: what `register` and `register_data` make of models and loaders there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch import TorchTrainer
from raysgd.torch.parallel.tensors import unwrap
from tests.torch.lab import Experiment, run_alone, run_together
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, OwnBatchOperator

pytestmark = pytest.mark.integration


class Distills(LinearOperator):
    """With a teacher that is another one on each worker when it is made."""

    def register(self, **parts: Any) -> Any:
        torch.manual_seed(self.world_rank)
        teacher = torch.nn.BatchNorm1d(NUM_FEATURES)
        teacher.weight.data = torch.rand(4, NUM_FEATURES).t()[:, 1]  # not contiguous
        teacher.bias.data = torch.rand(NUM_FEATURES).bfloat16()
        teacher.register_buffer("codes", torch.randint(100, (5,), dtype=torch.int16))
        models, optimizer, criterion = super().register(
            **{**parts, "models": [parts["models"], teacher.requires_grad_(False)]}
        )
        return models[0], optimizer, criterion

    def train_epoch(self, iterator: Any, **arguments: Any) -> dict[str, Any]:
        state = self._original_models[1].state_dict()
        return {**super().train_epoch(iterator, **arguments), "teacher": torch.cat([*map(torch.ravel, state.values())])}


@pytest.mark.parametrize(("parallel", "is_shared"), [("ddp", True), ("fsdp", True), ("none", False)])
def test_a_frozen_model_is_the_same_on_all_workers(two: TorchTrainer, parallel: str, is_shared: bool) -> None:
    findings = run_together(two, Experiment(Distills, options={"strategy": parallel}))
    first, second = (own["teacher"] for own in findings.single[0])
    assert torch.equal(first, second) == is_shared
    assert len(first.unique()) > 3


class Centers(torch.nn.Module):
    """Has a buffer alone, which follows the batches that it sees in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = self.mean.lerp(features.mean(dim=0), 0.5)
        return features - self.mean


class LearnsCentered(LinearOperator):
    def register(self, **parts: Any) -> Any:
        models, *rest = super().register(**{**parts, "models": [parts["models"], Centers()]})
        self.centers = models[1]
        return models[0], *rest

    def prepare_batch(self, batch: Any) -> Any:
        features, _, target = batch
        self.seen.append(self.centers.mean.tolist())
        return (self.centers(features),), target


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_model_of_buffers_alone_is_that_of_rank_0_in_each_step_and_in_validation(
    two: TorchTrainer, parallel: str
) -> None:
    experiment = Experiment(LearnsCentered, {}, (("train", None), ("validate", None)), {"strategy": parallel})
    first, second = run_together(two, experiment).seen
    assert first == second
    assert len({*map(tuple, first)}) == 4, "in each of three steps, and in validation"


class Uncertainty(torch.nn.Module):
    """A loss that learns by how much to count, and remembers in a buffer what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = torch.nn.Parameter(torch.rand(1))
        self.register_buffer("origin", torch.rand(1))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        squares = (output - target - self.origin).square()
        return (squares * torch.exp(-self.log_variance) + self.log_variance).mean()


class LearnsToCount(LinearOperator):
    """Has a criterion with a parameter, which begins as another one on each worker but the first."""

    def register(self, **parts: Any) -> Any:
        torch.manual_seed(self.world_rank + 1)
        self.loss = Uncertainty()
        parts["optimizers"].add_param_group({"params": self.loss.parameters()})
        return super().register(**{**parts, "criterion": self.loss})

    def train_epoch(self, iterator: Any, **arguments: Any) -> dict[str, Any]:
        results = super().train_epoch(iterator, **arguments)
        state = [value for value in self._raysgd.parallel.state_of(self.loss).values() if value is not None]
        return {**results, "criterion": torch.cat(state)}


class LearnsToCountInOwnBatch(LearnsToCount, OwnBatchOperator):
    """The same past the rungs of the library."""


@pytest.mark.parametrize(
    ("operator_cls", "parallel"),
    [(LearnsToCount, "ddp"), (LearnsToCountInOwnBatch, "ddp"), (LearnsToCount, "fsdp")],
)
def test_a_criterion_with_parameters_is_trained_as_in_one_process(
    two: TorchTrainer, operator_cls: type[LinearOperator], parallel: str
) -> None:
    config = {"num_samples": 18, "batch_size": 4}  # the last step has 2 samples
    calls = (("train", None), ("validate", None), ("train", None))
    found = run_together(two, Experiment(operator_cls, config, calls, {"strategy": parallel}))
    alone = run_alone(Experiment(operator_cls, {**config, "batch_size": 8}, calls))
    first, second = (own["criterion"] for own in found.single[2])
    if parallel == "ddp":
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone.single[2][0]["criterion"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.model[0], alone.model[0], rtol=1e-5, atol=1e-6)
    assert found.results[1]["val_loss"] == pytest.approx(alone.results[1]["val_loss"], rel=1e-5)


@pytest.mark.usefixtures("patient")
def test_an_optimizer_of_what_nobody_averages_is_refused(two: TorchTrainer) -> None:
    class Scaled(LinearOperator):
        def register(self, **parts: Any) -> Any:
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.head = torch.nn.Linear(1, 1)
            parts["optimizers"].add_param_group(
                {"params": [self.scale, self.head.bias, torch.nn.Parameter(self.scale)]}
            )
            return super().register(**parts)

    names = r"`self.scale`, `self.head.bias`, parameter 2 in group 1 of `SGD`\. Their gradients would not be averaged"
    for parallel in ("ddp", "fsdp"):
        with pytest.raises(InvalidRegistrationError, match=names):
            run_together(two, Experiment(Scaled, options={"strategy": parallel}))
    run_together(two, Experiment(Scaled, options={"strategy": "none"}))


class Thaws(LinearOperator):
    """Trains its first layer in the second pass only, and its last one in all but the last."""

    def make_model(self) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model

    def train_epoch(self, iterator: Any, epoch_idx: int = 0, **arguments: Any) -> dict[str, Any]:
        layers = unwrap(self.model)
        layers[0].requires_grad_(epoch_idx in self.config["thaws"])  # type: ignore[index]
        layers[2].requires_grad_(epoch_idx < 3)  # type: ignore[index]
        self.rewrap()
        return super().train_epoch(iterator, epoch_idx=epoch_idx, **arguments)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_parameters_that_are_unfrozen_later_are_trained_as_in_one_process(two: TorchTrainer, parallel: str) -> None:
    config = {"num_samples": 18, "batch_size": 4, "thaws": (1, 3), "lr": 0.2}  # the last step has 2 samples
    calls = (("train", None), ("train", 2), ("train", 1), ("train", None), ("train", None))
    found = run_together(two, Experiment(Thaws, config, calls, {"strategy": parallel}))
    alone = run_alone(Experiment(Thaws, {**config, "batch_size": 8}, calls))
    if parallel == "ddp":
        torch.testing.assert_close(found.model[0], found.model[1], rtol=0, atol=0)
    torch.testing.assert_close(found.model[0], alone.model[0], rtol=1e-5, atol=1e-6)


class WrapsByHand(LinearOperator):
    def register(self, **parts: Any) -> Any:
        model, *rest = super().register(**parts)
        return DistributedDataParallel(model, device_ids=self.device_ids), *rest


def test_replicas_wrapped_by_hand_stay_equal(two: TorchTrainer) -> None:
    experiment = Experiment(WrapsByHand, {"num_samples": 16}, options={"strategy": "none"})
    first, second = run_together(two, experiment).model
    alone = run_alone(Experiment(LinearOperator, {"num_samples": 16, "batch_size": 8}))
    assert list(first) == ["weight", "bias"]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone.model[0], rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ register_data


def seen_with(two: TorchTrainer, make_loader: Callable[..., Any], num_epochs: int = 1) -> Any:
    class Loads(LinearOperator):
        def make_loader(self, data: Any, shuffle: bool = False) -> Any:
            return make_loader(self, data)

    return run_together(two, Experiment(Loads, {"num_samples": 8}, (("train", None),) * num_epochs)).seen


def test_a_loader_is_divided_in_its_own_order(two: TorchTrainer) -> None:
    seen = seen_with(two, lambda operator, data: DataLoader(data, batch_size=2))
    assert seen == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_sampler_that_divides_is_told_the_pass_and_not_divided_again(two: TorchTrainer) -> None:
    def loader(operator: Any, data: Any) -> Any:
        sampler = DistributedSampler(data, shuffle=True, seed=3)
        return DataLoader(data, batch_size=2, sampler=sampler)

    seen = seen_with(two, loader, num_epochs=2)
    epochs = [[batch for rank in seen for batch in rank[2 * epoch : 2 * epoch + 2]] for epoch in range(2)]
    for batches in epochs:
        assert sorted(number for batch in batches for number in batch) == list(range(8))
    assert epochs[0] != epochs[1], "it was told that a new pass begins"


@pytest.mark.usefixtures("patient")
def test_a_sampler_that_divides_by_itself_without_saying_so_is_an_error(two: TorchTrainer) -> None:
    class EveryOther(Sampler[int]):
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.first, 8, 2))

    def loader(operator: Any, data: Any) -> Any:
        return DataLoader(data, batch_size=2, sampler=EveryOther(operator.world_rank))

    with pytest.raises(ValueError, match="sampler EveryOther drew different orders"):
        seen_with(two, loader)


@pytest.mark.usefixtures("patient")
def test_workers_that_freeze_different_parameters_are_told_so(two: TorchTrainer) -> None:
    class ByRank(Thaws):
        def train_epoch(self, iterator: Any, epoch_idx: int = 0, **arguments: Any) -> dict[str, Any]:
            return super().train_epoch(iterator, epoch_idx=self.world_rank, **arguments)

    with pytest.raises(RuntimeError, match="expects same model across all ranks"):
        run_together(two, Experiment(ByRank, {"thaws": (1,)}))
