"""Where a replica is among the batches of one optimizer step, and by how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raysgd.torch.parallel.step import BatchStep

OPTIMIZER, OTHER = object(), object()


def joint(window: int) -> BatchStep:
    step = BatchStep()
    step.is_joint = True
    step.open_call(window)
    return step


def backward(step: BatchStep, optimizer: object) -> bool:
    keeps = step.waits_for(optimizer)
    step.note_backward([optimizer])
    step.factor_of(optimizer)
    return keeps


def run(step: BatchStep, totals: list[int], last: int | None = None) -> tuple[list[bool], list[float]]:
    """Batches of so many samples of all ranks, with a backward pass each; boundaries, and factors corrected."""
    boundaries, factors, window = [], [], []
    for index, total in enumerate(totals):
        step.begin(1.0, total, total, is_last=index in (last, len(totals) - 1))
        step.note_backward([OPTIMIZER])
        window.append(step.factor_of(OPTIMIZER))
        boundaries.append(step.is_boundary)
        if step.is_boundary:
            factors += [factor * step.correction(OPTIMIZER) for factor in window]
            window = []
            step.stepped(OPTIMIZER)
    return boundaries, factors


def test_without_accumulation_every_batch_is_a_boundary_and_nothing_is_noted() -> None:
    step = BatchStep()
    for _ in range(3):
        step.begin(0.5, 4)
        assert step.is_boundary
        assert not step.waits_for(OPTIMIZER)
        step.note_backward([OPTIMIZER])
        assert not step.is_pending
    assert (step.weight, step.num_samples) == (0.5, 4)


def test_a_step_without_samples_is_padding_and_an_unknown_number_is_not() -> None:
    step = BatchStep()
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
        step.note_backward([OPTIMIZER])
        step.factor_of(OPTIMIZER)
    assert step.correction(OPTIMIZER) == 1.0


def test_a_rank_counts_by_its_share_of_all_samples() -> None:
    step = joint(2)
    step.begin(1.5, 3, 4, is_last=False)  # 3 of 4 samples on 2 ranks
    step.note_backward([OPTIMIZER])
    assert step.factor_of(OPTIMIZER) == pytest.approx(1.5 * 4 / 8)
    step.begin(0.0, 0, 4, is_last=True)
    assert step.factor_of(OPTIMIZER) == 0.0


def test_a_replica_by_itself_counts_its_own_samples_only() -> None:
    step = BatchStep()
    step.open_call(2)
    step.begin(1.5, 3, 4, is_last=False)
    step.note_backward([OPTIMIZER])
    assert step.factor_of(OPTIMIZER) == pytest.approx(3 / 6)
    step.begin(1.0, None, 5, is_last=True)
    step.note_backward([OPTIMIZER])
    assert step.factor_of(OPTIMIZER) == pytest.approx(5 / 6)


def test_gradients_wait_between_the_first_and_the_last_batch_of_a_window() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    assert not backward(step, OPTIMIZER), "the first clears what is left from the window before"
    assert step.is_pending
    assert step.is_unexchanged(OPTIMIZER)
    step.begin(1.0, 4, 4, is_last=True)
    assert backward(step, OPTIMIZER)
    assert not step.is_unexchanged(OPTIMIZER)
    step.stepped(OPTIMIZER)
    assert not step.is_pending


def test_each_optimizer_waits_by_itself() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    for optimizer in (OPTIMIZER, OTHER):
        backward(step, optimizer)
    step.begin(1.0, 2, 2, is_last=True)
    assert backward(step, OPTIMIZER)
    assert step.correction(OPTIMIZER) == pytest.approx(8 / 6)
    step.stepped(OPTIMIZER)
    assert step.waits_for(OTHER)
    assert backward(step, OTHER), "the step of one optimizer leaves the gradients of the other"
    assert backward(step, OTHER), "two losses of one batch"
    assert step.correction(OTHER) == pytest.approx(8 / 6), "a batch counts once, however many losses it has"


def test_what_one_optimizer_waits_for_is_nothing_to_another() -> None:
    """One is stepped with every window, the other with every second one."""
    step = joint(2)
    for is_second_window in (False, True):
        for is_last in (False, True):
            step.begin(1.0, 4, 4, is_last)
            backward(step, OPTIMIZER)
            backward(step, OTHER)
        assert step.correction(OPTIMIZER) == 1.0
        step.stepped(OPTIMIZER)
        assert step.correction(OTHER) == (0.5 if is_second_window else 1.0)


def test_a_window_whose_last_batch_was_left_out_goes_on() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    backward(step, OPTIMIZER)
    step.begin(1.0, 4, 4, is_last=False)
    step.skip()
    step.begin(1.0, 4, 4, is_last=False)
    assert backward(step, OPTIMIZER)
    step.begin(1.0, 4, 4, is_last=False)
    backward(step, OPTIMIZER)
    assert step.correction(OPTIMIZER) == pytest.approx(8 / 12), "three batches with gradients"


def test_a_new_call_forgets_what_a_failed_one_left() -> None:
    step = joint(2)
    step.begin(1.0, 4, 4, is_last=False)
    step.note_backward([OPTIMIZER])
    step.open_call(2)
    assert not step.is_pending
    assert step.is_boundary
    assert not step.is_used


def test_who_exchanges_is_told_what_can_wait() -> None:
    step, told = joint(2), []
    step.defer = told.append
    for is_last in (False, False, True):
        step.begin(1.0, 4, 4, is_last)
        step.use()
    step.open_call(2)
    assert told == [True, False, False, False]


# ------------------------------------------------------------------------------------------------ whose weight it is


def hand_out(step: BatchStep, weight: float = 1.0, num_samples: int = 4, is_last: bool = False) -> None:
    step.begin(weight, num_samples, 8, is_last)


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
    backward(step, [hand_out(step, 0.5)] and OPTIMIZER)
    step.close_call()
    assert not backward(step, OPTIMIZER)
    assert (step.window, step.is_boundary, step.factor_of(OPTIMIZER), step.correction(OPTIMIZER)) == (1, True, 1.0, 1.0)


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


# ------------------------------------------------------------------------------------------------ weights of the user's


class Weighed:
    """A step of some ranks that takes batches of so much, on this rank and on the others together."""

    def __init__(self, window: int, num_ranks: int = 2) -> None:
        self.step = joint(window)
        self.step.count_ranks = lambda: num_ranks
        self.step.start_sum = self.start_sum
        self.given: list[tuple[float, float]] = []
        self.num_told = self.num_exchanges = self.num_waits = 0

    def start_sum(self, own: float) -> Callable[[], float]:
        untold, self.num_told = self.given[self.num_told :], len(self.given)
        assert own == sum(mine for mine, _ in untold)
        self.num_exchanges += 1

        def wait() -> float:
            self.num_waits += 1
            return sum(map(sum, untold))

        return wait

    def take(self, own: float, other: float, is_last: bool = False) -> float:
        self.given.append((own, other))
        self.step.begin(1.5, 3, 4, is_last)
        self.step.note_backward([OPTIMIZER], own)
        return self.step.factor_of(OPTIMIZER, own)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_batches_count_by_what_user_code_gives_them(window: int, num_ranks: int) -> None:
    """The mean of the ranks' weighted gradients is that over all weights; the samples have no say in it."""
    weights = [(5.0, 1.0), (2.0, 0.0), (0.0, 7.0), (3.0, 3.0), (100.0, 1.0)]
    weights = [(own, other * (num_ranks - 1)) for own, other in weights]
    weighed = Weighed(window, num_ranks)
    for first in range(0, len(weights), window):
        taken = weights[first : first + window]
        factors = [weighed.take(*pair, is_last=pair is weights[-1]) for pair in taken]
        assert weighed.step.is_boundary
        correction = weighed.step.correction(OPTIMIZER)
        whole = sum(map(sum, taken))
        assert [factor * correction for factor in factors] == pytest.approx(
            [num_ranks * own / whole if whole else 0.0 for own, _ in taken]
        )
        weighed.step.stepped(OPTIMIZER)


