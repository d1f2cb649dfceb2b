"""Sweeps of Ray Tune over operators: searches, schedulers, trials that fail, and drivers that die."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import TorchTrainer
from tests.helpers.processes import shipped
from tests.helpers.run_if import RunIf
from tests.torch.operators_for_tests import LinearOperator

pytestmark = [pytest.mark.integration, RunIf(modules=["ray.tune", "pandas", "pyarrow"])]


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    with shipped(request.module):
        yield


def fit(folder: Path, space: dict[str, Any], num_epochs: int, options: dict[str, Any], **more: Any) -> Any:
    """A sweep with one worker for each trial, in the process of the trial."""
    from ray import tune

    trainable_cls = TorchTrainer.as_trainable(training_operator_cls=LinearOperator, use_local=True, use_gpu=False)
    return tune.Tuner(
        trainable_cls,
        param_space=space,
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", **options),
        run_config=tune.RunConfig(storage_path=str(folder), stop={"training_iteration": num_epochs}, verbose=0, **more),
    ).fit()


def test_a_scheduler_stops_what_is_worse(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(max_t=3, grace_period=1, reduction_factor=2)
    space = {"lr": tune.grid_search([0.05, 1e-6, 1e-7])}
    results = fit(tmp_path, space, 3, {"scheduler": scheduler, "max_concurrent_trials": 1, "reuse_actors": True})
    assert results.num_errors == 0
    epochs = {result.config["lr"]: result.metrics["epoch"] for result in results}
    assert epochs[0.05] == 3
    assert epochs[1e-7] == 1
    assert results.get_best_result().config["lr"] == 0.05


@pytest.mark.soak
def test_a_trial_that_loses_a_worker_is_repeated_from_its_checkpoint(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune

    def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
        import signal

        result = {**trainer.train(), **trainer.validate()}
        mark = tmp_path / "killed"
        if info["iteration"] == 1 and not mark.exists():
            mark.touch()
            pid = trainer.apply_all_workers(os.getpid)[0]
            os.kill(pid, signal.SIGKILL)
            trainer.train(max_retries=0)
        return result

    trainable_cls = TorchTrainer.as_trainable(
        override_tune_step=step, training_operator_cls=LinearOperator, use_gpu=False
    )
    [result] = tune.Tuner(
        trainable_cls,
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            stop={"training_iteration": 3},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            failure_config=tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    ).fit()
    assert result.error is None
    assert (tmp_path / "killed").exists()
    assert (result.metrics["epoch"], result.metrics["training_iteration"]) == (3, 3)
