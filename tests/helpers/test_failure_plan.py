from __future__ import annotations

import multiprocessing
import pickle
import signal
from pathlib import Path

import pytest

from tests.helpers.failure_plan import FailurePlan, InjectedError


def test_happens_only_on_its_rank_at_its_step(tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path).fail(rank=1, step=3)
    plan.check(0, 3)
    plan.check(1, 2)
    with pytest.raises(InjectedError, match="step 3"):
        plan.check(1, 3)


def test_happens_once_also_when_the_plan_is_copied(tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path).raise_(rank=0, error=KeyError("x"))
    with pytest.raises(KeyError):
        pickle.loads(pickle.dumps(plan)).check(0)
    plan.check(0)
    assert plan.num_fired == 1


def test_happens_as_often_as_it_says_and_on_any_rank(tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path).fail(rank=None, times=2)
    for rank in (4, 5):
        with pytest.raises(InjectedError):
            plan.check(rank)
    plan.check(6)


def test_a_longer_plan_leaves_the_shorter_one_as_it_was(tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path)
    plan.fail(rank=0)
    plan.check(0)


def test_a_death_is_that_of_the_whole_process(tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path).die(rank=0)
    process = multiprocessing.get_context("spawn").Process(target=plan.check, args=(0,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_those_that_die_together_wait_for_each_other(tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path).die_together(num_ranks=2)
    spawn = multiprocessing.get_context("spawn")
    first, second = [spawn.Process(target=plan.check, args=(rank,)) for rank in range(2)]
    first.start()
    first.join(1)
    assert first.exitcode is None
    second.start()
    for process in (first, second):
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert plan.num_fired == 2
