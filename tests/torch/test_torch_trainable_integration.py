"""Operators as trials of Ray Tune, with workers of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle

from raysgd import TorchTrainer
from tests.helpers.run_if import RunIf
from tests.torch.operators_for_tests import LinearOperator

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("ray_cluster"),
    RunIf(modules=["ray.tune", "pandas", "pyarrow"]),
]


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(request.module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(request.module)


class NotingOperator(LinearOperator):
    """Notes the process that it was set up in, and with which learning rate."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.world_rank == 0:
            with (Path(config["folder"]) / str(os.getpid())).open("a") as file:
                file.write(f"{config['lr']}\n")


def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    result = {**trainer.train(), **trainer.validate()}
    rates = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
    return {**result, "num_groups": len(groups), "num_workers": trainer.num_workers, "rate": rates[0]}


def test_workers_are_in_what_tune_reserved_with_the_resources_of_the_trial(tmp_path: Path) -> None:
    from ray import tune

    trainable_cls = TorchTrainer.as_trainable(
        override_tune_step=step,
        training_operator_cls=NotingOperator,
        config={"folder": str(tmp_path)},
        num_workers=1,
        use_gpu=False,
    )
    tuner = tune.Tuner(trainable_cls, param_space={"lr": 0.01, "num_workers": 2}, run_config=_stop(tmp_path, 2))
    [result] = tuner.fit()
    assert result.error is None
    assert (result.metrics["num_workers"], result.metrics["num_groups"]) == (2, 1)
    assert result.metrics["epoch"] == 2


def _stop(folder: Path, num_iterations: int) -> Any:
    from ray import tune

    return tune.RunConfig(storage_path=str(folder / "tune"), verbose=0, stop={"training_iteration": num_iterations})


@pytest.mark.soak
def test_a_trial_copies_a_better_one_on_the_workers_that_it_has(tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    trainable_cls = TorchTrainer.as_trainable(
        override_tune_step=step, training_operator_cls=NotingOperator, config={"folder": str(tmp_path)}, use_gpu=False
    )
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"lr": tune.uniform(1e-6, 0.05)},
        synch=True,
    )
    tuner = tune.Tuner(
        trainable_cls,
        param_space={"lr": tune.grid_search([1e-6, 0.05])},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=scheduler, reuse_actors=True),
        run_config=_stop(tmp_path, 4),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    notes = [file.read_text().split() for file in tmp_path.iterdir() if file.is_file() and file.name.isdigit()]
    assert any(len(rates) > 1 for rates in notes), "a worker process served a second config"
    rates = {result.config["lr"]: result.metrics["rate"] for result in results}
    assert all(rate == lr for lr, rate in rates.items()), "the optimizer has the numbers of its trial"
    assert any(1e-5 < lr != 0.05 for lr in rates)
    losses = [result.metrics["val_loss"] for result in results]
    assert max(losses) < 0.5 * _loss_without_copy(results)


def _loss_without_copy(results: Any) -> float:
    """What the worse trial had before it copied."""
    return max(float(result.metrics_dataframe["val_loss"].max()) for result in results)
