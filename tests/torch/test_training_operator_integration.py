"""Operators on several workers: what `register` and `register_data` make of models and loaders there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.parallel.strategy import unwrap
from tests.torch.lab import Experiment, run_alone, run_together
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, OwnBatchOperator, dataset

pytestmark = pytest.mark.integration


def create_models(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return [torch.nn.Linear(NUM_FEATURES, 4), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 1))]


def create_optimizers(models: Any, config: dict[str, Any]) -> Any:
    return tuple(torch.optim.SGD(model.parameters(), lr=0.1) for model in models)


def create_loaders(config: dict[str, Any]) -> Any:
    return DataLoader(dataset(21), batch_size=4), DataLoader(dataset(13, seed=1), batch_size=4)


def create_schedulers(optimizers: Any, config: dict[str, Any]) -> Any:
    return [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5) for optimizer in optimizers]


class TwoModels(
    TrainingOperator.from_creators(  # type: ignore[misc]
        create_models, create_optimizers, create_loaders, torch.nn.MSELoss, create_schedulers
    )
):
    """Two models in a row, each with an optimizer and a scheduler, in a rung of the user's own."""

    def prepare_batch(self, batch: Any) -> Any:
        features, _, target = batch
        return (features,), target

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (features,), target = self.prepare_batch(batch)
        loss = self.criterion(self.models[1](self.models[0](features)), target)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        return {"train_loss": loss.item(), "num_samples": len(target)}


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[TorchTrainer]:
    with TorchTrainer(
        training_operator_cls=TwoModels,
        num_workers=2,
        min_workers=2,
        num_cpus_per_worker=0.5,
        scheduler_step_freq="manual",
    ) as trainer:
        yield trainer


# ------------------------------------------------------------------------------------------------ of creators


def test_several_models_train_as_in_one_process(two: TorchTrainer, make_local: Callable[..., TorchTrainer]) -> None:
    class Joined(TwoModels):
        def register_data(self, **loaders: Any) -> None:
            super().register_data(train_loader=DataLoader(dataset(21), batch_size=8))

    alone = make_local(Joined, scheduler_step_freq="manual")
    two.load_state_dict(alone.state_dict())
    assert two.train()["train_loss"] == pytest.approx(alone.train()["train_loss"], rel=1e-6)
    models, expected = two.get_model(), alone.get_model()
    assert [type(model) for model in models] == [torch.nn.Linear, torch.nn.Sequential]
    for model, other in zip(models, expected, strict=True):
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)


def test_every_scheduler_is_stepped_by_the_trainer(two: TorchTrainer) -> None:
    def steps(operator: Any) -> list[int]:
        return [scheduler.last_epoch for scheduler in operator.schedulers]

    before = two.apply_all_operators(steps)
    two.update_scheduler(before[0][0] + 7)
    assert two.apply_all_operators(steps) == [[before[0][0] + 7] * 2] * 2


@pytest.mark.usefixtures("patient")
def test_creators_that_return_one_loader_have_no_validation(two: TorchTrainer) -> None:
    def check() -> Any:
        operator_cls = TrainingOperator.from_creators(create_models, create_optimizers, lambda config: [[1, 2, 3]])
        [answer], _ = Experiment(operator_cls, calls=(("validate", None),)).run_in(world())
        return answer

    with pytest.raises(RuntimeError, match=r"`validation_loader` was not registered"):
        two.apply_all_workers(check)


def world() -> Any:
    from raysgd.engine.shared.types import World

    return World(dist.get_rank(), dist.get_world_size())


# ------------------------------------------------------------------------------------------------ register


class Looks(LinearOperator):
    """Returns what a function in the config finds, after one epoch of the stock loop."""

    def train_epoch(self, iterator: Any, **arguments: Any) -> dict[str, Any]:
        result = super().train_epoch(iterator, **arguments)
        return {**result, "found": self.config["look"](self)}


def look(two: TorchTrainer, function: Callable[[Any], Any], base: type = Looks, **options: Any) -> list[Any]:
    findings = run_together(two, Experiment(base, {"look": function}, options=options))
    return [own["found"] for own in findings.single[0]]


def test_options_reach_the_wrapper(two: TorchTrainer) -> None:
    class Unused(Looks):
        def register(self, **parts: Any) -> Any:
            return super().register(**parts, ddp_args={"find_unused_parameters": True, "bucket_cap_mb": 1})

    assert look(two, lambda operator: operator.model.find_unused_parameters, Unused) == [True, True]