def test_ranks_exchange_weights_once_for_a_step_and_wait_before_the_first_backward_pass_of_a_call_only() -> None:
    weighed = Weighed(3)
    waits = []
    for index in range(6):
        weighed.take(4.0, 2.0)
        waits.append(weighed.num_waits)
        if index % 3 == 2:
            assert weighed.step.correction(OPTIMIZER) == 1.0, "equal batches need none"
            weighed.step.stepped(OPTIMIZER)
    assert waits == [1, 1, 1, 2, 2, 2], "the second wait is that of the correction"
    assert weighed.num_exchanges == 3


def test_the_first_batch_that_counts_says_what_to_expect() -> None:
    """What the losses are multiplied with stays near 1, so that no format overflows."""
    weighed = Weighed(1)
    for own, other, factor in ((0.0, 0.0, 0.0), (0.0, 1e9, 0.0), (3e9, 1e9, 6.0), (1e9, 3e9, 0.5)):
        assert weighed.take(own, other) == factor
        weighed.step.correction(OPTIMIZER)
        weighed.step.stepped(OPTIMIZER)


@pytest.mark.parametrize("window", [1, 2])
def test_where_nothing_counts_there_is_no_step(window: int) -> None:
    weighed = Weighed(window)
    for _ in range(window):
        weighed.take(0.0, 0.0)
    assert weighed.step.correction(OPTIMIZER) == 0.0


