"""How often the prediction is the target, as the criterion reads outputs and targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from raysgd._text.log_lines import Once
from raysgd.torch.objects.criteria import LossCall, LossCalls, accuracy, known

SAMPLES, PLACES = 40, 5
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flipped(classes: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The same classes, but for every fourth, which is another one."""
    wrong = torch.arange(classes.numel()).reshape(classes.shape) % 4 == 0
    return torch.where(wrong, (classes + 1) % num_classes, classes)


def seen_by(criterion: Any, *args: Any, **kwargs: Any) -> list[LossCall]:
    comparisons: list[LossCall] = []
    with LossCalls().on(criterion, comparisons.append):
        criterion(*args, **kwargs)
    return comparisons


def called_by_library(criterion: Any, output: Any, target: Any) -> list[LossCall]:
    calls, comparisons = LossCalls(), list[LossCall]()
    with calls.on(criterion, comparisons.append):
        calls.call(criterion, output, target)
    return comparisons


def share(*args: Any, **kwargs: Any) -> Any:
    return known(accuracy(*args, **kwargs), Once(), says_so=False).share


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
    assert share(last, target, seen_by(LastIsClasses(), last, target)) == 0.75
    assert share(second, target, seen_by(criterion, second, target)) == 0.75
    assert share(last, target, seen_by(criterion, second, target)) == 0.75, "transposed on its way to the loss"
    assert share(second, target, seen_by(criterion, input=second, target=target)) == 0.75


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
    assert share(output, target, seen_by(Casting(loss), output, target)) == 0.75


def test_several_labels_per_sample_count_one_by_one() -> None:
    output = scores(SAMPLES, 4)
    target = flipped((output > 0).long(), 2)
    assert share(output, target, seen_by(torch.nn.BCEWithLogitsLoss(), output, target.float())) == 0.75


@pytest.mark.parametrize("criterion", [functional.cross_entropy, partial(functional.cross_entropy, reduction="mean")])
def test_functions_of_pytorch_are_known(criterion: Criterion) -> None:
    output = scores(SAMPLES, PLACES, PLACES)
    target = flipped(output.argmax(dim=1), PLACES)
    assert share(output, target, called_by_library(criterion, output, target)) == 0.75


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
    assert share(output, target, called_by_library(unknown, output, target)) == 1.0


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
        (scores(4, 3), scores(4, 3).sigmoid(), torch.nn.BCEWithLogitsLoss()),
        (scores(4, 3), scores(4, 3).softmax(dim=1), torch.nn.CrossEntropyLoss()),
        (scores(4, 3), torch.ones(5, dtype=torch.int64), unknown),
        (scores(0, 3), torch.ones(0, dtype=torch.int64), unknown),
        ([scores(4, 3)], torch.ones(4, dtype=torch.int64), lambda output, target: output[0].sum()),
        (scores(4, 3), [1, 1, 1, 1], unknown),
    ],
    ids=["values", "counts", "soft labels", "probabilities", "sizes", "nothing", "several outputs", "a list"],
)
def test_where_nothing_is_classified_there_is_no_accuracy(output: Any, target: Any, criterion: Any) -> None:
    assert math.isnan(share(output, target, seen_by(criterion, output, target)))


@pytest.mark.parametrize("ignored", [-100, 0])
def test_ignored_labels_are_neither_right_nor_wrong(ignored: int) -> None:
    output = scores(SAMPLES, 4, PLACES)
    target = flipped(output.argmax(dim=1), 4)
    hidden = target.where(torch.arange(SAMPLES).reshape(-1, 1) % 4 == 1, ignored)  # these are all right
    criterion = torch.nn.CrossEntropyLoss(ignore_index=ignored)
    found = accuracy(output, hidden, seen_by(criterion, output, hidden))
    assert found is not None
    expected = (output.argmax(dim=1) == hidden)[hidden != ignored]
    assert found.share.item() == pytest.approx(expected.float().mean().item())
    assert found.num_labels == len(expected)
    if ignored < 0:
        assert accuracy(output, hidden) == found, "no class has a negative number, whatever the criterion"
    assert accuracy(output, hidden, ignored=ignored) == found


def test_a_batch_of_ignored_labels_alone_counts_nothing() -> None:
    output, target = scores(4, 3), torch.full((4,), -100)
    found = accuracy(output, target, seen_by(torch.nn.CrossEntropyLoss(), output, target))
    assert found is not None
    assert math.isnan(found.share)
    assert found.num_labels == 0


@pytest.mark.parametrize(
    ("loss", "link"), [(torch.nn.BCEWithLogitsLoss(), torch.nn.Identity()), (torch.nn.BCELoss(), torch.nn.Sigmoid())]
)
def test_targets_of_zeros_and_ones_are_classes_to_a_binary_loss(loss: torch.nn.Module, link: torch.nn.Module) -> None:
    logits = scores(SAMPLES, 1)
    target = flipped((logits > 0).long(), 2).float()
    output = link(logits)
    assert share(output, target, seen_by(loss, output, target)) == 0.75


def test_a_weight_that_leaves_labels_out_does_not_say_which() -> None:
    output = scores(SAMPLES, 4, 3)
    target = output.argmax(dim=1)
    known_weights = {weight: accuracy(output, target, weight=weight) for weight in (None, SAMPLES * 3, SAMPLES, 7.5)}
    assert all(found is not None and found.share == 1.0 for found in known_weights.values())
    assert accuracy(output, target, weight=torch.tensor(17)) is None


def test_of_several_comparisons_that_of_the_output_counts() -> None:
    output, auxiliary = scores(SAMPLES, 3), scores(SAMPLES, 3, seed=1)
    target = output.argmax(dim=1)
    criterion = torch.nn.CrossEntropyLoss(ignore_index=0)
    both = seen_by(criterion, auxiliary, target) + seen_by(criterion, output, target)
    found = accuracy(output, target, both)
    assert found is not None
    assert (found.share, found.num_labels) == (1.0, (target != 0).sum())
