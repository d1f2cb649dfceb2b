"""Every second of a replica falls into one bin, whatever happens to its calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from raysgd.core.history.status import find_straggler
from raysgd.core.numbers.timing import DRIVER, TimeSpent
from raysgd.trainer.worker.ledger import Ledger


class Clock:
    """Passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(clock)


def spent(ledger: Ledger) -> dict[str, float]:
    """The bins that hold something, which add up to the time that passed."""
    return {name: seconds for name, seconds in ledger.reading().seconds.items() if seconds}


def drawing(clock: Clock, num: int, ledger: Ledger, seconds: float = 1.0) -> Iterator[int]:
    """Batches that take a while to draw; the step before is complete when the next one is asked for."""
    for number in range(num):
        clock.sleep(seconds)
        yield number
        ledger.commit()


class Group:
    waited_s = 0.0


def test_a_call_is_told_apart(ledger: Ledger, clock: Clock) -> None:
    clock.sleep(5)
    ledger.begin_call()
    clock.sleep(0.5)
    with ledger.call():
        for _ in ledger.timing(drawing(clock, 3, ledger)):
            clock.sleep(10)
        clock.sleep(0.25)
    ledger.enter(DRIVER)
    clock.sleep(7)
    assert spent(ledger) == {"start_up": 5, "other": 0.75, "data": 3, "useful": 30, "driver": 7}
    assert ledger.of_call() == {"other": 0.75, "data": 3, "useful": 30, "driver": 7}


def test_an_exchange_is_told_from_waiting_for_others_and_from_the_step(ledger: Ledger, clock: Clock) -> None:
    group = Group()
    with ledger.call():
        for _ in ledger.timing(drawing(clock, 1, ledger, 0)):
            clock.sleep(2)
            with ledger.exchanging(group):
                clock.sleep(5)
                group.waited_s += 3
            clock.sleep(1)
    assert spent(ledger) == {"useful": 3, "exchange": 2, "slower_rank": 3}


def test_an_exchange_outside_of_a_step_stays_where_it_is(ledger: Ledger, clock: Clock) -> None:
    ledger.enter("evaluation")
    with ledger.exchanging(Group()):
        clock.sleep(4)
    assert spent(ledger) == {"evaluation": 4}


def break_off(ledger: Ledger, clock: Clock, num_done: int = 2) -> None:
    """A call that breaks in the exchange of the step after `num_done` complete ones; a step takes 10 s, 3 in it."""
    ledger.begin_call()
    with suppress(ConnectionError), ledger.call():
        for number in ledger.timing(drawing(clock, 9, ledger, 0)):
            clock.sleep(7)
            with ledger.exchanging(Group()):
                clock.sleep(3)
                if number == num_done:
                    raise ConnectionError


def test_a_step_that_a_loss_undid_is_done_again(ledger: Ledger, clock: Clock) -> None:
    break_off(ledger, clock)
    clock.sleep(1)
    ledger.note_recovery()
    clock.sleep(2)
    with ledger.regrouping(goes_on=lambda: True):
        clock.sleep(4)
    clock.sleep(8)
    with ledger.call():
        for _ in ledger.timing(drawing(clock, 1, ledger, 0)):
            clock.sleep(10)
    assert spent(ledger) == {
        "useful": 24,
        "again": 7,
        "exchange": 6,
        "recovery_detect": 3 + 1,  # the exchange that waited for the lost rank, too
        "recovery_form": 2,
        "recovery_hand_over": 4,
        "recovery_resume": 8,
    }
    assert sum(spent(ledger).values()) == clock.now


def test_a_call_that_failed_for_another_reason_is_no_recovery(ledger: Ledger, clock: Clock) -> None:
    break_off(ledger, clock, num_done=0)
    clock.sleep(100)
    ledger.note_recovery()
    clock.sleep(50)
    ledger.begin_call()
    assert spent(ledger) == {"again": 7, "recovery_detect": 3, "driver": 150}


def test_a_regroup_between_calls_ends_between_calls(ledger: Ledger, clock: Clock) -> None:
    ledger.enter("driver")
    clock.sleep(6)
    with ledger.regrouping(goes_on=lambda: False):
        clock.sleep(4)
    clock.sleep(5)
    assert spent(ledger) == {"driver": 11, "recovery_hand_over": 4}


