"""By how much each batch counts: the weight is that of the batch, and users may give one of their own."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.core.engine.shared.types import World
from raysgd.data import IterableStream
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.configuration import BatchOptions
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.utils import BATCH_SIZE, BATCH_WEIGHT
from tests.torch.lab import SEED, Experiment, Findings, run_alone, run_together
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator

pytestmark = pytest.mark.integration

UNEVEN = {
    "num_samples": 65,
    "batch_size": 8,
}  # on two workers: four global batches of 16 samples, and one of a single one
EVEN = {"num_samples": 64, "batch_size": 8}


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


class SkipsInItsLoop(LinearOperator):
    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        for index, batch in enumerate(iterator):
            if index % 2:
                self.skip_batch()
            else:
                self.train_batch(batch, info)
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

    def forward(self, features: Any, target: Any) -> Any:
        return *super().forward(features, target), len(target)


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
@pytest.mark.usefixtures("patient")
def test_batches_of_different_weights_drawn_ahead_are_an_error(
    two: TorchTrainer, operator_cls: type[TrainingOperator]
) -> None:
    with pytest.raises(RuntimeError, match=r"was drawn while a batch with weight .* Draw one batch, train on it"):
        run_together(two, Experiment(operator_cls, UNEVEN))
    for config in (EVEN, {**UNEVEN, "drop_last": True}):
        found = run_together(two, Experiment(operator_cls, config))
        expected = run_alone(Experiment(LinearOperator, {**config, "batch_size": 16}))
        assert_close(found.model[0], expected.model[0], operator_cls.__name__)


@pytest.mark.parametrize("operator_cls", [DrawsAll, DrawsAhead])
def test_batches_of_a_window_drawn_ahead_are_an_error(operator_cls: type[TrainingOperator]) -> None:
    options = {"step_options": StepOptions(accumulate_grad_batches=2)}
    with pytest.raises(ValueError, match=r"`self\.backward` was not called for the batch"):
        run_alone(Experiment(operator_cls, EVEN, options=options))


@pytest.mark.parametrize("operator_cls", [Skips, SkipsWhatItComputed, SkipsInItsLoop])
def test_a_batch_may_be_skipped(two: TorchTrainer, operator_cls: type[TrainingOperator]) -> None:
    found = run_together(two, Experiment(operator_cls, UNEVEN))
    expected = run_alone(Experiment(operator_cls, {**UNEVEN, "batch_size": 16}))
    assert_close(found.model[0], expected.model[0], operator_cls.__name__)


def test_two_equal_batches_may_be_drawn_for_a_step(two: TorchTrainer) -> None:
    found = run_together(two, Experiment(DrawsTwice, EVEN))
    expected = run_alone(Experiment(DrawsTwice, {**EVEN, "batch_size": 16}))
    assert_close(found.model[0], expected.model[0], "two for a step")


@pytest.mark.parametrize(
    ("operator_cls", "window"), [(OfOneSampleEach, 1), (OfOneSampleEach, 2), (OfOneSampleEachByHand, 1)]
)
@pytest.mark.parametrize("is_between_calls", [False, True])
def test_a_step_that_is_not_over_the_data_counts_all_ranks_alike(
    two: TorchTrainer, operator_cls: type[TrainingOperator], is_between_calls: bool, window: int
) -> None:
    config = {**UNEVEN, "optimizer": "sgd"}
    spec = TorchSettings(operator_cls, config, step_options=StepOptions(accumulate_grad_batches=window))

    def run(operator: TrainingOperator) -> tuple[Any, Any]:
        runner = TorchRunner(spec, World(operator.world_rank, operator.world_size))
        runner.setup()
        runner.train_epoch(EpochRequest(None, {}, False, SEED))  # ends with a global batch of one sample
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


# ------------------------------------------------------------------------------------------------ weights of the user's

SEQUENCES = {"num_samples": 39, "batch_size": 3, "lr": 0.1, "optimizer": "adam"}  # the last global batch has 3 samples
LONGEST = 9
TOLERANCE = {"fp32": 1e-6, "fp16": 4e-3}


class Tokens(LinearOperator):
    """Predicts something for each token of sequences of different length; the loss is the mean over tokens.

    The second global batch of two workers has no token at all, and in the third one a worker has none.
    """

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self._raysgd.precision.state_key:  # not the large first scale, whose steps are skipped
            self._raysgd.precision.load_state_dict({**self._raysgd.precision.state_dict(), "scale": 256.0})

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        generator = torch.Generator().manual_seed(7)
        num_samples = len(data)
        lengths = torch.randint(1, LONGEST + 1, (num_samples,), generator=generator)
        if not self.config.get("all_have_tokens"):
            lengths[6:12] = lengths[15:18] = 0
        features = torch.randn(num_samples, LONGEST, 3, generator=generator)
        target = features.sum(dim=2, keepdim=True) * (1 + lengths.reshape(-1, 1, 1))
        return super().make_loader(torch.utils.data.TensorDataset(features, lengths, target))

    def prepare_batch(self, batch: Any) -> Any:
        features, lengths, target = batch
        return (features, torch.arange(LONGEST) < lengths.reshape(-1, 1)), target

    def forward(self, features: Any, target: Any) -> Any:
        inputs, is_there = features
        output = self.model(inputs)
        errors = torch.nn.functional.mse_loss(output.float(), target, reduction="none").squeeze(2)
        return output, self.mean_over(errors, is_there), is_there.sum()

    def mean_over(self, errors: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
        return (errors * is_there).sum() / is_there.sum()  # without a token it is NaN, and so are its gradients


class TokensInRungs(Tokens):
    """Calls the rungs in a `train_batch` of its own."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = self.prepare_batch(batch)
        with self._raysgd.precision.forward():
            _, loss, num_tokens = self.forward(features, target)
        self.backward(loss, weight=num_tokens.item())
        self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(target), BATCH_WEIGHT: num_tokens}