def test_a_model_that_has_nothing_to_train_is_not_wrapped(two: TorchTrainer) -> None:
    class Teacher(Looks):
        def register(self, **parts: Any) -> Any:
            self.teacher = torch.nn.Linear(1, 1).requires_grad_(False)
            models, optimizer, criterion = super().register(**{**parts, "models": [parts["models"], self.teacher]})
            self.registered = models
            return models[0], optimizer, criterion

    def found(operator: Any) -> Any:
        return operator.registered[1] is operator.teacher, len(operator._original_models)

    assert look(two, found, Teacher) == [(True, 2)] * 2


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
    class Scaled(Looks):
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
            look(two, id, Scaled, strategy=parallel)
    assert look(two, lambda operator: True, Scaled, strategy="none") == [True, True]


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


@pytest.mark.usefixtures("patient")
def test_workers_that_freeze_different_parameters_are_told_so(two: TorchTrainer) -> None:
    class ByRank(Thaws):
        def train_epoch(self, iterator: Any, epoch_idx: int = 0, **arguments: Any) -> dict[str, Any]:
            return super().train_epoch(iterator, epoch_idx=self.world_rank, **arguments)

    with pytest.raises(RuntimeError, match="expects same model across all ranks"):
        run_together(two, Experiment(ByRank, {"thaws": (1,)}))


class WrapsByHand(Looks):
    def register(self, **parts: Any) -> Any:
        model, *rest = super().register(**parts)
        self.was_wrapped = isinstance(model, DistributedDataParallel)
        return DistributedDataParallel(model, device_ids=self.device_ids), *rest


def test_whoever_wraps_by_hand_gets_the_model_as_it_is(two: TorchTrainer) -> None:
    assert look(two, lambda operator: operator.was_wrapped, WrapsByHand, strategy="none") == [False, False]


def test_replicas_wrapped_by_hand_stay_equal(two: TorchTrainer) -> None:
    experiment = Experiment(WrapsByHand, {"look": id, "num_samples": 16}, options={"strategy": "none"})
    first, second = run_together(two, experiment).model
    alone = run_alone(Experiment(LinearOperator, {"num_samples": 16, "batch_size": 8}))
    assert list(first) == ["weight", "bias"]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, alone.model[0], rtol=1e-6, atol=1e-6)


def test_a_communication_hook_of_the_users_own_is_kept(two: TorchTrainer) -> None:
    class Compresses(Looks):
        def register(self, **parts: Any) -> Any:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            return super().register(**parts, ddp_args={"comm_hook": (dist.group.WORLD, fp16_compress_hook)})

    assert look(two, lambda operator: len(operator.model._comm_hooks), Compresses) == [1, 1]


# ------------------------------------------------------------------------------------------------ register_data


def seen_with(two: TorchTrainer, make_loader: Callable[..., Any], num_epochs: int = 1, **options: Any) -> Any:
    class Loads(LinearOperator):
        def make_loader(self, data: Any, shuffle: bool = False) -> Any:
            return make_loader(self, data)

    experiment = Experiment(Loads, {"num_samples": 8}, (("train", None),) * num_epochs, options)
    return run_together(two, experiment).seen


def test_a_loader_is_divided_in_its_own_order(two: TorchTrainer) -> None:
    seen = seen_with(two, lambda operator, data: DataLoader(data, batch_size=2))
    assert seen == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_loader_is_left_whole_where_that_is_asked_for(two: TorchTrainer) -> None:
    seen = seen_with(two, lambda operator, data: DataLoader(data, batch_size=4), add_dist_sampler=False)
    assert seen == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


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


def test_batches_of_a_batch_sampler_are_left_alone_without_global_batches(two: TorchTrainer) -> None:
    class Pairs(BatchSampler):
        pass

    def loader(operator: Any, data: Any) -> Any:
        return DataLoader(data, batch_sampler=Pairs(SequentialSampler(data), 4, drop_last=False))

    assert seen_with(two, loader) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_shuffled_passes_differ_and_are_divided_alike(two: TorchTrainer) -> None:
    seen = seen_with(two, lambda operator, data: DataLoader(data, batch_size=2, shuffle=True), num_epochs=2)
    epochs = [[number for rank in seen for batch in rank[2 * e : 2 * e + 2] for number in batch] for e in range(2)]
    assert [sorted(numbers) for numbers in epochs] == [list(range(8))] * 2
    assert epochs[0] != epochs[1]


def test_processes_of_a_loader_may_read_ahead(two: TorchTrainer) -> None:
    def loader(operator: Any, data: Any) -> Any:
        return DataLoader(data, batch_size=2, num_workers=1)

    assert seen_with(two, loader) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


# ------------------------------------------------------------------------------------------------ mixed precision
