"""Which state and settings a spare validates, who validates where there is no spare, and how fast a call trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd.core.engine.shared.interface import Call, Completed
from raysgd.core.engine.shared.types import Heartbeat
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.core.numbers.results import CallProgress
from raysgd.exceptions import WorkersLostError
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.driver import calls, life
from raysgd.trainer.driver.calls import TrainerCalls
from raysgd.trainer.driver.life import Figures
from raysgd.trainer.driver.listeners import ProgressListeners
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest

ASKED: Any = None
SHARING: Any = SimpleNamespace(forget=lambda: None)
SETTINGS = ReplicaSettings(object, {"a": 1})


class Lost:
    """A state whose worker died before it had sent it."""

    def result(self, timeout_s: float | None = None) -> Snapshot:
        raise WorkersLostError("gone")


class Calls(TrainerCalls):
    """Calls to a trainer that notes what its spare is to run, in one attempt after the other."""

    def __init__(self, *answers: Any, has_spares: bool = True) -> None:
        self.args: list[list[Any]] = []
        self.answers = list(answers)
        self.training: Any = SimpleNamespace(
            lend_spare=lambda: "loan" if has_spares else None,
            has_spares=has_spares,
            facts=["facts of then"],
            run_on_spare=self.run_on_spare,
        )
        framework: Any = SimpleNamespace(runner_cls=SimpleNamespace(validate_on_loan="function"))
        trainer: Any = SimpleNamespace(controller=self.training, framework=framework)
        super().__init__(trainer)

    def run_on_spare(self, loan: Any, function: Any, make_args: Any, on_wait: Any) -> Any:
        assert (loan, function) == ("loan", "function")
        self.args += [make_args() for _ in self.answers]
        return self.answers[-1]

    def requests(self, name: str, asked: Any, dataset: Any, worlds: Any, sharing: Any = None, facts: Any = None) -> Any:
        return [(name, asked, dataset, len(worlds), sharing, facts)]

    def answers_of_validation(self, asked: Any, dataset: Any) -> list[Any]:
        return ["of those that train"]

    def begin(self, state: Any, dataset: Any = None) -> Any:
        return self.begin_on_spare(ASKED, dataset, SETTINGS, SHARING, state)


SMALL = NewestSnapshot(Snapshot("small", ()))


def test_a_spare_is_given_settings_and_state_of_the_call_in_each_attempt() -> None:
    made = Calls(None, "answer")
    validate = made.begin(SMALL, "data")
    made.training.facts = ["facts of now"]
    assert validate(lambda: None) == ["answer"]
    assert made.args == [[SETTINGS, "small", "validation", ASKED, "data", 1, SHARING, "facts of then"]] * 2


def test_where_there_is_no_spare_the_workers_that_train_validate_at_once(caplog: pytest.LogCaptureFixture) -> None:
    validate = Calls(has_spares=False).begin(SMALL)
    assert "there is no spare" in caplog.text
    assert validate(lambda: None) == ["of those that train"]


def test_a_state_that_was_lost_on_its_way_is_not_replaced_by_a_later_one() -> None:
    made = Calls("answer")
    with pytest.raises(WorkersLostError):
        made.begin(Lost())(lambda: None)
    assert made.args == []


class Controller:
    """Answers a call with what each rank has measured, after so many rejoins."""

    def __init__(self, num_samples: list[int], used: int, num_continued: int = 0) -> None:
        self.history = SimpleNamespace(events=[])
        self._beats = [Heartbeat(num_samples=num) for num in num_samples]
        self._used = used
        self._num_rejoins = num_continued

    def run_or_leave(self, call: Any, max_retries: int) -> Completed:
        self.history.events += [SimpleNamespace(kind="continued")] * self._num_rejoins
        return Completed([EpochAnswer(None, None, 1, heartbeat=beat, num_used=self._used) for beat in self._beats])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: Iterator[float] = iter((10.0, 12.0))
    monkeypatch.setattr(calls.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(life, "Gauges", lambda name: SimpleNamespace(report=lambda *numbers: None))


def after_a_call(controller: Any) -> Figures:
    figures = Figures(controller, name="mine")
    assert figures.samples_per_s is None
    trainer: Any = SimpleNamespace(controller=controller, figures=figures)
    assert len(TrainerCalls(trainer)._run_measured(None, max_retries=0)) == 2  # type: ignore[arg-type]
    return figures


@pytest.mark.usefixtures("clock")
def test_the_samples_of_all_ranks_count() -> None:
    assert after_a_call(Controller([30, 50], used=80)).samples_per_s == 40.0


@pytest.mark.usefixtures("clock")
def test_a_call_without_samples_has_no_rate() -> None:
    assert after_a_call(Controller([0, 0], used=0)).samples_per_s is None


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("used", "num_continued", "is_told"), [(100, 1, True), (80, 1, False), (100, 0, False)])
def test_samples_whose_metrics_were_lost_are_named_in_the_log(
    used: int, num_continued: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    after_a_call(Controller([30, 50], used, num_continued))
    assert ("cover 80 of 100 samples" in caplog.text) is is_told


class Rank:
    """The controller of a group whose rank 0 answers with its progress, and the number of times that it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.turns = SimpleNamespace(closed=nullcontext)

    def ensure_group(self) -> Rank:
        return self

    def fetch(self, rank: int, function: Any) -> Any:
        self.num_asked += 1
        return SimpleNamespace(result=lambda timeout_s: CallProgress(3, 9, 0, 1, None))


def test_rank_0_is_asked_for_its_progress_only_if_a_listener_needs_it() -> None:
    rank, read, heard = Rank(), list[bool](), list[CallProgress]()
    found, request = ProgressListeners(cast("Any", rank)), EpochRequest(None, {}, False, seed=0)
    answer = EpochAnswer(None, None, 9)
    assert found.on_wait is None
    with found.listening(step_reader=read.append):
        assert found.on_wait is not None
        found.on_wait()
        assert (rank.num_asked, read) == (0, [False])
        with found.listening(heard.append):
            found.on_wait()
        assert (rank.num_asked, read, len(heard)) == (1, [False, False], 1)
        found.tell_end("validation", request, answer)
        found.tell_end("train", request, answer)
        assert read == [False, False, True], "validations have no steps"
    assert found.on_wait is None


def test_what_shows_a_training_call_hears_of_it_while_it_runs_and_at_its_end() -> None:
    rank, heard = Rank(), list[CallProgress]()
    listeners = ProgressListeners(cast("Any", rank))
    framework = SimpleNamespace(
        runner_cls=SimpleNamespace(train_epoch=None, resume_epoch=None),
        shown=lambda trainer: listeners.listening(heard.append),
        merged=lambda answers, reduce_results: {},
    )
    recorder = SimpleNamespace(begin=lambda *call: lambda result, num_workers: result)
    controller = SimpleNamespace(facts=[SimpleNamespace(epoch_obstacle=None)], num_workers=1)
    trainer: Any = SimpleNamespace(
        framework=framework,
        listeners=listeners,
        recorder=recorder,
        controller=controller,
        sharing=SHARING,
        warn_of_whole_batches=lambda: None,
        largest_batch=None,
    )

    class Waiting(TrainerCalls):
        def _run_measured(self, call: Call, max_retries: int) -> list[EpochAnswer]:
            assert call.on_wait is not None
            call.on_wait()
            return [EpochAnswer(None, None, 9)]

    Waiting(trainer).train(EpochRequest(None, {}, False, seed=0))
    assert [progress.is_done for progress in heard] == [False, True]
