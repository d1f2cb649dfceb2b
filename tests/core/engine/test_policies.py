"""How many workers, what a failure means and what follows it, who goes on from whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysgd.core.cluster.resources import ClusterView, NodeView, Resources
from raysgd.core.engine.policies import (
    ElasticRules,
    LostNodes,
    Resizing,
    RetryBudget,
    ScalingPolicy,
    Wait,
    WaitForWorkers,
    are_alike,
    choose_source,
    classify,
    emptied_nodes,
    failed_alike,
    is_lack_of_memory,
    takers,
    why_not_started,
    words,
)
from raysgd.core.engine.shared.types import (
    Answered,
    Failed,
    Failure,
    FailureKind,
    GroupReport,
    ReplicaProgress,
    Unanswered,
    WorkerInfo,
)
from tests.helpers.facts import known_of
from tests.helpers.fakes import failure, fault


def view(*free_cpus: float, total: float = 8, **more: float) -> ClusterView:
    """A cluster with so many free CPUs on each node, of `total`, and `more` of other things."""
    return ClusterView(
        tuple(
            NodeView(f"node{index}", f"10.0.0.{index}", {"CPU": total, **more}, {"CPU": cpus, **more})
            for index, cpus in enumerate(free_cpus)
        )
    )


def policy(max_workers: int = 4, **options: float) -> ScalingPolicy:
    return ScalingPolicy(max_workers, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scaling", "free_cpus", "attempt", "expected"),
    [
        (policy(4), 8, 0, 4),
        (policy(4), 3, 0, 3),
        (policy(4), 1.9, 0, 1),
        (policy(4), 0, 0, WaitForWorkers(1.0, "0 of at least 1 workers fit")),
        (policy(4), 0, 3, WaitForWorkers(8.0, "0 of at least 1 workers fit")),
        (policy(4), 0.5, 0, WaitForWorkers(1.0, "0 of at least 1 workers fit")),
        (policy(4, min_workers=3), 2, 0, WaitForWorkers(1.0, "2 of at least 3 workers fit")),
        (policy(4, min_workers=3), 3, 0, 3),
        (policy(4, num_attempts=3), 0, 1, WaitForWorkers(2.0, "0 of at least 1 workers fit")),
        (policy(4), 2, 9, 2),
        (policy(4, num_local=1), 0, 0, 1),
        (policy(4, num_local=1), 3, 0, 3),
        (policy(4, num_local=1, min_workers=2), 0, 0, WaitForWorkers(1.0, "1 of at least 2 workers fit")),
    ],
)
def test_a_new_group_is_as_large_as_fits_and_never_larger_than_asked_for(
    scaling: ScalingPolicy, free_cpus: float, attempt: int, expected: int | WaitForWorkers
) -> None:
    assert scaling.decide(view(free_cpus), Resources(), attempt) == expected


@pytest.mark.parametrize(("num_attempts", "last"), [(10, 9), (3, 2), (1, 0)])
def test_the_last_attempt_gives_up_and_says_what_would_fit(num_attempts: int, last: int) -> None:
    decision = policy(4, num_attempts=num_attempts, min_workers=2).decide(view(1), Resources(), last)
    assert isinstance(decision, WaitForWorkers)
    assert decision.delay_s is None
    assert f"1 of at least 2 workers fit after {num_attempts} attempts" in decision.reason


def test_what_can_never_fit_is_not_waited_for_where_no_node_joins() -> None:
    two_cpus = NodeView("n", "10.0.0.1", {"CPU": 2}, {"CPU": 0})
    fixed = ClusterView((two_cpus,), can_grow=False)
    assert policy(4, min_workers=3).decide(fixed, Resources(), 0) == WaitForWorkers(
        None, "0 of at least 3 workers fit, even when nothing else runs"
    )
    for patient, where in ((policy(4, min_workers=3), ClusterView((two_cpus,))), (policy(4, min_workers=2), fixed)):
        decision = patient.decide(where, Resources(), 0)
        assert isinstance(decision, WaitForWorkers)
        assert decision.delay_s == 1.0


def test_waits_double_up_to_a_cap() -> None:
    waits = [policy().delay_s(attempt) for attempt in range(10)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


@pytest.mark.parametrize(
    ("free_cpus", "num_workers", "num_reserved", "expected"),
    [
        (1, 2, 2, 1),
        (8, 2, 2, 2),
        (0, 2, 2, 0),
        (0.5, 2, 2, 0),  # free, but not enough for another one
        (8, 4, 4, 0),
        (1, 1, 0, 0),  # the driver alone holds nothing: one free CPU would be for itself
        (2, 1, 0, 1),
    ],
)
def test_a_running_group_grows_only_when_it_gains_a_worker(
    free_cpus: float, num_workers: int, num_reserved: int, expected: int
) -> None:
    assert policy(4).grow(view(free_cpus), Resources(), num_workers, num_reserved) == expected


def test_free_pieces_on_two_nodes_are_no_reason_to_grow() -> None:
    assert policy(4).grow(view(1, 1), Resources(num_cpus=2), 2, 2) == 0


def spent(num_retries: int, num_restored: int) -> RetryBudget:
    """A budget of which so much was used up by rebuilds."""
    budget = RetryBudget(num_retries)
    for _ in range(num_restored):
        budget.pay_for_restart()
    return budget


# -------------------------------------------------------------------------------------------- the budget


NO_STEP = "no step was completed since the survivors went on the last time"
NOTHING_LEFT = "no retry is left to pay for going on"


def obstacle_to_continuing(budget: RetryBudget, steps: int) -> str | None:
    """What the table makes of a budget."""
    num_left = budget.num_retries - budget.num_spent
    known = known_of(
        num_retries=budget.num_retries,
        num_left=num_left,
        continued_at=budget.continued_at,
        free_from=budget.free_from,
    )
    return known.obstacle_to_continuing(steps)


@pytest.mark.parametrize(
    ("num_retries", "went_on_at", "progress", "expected"),
    [
        (3, (), 0, None),
        (3, (), 5, None),
        (3, (5,), 6, None),
        (3, (5,), 5, NO_STEP),
        (3, (5,), 4, NO_STEP),
        (3, (0,), 0, NO_STEP),
        (3, (0,), 1, None),
        (3, (0, 1, 2), 2, NO_STEP),
        (3, (5, "restart"), 5, None),
        (3, (0, "restart"), 0, None),
        (3, (5, "restart", 0), 0, NO_STEP),
        (1, (0,), 2, None),  # progress is free also when nothing is left
        (1, (0,), 1, NOTHING_LEFT),  # what fails at every step makes none
        (1, ("restart",), 0, NOTHING_LEFT),
        (1, ("restart",), 1, None),
        (0, (), 100, NOTHING_LEFT),
    ],
)
def test_survivors_go_on_once_without_a_step_and_then_are_replaced(
    num_retries: int, went_on_at: tuple[int | str, ...], progress: int, expected: str | None
) -> None:
    budget = RetryBudget(num_retries)
    for event in went_on_at:
        budget.pay_for_continuing(event) if isinstance(event, int) else budget.pay_for_restart()
    assert obstacle_to_continuing(budget, progress) == expected


@pytest.mark.parametrize(
    ("num_retries", "went_on_at", "is_spent"),
    [
        (1, (1, 3, 5, 9), False),
        (3, (7, 8, 9, 10), True),  # after one step since the last time
        (1, (0,), True),  # before the first step
    ],
)
def test_going_on_is_free_while_there_is_progress(num_retries: int, went_on_at: list[int], is_spent: bool) -> None:
    budget = RetryBudget(num_retries)
    for progress in went_on_at:
        budget.pay_for_continuing(progress)
    assert budget.is_spent is is_spent


def test_going_on_after_a_hang_spends_one_however_many_steps_were_done() -> None:
    budget = RetryBudget(2)
    for progress in (10, 20, 30):
        if progress != 20:
            budget.note_hang()
        assert obstacle_to_continuing(budget, progress) is None
        budget.pay_for_continuing(progress)
    assert budget.is_spent
    budget.note_hang()
    assert obstacle_to_continuing(budget, 40) == NOTHING_LEFT


# -------------------------------------------------------------------------------------------- who goes on from whom


BROKEN = ReplicaProgress(7, can_be_source=False)


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
    for pay in (budget.pay_for_restart, lambda: budget.pay_for_continuing(5), lambda: budget.pay_for_continuing(0)):
        pay()
        found.append((budget.num_spent, budget.is_spent))
    assert found == [(1, False), (1, False), (2, False)]


def test_a_budget_without_end_is_never_spent() -> None:
    budget = RetryBudget(float("inf"))
    for _ in range(100):
        budget.pay_for_restart()
    assert (budget.num_spent, budget.is_spent) == (100, False)


@pytest.mark.parametrize(("num_short", "enough"), [(0, 1), (3, 4), (4, 5), (5, 6), (6, 6), (7, 6)])
def test_survivors_wait_for_more_than_those_with_whom_memory_ran_out(num_short: int, enough: int) -> None:
    rules = ElasticRules("auto", 60.0, keeps_global_batch=lambda: True)
    assert rules.resizing(6, num_short) == Resizing(60.0, enough, enough, minds_memory=True)


@pytest.mark.parametrize(
    ("wait", "keeps_global_batch", "expected"),
    [
        ("auto", False, Resizing(None, 4, 4)),
        (True, True, Resizing(2.0, 4, 4)),
        (True, False, Resizing(2.0, 4, 4)),
        (False, True, Resizing(2.0, 1, 4)),
        (False, False, Resizing(2.0, 1, 4)),
    ],
)
def test_where_a_step_would_be_another_one_survivors_wait_unless_they_are_not_to(
    wait: Wait, keeps_global_batch: bool, expected: Resizing
) -> None:
    rules = ElasticRules(wait, 2.0, keeps_global_batch=lambda: keeps_global_batch)
    assert rules.resizing(4) == expected
    assert rules.resizing(4, num_short=3) == expected
    assert replace(rules, resize_interval_s=None).resizing(4) == replace(expected, check_s=None)
    assert replace(rules, keeps_global_batch=lambda: True).resizing(4, regroups=False) == (
        replace(rules, keeps_global_batch=lambda: False).resizing(4)
    )


def report(*kinds: FailureKind | None) -> GroupReport:
    return GroupReport(
        tuple((Failed(rank, failure(kind, rank)) if kind else Answered(rank)) for rank, kind in enumerate(kinds))
    )


@pytest.mark.parametrize(
    ("kinds", "expected", "ranks"),
    [
        ((None, "died"), "died", [1]),
        (("died", "died", None), "died", [0, 1]),
        (("disconnected", "died"), "died", [1]),
        (("user", "died", "disconnected"), "died", [1]),
        (("user", None), "user", [0]),
        (("disconnected", "user", "user"), "user", [1, 2]),
        (("disconnected", None, "disconnected"), "disconnected", [0, 2]),
    ],
)
def test_a_death_outranks_an_exception_and_that_a_lost_connection(
    kinds: tuple[FailureKind | None, ...], expected: FailureKind, ranks: list[int]
) -> None:
    diagnosis = classify(report(*kinds))
    assert (diagnosis.kind, diagnosis.ranks) == (expected, ranks)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (("a.py:7", "a.py:7"), True),
        (("a.py:7", "a.py:9"), False),
        (("a.py:7", None), False),
        ((None, "a.py:7"), False),
        (("a.py:7",), True),
    ],
)
def test_ranks_failed_alike_if_all_of_them_raised_at_the_same_line(
    places: tuple[str | None, ...], expected: bool
) -> None:
    failures = [place and Failure("user", fault(rank, location=place)) for rank, place in enumerate(places)]
    outcomes = tuple(Failed(rank, found) if found else Answered(rank) for rank, found in enumerate(failures))
    assert failed_alike(GroupReport(outcomes)) == expected


class OutOfMemoryError(RuntimeError):
    """As PyTorch's, for devices."""


