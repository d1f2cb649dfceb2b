"""A trainer as a trial of Ray Tune."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.train import Trainer
from raysgd.train._tune import FunctionTrial
from raysgd.train.backend import BackendConfig
from raysgd.trainer.driver.tune_trial import TrialInfo
from tests.helpers.run_if import RunIf
from tests.train import lab

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


def test_a_trial_goes_on_from_the_checkpoint_that_it_gave_away(tmp_path: Path) -> None:
    info = TrialInfo(tmp_path / "logs")
    trial = FunctionTrial(
        lambda logdir: Trainer(BackendConfig(), logdir=logdir), lab.count_up, None, False, {"num_steps": 3}, info
    )
    try:
        steps = [trial.step() for _ in range(4)]
        assert [(step.metrics and step.metrics["number"], step.has_checkpoint, step.is_last) for step in steps] == [
            (0, False, False),
            (1, True, False),
            (2, True, False),
            (None, True, True),
        ]
        trial.save(tmp_path / "kept")
        assert not trial.step().has_checkpoint
        content = pickle.loads((tmp_path / "kept" / "checkpoint").read_bytes())
        assert (content["number"], content["_current_checkpoint_id"]) == (2, 3)
        trial.load(tmp_path / "kept")
        assert trial.step().metrics is None  # there is nothing left to do
    finally:
        trial.end()


def test_what_a_trial_asks_for(tmp_path: Path) -> None:
    trainer = Trainer(BackendConfig(), 2, resources_per_worker={"CPU": 2, "extra": 1}, logdir=tmp_path)
    request = trainer.to_tune_trainable(lab.count_up).default_resource_request({})
    assert request.bundles == [{"CPU": 1}, {"CPU": 2, "extra": 1}, {"CPU": 2, "extra": 1}]
    assert request.strategy == "PACK"


@RunIf(modules=["pandas", "pyarrow"])
def test_what_a_function_saved_that_never_reports_is_given_to_tune(tmp_path: Path) -> None:
    from ray import tune

    def function() -> None:
        train.save_checkpoint(number=1)
        train.save_checkpoint(number=2)

    trainer = Trainer(BackendConfig(), logdir=tmp_path / "unused")
    tuner = tune.Tuner(
        trainer.to_tune_trainable(function),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    [result] = tuner.fit()
    assert result.error is None
    with result.checkpoint.as_directory() as folder:
        assert pickle.loads((Path(folder) / "checkpoint").read_bytes())["number"] == 2


@pytest.mark.promise("Ray Tune")
@RunIf(modules=["pandas", "pyarrow"])
def test_tune_runs_trials_and_keeps_their_checkpoints(tmp_path: Path) -> None:
    from ray import tune

    def function(config: dict[str, Any]) -> None:
        lab.count_up({"num_steps": config["num_steps"]})

    trainer = Trainer(BackendConfig(), num_workers=2, logdir=tmp_path / "unused")
    tuner = tune.Tuner(
        trainer.to_tune_trainable(function),
        param_space={"num_steps": tune.grid_search([1, 3])},
        tune_config=tune.TuneConfig(metric="number", mode="max", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    best = results.get_best_result()
    assert best.metrics["number"] == 2
    assert best.metrics["size"] == 2
    with best.checkpoint.as_directory() as folder:
        content = pickle.loads((Path(folder) / "checkpoint").read_bytes())
    assert (content["number"], content["_current_checkpoint_id"]) == (2, 3)