class TokensInSteps(TokensInRungs):
    """Steps the optimizer by itself."""

    def optimizer_step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


class TokensOfTwo(TokensInRungs):
    """Two optimizers for one loss."""

    def register(self, **parts: Any) -> Any:
        model = parts["models"]
        parts["optimizers"] = [torch.optim.Adam(model[index].parameters(), lr=self.config["lr"]) for index in (0, 2)]
        model, optimizers, criterion = super().register(**parts)
        return model, optimizers, criterion

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(loss, optimizer=self.optimizer, **options)

    def optimizer_step(self) -> None:  # type: ignore[override]
        super().optimizer_step(self.optimizer)


class WideTokens(Tokens):
    """A model whose gradients are exchanged while others are computed."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 60_000), torch.nn.Linear(60_000, 1))

    def mean_over(self, errors: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
        return super().mean_over(errors, is_there) * 1e-3


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_averaged_over_what_user_code_counts(two: TorchTrainer, precision: str) -> None:
    cases = [(Tokens, 1), (Tokens, 2), (TokensInRungs, 1), (TokensInRungs, 3), (TokensOfTwo, 1)]
    if precision == "fp32":
        cases += [(TokensInSteps, 1), (WideTokens, 1), (WideTokens, 2)]
    for operator_cls, window in cases:
        case = f"{operator_cls.__name__}, {window} batches a step"
        lr = {"lr": 1e-4} if operator_cls is WideTokens else {}
        options = {"precision": precision, "step_options": StepOptions(accumulate_grad_batches=window)}
        found = run_together(two, Experiment(operator_cls, {**SEQUENCES, **lr}, options=options))
        base = WideTokens if operator_cls is WideTokens else Tokens
        config = {**SEQUENCES, **lr, "batch_size": 6 * window}
        expected = run_alone(Experiment(base, config, options={"precision": precision}))
        assert_close(found.model[0], expected.model[0], case, TOLERANCE[precision])
        assert_close(found.model[1], found.model[0], case, 0.0)
        [result], [whole] = found.results, expected.results
        assert result["num_samples"] == whole["num_samples"] == 39
        assert result["train_loss"] == pytest.approx(whole["train_loss"], rel=TOLERANCE[precision]), case
        assert BATCH_WEIGHT not in result


def test_validation_is_averaged_over_what_user_code_counts(two: TorchTrainer) -> None:
    calls = (("validate", None),)
    found = run_together(two, Experiment(Tokens, SEQUENCES, calls)).results[0]
    whole = run_alone(Experiment(Tokens, {**SEQUENCES, "batch_size": 39}, calls)).results[0]
    assert found["num_samples"] == whole["num_samples"] == 13
    assert found["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-6)


@pytest.mark.parametrize("window", [1, 2])
def test_a_single_worker_counts_likewise(window: int) -> None:
    for operator_cls in (Tokens, TokensInRungs):
        steps = {"step_options": StepOptions(accumulate_grad_batches=window)}
        found = run_alone(Experiment(operator_cls, SEQUENCES, options=steps))
        expected = run_alone(Experiment(Tokens, {**SEQUENCES, "batch_size": 3 * window}))
        assert_close(found.model[0], expected.model[0], operator_cls.__name__)


@pytest.mark.parametrize("window", [1, 2])
def test_divided_models_count_likewise(two: TorchTrainer, window: int) -> None:
    config = {**SEQUENCES, "all_have_tokens": True}
    steps = {"step_options": StepOptions(accumulate_grad_batches=window)}
    found = run_together(two, Experiment(Tokens, config, options={**steps, "strategy": "fsdp"}))
    expected = run_alone(Experiment(Tokens, {**config, "batch_size": 6 * window}))
    assert_close(found.model[0], expected.model[0], "fsdp")


class TokensOfUnequalLoaders(Tokens):
    """Loaders that the library does not divide; the shorter one is filled up with batches that count nothing."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        features, lengths, target = super().make_loader(data).dataset.tensors
        bounds = {(0, 1): [0, 39], (0, 2): [0, 5, 9], (1, 2): [9, 11, 20, 21, 39]}[self.world_rank, self.world_size]
        return [(features[a:b], lengths[a:b], target[a:b]) for a, b in itertools.pairwise(bounds)]


