"""What holds for every precision and every way to keep replicas equal, with the stock and with a user's `train_batch`.

Replicas live side by side in the workers of running trainers, so that a case costs milliseconds.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysgd.core.engine.shared.types import World
from raysgd.operators import GANOperator
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import FSDPOptions, StepOptions
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.messages.epochs import EpochRequest
from tests.helpers.processes import shipped
from tests.torch import lab, operators_for_tests
from tests.torch.lab import SEED, Experiment, run_alone, run_together
from tests.torch.operators_for_tests import BatchNormOperator, LinearOperator, OwnBatchOperator, equal

pytestmark = pytest.mark.integration

PRECISIONS = ("fp32", "fp16", "bf16")
PARALLEL = ("ddp", "fsdp", "none")
TOLERANCE = {"fp32": 1e-6, "fp16": 4e-3, "bf16": 4e-2}
CONFIG = {"num_samples": 21, "batch_size": 3, "lr": 0.1}  # on two workers: steps of 6, 6, 6 and 3 samples


# ------------------------------------------------------------------------------------------------ operators


class DeepOperator(LinearOperator):
    """Layers in a row, and a scale for fp16 that does not overflow at first, as the default does on purpose."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self._raysgd.precision.state_key:
            self._raysgd.precision.load_state_dict({**self._raysgd.precision.state_dict(), "scale": 256.0})

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(operators_for_tests.NUM_FEATURES, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )


class RungsOperator(DeepOperator):
    """A `train_batch` of the user's that calls the lower rungs."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = self.prepare_batch(batch)
        with self._raysgd.precision.forward():
            _, loss = self.forward(features, target)
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(target)}


class PlainOperator(OwnBatchOperator, DeepOperator):
    """A `train_batch` of the user's that knows neither rungs nor precision."""


