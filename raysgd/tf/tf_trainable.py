"""`TFTrainable`: a `TFTrainer` with creator functions as a Ray Tune trial."""

from __future__ import annotations

from typing import Any

from raysgd.core.cluster.ray_cluster import gpus_of_cluster
from raysgd.core.cluster.resources import DriverView, choose_gpus
from raysgd.tf.tf_trainer import TFTrainer
from raysgd.trainer.driver import tune_trial


class TFTrainable(tune_trial.trainer_trainable("`TFTrainable`")):  # type: ignore[misc]
    """A Ray Tune trial. Each of its steps runs Keras's `fit` once, and then one evaluation.

    The trial's config must have the keys `model_creator`, `data_creator`, `num_replicas` and `use_gpu`. Optional keys
    are `num_cpus_per_worker` (default: 1) and `trainer_config`, the trainer's config.
    """

    _checkpoint_name = "model"

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """Return an empty bundle for the trial itself, which needs no resources, and a bundle for each worker."""
        num_gpus = choose_gpus(config["use_gpu"], config["num_replicas"], DriverView(), gpus_of_cluster).num_gpus
        bundle = {"CPU": config.get("num_cpus_per_worker", 1), "GPU": num_gpus}
        return tune_trial.reservation([{}, *[bundle] * config["num_replicas"]])

    def _create_trainer(self, tune_config: dict[str, Any]) -> TFTrainer:
        self._resources = _resources(tune_config)
        return TFTrainer(
            model_creator=tune_config["model_creator"],
            data_creator=tune_config["data_creator"],
            config=tune_config.get("trainer_config", {}),
            **self._resources,
        )

    def _reset_trainer(self, tune_config: dict[str, Any]) -> bool:
        if _resources(tune_config) != self._resources:
            return False
        config = tune_config.get("trainer_config", {})
        self._trainer._reset_creators(tune_config["model_creator"], tune_config["data_creator"], config)
        return True

    def step(self) -> dict[str, Any]:
        """Run one step of the trial: train, evaluate, and return the results of both."""
        trained: dict[str, Any] = self._trainer.train()
        validated: dict[str, Any] = self._trainer.validate()
        return {**trained, **validated}


def _resources(tune_config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `TFTrainer` that set the workers' resources, from the trial's config."""
    return {
        "num_replicas": tune_config["num_replicas"],
        "num_cpus_per_worker": tune_config.get("num_cpus_per_worker", 1),
        "use_gpu": tune_config["use_gpu"],
    }
