"""What Ray Tune is told of a trial, whatever trains in it. No Ray runs here: Tune's class works without."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.exceptions import MissingTuneError
from raysgd.trainer.driver import tune_trial
from raysgd.trainer.driver.tune_trial import TrialInfo, TrialStepResult
from tests.helpers.run_if import RunIf

pytestmark = RunIf(modules=["ray.tune", "pandas", "pyarrow"])


class Counting:
    """A trial that counts to the end of its config, and saves behind even numbers."""

    def __init__(self, config: dict[str, Any], info: TrialInfo) -> None:
        self.config, self.info, self.number, self.has_ended = config, info, 0, False

    def step(self) -> TrialStepResult:
        if self.number == self.config["end"]:
            return TrialStepResult(None, has_checkpoint=self.config.get("saves_at_end", False), is_last=True)
        self.number += 1
        return TrialStepResult({"number": self.number}, has_checkpoint=self.number % 2 == 0)

    def save(self, folder: Path) -> None:
        (folder / "number").write_text(str(self.number))

    def load(self, folder: Path) -> None:
        self.number = int((folder / "number").read_text())

    def end(self) -> None:
        self.has_ended = True


def make(**config: Any) -> Any:
    trainable_cls = tune_trial.make_trainable(Counting, lambda config: [{"CPU": 1}] * config["end"], "Counter")
    return trainable_cls({"end": 2, **config})


def test_a_step_is_a_result_and_says_whether_there_is_a_checkpoint_to_ask_for() -> None:
    trial = make()
    first, second = trial.step(), trial.step()
    assert (first["number"], first["should_checkpoint"]) == (1, False)
    assert (second["number"], second["should_checkpoint"]) == (2, True)
    assert "done" not in second


def test_the_end_repeats_the_last_result_only_where_a_checkpoint_comes_with_it() -> None:
    silent, saving = make(), make(saves_at_end=True)
    for trial in (silent, saving):
        trial.step(), trial.step()
    assert silent.step() == {"__duplicate__": True, "done": True}
    assert saving.step() == {"number": 2, "should_checkpoint": True, "done": True}


def test_what_one_trial_saved_another_one_loads(tmp_path: Path) -> None:
    first, second = make(), make()
    first.step()
    assert first.save_checkpoint(str(tmp_path)) is None
    second.load_checkpoint(str(tmp_path))
    assert second.step()["number"] == 2


def test_a_trial_that_is_reset_is_ended_and_made_again() -> None:
    trial = make()
    before = trial._trial
    trial.step()
    assert trial.reset_config({"end": 1})
    assert trial._trial is not before
    assert before.has_ended
    assert trial.step()["number"] == 1


def test_tune_is_asked_for_the_bundles_of_the_config_under_the_name_of_the_class() -> None:
    trainable_cls = tune_trial.make_trainable(Counting, lambda config: [{"CPU": 1}] * config["end"], "Counter")
    request = trainable_cls.default_resource_request({"end": 3})
    assert (request.bundles, request.strategy) == ([{"CPU": 1}] * 3, "PACK")
    assert trainable_cls.__name__ == "Counter"


def test_a_trial_knows_its_folder() -> None:
    trial = make()
    assert trial._trial.info.logdir == Path(trial.logdir)


def test_without_tune_the_error_says_who_needs_it_and_is_of_all_former_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError("`as_trainable` needs `ray`")

    monkeypatch.setattr(tune_trial, "require", refuse)
    for former in (MissingTuneError, ImportError, ValueError, RuntimeError):
        with pytest.raises(former, match="as_trainable"):
            tune_trial.make_trainable(Counting, lambda config: [], "Counter")


def test_a_trial_without_a_trainer_says_what_to_override() -> None:
    trainable_cls = tune_trial.trainer_trainable("a test")
    with pytest.raises(NotImplementedError, match="override `_create_trainer"):
        trainable_cls({})


@pytest.mark.parametrize(
    ("before", "now", "has_changed"),
    [
        ({"lr": 0.1, "deep": {"a": [1, 2]}}, {"lr": 0.1, "deep": {"a": (1, 2)}}, False),
        ({"lr": 0.1}, {"lr": 0.2}, True),
        ({"deep": {"a": 1}}, {"deep": {"a": 2}}, True),
        ({"model": make}, {"model": print}, True),
        ({"object": object()}, {"object": object()}, False),
        ({"lr": np.float32(0.5)}, {"lr": np.float32(0.25)}, True),
        ({"size": np.int64(3)}, {"size": np.int64(4)}, True),
        ({"lr": np.float64(0.5), "size": np.int64(3)}, {"lr": 0.5, "size": 3}, False),
        ({"lr": math.nan}, {"lr": math.nan}, False),
        ({"lr": "0.5"}, {"lr": 0.5}, True),
        ({"weights": np.arange(3)}, {"weights": np.arange(3)}, False),
        ({"weights": np.arange(3)}, {"weights": np.ones(3)}, True),
        ({"lock": threading.Lock()}, {"lock": threading.Lock()}, True),
    ],
)
def test_a_checkpoint_knows_whether_the_config_is_another_one(
    tmp_path: Path, before: Any, now: Any, has_changed: bool
) -> None:
    assert not tune_trial.has_changed(tmp_path, now)
    tune_trial.write_config(tmp_path, before)
    assert tune_trial.has_changed(tmp_path, now) == has_changed
    assert json.loads((tmp_path / "trial.json").read_text())


def test_results_are_merged_down_to_the_values() -> None:
    first = {"loss": 1, "profile": {"fwd": 1, "bwd": 2}, "same": {"a": 1}}
    second = {"profile": {"fwd": 3}, "same": 4, "other": 5}
    assert tune_trial.merged(first, second) == {"loss": 1, "profile": {"fwd": 3, "bwd": 2}, "same": 4, "other": 5}
    assert first["profile"] == {"fwd": 1, "bwd": 2}
