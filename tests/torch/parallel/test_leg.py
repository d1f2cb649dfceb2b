"""Where a replica is among the batches of one optimizer step, and how they weight its gradients.

Covers `raysgd.torch.parallel.sync`.
"""

from __future__ import annotations

import pytest

from raysgd.torch.parallel.sync import Leg
from raysgd.torch.parallel.weights import Scale
from raysgd.trainer.worker.step_loop import StepRules
from tests.torch.planning import begin_next

OPTIMIZER = object()


def joint(window: int) -> Leg:
    return Leg(StepRules(averages=True, accumulate=window))


def backward(leg: Leg) -> float:
    leg.note_backward([OPTIMIZER])
    leg.weights.use()
    return leg.weights.add_up(None, 1)


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
    assert leg.weights.scale == Scale(gradients=1.5)


def test_a_replica_by_itself_may_draw_as_it_likes() -> None:
    leg = Leg()
    hand_out(leg)
    hand_out(leg, 1.5)


def test_where_user_code_weights_batches_only_padding_counts_otherwise() -> None:
    leg = joint(1)
    hand_out(leg)
    leg.weights.use(by_samples=False)
    hand_out(leg)
    hand_out(leg, 1.5)
    with pytest.raises(RuntimeError, match="waits"):
        hand_out(leg, 0.0, num_samples=0)


def test_the_first_exchange_of_the_last_batch_of_a_step_is_one_to_tell_others_with() -> None:
    leg, found = Leg(StepRules(averages=True, accumulate=2), share=lambda gather: None), []
    for index in range(4):
        begin_next(leg, 4, 8, is_last=index == 3, number=1 + index % 2)
        found.append([leg.send_rows() for _ in range(3)])
        leg.weights.use()
    assert found == [[False] * 3, [True, False, False]] * 2
    leg = Leg(StepRules(averages=True), share=lambda gather: None)
    begin_next(leg, 4, 8)
    assert leg.send_rows()
