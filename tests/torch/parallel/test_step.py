"""Where a replica is among the batches of one optimizer step, and by how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raysgd.torch.parallel.step import BatchStep, Counted

OPTIMIZER = object()


def joint(window: int) -> BatchStep:
    step = BatchStep()
    step.is_global = True
    step.open_call(window)
    return step


def backward(step: BatchStep, num_ranks: int = 1) -> float:
    step.note_backward([OPTIMIZER])
    return step.share(None, num_ranks, 1.0)


def corrected(step: BatchStep, factors: list[float], num_ranks: int = 1) -> list[float]:
    """What the losses of a window are multiplied with in the end."""
    assert step.waiting is not None
    correction = step.waiting.correction(step.waiting.total, num_ranks)
    return [factor * correction for factor in factors]


def run(step: BatchStep, totals: list[int], last: int | None = None) -> tuple[list[bool], list[float]]:
    """Batches of so many samples of all ranks, with a backward pass each; boundaries, and factors corrected."""
    boundaries, factors, window = [], [], []
    for index, total in enumerate(totals):
        step.begin_batch(1.0, total, total, is_last=index in (last, len(totals) - 1))
        window.append(backward(step))
        boundaries.append(step.is_boundary)
        if step.is_boundary:
            factors += corrected(step, window)
            window = []
            step.stepped(OPTIMIZER)
    return boundaries, factors


def test_without_accumulation_every_batch_is_a_boundary_and_nothing_is_noted() -> None:
    step = BatchStep()
    for _ in range(3):
        step.begin_batch(0.5, 4)
        assert step.is_boundary
        assert not step.adds_to(OPTIMIZER)
        step.note_backward([OPTIMIZER])
        assert step.adds_to(OPTIMIZER)
        assert step.waiting is None
    assert (step.weight, step.num_samples) == (0.5, 4)


def test_a_step_without_samples_is_padding_and_an_unknown_number_is_not() -> None:
    step = BatchStep()
    assert not step.is_padding
    step.begin_batch(0.0, 0)
    assert step.is_padding


def test_windows_are_full_but_for_the_last() -> None:
    boundaries, factors = run(joint(3), [4] * 7)
    assert boundaries == [False, False, True, False, False, True, True]
    assert factors == pytest.approx([1 / 3] * 6 + [1.0])


def test_batches_count_by_their_samples_whatever_was_expected() -> None:
    _, factors = run(joint(3), [4, 2, 6, 5, 1])
    assert factors == pytest.approx([4 / 12, 2 / 12, 6 / 12, 5 / 6, 1 / 6])


def test_a_pass_that_ends_in_between_ends_the_window() -> None:
    boundaries, _ = run(joint(2), [4] * 5, last=2)
    assert boundaries == [False, True, True, False, True]


def test_equal_batches_need_no_correction() -> None:
    step, factors = joint(2), []
    for is_last in (False, True):
        step.begin_batch(1.0, 8, 8, is_last)
        factors.append(backward(step))
    assert factors == corrected(step, factors) == [0.5, 0.5]


def test_a_rank_counts_by_its_share_of_all_samples() -> None:
    step = joint(2)
    step.begin_batch(1.5, 3, 4, is_last=False)  # 3 of 4 samples on 2 ranks
    factors = [backward(step, num_ranks=2)]
    step.begin_batch(0.0, 0, 4, is_last=True)
    factors.append(backward(step, num_ranks=2))
    assert corrected(step, factors, num_ranks=2) == pytest.approx([2 * 3 / 8, 0.0])


def test_a_replica_by_itself_counts_its_own_samples_only() -> None:
    step = BatchStep()
    step.open_call(2)
    step.begin_batch(1.5, 3, 4, is_last=False)
    factors = [backward(step)]
    step.begin_batch(1.0, None, 5, is_last=True)
    factors.append(backward(step))
    assert corrected(step, factors) == pytest.approx([3 / 8, 5 / 8])


def test_gradients_wait_between_the_first_and_the_last_batch_of_a_window() -> None:
    step = joint(2)
    step.begin_batch(1.0, 4, 4, is_last=False)
    assert not step.adds_to(OPTIMIZER), "the first clears what is left from the window before"
    backward(step)
    assert step.waiting is not None
    assert step.waiting is not None
    assert not step.waiting.is_exchanged
    step.begin_batch(1.0, 4, 4, is_last=True)
    assert step.adds_to(OPTIMIZER)
    backward(step)
    backward(step)  # two losses of one batch
    assert step.waiting.is_exchanged
    assert (step.waiting.num_batches, step.waiting.total) == (2, 8)
    step.stepped(OPTIMIZER)
    assert step.waiting is None


def test_a_window_whose_last_batch_was_left_out_goes_on() -> None:
    step, factors = joint(2), []
    for skips in (False, True, False):
        step.begin_batch(1.0, 4, 4, is_last=False)
        if skips:
            step.skip()
        else:
            factors.append(backward(step))
    assert corrected(step, factors) == [0.5, 0.5]


def test_a_new_call_forgets_what_a_failed_one_left() -> None:
    step = joint(2)
    step.begin_batch(1.0, 4, 4, is_last=False)
    backward(step)
    step.open_call(2)
    assert step.waiting is None
    assert step.is_boundary
    assert not step.is_used


def test_who_exchanges_is_told_what_can_wait() -> None:
    step, told = joint(2), []
    step.defer = told.append
    for is_last in (False, False, True):
        step.begin_batch(1.0, 4, 4, is_last)
        step.use()
    step.open_call(2)
    assert told == [True, False, False, False]


# ------------------------------------------------------------------------------------------------ whose weight it is


def hand_out(step: BatchStep, weight: float = 1.0, num_samples: int = 4, is_last: bool = False) -> None:
    step.begin_batch(weight, num_samples, 8, is_last)


def test_a_weight_ends_with_the_stream_and_with_the_call() -> None:
    step = joint(1)
    for end in (step.end_stream, step.close_call, lambda: step.open_call(1)):
        hand_out(step, 1.5)
        assert step.outgoing_weight() == 1.5
        end()  # type: ignore[operator]
        assert (step.weight, step.num_samples, step.outgoing_weight()) == (1.0, None, 1.0)


def test_a_stream_that_ends_before_its_last_batch_was_used_leaves_that_its_weight() -> None:
    step = joint(1)
    hand_out(step, 1.5)
    step.end_stream()
    assert step.outgoing_weight() == 1.5


def test_after_a_call_that_accumulated_nothing_is_accumulated() -> None:
    step = joint(2)
    hand_out(step, 0.5)
    backward(step)
    step.close_call()
    assert (step.window, step.is_boundary, step.adds_to(OPTIMIZER), step.outgoing_weight()) == (1, True, False, 1.0)


@pytest.mark.parametrize("num_ahead", [1, 2, 5])
def test_a_batch_that_counts_otherwise_is_not_drawn_while_another_one_waits(num_ahead: int) -> None:
    step = joint(1)
    for _ in range(num_ahead):
        hand_out(step)
    for _ in range(3):
        step.use()
        step.use()  # a second backward pass for the same batch
        hand_out(step)
    with pytest.raises(RuntimeError, match=r"A batch with weight 1\.5 was drawn while one with weight 1 waits"):
        hand_out(step, 1.5)


def test_batches_that_are_alike_may_be_drawn_ahead() -> None:
    step = joint(1)
    for _ in range(5):
        hand_out(step)
    step.end_stream()
    for _ in range(7):
        step.use()


@pytest.mark.parametrize("leaves_out", [BatchStep.use, BatchStep.skip])
def test_a_batch_that_was_trained_on_or_skipped_waits_no_longer(leaves_out: Callable[[BatchStep], None]) -> None:
    step = joint(1)
    for weight in (1.0, 1.0, 1.5, 0.5):
        hand_out(step, weight)
        leaves_out(step)


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


def test_with_accumulation_places_in_the_window_are_told_apart() -> None:
    step = joint(3)
    hand_out(step)
    hand_out(step)
    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=3`: `self\.backward` was not called for"):
        hand_out(step)


def test_a_backward_pass_may_have_a_weight_of_its_own() -> None:
    step = joint(1)
    hand_out(step, 1.5)
    with step.weighting(Counted(1.0, 1.0, 2, lambda: 8.0)):
        assert step.outgoing_weight() == 0.25
    assert step.outgoing_weight() == 1.5


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