def test_a_loop_that_stops_in_a_window_leaves_nothing_untold() -> None:
    weighed = Weighed(3)
    factors = [weighed.take(4.0, 2.0), weighed.take(1.0, 2.0)]
    correction = weighed.step.correction(OPTIMIZER)
    assert [factor * correction for factor in factors] == pytest.approx([8 / 9, 2 / 9])


def test_weights_are_for_all_batches_of_a_step_and_one_for_a_batch() -> None:
    step = joint(3)
    step.begin(1.0, 4, 8, is_last=False)
    backward(step, OPTIMIZER)
    with pytest.raises(ValueError, match=r"`weight=` for some of the 3 batches .* for all of them, or for none"):
        step.note_backward([OPTIMIZER], 2.0)
    step.note_backward([OTHER], 2.0)
    assert step.factor_of(OTHER, 2.0) == step.factor_of(OTHER, 2.0), "two losses of one batch count once"
    assert step.correction(OTHER) == 3.0
    with pytest.raises(ValueError, match=r"`self.backward\(loss, weight=3.0\)`: another loss of this batch .*=2.0"):
        step.factor_of(OTHER, 3.0)


def test_a_loss_may_be_for_several_optimizers() -> None:
    step = joint(2)
    for is_last in (False, True):
        step.begin(1.0, 4, 8, is_last)
        assert step.waits_for(OTHER) == is_last
        step.note_backward([OPTIMIZER, OTHER])
        step.factor_of(OPTIMIZER)
    step.stepped(OPTIMIZER)
    assert (step.waits_for(OPTIMIZER), step.waits_for(OTHER)) == (False, True)
    assert step.correction(OTHER) == 1.0


def test_gradients_of_a_loss_that_is_weighted_go_out_as_they_are() -> None:
    step = joint(1)
    hand_out(step, 1.5)
    with step.weighting():
        assert step.outgoing_weight() == 1.0
    assert step.outgoing_weight() == 1.5


def test_the_first_exchange_of_the_last_batch_of_a_step_is_one_to_tell_others_with() -> None:
    step = joint(2)
    found = []
    for index in range(4):
        step.begin(1.0, 4, 8, is_last=index == 3)
        found.append([step.begin_exchange() for _ in range(3)])
        step.use()
    assert found == [[False] * 3, [True, False, False]] * 2
    step.open_call(1)
    step.begin(1.0, 4, 8)
    assert step.begin_exchange()