def test_a_replica_that_stood_by_begins_when_it_takes_a_place(ledger: Ledger, clock: Clock) -> None:
    before = ledger.reading()
    ledger.stand_by()
    clock.sleep(60)
    ledger.enter("driver")
    with ledger.regrouping(goes_on=lambda: True):
        clock.sleep(2)
    clock.sleep(1)
    reading = ledger.reading()
    assert spent(ledger) == {"recovery_hand_over": 2, "recovery_resume": 1}
    assert (before.is_successor, reading.is_successor) == (False, True)
    assert reading.of != before.of


def test_copies_are_booked_and_what_came_after_them_is_unsaved(ledger: Ledger, clock: Clock) -> None:
    with ledger.call():
        for number in ledger.timing(drawing(clock, 3, ledger, 0)):
            clock.sleep(10)
            if number == 1:
                ledger.commit()
                with ledger.copying():
                    clock.sleep(2)
    assert spent(ledger) == {"useful": 30, "snapshot": 2}
    assert ledger.reading().unsaved_s == 10


def test_evaluation_is_booked_also_where_it_raises(ledger: Ledger, clock: Clock) -> None:
    def validate() -> None:
        clock.sleep(3)
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"), ledger.evaluating():
        validate()
    clock.sleep(1)
    assert spent(ledger) == {"evaluation": 3, "driver": 1}


def test_the_bins_add_up_at_every_moment(clock: Clock) -> None:
    """Also inside steps and exchanges, where the time is in bins that are not shown."""
    ledger, found = Ledger(clock), []

    def look() -> None:
        clock.sleep(1)
        found.append((ledger.reading(), clock.now))

    with ledger.call():
        for _ in ledger.timing(drawing(clock, 2, ledger)):
            look()
            with ledger.exchanging(Group()):
                look()
            look()
    look()
    assert len(found) == 7
    assert all(reading.total_s == now for reading, now in found)
    assert isinstance(found[0][0], TimeSpent)


class Interrupted(Clock):
    """When it is read, another thread would like to begin a bin, a moment later."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[threading.Thread] = []

    def __call__(self) -> float:
        now = self.now
        self.now += 1.0
        if self.others:
            other = self.others.pop()
            other.start()
            other.join(0.1)
        return now


def test_a_bin_that_another_thread_begins_during_a_look_is_not_less_than_nothing() -> None:
    clock = Interrupted()
    ledger = Ledger(clock)
    other = threading.Thread(target=ledger.begin_call)
    clock.others.append(other)
    assert min(ledger.reading().seconds.values()) >= 0
    other.join(60)


# ------------------------------------------------------------------------------------------------ own seconds


def test_a_rank_waits_for_others_from_its_backward_pass_to_the_next_draw(ledger: Ledger, clock: Clock) -> None:
    clock.sleep(1)
    with ledger.call():
        assert ledger.own_s is None
        for _ in ledger.timing(drawing(clock, 2, ledger)):
            clock.sleep(3)
            ledger.end_own_work()
            clock.sleep(50)
            ledger.end_own_work()
    assert ledger.own_s == 8


def in_user_code(own_s: float, since: float, now: float) -> Ledger:
    """The ledger of a rank that has spent so long by itself. It is in user code since then; 0 to wait."""
    clock = Clock()
    ledger = Ledger(clock)
    clock.now = 1.0
    ledger.begin_own_work()
    clock.sleep(own_s)
    ledger.end_own_work()
    if since:
        clock.now = since
        ledger.begin_own_work()
    clock.now = now
    return ledger


def test_where_all_ranks_hang_in_user_code_they_wait_for_none_of_them() -> None:
    ranks = [in_user_code(1.5, 100.0, 160.0), in_user_code(1.0, 100.1, 160.0), in_user_code(1.0, 100.2, 160.0)]
    assert find_straggler([each.own_s for each in ranks]) is None


def test_a_rank_that_alone_hangs_in_user_code_is_the_one_that_others_wait_for() -> None:
    ranks = [in_user_code(1.5, 0.0, 160.0), in_user_code(1.0, 0.0, 160.0), in_user_code(1.0, 100.0, 160.0)]
    assert find_straggler([each.own_s for each in ranks]) == 2


def test_the_own_time_of_a_call_that_broke_off_does_not_grow_and_a_new_group_begins_at_zero(
    ledger: Ledger, clock: Clock
) -> None:
    clock.sleep(1)
    with suppress(ValueError), ledger.call():
        for _ in ledger.timing(drawing(clock, 2, ledger)):
            clock.sleep(3)
            ledger.end_own_work()
            raise ValueError
    clock.sleep(100)
    assert ledger.own_s == 4
    ledger.note_recovery()
    with ledger.regrouping(lambda: True):
        assert ledger.own_s is None
