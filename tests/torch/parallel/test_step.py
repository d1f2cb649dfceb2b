"""Where a replica is among the batches of one optimizer step, and by how much each of them counts."""

from __future__ import annotations

import pytest

from raysgd.torch.parallel.step import BatchStep, Omitted

OPTIMIZER = object()


def joint(window: int) -> BatchStep:
    step = BatchStep()
    step.is_global = True
    step.open_call(window)
    return step


def backward(step: BatchStep) -> float:
    step.note_backward([OPTIMIZER])
    return step.share(None, 1, 1.0)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_batch_of_a_window_cannot_be_left_out(num_before: int) -> None:
    step = joint(2)
    for _ in range(num_before):
        step.begin_batch(1.0, 4, 4, is_last=False)
        backward(step)
    step.begin_batch(1.0, 4, 4, is_last=False)
    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=2`: a batch is left out.* pass `0 \* loss`"):
        step.skip()


def test_a_window_that_no_optimizer_has_stepped_with_is_an_error_at_the_next_batch() -> None:
    step = joint(2)
    for _ in range(2):
        step.begin_batch(1.0, 4, 4, is_last=False)
        backward(step)
    with pytest.raises(ValueError, match=r"`self.optimizer_step\(\)` was not called for the last batch of a step"):
        step.begin_batch(1.0, 4, 4, is_last=False)


@pytest.mark.parametrize(
    ("drawn", "told", "correction"),
    [
        ([8.0, 8.0], [[0.0, 0.0], [0.0, 0.0]], 1.0),
        ([8.0], [[0.0], [4.0]], 2.0),
        ([8.0], [[4.0], [4.0]], 0.0),
        ([8.0, 8.0], [[0.0, 0.0], [0.0, 4.0]], 16 / 12),
        ([8.0, 8.0], [[0.0, 4.0], [0.0, 4.0]], 1.0),  # a whole batch, as with Lightning
        ([8.0, 8.0], [[4.0, 4.0], [4.0, 4.0]], 0.0),
        ([8.0, 8.0], [[0.0, 4.0], [4.0, 4.0]], 16 / 12),
        ([8.0, 0.0], [[0.0, 0.0], [4.0, 0.0]], 2.0),  # fewer batches than a window has
    ],
)
def test_gradients_are_the_mean_over_the_samples_that_ranks_have_not_left_out(
    drawn: list[float], told: list[list[float]], correction: float
) -> None:
    omitted = Omitted(len(drawn))
    for index, number in enumerate(drawn):
        omitted.note(index, number, told[0][index])
    assert omitted.own == told[0]
    assert not omitted.is_known
    omitted.learn(told)
    assert omitted.correction == pytest.approx(correction)


def test_a_new_call_forgets_what_a_failed_one_left() -> None:
    step = joint(2)
    step.begin_batch(1.0, 4, 4, is_last=False)
    backward(step)
    step.open_call(2)
    assert step.waiting is None
    assert step.is_boundary
    assert not step.is_used


def hand_out(step: BatchStep, weight: float = 1.0, num_samples: int = 4) -> None:
    step.begin_batch(weight, num_samples, 8, is_last=False)


def test_a_stream_that_ends_before_its_last_batch_was_used_leaves_that_its_weight() -> None:
    step = joint(1)
    hand_out(step, 1.5)
    step.end_stream()
    assert step.outgoing_weight() == 1.5


def test_a_replica_by_itself_may_draw_as_it_likes() -> None:
    step = BatchStep()
    hand_out(step)
    hand_out(step, 1.5)


def test_where_user_code_weights_batches_only_padding_counts_otherwise() -> None:
    step = joint(1)
    hand_out(step)
    step.use(by_samples=False)
    hand_out(step)
    hand_out(step, 1.5)
    with pytest.raises(RuntimeError, match="waits"):
        hand_out(step, 0.0, num_samples=0)


def test_the_first_exchange_of_the_last_batch_of_a_step_is_one_to_tell_others_with() -> None:
    step = joint(2)
    found = []
    for index in range(4):
        step.begin_batch(1.0, 4, 8, is_last=index == 3)
        found.append([step.begin_exchange() for _ in range(3)])
        step.use()
    assert found == [[False] * 3, [True, False, False]] * 2
    step.open_call(1)
    step.begin_batch(1.0, 4, 8)
    assert step.begin_exchange()
