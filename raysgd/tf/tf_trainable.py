"""`TFTrainable`: a `TFTrainer` of creator functions as a trial of Ray Tune."""

from __future__ import annotations

import os
from typing import Any

from raysgd._optional import require
from raysgd.tf.tf_trainer import TFTrainer

tune = require("ray.tune", extra="tune", purpose="`TFTrainable`")

_CHECKPOINT = "model"


class TFTrainable(tune.Trainable):  # type: ignore[name-defined]
    """Trains for one `fit` and evaluates in each step of a trial.

    The trial's config has `model_creator`, `data_creator`, `num_replicas` and `use_gpu`, and may have
    `num_cpus_per_worker` (1) and `trainer_config`, which becomes the trainer's config.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """A bundle for each worker; the trial itself only drives."""
        bundle = {"CPU": config.get("num_cpus_per_worker", 1), "GPU": int(config["use_gpu"])}
        return tune.PlacementGroupFactory([{}, *[bundle] * config["num_replicas"]])

    def setup(self, config: dict[str, Any]) -> None:
        """Starts the workers."""
        self._trainer = TFTrainer(
            model_creator=config["model_creator"],
            data_creator=config["data_creator"],
            config=config.get("trainer_config", {}),
            num_replicas=config["num_replicas"],
            num_cpus_per_worker=config.get("num_cpus_per_worker", 1),
            use_gpu=config["use_gpu"],
        )

    def step(self) -> dict[str, Any]:
        """Trains, then evaluates; the results of both."""
        trained: dict[str, Any] = self._trainer.train()
        validated: dict[str, Any] = self._trainer.validate()
        return {**trained, **validated}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the state into the folder."""
        self._trainer.save(os.path.join(checkpoint_dir, _CHECKPOINT))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Restores what `save_checkpoint` wrote."""
        self._trainer.load(os.path.join(checkpoint, _CHECKPOINT))

    def cleanup(self) -> None:
        """Ends the workers."""
        self._trainer.shutdown()
