"""Numbers of calls, and what a worker does with a call that it is sent a second time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.cluster.keeper import CallNumber, Keeper
from raysgd.core.engine.platform import pack
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.shared.types import Answered
from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.fakes import NullConnection


class Steps(list[int]):
    """Stands in for a replica."""


def train(replica: list[int], step: int = 1) -> int:
    replica.append(step)
    return len(replica)


def fail(replica: list[int]) -> None:
    replica.append(0)
    raise ValueError("no")


def validate(replica: list[int]) -> int:
    return len(replica)


def keeper() -> Keeper:
    return Keeper("run", lambda group: None)


def worker(replica: Steps) -> Any:
    process = WorkerProcess(NullConnection(), None)
    process._replica = replica  # type: ignore[assignment]
    return process


def test_only_calls_that_change_the_state_have_numbers() -> None:
    kept_by = keeper()
    assert kept_by.number(Call(validate)) is None
    assert kept_by.number(Call(train, changes_state=True)) == CallNumber(1, 0, False, "train")
    assert kept_by.number(Call(fail, changes_state=True)) == CallNumber(2, 0, False, "fail")
    assert kept_by.num_calls == 2


@pytest.mark.parametrize(
    ("found", "is_taken_up"),
    [
        (CallNumber(4, 2, True, "train"), True),
        (CallNumber(3, 2, True, "train"), False),
        (CallNumber(4, 0, False, "fail"), False),
        (None, False),
    ],
)
def test_the_call_in_which_workers_are_found_has_the_number_that_they_know(
    found: CallNumber | None, is_taken_up: bool
) -> None:
    kept_by = keeper()
    kept_by.num_calls, kept_by.found = 3, found
    assert kept_by.number(Call(train, changes_state=True)) == (
        found if is_taken_up else CallNumber(4, 0, False, "train")
    )
    assert kept_by.number(Call(train, changes_state=True)) == CallNumber(5, 0, False, "train")


def test_a_call_that_is_sent_twice_runs_once_and_is_answered_twice() -> None:
    replica = Steps()
    process, number = worker(replica), CallNumber(1, 0, False, "train")
    first = process.on_packed(*pack(train, False, None, (7,), number))
    assert process.on_packed(*pack(validate, False, None, ())) == Answered(-1, 1)
    assert process.on_packed(*pack(train, False, None, (8,), number)) is first
    assert replica == [7]
    assert process.last_call() == number
    again = process.on_packed(*pack(train, False, None, (8,), replace(number, attempt=1)))
    assert again == Answered(-1, 2)


def test_a_call_that_has_failed_fails_again_with_the_same_error() -> None:
    replica = Steps()
    process, packed = worker(replica), pack(fail, False, None, (), CallNumber(1, 0, False, "fail"))
    for _ in range(2):
        failure: Any = process.on_packed(*packed)
        assert str(failure.fault.error) == "no"
    assert replica == [0]


def test_calls_without_a_number_run_as_often_as_they_are_sent() -> None:
    replica = Steps()
    process = worker(replica)
    for _ in range(2):
        process.on_packed(*pack(train, False, None, ()))
    assert replica == [1, 1]
    assert process.last_call() is None
