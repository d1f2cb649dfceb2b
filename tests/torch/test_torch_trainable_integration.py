"""Operators as trials of Ray Tune, with workers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd import TorchTrainer
from tests.helpers.run_if import RunIf
from tests.torch.operators_for_tests import LinearOperator

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("ray_cluster"),
    RunIf(modules=["ray.tune", "pandas", "pyarrow"]),
]


def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return {**trainer.train(), "num_groups": len(groups), "num_workers": trainer.num_workers}


def test_workers_are_in_what_tune_reserved_with_the_resources_of_the_trial(tmp_path: Path) -> None:
    from ray import tune

    trainable_cls = TorchTrainer.as_trainable(
        override_tune_step=step,
        training_operator_cls=LinearOperator,
        num_workers=1,
        use_gpu=False,
    )
    run_config = tune.RunConfig(storage_path=str(tmp_path), verbose=0, stop={"training_iteration": 2})
    tuner = tune.Tuner(trainable_cls, param_space={"lr": 0.01, "num_workers": 2}, run_config=run_config)
    [result] = tuner.fit()
    assert result.error is None
    assert (result.metrics["num_workers"], result.metrics["num_groups"]) == (2, 1)
    assert result.metrics["epoch"] == 2
