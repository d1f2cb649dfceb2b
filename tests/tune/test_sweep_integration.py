"""Sweeps of Ray Tune over operators: searches, schedulers, trials that fail, and drivers that die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import TorchTrainer
from tests.helpers.processes import shipped
from tests.helpers.run_if import RunIf
from tests.helpers.stories import ROOT, found_by, run_story
from tests.torch.operators_for_tests import LinearOperator
from tests.tune.sweep_story import NUM_EPOCHS, NUM_TRIALS

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
@RunIf(modules=["optuna"])
def test_optuna_chooses_configs(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    space = {"lr": tune.loguniform(1e-6, 1e-1)}
    results = fit(tmp_path, space, 2, {"search_alg": OptunaSearch(seed=0), "num_samples": 6})
    assert results.num_errors == 0
    assert len({result.config["lr"] for result in results}) == 6
    assert results.get_best_result().config["lr"] == max(result.config["lr"] for result in results)


@pytest.mark.soak
@RunIf(modules=["GPy", "sklearn"])
def test_pb2_explores_with_a_model_of_the_results(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers.pb2 import PB2

    scheduler = PB2(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_bounds={"lr": [1e-6, 0.05]},
        synch=True,  # so that both trials are compared, however long their epochs take
    )
    space = {"lr": tune.grid_search([1e-6, 0.05])}
    results = fit(tmp_path, space, 6, {"scheduler": scheduler, "reuse_actors": True})
    assert results.num_errors == 0
    for result in results:  # the one that learned nothing went on from the other one's weights
        assert 1e-6 <= result.config["lr"] <= 0.05, "the model may choose either bound"
        assert result.metrics["val_loss"] < 0.9 * result.metrics_dataframe["val_loss"].iloc[0]


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


@pytest.mark.soak
def test_the_oldest_way_to_run_trials_still_works(ray_cluster: None, tmp_path: Path) -> None:
    from ray import tune

    trainable_cls = TorchTrainer.as_trainable(training_operator_cls=LinearOperator, use_local=True, use_gpu=False)
    analysis = tune.run(
        trainable_cls,
        config={"lr": tune.grid_search([1e-6, 0.05])},
        metric="val_loss",
        mode="min",
        stop={"training_iteration": 2},
        checkpoint_at_end=True,
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert analysis.best_config["lr"] == 0.05
    assert (Path(analysis.best_checkpoint.path) / "trainer.checkpoint").exists()


@pytest.mark.soak
def test_a_sweep_that_is_killed_half_way_is_restored(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tune.sweep_story", str(tmp_path)]
    environment = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "1"}  # Tune notes often which trials there are
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    epochs, deadline = tmp_path / "epochs", time.monotonic() + 120
    while not epochs.exists() or len(epochs.read_text().split()) < NUM_TRIALS * NUM_EPOCHS // 2:
        assert process.poll() is None, "it ended before half of its epochs"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    num_before = len(epochs.read_text().split())
    found = found_by(run_story("tests.tune.sweep_story", str(tmp_path), "restore", timeout_s=300))
    assert found["epochs"] == [NUM_EPOCHS] * NUM_TRIALS
    assert min(found["trained"]) >= NUM_EPOCHS
    assert sum(found["trained"]) < NUM_TRIALS * NUM_EPOCHS + num_before, "not all was trained again"