class OldOperator(DeepOperator):
    """Mixed precision as operators for the old library did it."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, numbers, target = batch
        self.seen.append(numbers.tolist())
        if not self.use_fp16_native:
            loss = self.criterion(self.model(features), target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            with self._amp.autocast():
                loss = self.criterion(self.model(features), target)
            self.optimizer.zero_grad()
            self._amp_scaler.scale(loss).backward()
            self._amp_scaler.step(self.optimizer)
            self._amp_scaler.update()
        return {"train_loss": loss.item(), "num_samples": len(target)}


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    with shipped(operators_for_tests, lab, request.module):
        yield


def start(num_workers: int) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=LinearOperator, num_workers=num_workers, num_cpus_per_worker=0.5, use_gpu=False
    )


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[TorchTrainer]:
    with start(2) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def three(ray_cluster: None) -> Iterator[TorchTrainer]:
    with start(3) as trainer:
        yield trainer


def experiment(operator_cls: type[TrainingOperator], calls: Any = (("train", None),), **options: Any) -> Experiment:
    config = {**CONFIG, **options.pop("config", {})}
    return Experiment(operator_cls, config, calls, options)


def big_batch(operator_cls: type[TrainingOperator], factor: int, precision: str, **options: Any) -> Any:
    config = {**CONFIG, "batch_size": CONFIG["batch_size"] * factor, **options.pop("config", {})}
    return run_alone(Experiment(operator_cls, config, options={"precision": precision, **options}))


# ------------------------------------------------------------------------------------------------ one process


def assert_close(found: Any, expected: Any, tolerance: float, case: str) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_workers_train_as_one_process_does(two: TorchTrainer, parallel: str, precision: str) -> None:
    """With short last batches, unequal shares and padding, accumulated or not, whoever writes `train_batch`."""
    by_hand = (PlainOperator, OldOperator) if precision == "fp32" else (OldOperator,)  # the first knows no precision
    cases = [
        *itertools.product((DeepOperator, RungsOperator), (1, 2, 3)),
        *itertools.product(by_hand, (1,)),
    ]
    for operator_cls, window in cases:
        steps = StepOptions(accumulate_grad_batches=window)
        found = run_together(two, experiment(operator_cls, precision=precision, strategy=parallel, step_options=steps))
        expected = big_batch(DeepOperator, 2 * window, precision)
        case = f"{operator_cls.__name__}, {window} batches a step"
        assert_close(found.model[0], expected.model[0], TOLERANCE[precision], case)
        [result], [whole] = found.results, expected.results
        assert result["num_samples"] == whole["num_samples"] == 21
        if window == 1:
            assert result["train_loss"] == pytest.approx(whole["train_loss"], rel=TOLERANCE[precision])


def test_a_model_too_large_to_exchange_at_once_trains_likewise(two: TorchTrainer) -> None:
    class Wide(DeepOperator):
        def make_model(self) -> torch.nn.Module:
            num_hidden = 100_000
            model = torch.nn.Sequential(
                torch.nn.Linear(operators_for_tests.NUM_FEATURES, num_hidden), torch.nn.Linear(num_hidden, 1)
            )
            assert sum(each.nbytes for each in model.parameters()) > 2**20
            return model

    class WideInOwn(OwnBatchOperator, Wide):
        pass

    config = {"lr": 1e-7}  # so many weights learn fast
    expected = big_batch(Wide, 2, "fp32", config=config)
    for operator_cls in (Wide, WideInOwn):
        found = run_together(two, experiment(operator_cls, config=config))
        assert_close(found.model[0], expected.model[0], 1e-6, operator_cls.__name__)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_single_worker_accumulates_likewise(precision: str) -> None:
    for operator_cls, window in itertools.product((DeepOperator, RungsOperator), (2, 4, 100)):
        steps = StepOptions(accumulate_grad_batches=window)
        found = run_alone(experiment(operator_cls, precision=precision, step_options=steps))
        expected = big_batch(DeepOperator, window, precision)
        assert_close(found.model[0], expected.model[0], TOLERANCE[precision], f"{operator_cls.__name__}, {window}")


class WeightedOperator(DeepOperator):
    """Batches of many sizes, from a loader that is not divided; on each rank others, and another number of them."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        features, numbers, target = data.tensors
        shares = {(0, 1): [(0, 21)], (0, 2): [(0, 5), (5, 6), (6, 9)], (1, 2): [(9, 10), (10, 14), (14, 20), (20, 21)]}
        place = (self.world_rank, self.world_size)
        return [(features[a:b], numbers[a:b], target[a:b]) for a, b in shares[place]]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_samples_count_alike_whatever_batch_they_come_in(two: TorchTrainer, parallel: str) -> None:
    """Four batches a step are the whole pass here: its gradient is that of all samples at once."""
    steps = StepOptions(accumulate_grad_batches=4)
    expected = run_alone(experiment(WeightedOperator, step_options=steps))
    found = run_together(two, experiment(WeightedOperator, strategy=parallel, step_options=steps))
    assert_close(found.model[0], expected.model[0], 1e-6, parallel)
    assert found.results[0]["num_samples"] == 21


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_rest_of_a_window_is_stepped_at_the_end_of_pass_and_call(two: TorchTrainer, parallel: str) -> None:
    """Four steps a pass: calls of 3 and 4 steps end and cross it; windows of 2 are 2, 1; then 1 and 2, 1."""

    class Counts(DeepOperator):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.seen: list[int] = []

        def prepare_batch(self, batch: Any) -> Any:
            features, _, target = batch
            return (features,), target

        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.seen.append(self.global_step)

    for operator_cls in (Counts, type("CountsInOwn", (Counts, RungsOperator), {"optimizer_step": steps_at_boundary})):
        calls = (("train", 3), ("train", 4))
        options = {"strategy": parallel, "step_options": StepOptions(accumulate_grad_batches=2)}
        found = run_together(two, experiment(operator_cls, calls=calls, **options))
        assert found.seen[0] == found.seen[1] == [1, 2, 3, 5, 6], operator_cls.__name__


def steps_at_boundary(self: Any) -> None:
    DeepOperator.optimizer_step(self)
    if self._raysgd.sync.leg.plan.ends_step:
        self.seen.append(self.global_step)


class StopsEarlyOperator(DeepOperator):
    """A loop of the user's that stops in the middle of a window."""

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        for index, batch in enumerate(iterator):
            self.train_batch(batch, info)
            if index == 2:
                break
        return {"is_boundary": int(self._raysgd.sync.leg.plan.ends_step)}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_loop_that_stops_early_leaves_nothing_behind(two: TorchTrainer, parallel: str, precision: str) -> None:
    """What waits then was not exchanged, and is."""
    options = {"precision": precision, "step_options": StepOptions(accumulate_grad_batches=2)}
    found = run_together(two, experiment(StopsEarlyOperator, strategy=parallel, **options))
    assert found.results[0]["is_boundary"] == 0
    expected = run_alone(Experiment(DeepOperator, {**CONFIG, "batch_size": 6}, (("train", 3),), options))
    kept = [model for model in found.model if all(tensor is not None for tensor in model.values())]
    assert len(kept) == (2 if parallel == "ddp" else 1)
    for model in kept:
        assert_close(model, expected.model[0], TOLERANCE[precision], parallel)


