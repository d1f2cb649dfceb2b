from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.engine.gathering import Listener, grace_s, outcomes_within
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.shared.types import Answered, Failed, Failure, FailureKind, Outcome, Unanswered
from raysgd.exceptions import WorkerFault


@pytest.mark.parametrize("asks_survivors", [True, False])
def test_a_death_explains_everything_and_is_not_waited_after_for_long(asks_survivors: bool) -> None:
    shortest = grace_s({"died"}, asks_survivors)
    for kinds in ({"died", "user"}, {"died", "disconnected"}):
        assert grace_s(kinds, asks_survivors) == shortest
    for kinds in ({"user"}, {"disconnected"}, {"user", "disconnected"}):
        assert grace_s(kinds, asks_survivors) > shortest


def test_a_lost_connection_needs_no_explanation_where_survivors_are_asked_next() -> None:
    assert grace_s({"disconnected"}, asks_survivors=True) < grace_s({"disconnected"}, asks_survivors=False)
    assert grace_s({"user"}, asks_survivors=True) == grace_s({"user"}, asks_survivors=False)


@pytest.mark.parametrize(("ran_s", "grace"), [(0.0, 1.0), (0.9, 1.0), (3.0, 3.0), (3600.0, 5.0)])
def test_the_later_an_exception_comes_the_later_others_may_come_to_it_within_reason(ran_s: float, grace: float) -> None:
    assert grace_s({"user"}, ran_s=ran_s) == grace


class Silent:
    """Calls that never come to an end.

    Attributes:
        at_look: What happens whenever somebody waits for them.
        has_slept: Set once somebody waited for something else.
    """

    is_running = True

    def __init__(self) -> None:
        self.at_look: Callable[[], object] = lambda: None
        self.has_slept = threading.Event()
        self._seconds = itertools.count(0.0, 10.0)

    def now(self) -> float:
        return next(self._seconds)

    def sleep(self, seconds: float) -> None:
        self.has_slept.set()

    def ready(self, references: Collection[Any], timeout_s: float) -> Collection[Any]:
        return []

    def any_ready(self, references: Sequence[Any], timeout_s: float | None) -> Collection[Any]:
        self.at_look()
        return []

    def outcome(self, rank: int, reference: Any) -> Outcome:
        return Unanswered(rank)


