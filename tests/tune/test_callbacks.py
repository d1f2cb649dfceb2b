"""Callbacks of raysgd in a sweep, called as Ray Tune calls its own."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import Callback, GradientNorms, Run
from raysgd.train import TrainingCallback
from raysgd.tune._callbacks import CallsInTrials, for_tune
from tests.run_if import RunIf


@dataclass
class Trial:
    """What a trial of Ray Tune has that is read."""

    trial_id: str
    config: dict[str, Any] = field(default_factory=dict)
    local_path: str = "."


class Notes(Callback):
    """Notes what it sees, in a list that all copies share."""

    shared: list[tuple[Any, ...]] = []  # noqa: RUF012 - the copies share it

    def __init__(self) -> None:
        self.results = 0

    def on_run_begin(self, run: Run) -> None:
        self.shared.append(("begin", run.config["lr"], self.results))

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.results += 1
        self.shared.append((run.epoch, result["loss"], self.results))

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.shared.append(("checkpoint", checkpoint))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.shared.append(("end", error))

    def state_dict(self) -> Any:
        return self.results

    def load_state_dict(self, state: Any) -> None:
        self.results = state


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Notes, "shared", found)
    return found


def test_each_trial_has_a_copy(seen: list[tuple[Any, ...]]) -> None:
    calls = CallsInTrials([Notes()])
    first, second = Trial("a", {"lr": 1}), Trial("b", {"lr": 2})
    calls.start(first)
    calls.report(first, {"loss": 0.5, "training_iteration": 1})
    calls.start(second)
    calls.report(second, {"loss": 0.7, "training_iteration": 1})
    calls.start(first)  # again, after a pause
    calls.save(first, Checkpoint("/kept"))
    calls.end(first, None)
    calls.end(first, None)
    error = RuntimeError("lost")
    calls.end(second, error)
    assert seen == [
        ("begin", 1, 0),
        (1, 0.5, 1),
        ("begin", 2, 0),
        (1, 0.7, 1),
        ("checkpoint", "/kept"),
        ("end", None),
        ("end", error),
    ]


def test_a_sweep_that_is_restored_gives_each_trial_its_states_back(seen: list[tuple[Any, ...]]) -> None:
    before, after = CallsInTrials([Notes()]), CallsInTrials([Notes()])
    trial = Trial("a", {"lr": 1})
    before.start(trial)
    before.report(trial, {"loss": 0.5, "training_iteration": 1})
    after.load_states(pickle.loads(pickle.dumps(before.states())))
    after.start(trial)
    assert seen[-1] == ("begin", 1, 1)


def test_a_callback_cannot_end_a_trial(tmp_path: Path) -> None:
    class Impatient(Callback):
        def on_result(self, run: Run, result: dict[str, Any]) -> None:
            run.stop("enough")

    calls, trial = CallsInTrials([Impatient()]), Trial("a", local_path=str(tmp_path))
    calls.start(trial)
    with pytest.raises(Exception, match=r"`RunConfig\(stop=\.\.\.\)`"):
        calls.report(trial, {"loss": 1})


@RunIf(modules=["ray.tune"])
def test_what_needs_the_workers_is_refused_before_the_first_trial() -> None:
    with pytest.raises(TypeError, match="GradientNorms"):
        for_tune([GradientNorms()], "`Tuner`")


@RunIf(modules=["ray.tune"])
def test_callbacks_of_tune_go_there_as_they_are_and_ours_as_one() -> None:
    from ray.tune import Callback as TunesOwn

    own = TunesOwn()
    adapted = for_tune([Notes(), own, TrainingCallback()], "`Tuner`")
    assert adapted[0] is own
    assert len(adapted) == 2
    assert isinstance(adapted[1], TunesOwn)
    assert for_tune([own], "`Tuner`") == [own]


@dataclass
class Checkpoint:
    """Where it is."""

    path: str