class ResourceExhaustedError(Exception):
    """As TensorFlow's."""


ON_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([MemoryError()], True),
        ([type("_ArrayMemoryError", (MemoryError,), {})("Unable to allocate 8 TiB")], True),
        ([OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")], True),
        ([RuntimeError("CUDA error: out of memory")], True),
        ([RuntimeError(ON_CPU)], True),
        ([ResourceExhaustedError("OOM when allocating tensor")], True),
        ([MemoryError(), RuntimeError(ON_CPU)], True),
        ([MemoryError(), ValueError("out of range")], False),
        ([RuntimeError("the database is out of reach")], False),
        ([ValueError("out of memory")], False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_exceptions(errors: list[Exception], expected: bool) -> None:
    outcomes = [Failed(rank, failure("user", rank, error)) for rank, error in enumerate(errors)]
    assert is_lack_of_memory(classify(GroupReport(tuple(outcomes)))) is expected


def test_a_lack_of_memory_is_seen_where_the_exception_could_not_travel_and_not_beside_a_death() -> None:
    unknown = Failure("user", replace(fault(0), error=None, type_name="OutOfMemoryError"))
    text_only = Failure("user", replace(fault(1), error=None, type_name="RuntimeError", message=ON_CPU))
    both = tuple(Failed(rank, each) for rank, each in enumerate((unknown, text_only)))
    assert is_lack_of_memory(classify(GroupReport(both)))
    dead = Failed(2, failure("died", 2))
    assert not is_lack_of_memory(classify(GroupReport((*both, dead))))


def test_ranks_that_raised_different_exceptions_at_one_line_did_not_fail_alike() -> None:
    errors = [KeyError("x"), ValueError("x")]
    outcomes = [Failed(rank, failure("user", rank, error)) for rank, error in enumerate(errors)]
    assert not failed_alike(GroupReport(tuple(outcomes)))


def test_silence_is_no_cause() -> None:
    silent = Unanswered(0)
    diagnosis = classify(GroupReport((silent, Failed(1, failure("user", 1)))))
    assert diagnosis.ranks == [1]


def test_a_report_without_failures_cannot_be_classified() -> None:
    with pytest.raises(AssertionError, match="at least one failure"):
        classify(report(None, None))


@pytest.mark.parametrize("kind", ["user", "memory"])
def test_a_process_that_ran_out_of_memory_and_lives_was_not_killed(kind: FailureKind) -> None:
    lack = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    found = classify(
        GroupReport((Failed(0, Failure("disconnected", fault(0))), Failed(1, Failure(kind, fault(1, lack)))))
    )
    assert (found.kind, words(found)) == (kind, f"rank 1 raised OutOfMemoryError: {lack}")


def test_an_exception_beside_a_death_is_told_with_it() -> None:
    outcomes = [
        Failed(0, Failure("user", fault(0, ValueError("bad\nbatch")))),
        Failed(1, Failure("died", fault(1))),
    ]
    diagnosis = classify(GroupReport(tuple(outcomes)))
    assert diagnosis.kind == "died"
    assert words(diagnosis) == "lost rank 1 (RuntimeError: broken); rank 0 raised ValueError: bad"


@pytest.mark.parametrize(
    ("type_name", "text", "expected"),
    [
        ("ActorDiedError", "The actor died unexpectedly before finishing this task.", "its process died"),
        ("ActorDiedError", "The actor died.\n The actor is dead because its node has died.", "its node died"),
        ("OutOfMemoryError", "Task was killed due to the node running low on memory.", "killed, its node was out of"),
        ("ActorUnavailableError", "The actor is temporarily unavailable", "out of reach"),
    ],
)
def test_a_death_is_named_in_a_few_words(type_name: str, text: str, expected: str) -> None:
    died = replace(fault(1, RuntimeError(text)), type_name=type_name)
    outcomes = (Answered(0), Failed(1, Failure("died", died)))
    assert words(classify(GroupReport(outcomes))).startswith(f"lost rank 1 ({expected}")


def test_several_deaths_are_named_together() -> None:
    died = [replace(fault(rank, RuntimeError("The actor died.")), type_name="ActorDiedError") for rank in (0, 1)]
    report_of_both = GroupReport(tuple(Failed(each.rank, Failure("died", each)) for each in died))
    assert words(classify(report_of_both)) == "lost ranks 0, 1 (their processes died)"


ON_THREE_NODES = [WorkerInfo(f"node{index // 2}", f"10.0.0.{index // 2}", index) for index in range(6)]


@pytest.mark.parametrize(
    ("lost", "addresses"),
    [((2, 3), ["10.0.0.1"]), ((0, 1, 4, 5), ["10.0.0.0", "10.0.0.2"]), ((2,), []), ((1, 2, 3), []), ((), [])],
)
def test_nodes_that_are_empty_now_are_named(lost: tuple[int, ...], addresses: list[str]) -> None:
    assert [*emptied_nodes(lost, ON_THREE_NODES).values()] == addresses


DEAD, EMPTY = LostNodes(("10.0.0.1",), are_dead=True), LostNodes(("10.0.0.1",))
BROKEN = "connection to another rank lost (RuntimeError: broken)"


@pytest.mark.parametrize(
    ("kinds", "nodes", "expected"),
    [
        ((None, None, "died", None), DEAD, "lost ranks 2, 3 (node 10.0.0.1 died)"),
        ((None, None, "died", None), EMPTY, "lost ranks 2, 3 (RuntimeError: broken; all workers of node 10.0.0.1)"),
        (
            ("disconnected", None, None, "disconnected"),
            DEAD,
            f"lost ranks 2, 3 (node 10.0.0.1 died); rank 0 reports: {BROKEN}",
        ),
        (
            ("disconnected", None, None, "disconnected"),
            EMPTY,
            f"lost ranks 2, 3 (all workers of node 10.0.0.1); rank 0 reports: {BROKEN}",
        ),
        (("disconnected", "disconnected", None, "disconnected"), None, f"lost ranks 2, 3; ranks 0, 1 report: {BROKEN}"),
        ((None, None, None, "disconnected"), None, f"lost ranks 2, 3; rank 3 reports: {BROKEN}"),
        ((None, None, "died", None), LostNodes(("a", "b"), are_dead=True), "lost ranks 2, 3 (nodes a, b died)"),
    ],
)
def test_the_loss_of_a_node_is_told_as_such_and_no_lost_rank_reports_beside_others(
    kinds: tuple[FailureKind | None, ...], nodes: LostNodes | None, expected: str
) -> None:
    assert words(classify(report(*kinds)), {2, 3}, nodes) == expected


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (Failure("user", fault(0, KeyError("width"))), "KeyError: 'width', raised at model.py:7 in forward: x / 0"),
        (Failure("died", replace(fault(0), type_name="NodeDiedError")), "its node died"),
        (Failure("died", replace(fault(0), type_name="ActorDiedError")), "its process died. Ray's log of the worker "),
    ],
)
def test_why_a_new_worker_did_not_start_is_told(failed: Failure, expected: str) -> None:
    assert why_not_started(failed).startswith(expected)


@pytest.mark.parametrize(
    ("kinds", "who"),
    [(("disconnected", None), "rank 0 reports"), (("disconnected", "disconnected"), "ranks 0, 1 report")],
)
def test_those_who_lost_a_connection_report_it(kinds: tuple[FailureKind | None, ...], who: str) -> None:
    assert words(classify(report(*kinds))).startswith(f"{who}: connection to another rank lost (")
