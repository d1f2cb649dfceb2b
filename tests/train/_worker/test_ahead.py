"""Messages of ranks that are not equally far, and the functions that sent them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from raysgd.air.session import current_session
from raysgd.core.engine.shared.types import StateHandover, World
from raysgd.train import session
from raysgd.train._function_run import MessageQueues
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import (
    NO_WORDS,
    CheckpointRef,
    FunctionEnded,
    FunctionMessage,
    RanksMet,
    TrainingResultType,
)
from tests.train.replicas import begin, user_keys

TWO = {"one": 0, "another": 0}


def members(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def report(number: int, checkpoint: CheckpointRef | None = None) -> FunctionMessage:
    return FunctionMessage(TrainingResultType.REPORT, number, checkpoint)


def test_messages_of_workers_that_were_replaced_are_dropped() -> None:
    ahead = MessageQueues()
    ahead.follow(1, TWO)
    ahead.extend([[report(1), report(2)], [report(1)]])
    ahead.follow(1, TWO)
    assert ahead.has_step, "the same as before"
    ahead.follow(2, TWO)
    assert [ahead.is_needed(rank) for rank in range(2)] == [True, True]
    assert [ahead.num_taken(rank) for rank in range(2)] == [0, 0]


def test_messages_of_those_that_are_left_stay_whatever_their_rank_is_then() -> None:
    ahead = MessageQueues()
    ahead.follow(1, members("one", "another", "third"))
    ahead.extend([[], [report(1), report(2)], [report(1)]])
    assert not ahead.has_step
    ahead.follow(1, members("another", "third"))
    assert [ahead.num_taken(rank) for rank in range(2)] == [2, 1]
    assert ahead.take_step() == [report(1), report(1)]
    assert [ahead.is_needed(rank) for rank in range(2)] == [False, True]


def test_those_that_step_in_report_from_where_they_have_met_the_others() -> None:
    ahead = MessageQueues()
    ahead.follow(1, members("one", "another", "lost"))
    ahead.follow(1, {**members("one", "another"), "new": 2})
    ahead.extend([[RanksMet(1)], [RanksMet(1)], []])
    assert not ahead.has_step
    assert not ahead.are_all_there, "those of an earlier group have met"
    assert [ahead.is_needed(rank) for rank in range(3)] == [True, True, False]
    ahead.extend([[report(1), RanksMet(2), report(2)], [report(1)], []])
    assert ahead.take_step() == [report(1), report(1), None]
    assert not ahead.are_all_there
    assert not ahead.has_step, "one rank says that all have met"
    assert [ahead.is_needed(rank) for rank in range(3)] == [False, True, True]
    ahead.extend([[], [RanksMet(2), report(2)], [RanksMet(2), report(2)]])
    assert ahead.has_step
    assert ahead.take_step() == [report(2)] * 3


def test_those_that_stepped_in_report_where_all_others_are_lost() -> None:
    ahead = MessageQueues()
    ahead.follow(1, members("one", "another"))
    ahead.follow(1, {"one": 0, "new": 1})
    ahead.follow(1, {"new": 1})
    assert not ahead.has_step
    assert ahead.is_needed(0)


def test_where_reports_are_not_read_any_more_checkpoints_and_the_end_stay() -> None:
    ahead, saved = MessageQueues(), report(2, CheckpointRef())
    ahead.follow(1, TWO)
    ahead.extend([[report(1), saved, FunctionEnded()], [report(1)]])
    ahead.drop_reports()
    ahead.extend([[], [saved, FunctionEnded()]])
    assert ahead.take_step() == [saved, saved]
    assert ahead.take_step() == [FunctionEnded(), FunctionEnded()]


def take_all(replica: FunctionReplica) -> list[Any]:
    """All messages to the end, as they come."""
    found: list[Any] = []
    while not found or not isinstance(found[-1], FunctionEnded):
        messages = replica.next_messages(NO_WORDS, True)
        assert messages
        found += messages
    return found


def test_a_function_sends_all_that_waits_at_once_and_nothing_where_nothing_is_needed() -> None:
    def train() -> None:
        for number in range(5):
            session.report(number=number)

    replica = FunctionReplica(World(0, 1))
    begin(replica, train, num_ahead=9)
    assert replica.next_messages(NO_WORDS, False) == []
    *reports, end = take_all(replica)
    assert [user_keys(each) for each in reports] == [{"number": number} for number in range(5)]
    assert end == FunctionEnded()


@pytest.mark.usefixtures("unhurried")
def test_an_answer_ends_however_fast_the_function_reports() -> None:
    def train() -> None:
        while True:
            session.report(a=1)

    replica = FunctionReplica(World(0, 1))
    begin(replica, train, num_ahead=3)
    assert all(1 <= len(replica.next_messages(NO_WORDS, True)) <= 4 for _ in range(50))
    assert replica.end_function()


def test_nothing_comes_in_one_answer_with_the_checkpoint_before_it() -> None:
    is_behind = threading.Event()

    def train() -> None:
        threading.Thread(target=report_behind).start()
        session.save_checkpoint(a=1)

    def report_behind() -> None:
        running = current_session()
        while running is not None and not running.mailbox.has_more:
            time.sleep(0.001)
        session.report(a=2)
        is_behind.set()

    replica = FunctionReplica(World(0, 1))
    begin(replica, train, num_ahead=9)
    assert is_behind.wait(120)  # the first checkpoint imports Ray
    [checkpoint] = replica.next_messages(NO_WORDS, True)
    assert checkpoint.checkpoint_ref is not None
    behind = take_all(replica)
    assert user_keys(behind[0]) == {"a": 2}


def test_what_the_driver_has_not_got_is_sent_again_where_functions_go_on() -> None:
    def train() -> str:
        for number in range(3):
            session.report(number=number)
        return "end"

    replica = FunctionReplica(World(0, 2))
    begin(replica, train, is_elastic=True)
    assert replica.replica_progress().obstacle == "the function has not taken a step yet"
    [first] = replica.next_messages(NO_WORDS, True, 0)
    assert replica.next_messages(NO_WORDS, True, 0) == [first], "the answer was lost"
    [second] = replica.next_messages(NO_WORDS, True, 1)
    assert user_keys(second) == {"number": 1}
    assert replica.next_messages(NO_WORDS, False, 1) == [second]
    assert replica.next_messages(NO_WORDS, False, 2) == []
    assert user_keys(*replica.next_messages(NO_WORDS, True, 2)) == {"number": 2}
    assert replica.next_messages(NO_WORDS, True, 3) == [FunctionEnded("end")]
    assert replica.next_messages(NO_WORDS, True, 3) == [FunctionEnded("end")]


def test_a_function_that_raised_or_never_began_does_not_go_on() -> None:
    def train() -> None:
        raise ZeroDivisionError("mine")

    replica = FunctionReplica(World(0, 2))
    assert replica.replica_progress().obstacle == "no function was started here"
    begin(replica, train, is_elastic=True)
    with pytest.raises(ZeroDivisionError):
        replica.next_messages(NO_WORDS, True)
    assert "raised ZeroDivisionError('mine')" in str(replica.replica_progress().obstacle)


def test_a_broken_group_ends_the_wait_for_a_message_and_not_the_function() -> None:
    goes_on = threading.Event()

    def train() -> None:
        goes_on.wait(60)
        session.report(number=1, rank=session.world_rank())

    replica = FunctionReplica(World(1, 2))
    begin(replica, train, is_elastic=True)
    membership: Any = replica._membership
    membership.note_broken(ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        replica.next_messages(NO_WORDS, True)
    membership.leave()
    replica.regroup(World(0, 1), StateHandover())
    goes_on.set()
    assert user_keys(*replica.next_messages(NO_WORDS, True)) == {"number": 1, "rank": 0}
    assert replica.next_messages(NO_WORDS, True, 1) == [FunctionEnded()]
