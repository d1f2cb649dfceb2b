"""In which order reports are handed over. Real runs are in `test_fit_integration`."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from raysgd.air import Checkpoint, RunConfig, ScalingConfig
from raysgd.air.session import TrialFacts
from raysgd.core.engine.policies import RetryBudget
from raysgd.core.engine.recovery.machine import CallFailed, Do, Running, transition
from raysgd.core.engine.shared.types import FailureKind
from raysgd.train._function_run import FunctionStep
from raysgd.train._worker.messages import TrainingResultType
from raysgd.train.backend import BackendConfig
from raysgd.train.checkpoint import CheckpointLostError
from raysgd.train.fit.recorder import Recorder
from raysgd.train.fit.run import FitJob, FitRun, StopConditionMet
from tests.helpers.facts import known_of
from tests.train.fit.notes import make_folder


class Steps:
    """Stands for a run of a function: each step has its metrics, and perhaps a checkpoint on its way."""

    is_over = False

    def __init__(self, run: FitRun, *steps: tuple[int, Future[Any] | None]) -> None:
        self.fit, self.steps = run, list(steps)

    def next_step(self) -> FunctionStep:
        if not self.steps:
            self.is_over = True
            return FunctionStep(None, ("returned",))
        number, landing = self.steps.pop(0)
        self.fit._checkpoints.landing = landing or self.fit._checkpoints.landing
        ref: Any = object() if landing is not None else None
        return FunctionStep(TrainingResultType.REPORT, ({"number": number},), ref)

    def decoded(self, data: Any) -> Any:
        return data


class Seen:
    """Takes reports, and stops at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.numbers: list[int] = []
        self.checkpoints: list[Checkpoint | None] = []
        self.told: list[str] = []

    def record(self, metrics: dict[str, Any], checkpoint: Checkpoint | None) -> bool:
        self.numbers.append(metrics["number"])
        self.checkpoints.append(checkpoint)
        return metrics["number"] == self.stop_at

    def begin_attempt(self) -> None:
        self.told.append("begin")

    def fail(self, error: Exception) -> None:
        self.told.append(f"fail after {self.numbers}")


def fit_run(place: Path, seen: Seen, scaling: ScalingConfig, **options: Any) -> FitRun:
    folder = make_folder(place)
    facts = TrialFacts(folder.trial, "run", "trial", "1", scaling)
    job = FitJob(folder, cast(Recorder, seen), RunConfig(**options), facts, None)
    return FitRun(job, int, BackendConfig(), scaling)


def run_of(place: Path, seen: Seen, *steps: tuple[int, Future[Any] | None]) -> Any:
    """A run whose `step` takes the next of these steps."""
    run: Any = fit_run(place, seen, ScalingConfig(num_workers=1))
    run.step = partial(run.step, Steps(run, *steps))
    return run


def test_workers_go_and_run_where_the_configs_say(tmp_path: Path) -> None:
    scaling = ScalingConfig(num_workers=1, accelerator_type="A100", placement_strategy="SPREAD")
    environment = {"env_vars": {"A": "1"}}
    spec = fit_run(tmp_path, Seen(), scaling, worker_runtime_env=environment)._workers.group_spec(None)
    assert (spec.packs, spec.resources.runtime_env) == (False, environment)
    assert spec.resources.bundle() == {"CPU": 1, "accelerator_type:A100": 0.001}


def test_a_report_waits_for_its_checkpoint_and_later_ones_for_it(tmp_path: Path) -> None:
    seen = Seen()
    landing: Future[Any] = Future()
    run = run_of(tmp_path, seen, (1, None), (2, landing), (3, None))
    for _ in range(3):
        assert run.step()
    assert seen.numbers == [1]
    checkpoint = Checkpoint.from_dict({"number": 2})
    landing.set_result(checkpoint)
    run._hand_over()  # as the driver does while it waits for the next step
    assert seen.numbers == [1, 2, 3]
    assert seen.checkpoints == [None, checkpoint, None]
    assert not run.step()


