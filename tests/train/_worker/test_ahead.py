"""Messages of ranks that are not equally far, and the functions that sent them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from raysgd.air._running import current_session
from raysgd.engine.shared.types import World
from raysgd.train import session
from raysgd.train._worker.ahead import MessageQueues
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import CheckpointRef, FunctionMessage, TrainingResultType
from tests.train.replicas import begin, user_keys

TWO, OTHER_TWO = ["one", "another"], ["one", "another"]


def report(number: int, checkpoint: CheckpointRef | None = None) -> FunctionMessage:
    return FunctionMessage(TrainingResultType.REPORT, number, checkpoint)


def test_a_step_is_there_when_each_rank_has_a_message() -> None:
    ahead = MessageQueues()
    assert not ahead.has_step(None)
    ahead.begin(TWO)
    assert [ahead.is_needed(rank) for rank in range(2)] == [True, True]
    ahead.add([[report(1), report(2)], [report(1)]])
    assert ahead.has_step(TWO)
    assert ahead.take_step() == [report(1), report(1)]
    assert not ahead.has_step(TWO)
    assert [ahead.is_needed(rank) for rank in range(2)] == [False, True]
    ahead.add([[], [report(2), FunctionEnded()]])
    assert ahead.take_step() == [report(2), report(2)]


def test_messages_of_workers_that_were_replaced_are_dropped() -> None:
    ahead = MessageQueues()
    ahead.begin(TWO)
    ahead.add([[report(1), report(2)], [report(1)]])
    assert not ahead.has_step(OTHER_TWO)
    ahead.begin(TWO)
    assert ahead.has_step(TWO), "the same as before"
    ahead.begin(OTHER_TWO)
    assert [ahead.is_needed(rank) for rank in range(2)] == [True, True]


def test_where_reports_are_not_read_any_more_checkpoints_and_the_end_stay() -> None:
    ahead, saved = MessageQueues(), report(2, CheckpointRef())
    ahead.begin(TWO)
    ahead.add([[report(1), saved, FunctionEnded()], [report(1)]])
    ahead.drop_reports()
    ahead.add([[], [saved, FunctionEnded()]])
    assert ahead.take_step() == [saved, saved]
    assert ahead.take_step() == [FunctionEnded(), FunctionEnded()]


def take_into(found: list[Any], replica: FunctionReplica) -> None:
    """Adds one message after the other."""
    while True:
        found += replica.take(None, True)


def take_all(replica: FunctionReplica) -> list[Any]:
    """All messages to the end, as they come."""
    found: list[Any] = []
    while not found or not isinstance(found[-1], FunctionEnded):
        messages = replica.take(None, True)
        assert messages
        found += messages
    return found


def test_a_function_sends_all_that_waits_at_once_and_nothing_where_nothing_is_needed() -> None:
    def train() -> None:
        for number in range(5):
            session.report(number=number)

    replica = FunctionReplica(World(0, 1))
    begin(replica, train, num_ahead=9)
    assert replica.take(None, False) == []
    *reports, end = take_all(replica)
    assert [user_keys(each) for each in reports] == [{"number": number} for number in range(5)]
    assert end == FunctionEnded()


def test_an_exception_comes_behind_all_reports() -> None:
    def train() -> None:
        for number in range(3):
            session.report(number=number)
        raise ZeroDivisionError("mine")

    replica = FunctionReplica(World(0, 1))
    begin(replica, train, num_ahead=9)
    found: list[Any] = []
    with pytest.raises(ZeroDivisionError, match="mine"):
        take_into(found, replica)
    assert [user_keys(each) for each in found] == [{"number": number} for number in range(3)]


@pytest.mark.usefixtures("unhurried")
def test_an_answer_ends_however_fast_the_function_reports() -> None:
    def train() -> None:
        while True:
            session.report(a=1)

    replica = FunctionReplica(World(0, 1))
    begin(replica, train, num_ahead=3)
    assert all(1 <= len(replica.take(None, True)) <= 4 for _ in range(50))
    assert replica.end()


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
    [checkpoint] = replica.take(None, True)
    assert isinstance(checkpoint, FunctionMessage)
    assert checkpoint.checkpoint_ref is not None
    behind = take_all(replica)
    assert user_keys(behind[0]) == {"a": 2}


def test_a_function_whose_end_was_sent_already_can_be_muted() -> None:
    replica = FunctionReplica(World(0, 1))
    begin(replica, lambda: None, num_ahead=9)
    assert take_all(replica) == [FunctionEnded()]
    replica.mute()