def test_a_batch_that_only_fills_up_counts_nothing_whatever_user_code_says(two: TorchTrainer) -> None:
    steps = {"step_options": StepOptions(accumulate_grad_batches=4)}
    for operator_cls in (TokensOfUnequalLoaders, type("InRungs", (TokensInRungs, TokensOfUnequalLoaders), {})):
        found = run_together(two, Experiment(operator_cls, SEQUENCES, options=steps))
        expected = run_alone(Experiment(TokensOfUnequalLoaders, SEQUENCES))
        assert_close(found.model[0], expected.model[0], operator_cls.__name__)


class DiesInBackward(Tokens):
    """Rank 1 is killed in the backward pass of a batch, when its weight is on its way already."""

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        note = Path(self.config["note_of_death"])
        if self.world_rank == 1 and self.global_step == self.config["dies_at"] and not note.exists():
            note.touch()
            loss.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        super().backward(loss, **options)


class OfGlobalBatches(DiesInBackward):
    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        loader = super().make_loader(data)
        return torch.utils.data.DataLoader(loader.dataset, batch_size=self.config[BATCH_SIZE])


def test_a_loss_during_a_step_changes_no_weight(ray_cluster: None, tmp_path: Path) -> None:
    config = {**SEQUENCES, "dies_at": 3, "note_of_death": str(tmp_path / "note"), BATCH_SIZE: 6}
    with TorchTrainer(
        training_operator_cls=OfGlobalBatches,
        num_workers=2,
        num_cpus_per_worker=0.5,
        config=config,
        accumulate_grad_batches=2,
    ) as trainer:
        trainer.train()
        assert (tmp_path / "note").exists()
        found = trainer.get_model(to_cpu=True).state_dict()
    expected = run_alone(Experiment(Tokens, {**SEQUENCES, "batch_size": 12}))
    assert_close(dict(found), dict(expected.model[0]), "after a loss")


