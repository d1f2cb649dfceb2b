from __future__ import annotations

import pytest

from raysgd.engine.decisions.failures import Diagnosis
from raysgd.engine.decisions.policies import (
    FailurePolicy,
    GiveUpWaiting,
    KeepGroup,
    RaiseError,
    Rebuild,
    Rejoin,
    Resize,
    RetryBudget,
    ScalingPolicy,
    WaitForWorkers,
    are_alike,
    capacity,
    choose_source,
    num_fitting,
    takers,
)
from raysgd.engine.shared.types import ClusterView, FailureKind, NodeView, ReplicaProgress, Resources
from tests.helpers.fakes import fault


def view(*free_cpus: float, total: float = 8, **more: float) -> ClusterView:
    """A cluster with so many free CPUs on each node, of `total`, and `more` of other things."""
    return ClusterView(
        tuple(
            NodeView(f"node{index}", f"10.0.0.{index}", {"CPU": total, **more}, {"CPU": cpus, **more})
            for index, cpus in enumerate(free_cpus)
        )
    )


def policy(max_workers: int = 4, **options: float) -> ScalingPolicy:
    return ScalingPolicy(max_workers, **{"draw": lambda: 0.0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "need", "expected"),
    [
        ({"CPU": 4}, Resources(), 4),
        ({"CPU": 4}, Resources(num_cpus=3), 1),
        ({"CPU": 2.5}, Resources(), 2),
        ({"CPU": 0.5}, Resources(), 0),
        ({"CPU": 0.5}, Resources(num_cpus=0.25), 2),
        ({"CPU": 0.3}, Resources(num_cpus=0.1), 3),  # 0.3 / 0.1 is a little less than 3
        ({"CPU": 8, "GPU": 1}, Resources(num_gpus=1), 1),
        ({"CPU": 8}, Resources(num_gpus=1), 0),
        ({"CPU": 8, "tpu": 3}, Resources(custom={"tpu": 2}), 1),
        ({"CPU": 1, "GPU": 8}, Resources(num_gpus=1), 1),
        ({}, Resources(), 0),
    ],
)
def test_the_scarcest_resource_decides_how_many_fit(free: dict[str, float], need: Resources, expected: int) -> None:
    assert num_fitting(free, need) == expected


def test_workers_that_need_nothing_fit_in_any_number() -> None:
    assert num_fitting({}, Resources(num_cpus=0)) >= 1000


@pytest.mark.parametrize(
    ("free_cpus", "num_cpus", "expected"),
    [((2, 2), 1, 4), ((1, 1), 2, 0), ((3, 3), 2, 2), ((0.5, 0.5), 1, 0), ((), 1, 0)],
)
def test_what_is_left_over_on_two_nodes_does_not_make_a_worker(
    free_cpus: tuple[float, ...], num_cpus: float, expected: int
) -> None:
    assert capacity(view(*free_cpus), Resources(num_cpus)) == expected


def test_capacity_counts_all_there_is_when_asked_to() -> None:
    assert capacity(view(1, 0, total=4), Resources(2), free_only=False) == 4


@pytest.mark.parametrize(
    ("scaling", "free_cpus", "attempt", "expected"),
    [
        (policy(4), 8, 0, Resize(4)),
        (policy(4), 3, 0, Resize(3)),
        (policy(4), 1.9, 0, Resize(1)),
        (policy(4), 0, 0, WaitForWorkers(1.0, "0 of at least 1 workers fit")),
        (policy(4), 0, 3, WaitForWorkers(8.0, "0 of at least 1 workers fit")),
        (policy(4), 0.5, 0, WaitForWorkers(1.0, "0 of at least 1 workers fit")),
        (policy(4, min_workers=3), 2, 0, WaitForWorkers(1.0, "2 of at least 3 workers fit")),
        (policy(4, min_workers=3), 3, 0, Resize(3)),
        (policy(4, num_attempts=3), 0, 1, WaitForWorkers(2.0, "0 of at least 1 workers fit")),
        (policy(4), 2, 9, Resize(2)),
        (policy(4, num_local=1), 0, 0, Resize(1)),
        (policy(4, num_local=1), 3, 0, Resize(3)),
        (policy(4, num_local=1, min_workers=2), 0, 0, WaitForWorkers(1.0, "1 of at least 2 workers fit")),
    ],
)
def test_a_new_group_is_as_large_as_fits_and_never_larger_than_asked_for(
    scaling: ScalingPolicy, free_cpus: float, attempt: int, expected: Resize | WaitForWorkers
) -> None:
    assert scaling.decide(view(free_cpus), Resources(), attempt) == expected


@pytest.mark.parametrize(("num_attempts", "last"), [(10, 9), (3, 2), (1, 0)])
def test_the_last_attempt_gives_up_and_says_what_would_fit(num_attempts: int, last: int) -> None:
    decision = policy(4, num_attempts=num_attempts, min_workers=2).decide(view(1), Resources(), last)
    assert isinstance(decision, GiveUpWaiting)
    assert f"1 of at least 2 workers fit after {num_attempts} attempts" in decision.reason


