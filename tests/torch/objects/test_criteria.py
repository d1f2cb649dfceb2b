"""What the losses of PyTorch are called with, and which labels their mean is over."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from raysgd.torch.objects.criteria import LossCall, LossCalls

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])
SCORES = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(0, 4, (6, 5), generator=torch.Generator().manual_seed(1))
WITH_IGNORED = TARGET.where(TARGET != 3, -100)


class Likelihood(torch.nn.Module):
    """A criterion of a user's around one of PyTorch's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.loss = torch.nn.NLLLoss(**options)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(output.log_softmax(dim=1), target)
        return loss


def heard(criterion: Any, output: Any = SCORES, target: Any = TARGET) -> list[LossCall]:
    calls, found = LossCalls(), list[LossCall]()
    with calls.on(criterion, found.append):
        calls.call(criterion, output, target)
    return found


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (torch.nn.CrossEntropyLoss, TARGET),
        (torch.nn.CrossEntropyLoss, WITH_IGNORED),
        (partial(torch.nn.CrossEntropyLoss, label_smoothing=0.1), WITH_IGNORED),
        (partial(torch.nn.CrossEntropyLoss, ignore_index=2), TARGET),
        (partial(torch.nn.CrossEntropyLoss, weight=CLASS_WEIGHTS), WITH_IGNORED),
        (partial(torch.nn.CrossEntropyLoss, weight=CLASS_WEIGHTS, ignore_index=1, label_smoothing=0.1), TARGET),
        (partial(Likelihood, weight=CLASS_WEIGHTS, ignore_index=0), TARGET),
        (lambda **options: partial(functional.cross_entropy, weight=CLASS_WEIGHTS, **options), WITH_IGNORED),
        (
            lambda **options: torch.compile(torch.nn.CrossEntropyLoss(ignore_index=3, **options), backend="eager"),
            TARGET,
        ),
    ],
)
def test_a_mean_times_its_amount_is_the_sum(make: Any, target: torch.Tensor) -> None:
    mean, total = make(), make(reduction="sum")
    [comparison] = heard(mean, target=target)
    assert mean(SCORES, target).item() * comparison.amount == pytest.approx(total(SCORES, target).item())
    assert heard(total, target=target)[0].amount is None, "it is no mean"


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="this PyTorch has no fused loss")
def test_a_fused_loss_counts_labels_too() -> None:
    criterion = torch.nn.LinearCrossEntropyLoss(3, 4, weight=CLASS_WEIGHTS)
    target = TARGET[:, 0]
    [comparison] = heard(criterion, torch.randn(6, 3), target)
    assert (comparison.amount, comparison.reading) == (pytest.approx(CLASS_WEIGHTS[target].sum().item()), "values")


@pytest.mark.parametrize(
    ("criterion", "output", "target"),
    [
        (torch.nn.BCEWithLogitsLoss(weight=torch.rand(5), pos_weight=torch.rand(5)), SCORES, SCORES.sigmoid()),
        (torch.nn.MultiMarginLoss(weight=CLASS_WEIGHTS), SCORES[:, :, 0], TARGET[:, 0]),
        (torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), SCORES, SCORES.softmax(dim=1)),
        (torch.nn.MSELoss(), SCORES, SCORES),
    ],
)
def test_other_means_are_over_samples_whatever_their_weights(criterion: Any, output: Any, target: Any) -> None:
    halves = [criterion(output[part], target[part]) for part in (slice(0, 3), slice(3, 6))]
    assert criterion(output, target).item() == pytest.approx(sum(halves).item() / 2)  # type: ignore[union-attr]
    assert heard(criterion, output, target)[0].amount is None


class Reversed(torch.nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(target, input)


def test_a_subclass_that_is_called_in_another_way_is_not_known() -> None:
    assert heard(Reversed(), TARGET, SCORES) == []


def test_a_compiled_criterion_is_left_alone() -> None:
    criterion = torch.nn.CrossEntropyLoss()
    criterion.compile(backend="eager")
    with LossCalls().on(criterion, print):
        assert not criterion._forward_hooks
    assert len(heard(criterion)) == 1, "the library calls it by itself"


@pytest.mark.parametrize("criterion", [torch.nn.CrossEntropyLoss(), functional.cross_entropy, Likelihood()])
def test_a_call_is_told_once_with_the_labels_that_count(criterion: Any) -> None:
    calls, found = LossCalls(), list[LossCall]()
    with calls.on(criterion, found.append, only_labels=True):
        calls.call(criterion, SCORES, WITH_IGNORED)
    counted = (int((TARGET != 3).sum()), TARGET.numel(), True)
    assert [(each.amount, each.num_labels, each.is_uneven) for each in found] == [counted]


def test_listening_leaves_nothing_behind_in_the_criterion() -> None:
    criterion = Likelihood()
    assert len(heard(criterion)) == 1
    assert not criterion.loss._forward_hooks


def test_arguments_are_known_by_name() -> None:
    found: list[LossCall] = []
    criterion = torch.nn.CrossEntropyLoss()
    with LossCalls().on(criterion, found.append):
        criterion(target=TARGET, input=SCORES)
    assert found[0].output is SCORES
    assert found[0].target is TARGET
