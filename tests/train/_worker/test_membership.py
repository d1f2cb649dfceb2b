"""A function and the thread that changes its group beneath it, without workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.engine.shared.types import World
from raysgd.train._worker.membership import Membership
from raysgd.train._worker.messages import Mailbox, RanksMet

BROKEN = ConnectionError("gone")


class Rank:
    """A rank, and what it told the driver."""

    def __init__(self) -> None:
        self.told: list[BaseException] = []
        mailbox: Any = SimpleNamespace(break_off=self.told.append, is_held=True)
        self.membership = Membership(World(1, 3), mailbox)

    def step(self, broken: BaseException | None = None, has_trained: bool = True) -> bool:
        """Goes through a batch; `broken` is what all ranks' agreement ends with."""
        membership = self.membership
        membership.open_batch(membership.enter(), has_trained)
        if membership.begin_exchange():
            membership.end_exchange()
        return membership.count_step(lambda: broken)

    def regroup(self, is_behind: bool = False) -> None:
        self.membership.leave()
        self.membership.join(World(0, 2), is_behind)
        self.membership.go_on()


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begins to call a function; returns what waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()

    def wait() -> Any:
        thread.join(60)
        [value] = found
        return value

    return wait


def test_steps_that_all_agree_on_count_and_the_first_one_makes_it_possible_to_go_on() -> None:
    rank = Rank()
    assert rank.membership.obstacle == "the function has not taken a step yet"
    assert rank.step()
    assert rank.step()
    assert (rank.membership.num_done, rank.membership.obstacle) == (2, None)


def test_a_batch_whose_exchange_breaks_has_failed_and_is_told_once() -> None:
    rank = Rank()
    membership = rank.membership
    mark = membership.open_batch(membership.enter(), True)
    assert membership.begin_exchange()
    membership.end_exchange(BROKEN)
    assert not membership.begin_exchange(), "the next bucket is not sent"
    assert not membership.count_step(lambda: pytest.fail("the step is not asked for"))
    assert membership.has_failed
    assert membership.has_repeated(mark)
    membership.note_broken(BROKEN)
    assert rank.told == [BROKEN]


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_rank_that_holds_the_gradients_steps_if_another_one_has(is_behind: bool) -> None:
    rank = Rank()
    assert rank.step()
    counts = in_thread(lambda: rank.step(BROKEN))
    while not rank.told:
        pass
    rank.regroup(is_behind)
    assert counts() is is_behind
    assert rank.membership.num_done == 1 + is_behind
    assert rank.membership.has_failed is not is_behind


def test_a_rank_without_the_gradients_of_a_step_that_another_one_took_does_not_go_on() -> None:
    rank = Rank()
    rank.membership.leave()
    with pytest.raises(RuntimeError, match="whose gradients this rank does not have"):
        rank.membership.join(World(0, 2), True)


def test_each_loss_costs_each_rank_one_batch_wherever_it_was() -> None:
    in_exchange, between = Rank(), Rank()
    for rank in (in_exchange, between):
        assert rank.step()
    membership = in_exchange.membership
    membership.open_batch(membership.enter(), True)
    membership.begin_exchange()
    membership.end_exchange(BROKEN)
    for rank in (in_exchange, between):
        rank.regroup()
    assert in_exchange.step(), "it had a batch that failed"
    assert not between.step()
    assert between.step()
    assert [rank.membership.num_done for rank in (in_exchange, between)] == [2, 2]


def test_batches_of_a_loader_that_never_trained_do_not_fail_for_a_loss_before_them() -> None:
    rank = Rank()
    assert rank.step()
    rank.regroup()
    assert rank.step(has_trained=False)


def test_a_batch_that_was_divided_for_another_group_fails() -> None:
    rank = Rank()
    membership = rank.membership
    assert rank.step()
    place = membership.enter()
    rank.regroup()
    membership.open_batch(place, True)
    assert not membership.begin_exchange()


def test_a_function_waits_for_the_next_group_which_is_open_when_all_are_there() -> None:
    rank = Rank()
    membership = rank.membership
    membership.note_broken(BROKEN)
    place = in_thread(membership.enter)
    membership.leave()
    membership.join(World(0, 2), False)
    assert not membership.is_usable
    membership.go_on()
    membership.go_on()  # the next call of the driver
    assert (place().number, place().world) == (1, World(0, 2))


def test_a_function_that_steps_in_waits_for_its_place_and_then_meets_the_others() -> None:
    mailbox = Mailbox(int)
    membership = Membership(World(2, 3), mailbox, is_new=True)
    assert membership.has_failed, "what it reports is dropped"
    assert membership.obstacle is None

    def first_batch() -> Any:
        membership.await_place()
        place = membership.enter()
        assert membership.meet(place, lambda: BROKEN) is False, "it meets them in the next group"
        assert membership.is_new
        place = membership.enter()
        assert membership.meet(place, lambda: membership.step_in(4, 17))
        return membership.place

    found = in_thread(first_batch)
    membership.await_rest()
    membership.join(World(0, 3), True)
    assert membership.is_at_first_batch
    membership.go_on()
    while membership.is_usable:
        pass
    membership.leave()
    membership.join(World(1, 2), True)
    membership.go_on()
    place = found()
    assert (place.number, place.world, membership.num_done) == (4, World(1, 2), 17)
    assert mailbox.next_message() == RanksMet(4)
    membership.open_batch(place, True)
    assert not membership.has_failed, "it was not there when the group broke"


def test_a_group_is_not_left_while_an_exchange_goes_on() -> None:
    rank = Rank()
    membership = rank.membership
    membership.open_batch(membership.enter(), True)
    assert membership.begin_exchange()
    has_left = in_thread(lambda: membership.leave() or True)
    membership.end_exchange()
    assert has_left()