def test_a_step_of_several_batches_is_refused_with_several_optimizers() -> None:
    for options in (
        {"step_options": StepOptions(accumulate_grad_batches=2)},
        {"batch_options": BatchOptions(split_batches=True, micro_batch_size=2)},
    ):
        with pytest.raises(ValueError, match=r"works with one optimizer, and 2 are registered: register one with"):
            run_alone(Experiment(TokensOfTwo, SEQUENCES, options=options))


# ------------------------------------------------------------------------------------------------ those of criteria

NUM_LABELLED, NUM_CLASSES, PLACES = 43, 4, 5
CLASS_WEIGHTS = torch.tensor([0.1, 5.0, 1.0, 0.3])
CRITERIA: dict[str, Any] = {
    "plain": torch.nn.CrossEntropyLoss,
    "told": partial(torch.nn.CrossEntropyLoss, ignore_index=2),
    "classes": partial(torch.nn.CrossEntropyLoss, weight=CLASS_WEIGHTS),
    "function": partial(partial, torch.nn.functional.cross_entropy, weight=CLASS_WEIGHTS),
}


def labelled(ignored: int, has_empty: bool = True) -> torch.utils.data.TensorDataset:
    """Sequences with labels, of which many are ignored: all those of a global batch of 8, and of a share of another."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(NUM_LABELLED, 3, PLACES, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (NUM_LABELLED, PLACES), generator=generator)
    labels[torch.arange(PLACES) >= torch.randint(1, PLACES + 1, (NUM_LABELLED, 1), generator=generator)] = ignored
    labels[20:24] = ignored
    if has_empty:
        labels[32:40] = ignored
    return torch.utils.data.TensorDataset(features, labels)


class Labelling(TrainingOperator):
    """Finds the class of each place, with all that is stock."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Conv1d(3, NUM_CLASSES, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
            criterion=CRITERIA[config["criterion"]](),
        )
        data = labelled(-100 if config["criterion"] != "told" else 2, type(self) is not LabellingPenalized)
        train, validation = (torch.utils.data.DataLoader(data, batch_size=size) for size in (config["size"], 3))
        self.register_data(train_loader=train, validation_loader=validation)