class AnsweredInTurn:
    """Stands for `ray.wait`: calls that are answered one after the other, at a steady pace.

    Attributes:
        num_looked_at: How many calls were looked at, each as often as it was.
    """

    def __init__(self, seconds_each: float) -> None:
        self._seconds_each, self._now, self.num_looked_at = seconds_each, 0.0, 0

    def wait(self, references: list[int], num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        self.num_looked_at += len(references)
        answered_at = sorted(reference * self._seconds_each for reference in references)[num_returns - 1]
        until = answered_at if timeout is None else min(answered_at, self._now + timeout)
        self._now = max(self._now, until)
        done = [reference for reference in references if reference * self._seconds_each <= self._now]
        return done, [reference for reference in references if reference not in set(done)]


def looks_for_each(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often each of so many calls is looked at."""

    class Answering(Platform):
        def outcome(self, rank: int, reference: Any) -> Outcome:
            return Answered(rank, "an answer")

    calls = AnsweredInTurn(0.0003)
    monkeypatch.setattr("ray.wait", calls.wait)
    outcomes = Listener(dict(enumerate(range(num_calls))), platform=Answering()).listen()
    assert [outcomes[rank].value for rank in range(num_calls)] == ["an answer"] * num_calls
    return calls.num_looked_at / num_calls


def test_a_call_of_many_workers_is_looked_at_as_often_as_one_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {num_calls: looks_for_each(num_calls, monkeypatch) for num_calls in (100, 1000, 5000)}
    assert looks[100] < looks[5000] <= 1.25 * looks[1000]


def test_what_a_listener_looks_at_may_end_once_the_listener_was_stopped() -> None:
    calls, is_inside, told = Silent(), threading.Event(), []

    def on_wait() -> None:
        told.append("looks")
        is_inside.set()
        assert calls.has_slept.wait(60), "nobody waits for the look at the group"
        told.append("has looked")

    listener = Listener({0: "a call"}, platform=calls)
    thread = threading.Thread(target=listener.listen, args=(on_wait,))
    thread.start()
    assert is_inside.wait(60)
    listener.stop()
    told.append("stopped")
    thread.join(60)
    assert told == ["looks", "has looked", "stopped"]


def test_a_stopped_listener_looks_at_nothing_any_more() -> None:
    calls, told = Silent(), []
    listener = Listener({0: "a call"}, platform=calls)
    calls.at_look = listener.stop
    outcomes = listener.listen(lambda: told.append("looks"))
    assert (outcomes[0].answered, told) == (False, [])


class Timed(Silent):
    """Calls that raise, each at a time of its own, on a clock that jumps to the next one."""

    def __init__(self, **raises_at_s: float) -> None:
        super().__init__()
        self._raises_at_s, self._now = raises_at_s, 0.0
        self.stalls_s = 0.0

    def now(self) -> float:
        return self._now

    def any_ready(self, references: Sequence[Any], timeout_s: float | None) -> Collection[Any]:
        soonest = min(self._raises_at_s[each] for each in references)
        self._now = soonest if timeout_s is None else min(soonest, self._now + timeout_s)
        if self._now > 0.0:
            self._now, self.stalls_s = self._now + self.stalls_s, 0.0
        return [each for each in references if self._raises_at_s[each] <= self._now]

    def outcome(self, rank: int, reference: Any) -> Outcome:
        if self._raises_at_s[reference] > self._now:
            return super().outcome(rank, reference)
        fault = WorkerFault(rank, "a node", None, "ValueError", "", "", "")
        return Failed(rank, Failure("user", fault))


@pytest.mark.parametrize(("late_s", "is_heard"), [(7.9, True), (8.1, False)])
def test_a_rank_that_comes_to_the_same_exception_later_is_waited_for(late_s: float, is_heard: bool) -> None:
    calls = Timed(early=4.0, late=late_s)
    outcomes = Listener({0: "early", 1: "late"}, platform=calls).listen()
    assert [outcomes[rank].failure is not None for rank in (0, 1)] == [True, is_heard]
    assert calls.now() == pytest.approx(min(late_s, 8.0))


@pytest.mark.parametrize(
    ("answers_at_s", "asks_survivors", "heard", "until_s"),
    [
        ((0.04, 0.08, 0.12), True, 3, 0.12),  # each of them is still on its way when the one before it comes
        ((0.04, 0.11, 0.12), True, 1, 0.09),
        ((0.04, 0.08, 0.12), False, 1, 0.05),
        (tuple(0.04 * number for number in range(1, 20)), True, 7, 0.3),
    ],
)
def test_after_a_death_survivors_that_go_on_answering_are_not_asked(
    answers_at_s: Sequence[float], asks_survivors: bool, heard: int, until_s: float
) -> None:
    class Death(Timed):
        def outcome(self, rank: int, reference: Any) -> Outcome:
            found = super().outcome(rank, reference)
            kind: FailureKind = "died" if reference == "dead" else "disconnected"
            return replace(found, failure=replace(found.failure, kind=kind)) if found.failure else found

    names = [f"survivor {number}" for number in range(len(answers_at_s))]
    calls = Death(dead=0.0, **dict(zip(names, answers_at_s, strict=True)))
    outcomes = Listener(dict(enumerate(["dead", *names])), asks_survivors, calls).listen()
    assert sum(found.failure is not None for found in outcomes.values()) == 1 + heard
    assert calls.now() == pytest.approx(until_s)


class Stalling(Silent):
    """A call that is answered at a time of its own, on a machine that stands still whenever somebody waits."""

    def __init__(self, answered_at_s: float, stalls_s: float) -> None:
        super().__init__()
        self._answered_at_s, self._stalls_s, self._now = answered_at_s, stalls_s, 0.0

    def now(self) -> float:
        return self._now

    def ready(self, references: Collection[Any], timeout_s: float) -> Collection[Any]:
        self._now += timeout_s + self._stalls_s
        return references if self._now >= self._answered_at_s else []


@pytest.mark.parametrize(
    ("answered_at_s", "stalls_s", "waits_s"), [(1.15, 0.0, 1.2), (9.0, 0.0, 2.0), (7.0, 4.0, 8.2), (99.0, 4.0, 8.2)]
)
def test_who_waits_for_all_does_not_count_the_time_in_which_it_stood_still(
    answered_at_s: float, stalls_s: float, waits_s: float
) -> None:
    calls = Stalling(answered_at_s, stalls_s)
    outcomes_within(calls, {0: "a call"}, 2.0)
    assert calls.now() == pytest.approx(waits_s, abs=0.11)


@pytest.mark.parametrize(
    ("kind", "asks_survivors", "until_s"),
    [("user", False, 1.0), ("disconnected", False, 5.0), ("disconnected", True, 0.3)],
)
def test_after_a_failure_of_the_driver_itself_others_are_listened_to_as_after_one_of_theirs(
    kind: FailureKind, asks_survivors: bool, until_s: float
) -> None:
    """A connection that the driver has lost is the shadow of a death, too, that Ray reports a little later."""
    calls = Timed(late=60.0)
    listener = Listener({1: "late"}, asks_survivors, calls)
    listener.stop([kind])
    assert not listener.listen()[1].answered
    assert calls.now() == pytest.approx(until_s)


def test_what_the_driver_itself_has_left_counts_from_the_failure_too() -> None:
    calls = Timed(early=4.0, late=60.0)
    listener = Listener({1: "early", 2: "late"}, platform=calls)
    outcomes = listener.listen()
    assert calls.now() == pytest.approx(8.0)
    assert listener.left_s(outcomes) == pytest.approx(0.0)


def test_time_in_which_the_driver_stood_still_is_no_time_to_answer_in() -> None:
    calls = Timed(early=0.0, late=60.4)
    calls.stalls_s = 60.0
    assert Listener({1: "early", 2: "late"}, platform=calls).listen()[2].failure is not None
