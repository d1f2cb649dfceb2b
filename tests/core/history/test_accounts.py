"""The time of a rank, added up over the processes that had its place."""

from __future__ import annotations

import logging
import pickle

import pytest

from raysgd.core.engine.shared.types import Heartbeat
from raysgd.core.history.accounts import _ADVICE, Accounts
from raysgd.core.numbers.timing import _AVOIDABLE, TimeSpent


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accounts(clock: Clock) -> Accounts:
    return Accounts(clock)


def of(accounts: Accounts, rank: int) -> dict[str, float]:
    return {name: seconds for name, seconds in accounts.ledger().of(rank).items() if seconds}


def says(of: str, unsaved_s: float = 0.0, is_successor: bool = False, **seconds: float) -> Heartbeat:
    return Heartbeat(time=TimeSpent(of, seconds, unsaved_s, is_successor))


def test_there_is_advice_for_all_that_can_be_saved() -> None:
    assert set(_ADVICE) == set(_AVOIDABLE)


def test_a_rank_tells_more_and_more(accounts: Accounts, clock: Clock) -> None:
    clock.now = 10
    accounts.note_times({0: says("a", useful=4.0)})
    clock.now = 15
    accounts.note_times({0: says("a", useful=7.0, data=2.0)})
    accounts.note_times({0: says("a", useful=5.0)})  # came late
    assert of(accounts, 0) == {"start_up": 6, "useful": 7, "data": 2}


def test_a_first_answer_that_came_late_is_seen_by_the_next_one(accounts: Accounts, clock: Clock) -> None:
    clock.now = 10
    accounts.note_times({0: says("a", useful=2.0)})
    clock.now = 11
    accounts.note_times({0: says("a", useful=5.0)})  # it ran since 6, not since 8
    assert of(accounts, 0) == {"start_up": 6, "useful": 5}
    accounts.begin_call()
    clock.now = 13
    accounts.note_times({0: says("b", is_successor=True, useful=1.0)})
    clock.now = 13.5
    accounts.note_times({0: says("b", is_successor=True, useful=2.0)})
    assert of(accounts, 0) == {"start_up": 6, "useful": 7, "recovery_replace": 0.5}


def test_a_successor_keeps_the_steps_of_the_lost_one(accounts: Accounts, clock: Clock) -> None:
    accounts.begin_call()
    clock.now = 10
    accounts.note_times({0: says("a", useful=10.0), 1: says("b", useful=10.0, unsaved_s=8.0)})
    clock.now = 16
    accounts.note_times({1: says("c", is_successor=True, useful=1.0)})
    assert of(accounts, 1) == {"useful": 11, "recovery_replace": 5}


def test_a_rank_without_a_process_costs_no_goodput_while_nothing_is_trained(accounts: Accounts, clock: Clock) -> None:
    accounts.begin_call()
    clock.now = 10
    accounts.note_times({0: says("a", useful=10.0)})
    accounts.end_call()
    clock.now = 100
    accounts.note_times({0: says("b", driver=2.0)})
    assert of(accounts, 0) == {"useful": 10, "driver": 90}
    clock.now = 150  # "b" dies at 120
    accounts.begin_call()
    clock.now = 156
    accounts.note_times({0: says("c", useful=1.0)})
    assert of(accounts, 0) == {"useful": 11, "driver": 140, "recovery_replace": 5}


def test_steps_behind_the_last_copy_are_done_again_after_a_restart(accounts: Accounts, clock: Clock) -> None:
    accounts.begin_call()
    clock.now = 10
    accounts.note_times({0: says("a", useful=10.0, unsaved_s=8.0)})
    clock.now = 16
    accounts.note_times({0: says("b", useful=1.0)})
    assert of(accounts, 0) == {"useful": 3, "again": 8, "recovery_replace": 5}


def test_a_survivor_that_changes_its_rank_brings_no_time_twice(accounts: Accounts, clock: Clock) -> None:
    accounts.begin_call()
    clock.now = 10
    accounts.note_times({rank: says(name, useful=10.0) for rank, name in enumerate("abc")})
    clock.now = 14
    accounts.note_times({0: says("a", useful=14.0), 1: says("c", useful=13.0, recovery_form=1.0)})
    assert [sum(accounts.ledger().of(rank).values()) for rank in range(3)] == [14, 14, 10]
    assert of(accounts, 1) == {"useful": 13, "recovery_form": 1}