def test_a_report_whose_checkpoint_was_lost_is_handed_over_without_it(tmp_path: Path) -> None:
    seen = Seen()
    lost: Future[Any] = Future()
    never: Future[Any] = Future()
    run = run_of(tmp_path, seen, (1, lost), (2, never))
    run.step(), run.step()
    lost.set_result(None)
    run._hand_over()
    assert (seen.numbers, seen.checkpoints) == ([1], [None])
    run.stop()
    assert (seen.numbers, seen.checkpoints) == ([1, 2], [None, None])


def test_a_stop_condition_ends_the_run(tmp_path: Path) -> None:
    seen = Seen(stop_at=2)
    run = run_of(tmp_path, seen, (1, None), (2, None), (3, None))
    assert run.step()
    with pytest.raises(StopConditionMet):
        run.step()


def test_an_attempt_begins_when_all_that_was_reported_before_is_written_down(tmp_path: Path) -> None:
    seen = Seen()
    run = run_of(tmp_path, seen, (1, Future()))
    run.step()
    run._failure = ValueError("bad")
    run._begin_attempt()
    assert seen.told == ["fail after [1]", "begin"]
    run._begin_attempt()
    assert seen.told == ["fail after [1]", "begin", "begin"]


# ---------------------------------------------------------------------------------------------- how often it may fail

DEATH: FailureKind = "died"
EXCEPTION: FailureKind = "user"


def lose() -> dict[str, Any]:
    raise CheckpointLostError("its worker died")


class Failing:
    """A run whose function fails; pays as the engine does."""

    def __init__(self, run: FitRun, num_allowed: int) -> None:
        self.run, self.budget = run, RetryBudget(num_allowed)
        self.policy = run._workers._failures

    def land(self) -> None:
        self.run._checkpoints.add(None, lambda: {"a": 1})

    def fail(self, kind: FailureKind) -> str:
        policy, budget = self.policy, self.budget
        policy.renew_if_due(budget, can_continue=False)
        num_left = budget.num_retries - budget.num_spent
        known = known_of(can_continue=False, retries_user_errors=policy.retries_user_errors, num_left=num_left)
        step = transition(Running(), CallFailed(kind), known)
        if Do.PAY_FOR_RESTART not in step.commands:
            return "give up" if kind == "died" else "raise error"
        budget.pay_for_restart()
        self.run._has_raised = self.run._has_raised or kind == "user"
        return "restart"


def test_each_checkpoint_that_has_landed_renews_the_failures_that_are_allowed(tmp_path: Path) -> None:
    failing = Failing(run_of(tmp_path, Seen()), 2)
    for _ in range(3):
        failing.land()
        assert [failing.fail(DEATH) for _ in range(2)] == ["restart", "restart"]
    assert failing.fail(DEATH) == "give up"


def test_a_checkpoint_that_was_lost_renews_nothing(tmp_path: Path) -> None:
    failing = Failing(run_of(tmp_path, Seen()), 1)
    assert failing.fail(DEATH) == "restart"
    failing.run._checkpoints.add(None, lose)
    assert failing.fail(DEATH) == "give up"
    failing.land()
    assert failing.fail(DEATH) == "restart"


def test_a_checkpoint_behind_one_that_has_landed_does_not_hide_it(tmp_path: Path) -> None:
    failing = Failing(run_of(tmp_path, Seen()), 1)
    assert failing.fail(DEATH) == "restart"
    failing.land()
    failing.run._checkpoints.add(None, lose)
    assert failing.fail(DEATH) == "restart"


def test_an_exception_of_the_function_ends_the_renewal(tmp_path: Path) -> None:
    failing = Failing(run_of(tmp_path, Seen()), 2)
    failing.fail(DEATH), failing.fail(DEATH)
    failing.land()
    assert failing.fail(EXCEPTION) == "restart"
    failing.land()
    assert failing.fail(DEATH) == "restart"
    failing.land()
    assert failing.fail(EXCEPTION) == "raise error"


def test_a_run_that_may_not_fail_may_not_fail_behind_a_checkpoint(tmp_path: Path) -> None:
    failing = Failing(run_of(tmp_path, Seen()), 0)
    failing.land()
    assert failing.fail(DEATH) == "give up"
