"""Copies wait until they are fetched, or travel with the answer; a saved state is looked at before it is loaded."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from raysgd.core.engine.shared.interface import Capture
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.replica_state import StateCopies, StateCopy, check_parts

LARGE, SMALL = 10**6, 10  # bytes


class Counted:
    """A state that is a number."""

    def __init__(self, num_bytes: int = LARGE) -> None:
        self.value, self._num_bytes = 0, num_bytes

    def own(self) -> str:
        return "own"

    def copy_for_driver(self, rank: int) -> StateCopy | None:
        return None if rank else StateCopy([self.value], self._num_bytes)


@pytest.fixture
def copies() -> StateCopies:
    return StateCopies(None, Ledger())


def after_call(copies: StateCopies, state: Counted, rank: int = 0) -> Capture:
    return copies.after_call(state, rank, None)


def test_copies_wait_for_the_driver_in_turn(copies: StateCopies) -> None:
    state = Counted()
    first = after_call(copies, state)
    state.value = 1
    second = after_call(copies, state)
    state.value = 2
    assert copies.fetch(cast(int, first.token)) == [0]
    fetched: list[Any] = []
    thread = threading.Thread(target=lambda: fetched.append(copies.fetch(cast(int, second.token))))
    thread.start()
    thread.join()
    assert fetched == [[1]]


def test_a_small_state_travels_with_the_answer(copies: StateCopies) -> None:
    state = Counted(SMALL)
    assert [after_call(copies, state).shared_state for _ in range(2)] == [[0], [0]]


def test_other_ranks_copy_nothing(copies: StateCopies) -> None:
    assert after_call(copies, Counted(), rank=1) == Capture("own")


def test_a_copy_inside_a_call_is_made_at_once() -> None:
    copies, state = StateCopies(1, Ledger()), Counted()
    after_call(copies, state)
    part = copies.inside_call(state, 0, "progress")
    state.value = 1
    assert part.progress == "progress"
    assert copies.fetch(cast(int, part.token)) == [0]


def test_a_copy_that_is_made_while_another_one_is_fetched_is_not_lost(copies: StateCopies) -> None:
    first = after_call(copies, Counted()).token
    fetching = threading.Thread(target=copies.fetch, args=(first,))

    class Kept(dict[int, Any]):
        """Is about to get the second copy when the first one is fetched."""

        def __setitem__(self, token: int, copy: Any) -> None:
            fetching.start()
            fetching.join(0.1)
            super().__setitem__(token, copy)

    class Second(Counted):
        def copy_for_driver(self, rank: int) -> StateCopy | None:
            copies._kept = Kept(copies._kept)
            return super().copy_for_driver(rank)

    second = after_call(copies, Second()).token
    fetching.join(60)
    assert copies.fetch(cast(int, second)) == [0]


# ------------------------------------------------------------------------------------------------ snapshots inside


def test_a_snapshot_is_due_so_many_steps_after_the_one_before_or_never(copies: StateCopies) -> None:
    snapshots = StateCopies(3, Ledger())
    taken = []
    for num_steps in (1, 2, 3, 4, 5, 7, 8, 9, 10):  # steps of several batches may jump over a multiple
        if snapshots.is_due(num_steps):
            snapshots.keep(num_steps, Capture())
            taken.append(num_steps)
    assert taken == [3, 7, 10]
    assert not any(copies.is_due(num_steps) for num_steps in range(1, 10))


def test_the_newest_two_parts_are_kept_until_another_call() -> None:
    inside = StateCopies(2, Ledger())
    parts = {number: Capture(number) for number in (2, 4, 6)}
    assert (inside.newest, inside.part_of_snapshot(2)) == (0, None)
    for number, part in parts.items():
        inside.keep(number, part)
    assert inside.newest == 6
    assert [inside.part_of_snapshot(number) for number in (2, 4, 6)] == [None, parts[4], parts[6]]
    inside.forget_call()
    assert (inside.newest, inside.part_of_snapshot(6)) == (0, None)


# ------------------------------------------------------------------------------------------------ saved states

STATE = {"epoch": 1, "operator": None, "models": [1, 2], "optimizers": []}


def test_a_state_with_all_its_parts_is_accepted() -> None:
    check_parts(STATE, {"models": 2, "optimizers": 0}, "operator")


@pytest.mark.parametrize("missing", ["epoch", "operator", "models"])
def test_a_missing_part_is_named_with_those_that_are_there(missing: str) -> None:
    state = {key: value for key, value in STATE.items() if key != missing}
    with pytest.raises(ValueError, match=f"no '{missing}', so nothing was loaded. It has .*optimizers"):
        check_parts(state, {"models": 2, "optimizers": 0}, "operator")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "'models' is a `dict` instead of a list"),
        ([1], "holds 1 models, but the operator registered 2. Nothing was loaded"),
    ],
)
def test_a_wrong_number_of_parts_is_refused(models: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parts({**STATE, "models": models}, {"models": 2})
