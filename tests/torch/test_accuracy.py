"""How often the prediction is the target, as the criterion reads outputs and targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from raysgd.torch.accuracy import Comparison, accuracy, compared_by, watching

SAMPLES, PLACES = 40, 5
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flipped(classes: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The same classes, but for every fourth, which is another one."""
    wrong = torch.arange(classes.numel()).reshape(classes.shape) % 4 == 0
    return torch.where(wrong, (classes + 1) % num_classes, classes)


def seen_by(criterion: Any, *args: Any, **kwargs: Any) -> list[Comparison]:
    with watching(criterion) as comparisons:
        criterion(*args, **kwargs)
    return comparisons


class LastIsClasses(torch.nn.Module):
    """A criterion of a user's that calls one of PyTorch's in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(output.flatten(0, 1), target.flatten())
        return loss


class Casting(torch.nn.Module):
    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(output.flatten(), target.flatten().float())
        return loss


@pytest.mark.parametrize("num_classes", [PLACES, 3])
def test_the_criterion_says_in_which_dimension_the_classes_are(num_classes: int) -> None:
    last = scores(SAMPLES, PLACES, num_classes)
    target = flipped(last.argmax(dim=2), num_classes)
    second, criterion = last.transpose(1, 2), torch.nn.CrossEntropyLoss()
    assert accuracy(last, target, seen_by(LastIsClasses(), last, target)) == 0.75
    assert accuracy(second, target, seen_by(criterion, second, target)) == 0.75
    assert accuracy(last, target, seen_by(criterion, second, target)) == 0.75, "transposed on its way to the loss"
    assert accuracy(second, target, seen_by(criterion, input=second, target=target)) == 0.75


@pytest.mark.parametrize("shape", [(SAMPLES, 1), (SAMPLES,)])
@pytest.mark.parametrize(
    ("loss", "link"), [(torch.nn.BCEWithLogitsLoss(), torch.nn.Identity()), (torch.nn.BCELoss(), torch.nn.Sigmoid())]
)
def test_one_number_per_sample_is_compared_with_the_threshold_of_the_criterion(
    loss: torch.nn.Module, link: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    logits = scores(SAMPLES)
    target = flipped((logits > 0).long(), 2)
    output = link(logits).reshape(shape)
    assert accuracy(output, target, seen_by(Casting(loss), output, target)) == 0.75


def test_several_labels_per_sample_count_one_by_one() -> None:
    output = scores(SAMPLES, 4)
    target = flipped((output > 0).long(), 2)
    assert accuracy(output, target, seen_by(torch.nn.BCEWithLogitsLoss(), output, target.float())) == 0.75


@pytest.mark.parametrize("criterion", [functional.cross_entropy, partial(functional.cross_entropy, reduction="mean")])
def test_functions_of_pytorch_are_known(criterion: Criterion) -> None:
    output = scores(SAMPLES, PLACES, PLACES)
    target = flipped(output.argmax(dim=1), PLACES)
    assert accuracy(output, target, compared_by(criterion, output, target)) == 0.75


def unknown(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("shape", "dim", "target_shape"),
    [
        ((SAMPLES, 3), 1, (SAMPLES,)),
        ((SAMPLES, 3), 1, (SAMPLES, 1)),
        ((SAMPLES, 3, 4, 4), 1, (SAMPLES, 1, 4, 4)),
        ((SAMPLES, 3, PLACES), 1, (SAMPLES, PLACES)),
        ((SAMPLES, PLACES, 3), 2, (SAMPLES, PLACES)),
        ((SAMPLES, 1, 3), 2, (SAMPLES,)),
        ((1, 3), 1, (1,)),
    ],
)
def test_shapes_decide_where_they_have_one_reading(
    shape: tuple[int, ...], dim: int, target_shape: tuple[int, ...]
) -> None:
    output = scores(*shape)
    target = output.argmax(dim=dim).reshape(target_shape)
    assert accuracy(output, target, compared_by(unknown, output, target)) == 1.0


@pytest.mark.parametrize(
    ("shape", "target_shape"),
    [
        ((SAMPLES, PLACES, PLACES), (SAMPLES, PLACES)),
        ((SAMPLES, 1), (SAMPLES,)),
        ((SAMPLES,), (SAMPLES,)),
        ((SAMPLES, 1, 4, 4), (SAMPLES, 4, 4)),
    ],
)
def test_shapes_with_several_readings_have_none(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> None:
    output, target = scores(*shape), torch.ones(target_shape, dtype=torch.int64)
    assert accuracy(output, target) is None


class Transposing(torch.nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input.transpose(1, 2), target)


def test_a_loss_that_is_called_in_another_way_or_twice_decides_nothing() -> None:
    output = scores(SAMPLES, PLACES, PLACES)
    target = output.argmax(dim=2)
    assert accuracy(output, target, seen_by(Transposing(), output, target)) is None
    twice = 2 * seen_by(torch.nn.CrossEntropyLoss(), output, target)
    assert accuracy(output, target, twice) is None


@pytest.mark.parametrize(
    ("output", "target", "criterion"),
    [
        (scores(4, 1), scores(4, 1), torch.nn.MSELoss()),
        (scores(4, 1), torch.ones(4, 1, dtype=torch.int64), torch.nn.MSELoss()),
        (scores(4, 3), scores(4, 3).softmax(dim=1), torch.nn.CrossEntropyLoss()),
        (scores(4, 3), torch.ones(5, dtype=torch.int64), unknown),
        (scores(0, 3), torch.ones(0, dtype=torch.int64), unknown),
        ([scores(4, 3)], torch.ones(4, dtype=torch.int64), lambda output, target: output[0].sum()),
        (scores(4, 3), [1, 1, 1, 1], unknown),
    ],
    ids=["values", "counts", "probabilities", "sizes", "nothing", "several outputs", "a list"],
)
def test_where_nothing_is_classified_there_is_no_accuracy(output: Any, target: Any, criterion: Any) -> None:
    assert math.isnan(accuracy(output, target, seen_by(criterion, output, target)))


def test_a_compiled_criterion_is_left_alone() -> None:
    criterion = torch.nn.CrossEntropyLoss()
    criterion.compile(backend="eager")
    with watching(criterion):
        assert not criterion._forward_pre_hooks


def test_watching_leaves_nothing_behind_in_the_criterion() -> None:
    criterion = LastIsClasses()
    output = scores(SAMPLES, PLACES, PLACES)
    assert len(seen_by(criterion, output, output.argmax(dim=2))) == 1
    assert not criterion.loss._forward_pre_hooks
