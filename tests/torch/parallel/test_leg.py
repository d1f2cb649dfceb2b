"""Where a replica is among the batches of one optimizer step, and how they weight its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd.core.arrays.division import BatchPlan
from raysgd.torch.objects.criteria import LossCall
from raysgd.torch.parallel.leg import Accumulation, Leg
from raysgd.trainer.worker.rank_rows import RowExchange
from raysgd.trainer.worker.step_loop import StepRules
from tests.torch.planning import begin_next

OPTIMIZER = object()


def joint(window: int) -> Leg:
    return Leg(StepRules(averages=True, accumulate=window))


def backward(leg: Leg) -> float:
    leg.note_backward([OPTIMIZER])
    leg.use()
    return leg.add_up(None, 1)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_batch_of_a_window_cannot_be_left_out(num_before: int) -> None:
    leg = joint(2)
    for _ in range(num_before):
        begin_next(leg, 4, 4, is_last=False)
        backward(leg)
    begin_next(leg, 4, 4, is_last=False, number=1 + num_before)
    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=2`: a batch was skipped.* pass `0 \* loss`"):
        leg.skip()


def test_a_window_that_no_optimizer_has_stepped_with_is_an_error_at_the_next_batch() -> None:
    leg = joint(2)
    for number in (1, 2):
        begin_next(leg, 4, 4, is_last=False, number=number)
        backward(leg)
    with pytest.raises(ValueError, match=r"`self.optimizer_step\(\)` was not called for the last batch of a step"):
        begin_next(leg, 4, 4, is_last=False)


def hand_out(leg: Leg, weight: float = 1.0, num_samples: int = 4) -> None:
    begin_next(leg, num_samples, 8, weight=weight, is_last=False)


def test_a_stream_that_ends_before_its_last_batch_was_used_leaves_that_its_weight() -> None:
    leg = joint(1)
    hand_out(leg, 1.5)
    leg.end_data()
    assert leg.factor == 1.5


def test_a_replica_by_itself_may_draw_as_it_likes() -> None:
    leg = Leg()
    hand_out(leg)
    hand_out(leg, 1.5)


def test_where_user_code_weights_batches_only_padding_counts_otherwise() -> None:
    leg = joint(1)
    hand_out(leg)
    leg.use(by_samples=False)
    hand_out(leg)
    hand_out(leg, 1.5)
    with pytest.raises(RuntimeError, match="waits"):
        hand_out(leg, 0.0, num_samples=0)


def test_the_first_exchange_of_the_last_batch_of_a_step_is_one_to_tell_others_with() -> None:
    rows = RowExchange(None, lambda row: [row])
    leg, found = Leg(StepRules(averages=True, accumulate=2), rows=rows), []
    for index in range(4):
        begin_next(leg, 4, 8, is_last=index == 3, number=1 + index % 2)
        found.append([leg.due_rows() for _ in range(3)])
        leg.use()
    assert found == [[None] * 3, [rows, None, None]] * 2
    leg = Leg(StepRules(averages=True), rows=rows)
    begin_next(leg, 4, 8)
    assert leg.due_rows() is rows


LOSS = torch.ones((), requires_grad=True)
PLAN = BatchPlan(4)
OTHER = torch.zeros((), requires_grad=True)


def items(rules: StepRules = StepRules(averages=True), plan: BatchPlan = PLAN) -> Leg:
    leg = Leg(rules)
    leg.begin_batch(plan)
    return leg


def labels(amount: Any, num_labels: int | None = 4) -> LossCall:
    return LossCall("classes", None, None, LOSS, -100, amount, num_labels)


@pytest.mark.parametrize(
    ("call", "loss", "given", "num_samples", "weight"),
    [
        (None, LOSS, None, 4, None),  # samples
        (labels(4), LOSS, None, 4, 4.0),
        (labels(3), LOSS, None, 4, 3.0),
        (labels(3), LOSS, 7, 4, 7.0),  # user code knows better
        (labels(3), OTHER, 7, 4, 7.0),
        (labels(4), OTHER, None, 4, None),  # another loss than the criterion's, and all labels count the same
        (labels(3), LOSS, None, 0, 0.0),  # padding
        (None, LOSS, 7, 0, 0.0),
    ],
)
def test_a_batch_counts_by_a_given_weight_or_its_labels_or_its_samples(
    call: LossCall | None, loss: torch.Tensor, given: Any, num_samples: int, weight: float | None
) -> None:
    weights = items(plan=BatchPlan(num_samples, is_padding=not num_samples))
    if call is not None:
        weights.note_labels(call)
    assert weights.items_of(loss, given) == weight
    weights.check_counted()


def test_labels_that_count_unequally_need_the_loss_of_the_criterion_or_a_weight() -> None:
    weights = items()
    weights.note_labels(labels(3))
    with pytest.raises(ValueError, match="some labels are ignored by the loss"):
        weights.items_of(OTHER, None)
    weights.check_counted()


def test_labels_on_a_device_are_checked_when_the_call_ends() -> None:
    weights = items()
    weights.note_labels(labels(torch.tensor(3)))
    assert weights.items_of(OTHER, None) is None
    with pytest.raises(ValueError, match="some labels are ignored by the loss"):
        weights.check_counted()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([labels(3)], r"counts: pass it, as in `self.backward\(loss, weight=\(target != -100\).sum\(\)\)`"),
        ([labels(3)._replace(ignored=7)], r"weight=\(target != 7\).sum\(\)\)`"),
        (
            [labels(3.5, None)],
            r"with the class weights of the loss: .*weight=class_weights\[target\[target != -100\]\].sum",
        ),
        ([labels(3)._replace(result=None)], r"has its own `forward` or is decorated, so say .*weight=number\)`"),
        ([labels(3), labels(2)], r"several means over different labels, so no single weight is right\. Make it one"),
        ([labels(3), labels(3)], r"weight=\(target != -100\).sum\(\)\)`"),  # the labels of one batch, used twice
    ],
)
def test_the_error_says_the_weight_that_is_right_if_there_is_one(calls: list[LossCall], words: str) -> None:
    weights = items()
    for call in calls:
        weights.note_labels(call)
    with pytest.raises(ValueError, match=words):
        weights.items_of(OTHER, None)


def test_labels_do_not_matter_where_a_step_has_one_batch() -> None:
    weights = items(StepRules())
    weights.note_labels(labels(3))
    assert (weights.items_of(LOSS, None), weights.batch.items) == (None, [3])
    weights.check_counted()


def test_logical_shards_count_by_their_samples() -> None:
    weights = items(StepRules(averages=True, num_shards=2))
    weights.note_labels(labels(4))
    assert weights.items_of(LOSS, None) is None
    with pytest.raises(ValueError, match=r"`weight=` of `self.backward`.* does not work with `deterministic=True`"):
        weights.items_of(LOSS, 7)
    weights.note_labels(labels(3))
    with pytest.raises(ValueError, match=r"a loss that ignores labels.* does not work with `deterministic=True`"):
        weights.items_of(LOSS, None)


@pytest.mark.parametrize(
    ("batches", "total"),
    [
        ([(8.0, False, True), (8.0, False, True)], 16.0),
        ([(8.0, True, True)], 0.0),
        ([(4.0, True, False), (4.0, False, True)], 4.0),
        ([(8.0, False, True), (4.0, False, False), (4.0, True, True)], 12.0),
        ([(8.0, False, True), (8.0, True, True)], 16.0),  # a whole batch, as with Lightning
        ([(8.0, True, True), (8.0, True, True)], 0.0),
        ([(4.0, True, False), (4.0, True, True), (4.0, False, False), (4.0, True, True)], 12.0),
        ([(4.0, False, False), (4.0, True, False)], 4.0),  # the data end within a batch
    ],
)
def test_gradients_are_the_mean_over_the_samples_that_user_code_has_not_skipped(
    batches: list[tuple[float, bool, bool]], total: float
) -> None:
    added = Accumulation(is_weighted=False, typical=1.0)
    for batch in batches:
        added.add_samples(*batch)
    assert added.num_samples == total