class LabellingInRungs(Labelling):
    """Calls criterion and rungs in a `train_batch` of its own, which counts nothing."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.detach()}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_loss": self.criterion(self.model(batch[0]), batch[1])}


class LabellingPenalized(Labelling):
    """Its loss is no mean over labels alone, so it says how much its batches count."""

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        weights, labels = getattr(self.criterion, "weight", None), target[target != -100]
        return output, loss + 0.0 * output.sum(), len(labels) if weights is None else weights[labels].sum()


class LabellingUncounted(Labelling):
    """Its loss is no mean over labels alone, and it does not say how much its batches count."""

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss + 0.0 * output.sum()


class LabellingByHand(Labelling):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        return {}


class TwoHeads(torch.nn.Module):
    def __init__(self, classes: torch.nn.Module) -> None:
        super().__init__()
        self.classes, self.other = classes, torch.nn.Conv1d(3, 1, 1)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.classes(features), self.other(features)


class LabellingByOneHead(Labelling):
    """Its loss does not use all outputs of its model."""

    def register(self, **parts: Any) -> Any:
        parts["models"] = TwoHeads(parts["models"])
        return super().register(**parts, ddp_args={"find_unused_parameters": True})

    def forward(self, features: Any, target: Any) -> Any:
        output, _ = self.model(*features)
        return output, self.criterion(output, target)


def labelled_by_pytorch(
    name: str, global_size: int, num_epochs: int, has_empty: bool
) -> tuple[dict[str, Any], float, float]:
    """Weights, loss and accuracy of a single process without the library."""
    torch.manual_seed(0)
    model, criterion = torch.nn.Conv1d(3, NUM_CLASSES, 1), CRITERIA[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    ignored = getattr(criterion, "ignore_index", -100)
    features, labels = labelled(ignored, has_empty).tensors
    for start in [*range(0, NUM_LABELLED, global_size)] * num_epochs:
        optimizer.zero_grad()
        criterion(model(features[start : start + global_size]), labels[start : start + global_size]).backward()
        optimizer.step()
    output = model(features)
    hits = (output.argmax(dim=1) == labels)[labels != ignored]
    return dict(model.state_dict()), criterion(output, labels).item(), hits.double().mean().item()


def check_labelling(run: Callable[[Experiment], Findings], num_workers: int) -> None:
    calls, size = (("train", None), ("train", None), ("validate", None)), 8 // num_workers
    cases = [(name, Labelling, window) for name in CRITERIA for window in (1, 2)]
    cases += [
        ("plain", LabellingInRungs, 1),
        ("function", LabellingInRungs, 1),
        ("classes", LabellingInRungs, 2),
        ("classes", LabellingPenalized, 1),
    ]
    for name, operator_cls, window in cases:
        case = f"{name}, {operator_cls.__name__}, {window} batches a step"
        config = {"criterion": name, "size": size}
        options = {"step_options": StepOptions(accumulate_grad_batches=window)}
        found = run(Experiment(operator_cls, config, calls, options))
        model, loss, accuracy = labelled_by_pytorch(
            name, size * num_workers * window, 2, operator_cls is not LabellingPenalized
        )
        assert_close(found.model[0], model, case)
        result = found.results[-1]
        assert result["val_loss"] == pytest.approx(loss, abs=1e-6), case
        assert operator_cls is LabellingInRungs or result["val_accuracy"] == pytest.approx(accuracy, abs=1e-6), case
        assert [each["num_samples"] for each in found.results] == [NUM_LABELLED] * 3, case
        alone = run_alone(Experiment(operator_cls, {**config, "size": size * num_workers}, calls, options))
        assert found.results[1]["train_loss"] == pytest.approx(alone.results[1]["train_loss"], rel=1e-5), case


def test_means_over_labels_are_those_of_one_process(two: TorchTrainer) -> None:
    check_labelling(partial(run_together, two), num_workers=2)


def test_labels_are_ignored_where_an_output_is_not_used_either(two: TorchTrainer) -> None:
    found = run_together(two, Experiment(LabellingByOneHead, {"criterion": "plain", "size": 4}))
    expected = run_alone(Experiment(LabellingByOneHead, {"criterion": "plain", "size": 8}))
    assert_close(found.model[0], expected.model[0], "one head")


def test_one_worker_counts_labels_too() -> None:
    check_labelling(run_alone, num_workers=1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("operator_cls", [LabellingUncounted, LabellingByHand])
@pytest.mark.parametrize("name", ["plain", "classes"])
def test_labels_that_nobody_counted_are_an_error(
    two: TorchTrainer, operator_cls: type[TrainingOperator], name: str
) -> None:
    with pytest.raises(ValueError, match=r"some labels are ignored.*`self\.backward\(loss, weight="):
        run_together(two, Experiment(operator_cls, {"criterion": name, "size": 4}))
    run_alone(Experiment(operator_cls, {"criterion": name, "size": 8}))


def test_a_changed_loss_over_labels_needs_a_weight_where_labels_are_ignored() -> None:
    class Halved(torch.nn.CrossEntropyLoss):
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return super().forward(output / 2, target)

    class Changed(Labelling):
        def register(self, **parts: Any) -> Any:
            return super().register(**{**parts, "criterion": Halved(ignore_index=self.config["ignored"])})

    options = {"step_options": StepOptions(accumulate_grad_batches=2)}
    run_alone(Experiment(Changed, {"criterion": "told", "size": 4, "ignored": -100}, options=options))
    with pytest.raises(ValueError, match="has its own `forward` or is decorated, so say what it is the mean over"):
        run_alone(Experiment(Changed, {"criterion": "told", "size": 4, "ignored": 2}, options=options))
    with pytest.raises(ValueError, match="`val_loss` is not what"):
        run_alone(Experiment(Changed, {"criterion": "told", "size": 4, "ignored": 2}, [("validate", None)]))


def test_logical_shards_refuse_losses_that_count_labels() -> None:
    batches = BatchOptions(split_batches=True, deterministic=True)
    with pytest.raises(ValueError, match=r"a loss that ignores labels.*`deterministic=True`"):
        run_alone(Experiment(Labelling, {"criterion": "classes", "size": 8}, options={"batch_options": batches}))


# ------------------------------------------------------------------------------------------------ sums


class Summing(LinearOperator):
    """Has a criterion that is a sum."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.criterion = config["criterion"]