class Halves:
    """A communication hook with a state: sends half of each gradient, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0


def halve(state: Halves, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    state.num_calls += 1
    bucket.buffer().mul_(0.5)
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def with_hook(parent: type[LinearOperator]) -> type[LinearOperator]:
    class Hooked(parent):  # type: ignore[misc, valid-type]
        def register(self, **parts: Any) -> Any:
            self.halves = Halves()
            return super().register(**parts, ddp_args={"comm_hook": (self.halves, halve)})

    return Hooked


def test_a_communication_hook_acts_on_weighted_gradients(two: TorchTrainer) -> None:
    """Also on the last step, whose shares differ, and whoever computes the gradients."""
    expected = big_batch(DeepOperator, 2, "fp32", config={"lr": CONFIG["lr"] / 2})
    for operator_cls in (DeepOperator, PlainOperator):
        found = run_together(two, experiment(with_hook(operator_cls)))
        assert_close(found.model[0], expected.model[0], 1e-6, operator_cls.__name__)


def test_batches_inside_a_window_are_not_exchanged(two: TorchTrainer) -> None:
    class Counts(with_hook(DeepOperator)):  # type: ignore[misc]
        def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
            return {"num_exchanges": self.halves.num_calls}

    calls = (("train", None), ("validate", None))
    counts = [
        run_together(two, experiment(Counts, calls, step_options=StepOptions(accumulate_grad_batches=window))).results[
            1
        ]["num_exchanges"]
        for window in (1, 2, 4)
    ]
    assert counts == [4, 2, 1]


@pytest.mark.usefixtures("patient")
def test_a_hook_that_is_none_is_refused(two: TorchTrainer) -> None:
    class Wrong(DeepOperator):
        def register(self, **parts: Any) -> Any:
            return super().register(**parts, ddp_args={"comm_hook": "fp16"})

    with pytest.raises(ValueError, match=r"'comm_hook': 'fp16'.*need a communication hook"):
        run_together(two, experiment(Wrong))


# ------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("parallel", PARALLEL)
def test_evaluation_is_exact_and_needs_no_other_rank(two: TorchTrainer, parallel: str) -> None:
    """13 samples, 3 a batch: one rank has a batch more. Evaluation comes first, between and after training."""
    calls = (("validate", None), ("train", None), ("validate", None), ("train", 2), ("validate", 1))
    found = run_together(two, experiment(DeepOperator, calls=calls, strategy=parallel))
    assert [result["num_samples"] for result in found.results] == [13, 21, 13, 12, 6]
    whole = run_alone(Experiment(DeepOperator, CONFIG, (("validate", None),)))
    assert found.results[0]["val_loss"] == pytest.approx(whole.results[0]["val_loss"], rel=1e-6)


# ------------------------------------------------------------------------------------------------ clipping


@pytest.mark.parametrize("bounds", [{"clip_grad_norm": 0.8}, {"clip_grad_value": 0.3}])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_clipped_is_the_true_gradient_of_all(
    two: TorchTrainer, precision: str, bounds: dict[str, float]
) -> None:
    steps = StepOptions(accumulate_grad_batches=2, **bounds)
    expected = big_batch(DeepOperator, 4, "fp32", step_options=StepOptions(**bounds))
    free = big_batch(DeepOperator, 4, "fp32")
    differences = [(expected.model[0][name] - tensor).abs().max() for name, tensor in free.model[0].items()]
    assert max(differences) > 2 * TOLERANCE[precision], "the bound has to make a difference"
    for parallel in ("ddp", "fsdp"):
        found = run_together(two, experiment(DeepOperator, precision=precision, strategy=parallel, step_options=steps))
        assert_close(found.model[0], expected.model[0], TOLERANCE[precision], parallel)


# ------------------------------------------------------------------------------------------------ checkpoints


def trained_state(spec: TorchSettings) -> Callable[[], dict[str, Any] | None]:
    """For all workers: trains a pass and returns the state, which rank 0 has."""

    def run() -> dict[str, Any] | None:
        runner = TorchRunner(spec, World(dist.get_rank(), dist.get_world_size()))
        runner.setup()
        runner.train_epoch(EpochRequest(None, {}, False, SEED))
        state = runner.state()
        return state if dist.get_rank() == 0 else None

    return run


def restored_state(spec: TorchSettings, state: dict[str, Any], trains: bool = False) -> Callable[[], Any]:
    """For all workers: takes over a state; returns it read back, or after another pass."""

    def run() -> Any:
        runner = TorchRunner(spec, World(dist.get_rank(), dist.get_world_size()))
        runner.setup()
        runner.restore(state, None)
        if trains:
            runner.train_epoch(EpochRequest(None, {}, False, SEED))
        return copied(runner.state())

    return run


def copied(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def spec_of(operator_cls: type[TrainingOperator] = DeepOperator, optimizer: str = "adam", **options: Any) -> Any:
    return TorchSettings(operator_cls, {**CONFIG, "num_samples": 24, "optimizer": optimizer}, **options)


KINDS = [("ddp", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16"), ("ddp", "fp16"), ("single", "fp32"), ("single", "fp16")]


def test_checkpoints_travel_between_all_kinds(two: TorchTrainer, three: TorchTrainer) -> None:
    """Between sizes, formats and ways to keep equal, models and optimizers arrive to the last bit."""
    states = {}
    for parallel, precision in KINDS:
        spec = spec_of(precision=precision, strategy="ddp" if parallel == "single" else parallel)
        if parallel == "single":
            runner = TorchRunner(spec, World(0, 1))
            runner.setup()
            runner.train_epoch(EpochRequest(None, {}, False, SEED))
            states[parallel, precision] = copied(runner.state())
        else:
            states[parallel, precision] = two.apply_all_workers(trained_state(spec))[0]
    assert not equal(states["ddp", "fp32"]["models"], states["ddp", "fp16"]["models"])
    for (kind, state), (parallel, precision) in itertools.product(states.items(), KINDS):
        spec = spec_of(precision=precision, strategy="ddp" if parallel == "single" else parallel)
        case = f"{kind} -> {parallel}, {precision}"
        if parallel == "single":
            runner = TorchRunner(spec, World(0, 1))
            runner.setup()
            runner.restore(state, None)
            found = runner.state()
        else:
            group = three if kind[1] == precision else two
            found = group.apply_all_workers(restored_state(spec, state))[0]
        assert equal(found["models"], state["models"]), case
        assert equal(found["optimizers"], state["optimizers"]), case
        assert ("amp_native" in found) == (precision == "fp16"), case
        if "amp_native" in found and "amp_native" in state:
            assert found["amp_native"] == state["amp_native"], case


def test_a_restored_group_goes_on_alike_however_it_is_divided(two: TorchTrainer) -> None:
    state = two.apply_all_workers(trained_state(spec_of(strategy="fsdp")))[0]
    ends = [two.apply_all_workers(restored_state(spec_of(strategy=way), state, True))[0] for way in ("ddp", "fsdp")]
    assert_close(ends[1]["models"], ends[0]["models"], 1e-6, "models")
    assert_close(ends[1]["optimizers"], ends[0]["optimizers"], 1e-6, "optimizers")


def test_what_an_optimizer_keeps_from_the_start_is_divided_too(two: TorchTrainer) -> None:
    found = [
        two.apply_all_workers(trained_state(spec_of(optimizer="adagrad", strategy=way)))[0] for way in PARALLEL[:2]
    ]
    assert_close(found[1]["models"], found[0]["models"], 1e-6, "models")
    assert_close(found[1]["optimizers"], found[0]["optimizers"], 1e-6, "optimizers")


# ------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_is_done_to_models_changes_neither_names_nor_numbers(two: TorchTrainer, parallel: str) -> None:
    expected = big_batch(DeepOperator, 2, "fp32")
    for model_options in (
        StepOptions(activation_checkpointing=True),
        StepOptions(compile={"backend": "aot_eager"}),
        StepOptions(activation_checkpointing=True, compile={"backend": "eager"}),
    ):
        fsdp = FSDPOptions(min_block_parameters=1)  # every layer is a group
        options = {"strategy": parallel, "step_options": model_options, "fsdp_options": fsdp}
        found = run_together(two, experiment(DeepOperator, (("train", None), ("validate", None)), **options))
        assert list(found.model[0]) == list(expected.model[0])
        assert_close(found.model[0], expected.model[0], 1e-6, f"{parallel}, {model_options}")


def test_buffers_and_state_of_batch_norm_survive_division(two: TorchTrainer) -> None:
    spec = TorchSettings(BatchNormOperator, {"num_samples": 24}, strategy="fsdp")
    state = two.apply_all_workers(trained_state(spec))[0]
    assert list(state["models"][0]) == list(BatchNormOperator.make_model(None).state_dict())  # type: ignore[arg-type]
    found = two.apply_all_workers(restored_state(spec, state))[0]
    assert equal(found["models"], state["models"])


class Adversaries(GANOperator):
    """Freezes one model while the other one steps."""

    def build_discriminator(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def build_generator(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def build_data(self, config: dict[str, Any]) -> Any:
        return torch.randn(16, 1, generator=torch.Generator().manual_seed(0)), None

    def build_optimizers(self, discriminator: Any, generator: Any, config: dict[str, Any]) -> Any:
        return tuple(torch.optim.SGD(model.parameters(), lr=0.1) for model in (discriminator, generator))

    def sample_noise(self, num_samples: int, rng: Any = None) -> torch.Tensor:
        return torch.linspace(-1, 1, 2 * num_samples).reshape(num_samples, 2)


def test_models_that_are_frozen_in_turns_train_alike_in_every_way(two: TorchTrainer) -> None:
    config = {"noise_dim": 2, "batch_size": 4, "seed": 0}
    states = []
    for parallel in ("ddp", "fsdp"):
        spec = TorchSettings(Adversaries, config, strategy=parallel)
        state = two.apply_all_workers(trained_state(spec))[0]
        states.append(state["models"])
    assert_close(states[1], states[0], 1e-6, "fsdp")