def test_waits_double_up_to_a_cap() -> None:
    waits = [policy().delay_s(attempt) for attempt in range(10)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


@pytest.mark.parametrize(("drawn", "expected"), [(0.0, 4.0), (0.5, 4.2), (0.999, 4.3996)])
def test_jitter_lengthens_a_wait_by_a_tenth_at_most(drawn: float, expected: float) -> None:
    assert ScalingPolicy(1, draw=lambda: drawn).delay_s(2) == pytest.approx(expected)


def test_waits_of_two_trainers_differ_by_default() -> None:
    assert ScalingPolicy(1).delay_s(3) != ScalingPolicy(1).delay_s(3)


@pytest.mark.parametrize(
    ("free_cpus", "num_workers", "num_reserved", "expected"),
    [
        (1, 2, 2, Resize(3)),
        (8, 2, 2, Resize(4)),
        (0, 2, 2, KeepGroup()),
        (0.5, 2, 2, KeepGroup()),  # free, but not enough for another one
        (8, 4, 4, KeepGroup()),
        (1, 1, 0, KeepGroup()),  # the driver alone holds nothing: one free CPU would be for itself
        (2, 1, 0, Resize(2)),
    ],
)
def test_a_running_group_grows_only_when_it_gains_a_worker(
    free_cpus: float, num_workers: int, num_reserved: int, expected: Resize | KeepGroup
) -> None:
    assert policy(4).grow(view(free_cpus), Resources(), num_workers, num_reserved) == expected


def test_free_pieces_on_two_nodes_are_no_reason_to_grow() -> None:
    assert policy(4).grow(view(1, 1), Resources(num_cpus=2), 2, 2) == KeepGroup()


def spent(num_restarts: int, num_rebuilds: int) -> RetryBudget:
    """A budget of which so much was used up by rebuilds."""
    budget = RetryBudget(num_restarts)
    for _ in range(num_rebuilds):
        budget.pay_for_rebuild()
    return budget


@pytest.mark.parametrize(
    ("kind", "num_restarts", "max_restarts", "expected"),
    [
        ("died", 0, 3, Rebuild()),
        ("died", 2, 3, Rebuild()),
        ("died", 3, 3, RaiseError(lost=True)),
        ("died", 0, 0, RaiseError(lost=True)),
        ("disconnected", 0, 1, Rebuild()),
        ("disconnected", 1, 1, RaiseError(lost=True)),
        ("user", 0, 3, RaiseError(lost=False)),
        ("user", 3, 3, RaiseError(lost=False)),
    ],
)
@pytest.mark.parametrize(("rejoins", "can_rejoin"), [(False, True), (True, False)])
def test_only_losses_are_retried_and_only_within_the_budget(
    kind: FailureKind,
    num_restarts: int,
    max_restarts: int,
    expected: Rebuild | RaiseError,
    rejoins: bool,
    can_rejoin: bool,
) -> None:
    budget = spent(max_restarts, num_restarts)
    assert FailurePolicy(rejoins).decide(Diagnosis(kind, (fault(),)), budget, can_rejoin) == expected


@pytest.mark.parametrize(
    ("kind", "num_spent", "max_restarts", "expected"),
    [
        ("died", 0, 3, Rejoin()),
        ("disconnected", 0, 3, Rejoin()),
        ("died", 3, 3, Rejoin()),  # it may be free; that is known only when the survivors say how far they are
        ("died", 0, 0, RaiseError(lost=True)),
        ("user", 0, 3, RaiseError(lost=False)),
    ],
)
def test_survivors_are_kept_where_they_can_go_on(
    kind: FailureKind, num_spent: int, max_restarts: int, expected: Rejoin | RaiseError
) -> None:
    decision = FailurePolicy(rejoins=True).decide(Diagnosis(kind, (fault(),)), spent(max_restarts, num_spent), True)
    assert decision == expected


@pytest.mark.parametrize(
    ("num_spent", "max_restarts", "expected"),
    [(0, 1, Rebuild()), (1, 1, RaiseError(lost=False)), (0, 0, RaiseError(lost=False)), (9, float("inf"), Rebuild())],
)
def test_an_error_in_user_code_is_retried_where_that_is_asked_for(
    num_spent: int, max_restarts: float, expected: Rebuild | RaiseError
) -> None:
    budget = RetryBudget(max_restarts)
    for _ in range(num_spent):
        budget.pay_for_rebuild()
    policy = FailurePolicy(retries_user_errors=True)
    assert policy.decide(Diagnosis("user", (fault(),)), budget, can_rejoin=False) == expected


# -------------------------------------------------------------------------------------------- the budget


def test_rebuilds_spend_the_budget_one_by_one() -> None:
    assert [spent(2, num_rebuilds).is_spent for num_rebuilds in range(3)] == [False, False, True]


NO_STEP = "no step was completed since the survivors went on the last time"
NOTHING_LEFT = "no retry is left to pay for going on"


@pytest.mark.parametrize(
    ("num_restarts", "went_on_at", "progress", "expected"),
    [
        (3, (), 0, None),
        (3, (), 5, None),
        (3, (5,), 6, None),
        (3, (5,), 5, NO_STEP),
        (3, (5,), 4, NO_STEP),
        (3, (0,), 0, NO_STEP),
        (3, (0,), 1, None),
        (3, (0, 1, 2), 2, NO_STEP),
        (3, (5, "rebuild"), 5, None),
        (3, (0, "rebuild"), 0, None),
        (3, (5, "rebuild", 0), 0, NO_STEP),
        (1, (0,), 2, None),  # progress is free also when nothing is left
        (1, (0,), 1, NOTHING_LEFT),  # what fails at every step makes none
        (1, ("rebuild",), 0, NOTHING_LEFT),
        (1, ("rebuild",), 1, None),
        (0, (), 100, NOTHING_LEFT),
    ],
)
def test_survivors_go_on_once_without_a_step_and_then_are_replaced(
    num_restarts: int, went_on_at: tuple[int | str, ...], progress: int, expected: str | None
) -> None:
    budget = RetryBudget(num_restarts)
    for event in went_on_at:
        budget.pay_for_rejoin(event) if isinstance(event, int) else budget.pay_for_rebuild()
    assert budget.rejoin_obstacle(progress) == expected


def test_going_on_is_free_while_there_is_progress() -> None:
    budget = RetryBudget(1)
    for progress in (1, 3, 5, 9):
        budget.pay_for_rejoin(progress)
    assert not budget.is_spent


def test_going_on_after_one_step_since_the_last_time_spends_one() -> None:
    budget = RetryBudget(3)
    for progress in (7, 8, 9, 10):
        budget.pay_for_rejoin(progress)
    assert budget.is_spent


def test_going_on_after_a_hang_spends_one_however_many_steps_were_done() -> None:
    budget = RetryBudget(2)
    for progress in (10, 20, 30):
        if progress != 20:
            budget.note_hang()
        assert budget.rejoin_obstacle(progress) is None
        budget.pay_for_rejoin(progress)
    assert budget.is_spent
    budget.note_hang()
    assert budget.rejoin_obstacle(40) == NOTHING_LEFT


def test_going_on_before_the_first_step_spends_one() -> None:
    budget = RetryBudget(1)
    budget.pay_for_rejoin(0)
    assert budget.is_spent


# -------------------------------------------------------------------------------------------- who goes on from whom


BROKEN = ReplicaProgress(7, is_whole=False)


@pytest.mark.parametrize(
    ("progress_reports", "source", "expected_takers"),
    [
        ([ReplicaProgress(3)], 0, ()),
        ([ReplicaProgress(3), ReplicaProgress(3)], 0, ()),
        ([ReplicaProgress(3), ReplicaProgress(4), ReplicaProgress(4)], 1, (0,)),
        ([ReplicaProgress(4), ReplicaProgress(3), ReplicaProgress(4)], 0, (1,)),
        ([BROKEN, ReplicaProgress(7), ReplicaProgress(6)], 1, (0, 2)),
        ([BROKEN, ReplicaProgress(2)], 1, (0,)),
        ([ReplicaProgress(0), ReplicaProgress(0)], 0, ()),
    ],
)
def test_all_go_on_from_the_most_advanced_whole_replica(
    progress_reports: list[ReplicaProgress], source: int, expected_takers: tuple[int, ...]
) -> None:
    assert choose_source(progress_reports) == source
    assert takers(progress_reports, source) == expected_takers


@pytest.mark.parametrize(
    "progress_reports",
    [[BROKEN], [BROKEN, BROKEN], [ReplicaProgress(3), ReplicaProgress(3, obstacle="its own group")], []],
)
def test_nobody_goes_on_when_no_state_is_whole_or_one_of_them_cannot(progress_reports: list[ReplicaProgress]) -> None:
    assert choose_source(progress_reports) is None


@pytest.mark.parametrize(
    ("progress_reports", "expected"),
    [
        ([ReplicaProgress(3)], True),
        ([ReplicaProgress(3), ReplicaProgress(3, obstacle="its own group")], True),
        ([ReplicaProgress(3), ReplicaProgress(4)], False),
        ([ReplicaProgress(7), BROKEN], False),
        ([BROKEN, BROKEN], False),
    ],
)
def test_replicas_are_alike_where_all_are_behind_the_same_completed_step(
    progress_reports: list[ReplicaProgress], expected: bool
) -> None:
    assert are_alike(progress_reports) == expected


def test_a_budget_counts_what_was_used_up() -> None:
    budget = RetryBudget(3)
    found = []
    for pay in (budget.pay_for_rebuild, lambda: budget.pay_for_rejoin(5), lambda: budget.pay_for_rejoin(0)):
        pay()
        found.append((budget.num_spent, budget.is_spent))
    assert found == [(1, False), (1, False), (2, False)]


def test_a_budget_without_end_is_never_spent() -> None:
    budget = RetryBudget(float("inf"))
    for _ in range(100):
        budget.pay_for_rebuild()
    assert (budget.num_spent, budget.is_spent) == (100, False)
