"""Callbacks of raysgd in a sweep, called as Ray Tune calls its own."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raysgd.callbacks import Callback, CometLogger, GradientNorms, MLflowLogger, Run, WandbLogger
from raysgd.train import TrainingCallback
from raysgd.tune.tuner import CallsInTrials, for_tune
from tests.helpers.run_if import RunIf


@dataclass
class Trial:
    """What a trial of Ray Tune has that is read."""

    trial_id: str
    config: dict[str, Any] = field(default_factory=dict)
    local_path: str = "."
    error: Exception | None = None

    def get_error(self) -> Exception | None:
        return self.error


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
    calls.on_trial_start(first)
    calls.on_trial_result(first, {"loss": 0.5, "training_iteration": 1})
    calls.on_trial_start(second)
    calls.on_trial_result(second, {"loss": 0.7, "training_iteration": 1})
    calls.on_trial_start(first)  # again, after a pause
    calls.on_checkpoint(first, Checkpoint("/kept"))
    calls.on_checkpoint(first, Checkpoint("/bucket/kept", MemoryFileSystem()))
    calls.on_trial_complete(first)
    calls.on_trial_complete(first)
    error = second.error = RuntimeError("lost")
    calls.on_trial_error(second)
    assert seen == [
        ("begin", 1, 0),
        (1, 0.5, 1),
        ("begin", 2, 0),
        (1, 0.7, 1),
        ("checkpoint", "/kept"),
        ("checkpoint", "memory://bucket/kept"),
        ("end", None),
        ("end", error),
    ]


def test_a_sweep_that_is_restored_gives_each_trial_its_states_back(seen: list[tuple[Any, ...]]) -> None:
    before, after = CallsInTrials([Notes()]), CallsInTrials([Notes()])
    trial = Trial("a", {"lr": 1})
    before.on_trial_start(trial)
    before.on_trial_result(trial, {"loss": 0.5, "training_iteration": 1})
    after.set_state(pickle.loads(pickle.dumps(before.get_state())))
    after.on_trial_start(trial)
    assert seen[-1] == ("begin", 1, 1)


def test_the_states_of_trials_yet_to_start_survive_a_second_interruption(seen: list[tuple[Any, ...]]) -> None:
    calls, trial = CallsInTrials([Notes()]), Trial("a", {"lr": 1})
    calls.set_state(saved := {"a": [{"name": "Notes", "state": 7}]})
    assert calls.get_state() == saved
    calls.on_trial_start(trial)
    assert seen == [("begin", 1, 7)]
    calls.on_trial_complete(trial)
    assert calls.get_state() == {}, "an ended trial has no state"


def test_a_callback_cannot_end_a_trial(tmp_path: Path) -> None:
    class Impatient(Callback):
        def on_result(self, run: Run, result: dict[str, Any]) -> None:
            run.stop("enough")

    calls, trial = CallsInTrials([Impatient()]), Trial("a", local_path=str(tmp_path))
    calls.on_trial_start(trial)
    with pytest.raises(Exception, match=r"`RunConfig\(stop=\.\.\.\)`"):
        calls.on_trial_result(trial, {"loss": 1})


@RunIf(modules=["ray.tune"])
def test_what_needs_the_workers_is_refused_before_the_first_trial() -> None:
    with pytest.raises(TypeError, match="GradientNorms"):
        for_tune([GradientNorms()])


@RunIf(modules=["ray.tune"])
def test_callbacks_of_tune_go_there_as_they_are_and_ours_as_one() -> None:
    from ray.tune import Callback as TunesOwn

    own = TunesOwn()
    adapted = for_tune([Notes(), own])
    assert adapted[0] is own
    assert len(adapted) == 2
    assert isinstance(adapted[1], TunesOwn)
    assert for_tune([own]) == [own]
    with pytest.raises(TypeError, match=r"A `TrainingCallback` is for `raysgd\.train\.Trainer\.run"):
        for_tune([TrainingCallback()])


@RunIf(modules=["ray.tune", "mlflow", "wandb", "comet_ml"])
@pytest.mark.parametrize("logger", [MLflowLogger, WandbLogger, CometLogger])
def test_loggers_of_services_are_copied_for_each_trial(logger: Any) -> None:
    assert len(for_tune([logger()])) == 1


@dataclass
class Checkpoint:
    """Where it is."""

    path: str
    filesystem: Any = None
