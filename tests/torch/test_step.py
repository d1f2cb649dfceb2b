"""Where a replica is among the batches of one optimizer step, and by how much each of them counts."""

from __future__ import annotations

import pytest

from raysgd.torch.step import Step

OPTIMIZER, OTHER = object(), object()


def joint(window: int) -> Step:
    step = Step()
    step.is_joint = True
    step.open_call(window)
    return step


def run(step: Step, totals: list[int], last: int | None = None) -> tuple[list[bool], list[float]]:
    """Batches of so many samples of all ranks, with a backward pass each; boundaries, and factors corrected."""
    boundaries, factors, window = [], [], []
    for index, total in enumerate(totals):
        step.begin(1.0, total, total, is_last=index in (last, len(totals) - 1))
        step.keeps_gradients(OPTIMIZER)
        window.append(step.factor)
        boundaries.append(step.is_boundary)
        if step.is_boundary:
            factors += [factor * step.correction() for factor in window]
            window = []
            step.stepped(OPTIMIZER)
    return boundaries, factors


def test_without_accumulation_every_batch_is_a_boundary_and_nothing_is_noted() -> None:
    step = Step()
    for _ in range(3):
        step.begin(0.5, 4)
        assert step.is_boundary
        assert not step.keeps_gradients(OPTIMIZER)
        assert not step.is_pending
    assert (step.weight, step.num_samples) == (0.5, 4)


def test_a_step_without_samples_is_padding_and_an_unknown_number_is_not() -> None:
    step = Step()
    assert not step.is_padding
    step.begin(0.0, 0)
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
    step = joint(2)
    for is_last in (False, True):
        step.begin(1.0, 8, 8, is_last)
        step.keeps_gradients(OPTIMIZER)
    assert step.correction() == 1.0


def test_a_rank_counts_by_its_share_of_all_samples() -> None:
    step = joint(2)
    step.begin(1.5, 3, 4, is_last=False)  # 3 of 4 samples on 2 ranks
    assert step.factor == pytest.approx(1.5 * 4 / 8)
    step.begin(0.0, 0, 4, is_last=True)
    assert step.factor == 0.0


def test_a_replica_by_itself_counts_its_own_samples_only() -> None:
    step = Step()
    step.open_call(2)
    step.begin(1.5, 3, 4, is_last=False)
    assert step.factor == pytest.approx(3 / 6)
    step.begin(1.0, None, 5, is_last=True)
    assert step.factor == pytest.approx(5 / 6)


def test_gradients_wait_between_the_first_and_the_last_batch_of_a_window() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    assert not step.keeps_gradients(OPTIMIZER), "the first clears what is left from the window before"
    assert step.is_pending
    assert step.is_unexchanged(OPTIMIZER)
    step.begin(1.0, 4, 4, is_last=True)
    assert step.keeps_gradients(OPTIMIZER)
    assert not step.is_unexchanged(OPTIMIZER)
    step.stepped(OPTIMIZER)
    assert not step.is_pending


def test_each_optimizer_waits_by_itself() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    for optimizer in (OPTIMIZER, OTHER):
        step.keeps_gradients(optimizer)
    step.begin(1.0, 2, 2, is_last=True)
    assert step.keeps_gradients(OPTIMIZER)
    step.stepped(OPTIMIZER)
    assert step.waits_for(OTHER)
    assert step.keeps_gradients(OTHER), "the step of one optimizer leaves the gradients of the other"
    assert step.correction() == pytest.approx(8 / 6), "a batch counts once, however many optimizers it is for"


def test_a_window_whose_last_batch_was_left_out_goes_on() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    step.keeps_gradients(OPTIMIZER)
    step.begin(1.0, 4, 4, is_last=False)  # user code skips it
    step.begin(1.0, 4, 4, is_last=False)
    assert step.keeps_gradients(OPTIMIZER)
    step.begin(1.0, 4, 4, is_last=False)
    step.keeps_gradients(OPTIMIZER)
    assert step.correction() == pytest.approx(8 / 12), "three batches with gradients"


def test_a_new_call_forgets_what_a_failed_one_left() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    step.keeps_gradients(OPTIMIZER)
    step.open_call(2)
    assert not step.is_pending
    assert step.is_boundary
    assert not step.is_used


def test_who_exchanges_is_told_what_can_wait() -> None:
    step, told = joint(2), []
    step.defer = told.append
    for is_last in (False, False, True):
        step.begin(1.0, 4, 4, is_last)
    step.open_call(2)
    assert told == [True, False, False, False]
