from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from raysgd.engine.processes.snapshots import Snapshot, SnapshotKeeper
from raysgd.engine.shared.replica import Capture

ON_ITS_WAY = TimeoutError("on its way")


@dataclass
class Transfer:
    """A transfer that a test lets arrive or be lost."""

    token: int
    outcome: Any = ON_ITS_WAY
    waits: list[float | None] = field(default_factory=list)

    def result(self, timeout_s: float | None) -> Any:
        self.waits.append(timeout_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Wire:
    """Starts transfers and keeps them."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def fetch(self, token: int) -> Transfer:
        self.transfers.append(Transfer(token))
        return self.transfers[-1]


def never(token: int) -> Transfer:
    raise AssertionError("nothing to fetch")


def inline(state: Any, *others: Any) -> list[Capture]:
    return [Capture("own 0", shared_state=state), *(Capture(other) for other in others)]


def keeper_with_landed_state() -> SnapshotKeeper[str]:
    keeper: SnapshotKeeper[str] = SnapshotKeeper()
    keeper.take(inline("start"), never, is_first=True)
    return keeper


def test_starts_with_nothing() -> None:
    keeper: SnapshotKeeper[str] = SnapshotKeeper()
    assert (keeper.landed, keeper.has_any, keeper.is_current, keeper.calls_since) == (None, False, False, ())


def test_a_small_state_lands_at_once_with_what_each_rank_had() -> None:
    keeper: SnapshotKeeper[str] = SnapshotKeeper()
    keeper.completed("call")
    keeper.take(inline("state", "own 1"), never)
    assert keeper.landed == Snapshot("state", ("own 0", "own 1"))
    assert keeper.is_current
    assert keeper.calls_since == ()


def test_a_call_makes_the_snapshot_old_until_the_next_one() -> None:
    keeper = keeper_with_landed_state()
    assert keeper.is_current
    keeper.completed("call")
    assert not keeper.is_current
    keeper.take(inline("next"), never)
    assert keeper.is_current


def test_random_numbers_that_were_drawn_make_old_only_what_each_rank_has_for_itself() -> None:
    keeper = keeper_with_landed_state()
    keeper.touch_ranks()
    assert (keeper.is_current, keeper.shares_current) == (False, True)
    keeper.take(inline("next"), never)
    assert keeper.is_current
    keeper.touch()
    assert not keeper.shares_current


def test_where_all_begin_again_nothing_of_before_is_left() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed("call")
    keeper.begin_again()
    assert (keeper.landed, keeper.landed_token, keeper.calls_since, keeper.has_any) == (None, None, (), False)


def test_touching_makes_the_snapshot_old_without_a_call() -> None:
    keeper = keeper_with_landed_state()
    keeper.touch()
    assert not keeper.is_current
    assert keeper.calls_since == ()


def test_calls_that_never_have_to_be_run_again_are_not_kept() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed(None)
    assert keeper.calls_since == ()
    assert not keeper.is_current


def test_until_a_large_state_has_landed_its_calls_are_kept() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed("first")
    keeper.take([Capture("own", token=5)], wire.fetch)
    assert keeper.is_coming
    assert keeper.is_current
    keeper.completed("second")
    assert list(keeper.calls_since) == ["first", "second"]
    assert keeper.landed == Snapshot("start", ("own 0",))
    wire.transfers[0].outcome = "large"
    keeper.poll()
    assert keeper.landed == Snapshot("large", ("own",))
    assert keeper.landed_token == 5
    assert keeper.calls_since == ("second",)
    assert not keeper.is_current


def test_looking_does_not_wait_unless_told_to() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take([Capture(token=1)], wire.fetch)
    keeper.poll()
    keeper.poll(2.5)
    keeper.poll(None)
    assert wire.transfers[0].waits == [0.0, 2.5, None]


def test_a_lost_transfer_leaves_the_state_before_it_and_its_calls() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed("call")
    keeper.take([Capture(token=1)], wire.fetch)
    wire.transfers[0].outcome = ConnectionError("gone")
    keeper.poll()
    assert keeper.landed == Snapshot("start", ("own 0",))
    assert keeper.calls_since == ("call",)
    assert not keeper.is_current
    assert not keeper.is_coming


def test_what_new_workers_captured_before_calls_were_run_again_covers_none_of_them() -> None:
    keeper, wire = SnapshotKeeper[str](), Wire()
    keeper.completed("call")
    keeper.take([Capture(token=1)], wire.fetch, is_first=True)
    wire.transfers[0].outcome = "as set up"
    keeper.poll()
    assert keeper.landed == Snapshot("as set up", (None,))
    assert keeper.calls_since == ("call",)
    assert not keeper.is_current


def test_leaving_a_group_forgets_its_tokens_but_not_what_landed() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed("call")
    keeper.take([Capture(token=7)], wire.fetch)
    wire.transfers[0].outcome = "state"
    keeper.poll()
    keeper.drop_incoming()
    assert keeper.landed_token is None
    assert keeper.landed == Snapshot("state", (None,))
    assert keeper.is_current


def test_leaving_a_group_gives_up_what_is_on_its_way() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed("call")
    keeper.take([Capture(token=1)], wire.fetch)
    keeper.drop_incoming()
    wire.transfers[0].outcome = "too late"
    keeper.poll(None)
    assert keeper.landed == Snapshot("start", ("own 0",))
    assert keeper.calls_since == ("call",)
    assert not keeper.is_current


def test_what_the_driver_is_storing_is_waited_for_when_a_group_is_left() -> None:
    keeper, transfer = keeper_with_landed_state(), Transfer(0, "loaded")
    keeper.completed("call")
    keeper.expect(transfer, ("own 0",), "load")
    assert keeper.is_current
    assert keeper.is_coming
    keeper.drop_incoming()
    assert transfer.waits == [None]
    assert keeper.landed == Snapshot("loaded", ("own 0",))
    assert keeper.calls_since == ()
    assert keeper.landed_token is None


def test_a_load_that_could_not_be_stored_is_run_again_like_any_call() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed("call")
    keeper.expect(Transfer(0, OSError("the store is full")), ("own 0",), "load")
    keeper.drop_incoming()
    assert keeper.landed == Snapshot("start", ("own 0",))
    assert keeper.calls_since == ("call", "load")
    assert not keeper.is_current


def test_forgetting_waits_for_what_the_driver_is_storing() -> None:
    keeper, transfer = keeper_with_landed_state(), Transfer(0, "loaded")
    keeper.expect(transfer, ("own 0",), "load")
    keeper.clear()
    assert transfer.waits == [None]
    assert not keeper.has_any


def test_forgetting_lets_go_of_everything() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed("call")
    keeper.take([Capture(token=1)], wire.fetch)
    keeper.clear()
    assert (keeper.landed, keeper.has_any, keeper.is_current, keeper.calls_since) == (None, False, False, ())


# -------------------------------------------------------------------------------------------- inside a call


def inside(state: Any, *progress: int) -> list[Capture]:
    first, *others = progress
    return [Capture("own 0", state, first), *(Capture("own", progress=other) for other in others)]


def test_a_snapshot_taken_inside_a_call_says_so_and_covers_the_calls_before() -> None:
    keeper = keeper_with_landed_state()
    keeper.completed("first")
    assert not keeper.is_inside
    keeper.take(inside("state", 3, 3), never)
    assert keeper.landed == Snapshot("state", ("own 0", "own"), (3, 3))
    assert keeper.is_inside
    assert keeper.calls_since == ()


def test_the_call_itself_is_still_to_be_finished_when_it_completes() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take(inside("state", 3), never)
    keeper.completed("call")
    assert (keeper.is_inside, keeper.calls_since) == (True, ("call",))
    keeper.take([Capture(token=1)], wire.fetch)
    wire.transfers[0].outcome = "after"
    keeper.poll()
    assert (keeper.is_inside, keeper.calls_since) == (False, ())


def test_a_large_state_from_inside_lands_with_its_progress() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take([Capture(progress=4, token=1)], wire.fetch)
    assert (keeper.is_coming, keeper.is_inside) == (True, False)
    wire.transfers[0].outcome = "state"
    keeper.poll()
    assert keeper.landed == Snapshot("state", (None,), (4,))


def test_after_a_call_that_was_broken_off_for_good_nobody_goes_on_inside() -> None:
    keeper = keeper_with_landed_state()
    keeper.take(inside("state", 3), never)
    keeper.leave_call()
    assert keeper.landed == Snapshot("state", ("own 0",))


def test_a_part_of_a_call_that_was_broken_off_for_good_is_not_waited_for() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take([Capture(progress=4, token=1)], wire.fetch)
    keeper.leave_call()
    assert not keeper.is_coming
    wire.transfers[0].outcome = "state"
    keeper.poll(None)
    assert keeper.landed == Snapshot("start", ("own 0",))


def test_a_part_of_a_broken_call_that_is_dropped_leaves_no_completed_call_covered() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.completed("call")
    keeper.take([Capture(progress=4, token=1)], wire.fetch)
    keeper.leave_call()
    assert not keeper.shares_current, "a file that is written now has to have what the call did"
    assert keeper.calls_since == ("call",)
    assert keeper.must_follow


def test_a_completed_call_is_finished_from_inside_whatever_becomes_of_the_next_one() -> None:
    keeper, wire = keeper_with_landed_state(), Wire()
    keeper.take(inside("state", 3), never)
    keeper.completed("call")
    keeper.take([Capture(token=1)], wire.fetch)
    keeper.leave_call()
    assert keeper.is_coming, "that one covers the completed call"
    assert (keeper.is_inside, keeper.calls_since) == (True, ("call",))


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [("a", 10, (10, 20, 30))]),
        (2, [("a", 10, (10, 30)), ("b", 10, (20,))]),
        (4, [("a", 10, (10,)), ("b", 10, (20,)), ("c", 10, (30,)), (None, 10, ())]),
    ],
)
def test_each_rank_takes_its_own_part_and_what_it_counts_for_others(num_ranks: int, expected: list[Any]) -> None:
    inside, between = Snapshot(0, ("a", "b", "c"), (10, 20, 30)), Snapshot(0, ("a", "b", "c"))
    assert inside.for_ranks(num_ranks) == expected
    assert between.for_ranks(num_ranks) == [(own,) for own, *_ in expected]


def test_what_the_ranks_divide_is_fetched_from_all_of_them() -> None:
    wanted: list[Any] = []
    keeper = keeper_with_landed_state()
    keeper.completed("call")

    def fetch(tokens: Any) -> Transfer:
        wanted.append(tokens)
        return Transfer(0, outcome=("part 0", "part 1"))

    keeper.take([Capture(f"own {rank}", token=3 + rank, is_part=True) for rank in range(2)], fetch)
    keeper.poll()
    assert wanted == [[3, 4]]
    assert keeper.landed == Snapshot(("part 0", "part 1"), ("own 0", "own 1"))
    assert keeper.landed_token == 3
