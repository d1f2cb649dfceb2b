"""Loans of standby workers: who may begin a call, when it counts, and what becomes of the worker."""

from __future__ import annotations

from typing import Any, cast

import pytest

from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.loans import Loan, StandbyWorker
from raysgd.engine.platform import Platform
from raysgd.engine.shared.connection import NoConnection
from raysgd.engine.shared.types import Failure, FailureKind, Outcome, WorkerInfo
from raysgd.engine.worker import WorkerAnswer
from tests.helpers.fakes import FakeClock, fault

SPEC = GroupSpec(NoConnection(), lambda world: None, heartbeat_s=3.0)  # type: ignore[arg-type,return-value]
INFO = WorkerInfo("node", "10.0.0.1", 7)


def function(replica: Any, number: int) -> None:
    """What a loan runs."""


class Scene:
    """A loan, its worker, and the platform that this is on."""

    def __init__(self, found: Outcome | None = None) -> None:
        self.clock, self.found, self.is_silent = FakeClock(), found, False
        self.calls: list[str] = []
        self.loan = Loan(StandbyWorker(cast(Any, self), INFO, None), 1, cast(Platform, self), SPEC)

    def submit(self, method: str, *args: Any) -> str:
        self.calls.append(method)
        return method

    def kill(self) -> None:
        self.calls.append("kill")

    def kill_process(self, info: WorkerInfo) -> None:
        assert info == INFO
        self.found = failed("died")

    def now(self) -> float:
        return self.clock.monotonic()

    def ready(self, calls: list[str], timeout_s: float) -> list[str]:
        self.clock.sleep(0.0 if self.found else timeout_s)
        return calls if self.found else []

    def outcome(self, rank: int, call: str) -> Outcome:
        if call == "describe":
            return Outcome(rank, INFO) if not self.is_silent else Outcome(rank, answered=False)
        return self.found or Outcome(rank, answered=False)

    def run(self, on_wait: Any = lambda: None) -> Outcome | None:
        return self.loan.run(function, lambda: (), on_wait)


def failed(kind: FailureKind) -> Outcome:
    return Outcome(-1, failure=Failure(kind, fault(-1)))


def test_a_call_that_is_answered_counts() -> None:
    scene = Scene(Outcome(-1, WorkerAnswer("value")))
    assert scene.run() == scene.found
    assert scene.loan.is_over
    assert not scene.loan.has_died


def test_no_call_begins_after_a_recall() -> None:
    scene = Scene(Outcome(-1, WorkerAnswer("value")))
    scene.loan.recall()
    assert scene.loan.is_over
    assert scene.run() is None
    assert scene.calls == []


@pytest.mark.parametrize(
    ("found", "counts"),
    [(Outcome(-1, WorkerAnswer(None)), False), (failed("user"), False), (Outcome(-1, WorkerAnswer(1)), True)],
)
def test_a_call_that_gave_up_or_failed_after_a_recall_does_not_count(found: Outcome, counts: bool) -> None:
    scene = Scene()

    def recall() -> None:
        scene.loan.recall()
        assert not scene.loan.is_over
        scene.found = found

    assert (scene.run(recall) is not None) == counts
    assert scene.calls[:2] == ["on_packed", "beside"]
    assert scene.loan.is_over


def test_an_error_of_user_code_counts_without_a_recall() -> None:
    scene = Scene(failed("user"))
    assert scene.run() == scene.found
    assert not scene.loan.has_died


def test_a_worker_that_does_not_answer_any_more_is_ended() -> None:
    scene = Scene()
    began, scene.is_silent = scene.now(), True
    assert scene.run() is None
    assert scene.calls == ["on_packed", "describe", "kill"]
    assert scene.now() - began == pytest.approx(4.0, abs=1.0)
    assert scene.loan.has_died


def test_what_is_raised_meanwhile_ends_the_loan() -> None:
    scene = Scene()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.run(interrupt)
    assert scene.calls == ["on_packed", "beside"]
    assert not scene.loan.is_over
    scene.found = Outcome(-1, WorkerAnswer(None))
    assert scene.loan.is_over