class SummingByHand(Summing):
    def forward(self, features: Any, target: torch.Tensor) -> Any:
        output, total = super().forward(features, target)
        return output, total / len(target)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "criterion", [torch.nn.MSELoss(reduction="sum"), partial(torch.nn.functional.mse_loss, reduction="sum")]
)
def test_sums_are_refused_where_gradients_are_means_over_several_batches(two: TorchTrainer, criterion: Any) -> None:
    config = {"criterion": criterion, "batch_size": 4}
    windows = {"step_options": StepOptions(accumulate_grad_batches=2)}
    refused = pytest.raises(ValueError, match=r"reduction=\"sum\".*`output, loss / len\(target\)`")
    with refused:
        run_together(two, Experiment(Summing, config))
    with refused:
        run_alone(Experiment(Summing, config, options=windows))
    run_alone(Experiment(Summing, config))
    found = run_together(two, Experiment(SummingByHand, {**config, **UNEVEN}))
    assert_close(found.model[0], run_alone(Experiment(LinearOperator, {**UNEVEN, "batch_size": 16})).model[0], "sums")


# ------------------------------------------------------------------------------------------------ those of collators


def without_every_fifth(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample[1] % 5])


class Leaving(LinearOperator):
    """Its collator leaves samples out."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        size = self.config["batch_size"]
        return torch.utils.data.DataLoader(data, batch_size=size, collate_fn=without_every_fifth)


class LeavingInRungs(Leaving):
    """Says how many samples there are, in `forward`."""

    def forward(self, features: Any, target: Any) -> Any:
        return *super().forward(features, target), len(target)


class LeavingInSteps(Leaving):
    """Says it in methods of its own."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        loss = self.criterion(self.model(features), target)
        self.backward(loss, weight=len(target))
        self.optimizer_step()
        return {"train_loss": loss.item(), "num_samples": len(target)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_loss": self.criterion(self.model(batch[0]), batch[2]), "num_samples": len(batch[2])}


COLLATED = {"num_samples": 43, "batch_size": 4}


@pytest.mark.parametrize(("operator_cls", "window"), [(LeavingInRungs, 1), (LeavingInRungs, 2), (LeavingInSteps, 1)])
def test_batches_of_a_collator_count_by_what_user_code_says(
    two: TorchTrainer, operator_cls: type[TrainingOperator], window: int
) -> None:
    calls = (("train", None), ("train", None), ("validate", None))
    options = {"step_options": StepOptions(accumulate_grad_batches=window)}
    found = run_together(two, Experiment(operator_cls, COLLATED, calls, options))
    expected = run_alone(Experiment(LeavingInRungs, {**COLLATED, "batch_size": 8 * window}, calls))
    assert_close(found.model[0], expected.model[0], operator_cls.__name__)
    for name, index in (("train_loss", 1), ("val_loss", 2)):
        assert found.results[index][name] == pytest.approx(expected.results[index][name], rel=1e-5), name
    is_told = operator_cls is LeavingInSteps  # else the samples that were drawn
    assert [result["num_samples"] for result in found.results] == ([34, 34, 10] if is_told else [43, 43, 13])


class SaysNothing(LeavingInSteps):
    """Returns metrics without the number of samples."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"train_loss": super().train_batch(batch, batch_info)["train_loss"]}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_loss": super().validate_batch(batch, batch_info)["val_loss"]}


class LeavingLater(Leaving):
    """Its collator begins to leave samples out in the second pass."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        def collate(samples: list[Any]) -> Any:
            leaves = self.is_late and any(sample[1] % 5 for sample in samples)
            return without_every_fifth(samples) if leaves else torch.utils.data.default_collate(samples)

        self.is_late = False
        return torch.utils.data.DataLoader(data, batch_size=self.config["batch_size"], collate_fn=collate)

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> Any:
        self.is_late = epoch_idx > 0
        return super().train_epoch(iterator, info, num_steps, epoch_idx)


class TimesThree(LinearOperator):
    """Its collator makes three samples of one, which looks like one array for each of three."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        def three_of_each(samples: list[Any]) -> Any:
            return tuple(part.repeat(3, 1) for part in torch.utils.data.default_collate(samples))

        return torch.utils.data.DataLoader(data, batch_size=3, collate_fn=three_of_each)

    def prepare_batch(self, batch: Any) -> Any:
        return (batch[0],), batch[2]


class OfAStream(LinearOperator):
    """A stream with such a collator."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return IterableStream([*data]).batch(8, collate=without_every_fifth)


SPLIT = {"batch_options": BatchOptions(split_batches=True)}
IN_SHARDS = {"batch_options": BatchOptions(split_batches=True, deterministic=True)}
UNKNOWN = r"a batch was made of \d+ samples and has \d+, .*return `output, loss, len\(target\)` from `forward`"
UNSAID: dict[str, tuple[type[TrainingOperator], str, dict[str, Any]]] = {
    "in the stock step": (Leaving, "train", {}),
    "in the stock validation": (Leaving, "validate", {}),
    "in an own step": (SaysNothing, "train", {}),
    "in an own validation": (SaysNothing, "validate", {}),
    "from the second pass on": (LeavingLater, "train", {}),
    "as many arrays as samples": (TimesThree, "train", {}),
    "in logical shards": (Leaving, "train", IN_SHARDS),
    "in a stream": (OfAStream, "train", SPLIT),
    "in an evaluation of a stream": (OfAStream, "validate", SPLIT),
}


@pytest.mark.parametrize(("operator_cls", "call", "options"), UNSAID.values(), ids=UNSAID)
def test_a_collator_that_changes_the_number_of_samples_is_refused_if_nobody_says_how_many_count(
    operator_cls: type[TrainingOperator], call: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=UNKNOWN):
        run_alone(Experiment(operator_cls, COLLATED, ((call, None), (call, None)), options))


def odd_ones_twice(samples: list[Any]) -> Any:
    """A batch in which samples whose first label is odd are twice."""
    return torch.utils.data.default_collate([each for each in samples for _ in range(1 + int(each[1][0]) % 2)])


class LabellingRepeated(Labelling):
    """Its collator repeats samples."""

    def register_data(self, **loaders: Any) -> None:
        made = {
            name: torch.utils.data.DataLoader(each.dataset, each.batch_size, collate_fn=odd_ones_twice)
            for name, each in loaders.items()
        }
        super().register_data(**made)


class LabellingLogged(LabellingRepeated):
    """Its `forward` logs a mean, of samples or labels."""

    def forward(self, features: Any, target: Any) -> Any:
        return *super().forward(features, target), {"mean": target.double().mean()}


@pytest.mark.parametrize("criterion", ["plain", "classes"])
def test_labels_say_how_much_a_batch_of_a_collator_counts(two: TorchTrainer, criterion: str) -> None:
    calls = (("train", None), ("validate", None))
    config = {"criterion": criterion}
    found = run_together(two, Experiment(LabellingRepeated, {**config, "size": 4}, calls))
    expected = run_alone(Experiment(LabellingRepeated, {**config, "size": 8}, calls))
    assert_close(found.model[0], expected.model[0], "labels")
    for name, index in (("train_loss", 0), ("val_loss", 1), ("val_accuracy", 1)):
        assert found.results[index][name] == pytest.approx(expected.results[index][name], rel=1e-5), name


class RepeatedUncounted(LabellingRepeated, LabellingUncounted):
    """All labels count, and its loss is no mean over them alone."""

    def prepare_batch(self, batch: Any) -> Any:
        return (batch[0],), batch[1].clamp(min=0)


def test_labels_of_a_collator_do_not_say_how_much_other_means_count() -> None:
    with pytest.raises(ValueError, match=UNKNOWN):
        run_alone(Experiment(LabellingLogged, {"criterion": "plain", "size": 8}))
    windows = {"step_options": StepOptions(accumulate_grad_batches=2)}
    with pytest.raises(ValueError, match=r"batches counted by their samples.*`self\.backward\(loss, weight="):
        run_alone(Experiment(RepeatedUncounted, {"criterion": "plain", "size": 8}, options=windows))


# ------------------------------------------------------------------------------------------------ those of metrics


class KeepsPairs(LinearOperator):
    """Leaves pairs out, and returns how many it kept."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, numbers, target = batch
        are_kept = numbers % 3 != 1
        loss = self.criterion(self.model(features[are_kept]), target[are_kept])
        self.step_with(loss, int(are_kept.sum()))
        return {"train_loss": loss.detach(), "num_samples": int(are_kept.sum())}

    def step_with(self, loss: torch.Tensor, num_kept: int) -> None:
        self.backward(loss)
        self.optimizer_step()


class KeepsPairsByHand(KeepsPairs):
    def step_with(self, loss: torch.Tensor, num_kept: int) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class KeepsPairsByWeight(KeepsPairs):
    def step_with(self, loss: torch.Tensor, num_kept: int) -> None:
        self.backward(loss, weight=num_kept)
        self.optimizer_step()


class OfUndividedLoaders(KeepsPairs):
    """Loaders that the library does not divide."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        first, size = self.world_rank, self.world_size
        return [[part[first + index :: size][:4] for part in data.tensors] for index in range(0, 20, 4 * size)]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("operator_cls", [KeepsPairs, KeepsPairsByHand, OfUndividedLoaders])
def test_samples_other_than_those_by_which_gradients_counted_are_refused(
    two: TorchTrainer, operator_cls: type[TrainingOperator]
) -> None:
    with pytest.raises(ValueError, match=r"returned `num_samples` \d, .*call `self\.backward\(loss, weight="):
        run_together(two, Experiment(operator_cls, {"batch_size": 4}))


def test_samples_that_gradients_count_by_are_those_of_one_process(two: TorchTrainer) -> None:
    found = run_together(two, Experiment(KeepsPairsByWeight, {"batch_size": 4}))
    expected = run_alone(Experiment(KeepsPairs, {"batch_size": 8}))
    assert_close(found.model[0], expected.model[0], "pairs")
    assert found.results[0]["num_samples"] == expected.results[0]["num_samples"]
    windows = {"step_options": StepOptions(accumulate_grad_batches=2)}
    with pytest.raises(ValueError, match="returned `num_samples`"):
        run_alone(Experiment(KeepsPairs, {"batch_size": 4}, options=windows))
