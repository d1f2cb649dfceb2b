"""A sweep of eight trials whose driver is killed half-way, and what is left of it when it is restored.

    python -m tests.tune.sweep_story FOLDER [restore]

Runs until it is killed, or with `restore` to the end; then prints as JSON which epoch each trial reached, and how many
epochs each trial trained in all.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raysgd import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator

NUM_TRIALS, NUM_EPOCHS = 8, 3


def trainable(folder: Path) -> Any:
    def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
        result = {**trainer.train(), **trainer.validate()}
        with (folder / "epochs").open("a") as file:
            file.write(f"{trainer.config['number']}\n")
        return result

    return TorchTrainer.as_trainable(
        override_tune_step=step, training_operator_cls=LinearOperator, use_local=True, use_gpu=False
    )


def run_config(folder: Path) -> Any:
    return tune.RunConfig(
        storage_path=str(folder),
        name="sweep",
        stop={"training_iteration": NUM_EPOCHS},
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        failure_config=tune.FailureConfig(max_failures=2),
        verbose=0,
    )


def make_tuner(folder: Path) -> Any:
    return tune.Tuner(
        trainable(folder),
        param_space={"number": tune.grid_search(list(range(NUM_TRIALS)))},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=2),
        run_config=run_config(folder),
    )


def main(folder: Path, restores: bool) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**28)
    path = folder / "sweep"
    tuner = tune.Tuner.restore(str(path), trainable(folder)) if restores else make_tuner(folder)
    results = tuner.fit()
    trained = Counter((folder / "epochs").read_text().split())
    print(json.dumps({"epochs": [each.metrics["epoch"] for each in results], "trained": sorted(trained.values())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["restore"])
