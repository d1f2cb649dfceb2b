"""By how much each batch counts: the weight is that of the batch, and users may give one of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from raysgd.engine.types import World
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.options import StepOptions
from raysgd.torch.torch_runner import EpochRequest, RunnerSpec, TorchRunner
from tests.torch.lab import SEED, Experiment, run_alone, run_together
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

UNEVEN = {
    "num_samples": 65,
    "batch_size": 8,
}  # on two workers: four joint batches of 16 samples, and one of a single one
EVEN = {"num_samples": 64, "batch_size": 8}


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[TorchTrainer]:
    with TorchTrainer(
        training_operator_cls=LinearOperator, num_workers=2, num_cpus_per_worker=0.5, use_gpu=False
    ) as trainer:
        yield trainer


def assert_close(found: Any, expected: Any, case: str, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}")


# ------------------------------------------------------------------------------------------------ whose weight it is


class DrawsAll(LinearOperator):
    """Makes a list of all batches first."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        for batch in list(iterator):
            self.train_batch(batch, info)
        return {}


class DrawsAhead(LinearOperator):
    """Has the next batch in its hands while it trains on one."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        batches = iter(iterator)
        coming = next(batches, None)
        while coming is not None:
            batch, coming = coming, next(batches, None)
            self.train_batch(batch, info)
        return {}


class DrawsAheadByHand(DrawsAhead, OwnBatchOperator):
    """Computes gradients past the rungs."""


class Skips(LinearOperator):
    """Leaves every second batch out, in one of the ways that programs do, among them the one before the last."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["batch_idx"] % 2:
            return {}
        return super().train_batch(batch, batch_info)


class SkipsWhatItComputed(LinearOperator):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        loss = self.criterion(self.model(features), target)
        if batch_info["batch_idx"] % 2 == 0:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {}


class DrawsTwice(LinearOperator):
    """Takes a step on two batches together, as some adversarial networks do."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        batches = iter(iterator)
        for first in batches:
            second = next(batches)
            for _ in range(2):
                self.train_batch([torch.cat(parts) for parts in zip(first, second, strict=True)], info)
        return {}


class OfOneSampleEach(LinearOperator):
    """Brings data of its own, which are one sample on each rank."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        if info["epoch_idx"] == 0:
            return super().train_epoch(iterator, info)
        one_step(self)
        return {}


class OfOneSampleEachByHand(OfOneSampleEach, OwnBatchOperator):
    pass


def one_step(operator: Any) -> None:
    features = torch.full((1, 3), operator.world_rank + 1.0)
    operator.train_batch((features, torch.zeros(1), torch.zeros(1, 1)), {"batch_idx": 0})


@pytest.mark.parametrize("operator_cls", [DrawsAll, DrawsAhead, DrawsAheadByHand])
def test_batches_of_different_weights_drawn_ahead_are_an_error(
    two: TorchTrainer, operator_cls: type[TrainingOperator]
) -> None:
    with pytest.raises(RuntimeError, match=r"drawn ahead that count differently .* Draw one batch, train on it"):
        run_together(two, Experiment(operator_cls, UNEVEN))
    for config in (EVEN, {**UNEVEN, "drop_last": True}):
        found = run_together(two, Experiment(operator_cls, config))
        expected = run_alone(Experiment(LinearOperator, {**config, "batch_size": 16}))
        assert_close(found.model[0], expected.model[0], operator_cls.__name__)


@pytest.mark.parametrize("operator_cls", [DrawsAll, DrawsAhead])
def test_batches_of_a_window_drawn_ahead_are_an_error(operator_cls: type[TrainingOperator]) -> None:
    options = {"step_options": StepOptions(accumulate_grad_batches=2)}
    with pytest.raises(RuntimeError, match="drawn ahead that are at different places of an optimizer step"):
        run_alone(Experiment(operator_cls, EVEN, options=options))


@pytest.mark.parametrize("operator_cls", [Skips, SkipsWhatItComputed])
def test_batches_may_be_skipped(two: TorchTrainer, operator_cls: type[TrainingOperator]) -> None:
    found = run_together(two, Experiment(operator_cls, UNEVEN))
    expected = run_alone(Experiment(operator_cls, {**UNEVEN, "batch_size": 16}))
    assert_close(found.model[0], expected.model[0], operator_cls.__name__)


def test_two_equal_batches_may_be_drawn_for_a_step(two: TorchTrainer) -> None:
    found = run_together(two, Experiment(DrawsTwice, EVEN))
    expected = run_alone(Experiment(DrawsTwice, {**EVEN, "batch_size": 16}))
    assert_close(found.model[0], expected.model[0], "two for a step")


@pytest.mark.parametrize("operator_cls", [OfOneSampleEach, OfOneSampleEachByHand])
@pytest.mark.parametrize("is_between_calls", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_that_is_not_over_the_data_counts_all_ranks_alike(
    two: TorchTrainer, operator_cls: type[TrainingOperator], is_between_calls: bool, window: int
) -> None:
    if window > 1 and operator_cls is OfOneSampleEachByHand:
        return
    config = {**UNEVEN, "optimizer": "sgd"}
    spec = RunnerSpec(operator_cls, config, step_options=StepOptions(accumulate_grad_batches=window))

    def run(operator: TrainingOperator) -> tuple[Any, Any]:
        runner = TorchRunner(spec, World(operator.world_rank, operator.world_size))
        runner.setup()
        runner.train_epoch(EpochRequest(None, {}, False, SEED))  # ends with a joint batch of one sample
        before = {name: tensor.clone() for name, tensor in runner.state()["models"][0].items()}
        if is_between_calls:
            one_step(runner.operator)
        else:
            runner.train_epoch(EpochRequest(None, {}, False, SEED))
        after = runner.state()["models"][0]
        runner.shutdown()
        return before, after

    for before, after in two.apply_all_operators(run):
        expected = torch.nn.Linear(3, 1)
        expected.load_state_dict(before)
        inputs = torch.tensor([[1.0] * 3, [2.0] * 3])
        torch.nn.functional.mse_loss(expected(inputs), torch.zeros(2, 1)).backward()
        for name, parameter in expected.named_parameters():
            assert parameter.grad is not None
            assert_close(after[name], before[name] - 0.05 * parameter.grad, name)
