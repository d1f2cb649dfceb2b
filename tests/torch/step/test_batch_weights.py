"""By how much batches count because of their criterion, on one rank of several."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from raysgd._text.once import Once
from raysgd.torch.objects.criteria import LossCalls
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.batch_weights import BatchWeights

SCORES = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1])
SOME_IGNORED = torch.tensor([0, -100, 2, -100])


class Bench:
    """One of two ranks, of which the other one says `others` when they agree."""

    def __init__(self, others: float = 0.0, obstacle: str | None = None) -> None:
        class Parallel(NoParallel):
            synchronizes = True
            weights_obstacle = obstacle

        self.parallel = Parallel()
        self.weights, self.others = BatchWeights(self.parallel, Once()), others
        self.num_agreements = 0

    def sums(self, votes: list[bool]) -> list[float]:
        self.num_agreements += len(votes)
        return [own + self.others for own in votes]

    def train(self, criterion: Any, *targets: Any, epoch_idx: int = 0, given: Any = None) -> list[float | None]:
        """What the batches of a call count by."""
        step, calls, found = self.parallel.step, LossCalls(), []
        step.open_call(1)
        self.weights.begin_call(criterion, epoch_idx)
        with calls.on(criterion, self.weights.note):
            self.weights.agree(self.sums(self.weights.votes()))
            for target in targets:
                step.begin(1.0, 4, 8)
                calls.call(criterion, SCORES, target)
                self.weights.look_at(target)
                found.append(self.weights.of_loss(given))
            self.weights.warn()
        self.weights.end_call()
        return found


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (torch.nn.CrossEntropyLoss(ignore_index=1), [2.0, 3.0]),
        (torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 4.0])), [6.0, 6.5]),
        (partial(torch.nn.functional.cross_entropy, ignore_index=1), [2.0, 3.0]),
    ],
)
def test_what_the_criterion_was_told_counts_without_an_agreement(criterion: Any, expected: list[float]) -> None:
    bench = Bench()
    for epoch_idx in range(2):
        assert bench.train(criterion, LABELS, torch.tensor([0, 0, 1, 2]), epoch_idx=epoch_idx) == expected
    assert bench.num_agreements == 0


def test_labels_count_in_the_first_pass_and_later_if_some_were_ignored() -> None:
    criterion, bench = torch.nn.CrossEntropyLoss(), Bench()
    assert bench.train(criterion, LABELS, LABELS) == [4.0, 4.0]
    assert bench.train(criterion, LABELS) == [4.0], "the same pass goes on"
    assert bench.train(criterion, LABELS, epoch_idx=1) == [None]
    assert bench.train(criterion, SOME_IGNORED, epoch_idx=2) == [None], "too late for this one"
    assert bench.train(criterion, SOME_IGNORED, LABELS, epoch_idx=3) == [2.0, 4.0]


def test_labels_count_if_another_rank_has_ignored_ones() -> None:
    bench = Bench(others=1.0)
    for epoch_idx in range(2):
        assert bench.train(torch.nn.CrossEntropyLoss(), LABELS, epoch_idx=epoch_idx) == [4.0]


@pytest.mark.parametrize("criterion", [torch.nn.MSELoss(), None, lambda output, target: output.sum()])
def test_no_rank_is_asked_about_other_criteria(criterion: Any) -> None:
    bench = Bench(others=1.0)
    assert bench.train(criterion or (lambda output, target: output.sum()), SCORES) == [None]
    assert bench.num_agreements == 0


def test_what_is_computed_without_gradients_or_between_calls_does_not_count() -> None:
    bench, criterion = Bench(), torch.nn.CrossEntropyLoss(ignore_index=0)
    with torch.no_grad():
        assert bench.train(criterion, LABELS) == [4.0], "samples, but a weight: others wait for it"
    assert bench.weights.of_loss(None) is None


def test_padding_counts_nothing() -> None:
    bench, criterion = Bench(), torch.nn.CrossEntropyLoss(ignore_index=0)
    bench.weights.begin_call(criterion, 0)
    bench.parallel.step.begin(0.0, 0, 8)
    with LossCalls().on(criterion, bench.weights.note):
        criterion(SCORES, LABELS)
    assert bench.weights.of_loss(None) == 0.0


WARNING = "some labels are ignored, or count more than others, and batches counted by their samples"


def unknown(output: torch.Tensor, target: torch.Tensor, **settings: Any) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("bench", "criterion", "target", "way_out"),
    [
        (Bench(), unknown, SOME_IGNORED, "after the loss\n"),
        (Bench(), partial(unknown, ignore_index=2), LABELS, "after the loss\n"),
        (Bench(), partial(unknown, weight=torch.rand(3)), LABELS, "after the loss\n"),
        (Bench(), torch.nn.CrossEntropyLoss(reduction="none"), SOME_IGNORED, "after the loss\n"),
        (
            Bench(obstacle='parallel="fsdp"'),
            torch.nn.CrossEntropyLoss(),
            SOME_IGNORED,
            'after the loss, which does not work with `parallel="fsdp"`',
        ),
    ],
)
def test_a_sign_that_samples_are_wrong_is_a_warning_once(
    caplog: pytest.LogCaptureFixture, bench: Bench, criterion: Any, target: Any, way_out: str
) -> None:
    for epoch_idx in range(3):
        assert bench.train(criterion, target, epoch_idx=epoch_idx) == [None]
    assert caplog.text.count(WARNING) == 1
    assert way_out in caplog.text


@pytest.mark.parametrize(
    ("criterion", "target", "given"),
    [
        (unknown, LABELS, None),
        (unknown, SCORES, None),
        (unknown, SOME_IGNORED, 2),
        (torch.nn.CrossEntropyLoss(), SOME_IGNORED, None),
        (torch.nn.CrossEntropyLoss(reduction="none"), LABELS, None),
    ],
)
def test_without_a_sign_or_with_a_weight_there_is_no_warning(
    caplog: pytest.LogCaptureFixture, criterion: Any, target: Any, given: Any
) -> None:
    Bench().train(criterion, target, given=given)
    assert not caplog.records


def test_one_worker_alone_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.parallel.synchronizes = False
    assert bench.train(unknown, SOME_IGNORED) == [None]
    assert not caplog.records