def test_a_new_rank_begins_when_it_came(accounts: Accounts, clock: Clock) -> None:
    clock.now = 5
    accounts.note_times({0: says("a", driver=5.0)})
    accounts.begin_call()
    clock.now = 100
    accounts.note_times({1: says("b", is_successor=True, useful=3.0)})
    assert of(accounts, 1) == {"useful": 3}


def test_a_ledger_says_what_is_missing(accounts: Accounts) -> None:
    assert "no training call was made yet" in str(accounts.ledger(2))
    accounts.note_times({0: says("a", driver=1.0)})
    accounts.begin_call()
    found = accounts.ledger(2)
    assert found.notes == ("rank 1 has not answered yet",)
    with pytest.raises(
        ValueError, match=r"`rank=1` has no ledger: available ranks are \[0\]; rank 1 has not answered yet"
    ):
        found.of(1)
    assert accounts.ledger(1000).notes == ("ranks 1-999 have not answered yet",)
    assert accounts.ledger().notes == ("the trainer was shut down, the ledger ends there",)


def test_exchanges_that_cannot_be_told_apart_are_named(accounts: Accounts) -> None:
    accounts.begin_call()
    accounts.note_times({0: says("a", useful=1.0), 1: says("b", useful=1.0)})
    assert "exchanges cannot be told from useful steps" in str(accounts.ledger(2))
    accounts.note_times({0: says("a", useful=1.0, exchange=1.0)})
    assert not accounts.ledger(2).notes


def test_goodput_leaves_out_what_is_not_training(accounts: Accounts) -> None:
    assert accounts.ledger().goodput is None
    accounts.note_times(
        {0: says("a", useful=8.0, exchange=1.0, again=0.5, recovery_form=0.5, driver=90.0, evaluation=5.0)}
    )
    assert accounts.ledger().goodput == pytest.approx(0.9)
    assert "goodput 90.0%" in str(accounts.ledger())


@pytest.mark.parametrize(("data_s", "is_told"), [(30.0, True), (10.0, False)])
def test_the_largest_avoidable_bin_is_named_once(
    accounts: Accounts, data_s: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    accounts.begin_call()
    accounts.note_times({0: says("a", useful=90.0 - data_s, data=data_s, driver=500.0)})
    for _ in range(2):
        accounts.warn()
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == (
        ["33 % of the time in training calls goes into waiting for data"] if is_told else []
    )


@pytest.mark.parametrize(("used", "is_told"), [((), True), (("spare_workers",), False), (("undo",), True)])
def test_advice_that_is_followed_already_is_not_given(
    used: tuple[str, ...], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    accounts = Accounts(used=used)
    accounts.begin_call()
    accounts.note_times({0: says("a", useful=50.0, recovery_form=50.0)})
    accounts.warn()
    assert "goes into recovering from failures." in caplog.text
    assert ("`spare_workers=1`" in caplog.text) == is_told


def test_short_trainings_are_not_warned(accounts: Accounts, caplog: pytest.LogCaptureFixture) -> None:
    accounts.note_times({0: says("a", useful=1.0, data=30.0)})
    accounts.warn()
    assert not caplog.records


def test_another_process_continues_the_accounts_by_its_own_clock(accounts: Accounts, clock: Clock) -> None:
    clock.now = 10
    accounts.begin_call()
    accounts.note_times({0: says("a", useful=4.0)})
    later = Clock()
    later.now = 500.0
    others = Accounts(later)
    others.take_over(pickle.loads(pickle.dumps(accounts.kept())))
    assert of(others, 0) == of(accounts, 0)
    assert others.ledger(1).notes == accounts.ledger(1).notes == ()
    before = others.in_calls()
    others.begin_call()
    later.now += 20
    others.note_times({0: says("a", useful=9.0, data=1.0)})
    assert of(others, 0) == {"start_up": 6, "useful": 9, "data": 1}
    assert (before, others.in_calls()) == ({0: 4.0}, {0: 10.0})
    later.now += 2
    others.note_times({0: says("b", is_successor=True, useful=1.0)})
    assert 0 < of(others, 0)["recovery_replace"] < 30
