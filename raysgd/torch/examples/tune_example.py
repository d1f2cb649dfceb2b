"""Tunes the learning rate for fitting a line with Ray Tune. Every trial is a `TorchTrainer`.

The data is points on the line y = 2 x + 5. Existing programs and tests import names from this module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from raysgd.torch.examples.train_example import LinearDataset
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

_NUM_ITERATIONS = 2
_NUM_SAMPLES = 3
_LEARNING_RATES = (1e-4, 1e-3)


def get_custom_training_operator(lr_reduce_on_plateau: bool = False) -> type[TrainingOperator]:
    """Create an operator class that fits a linear layer.

    Args:
        lr_reduce_on_plateau: True for a `ReduceLROnPlateau` scheduler instead of a `StepLR`.
    """

    class CustomTrainingOperator(TrainingOperator):
        """Fits a linear layer."""

        def setup(self, config: dict[str, Any]) -> None:
            model = torch.nn.Linear(1, config.get("hidden_size", 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-4))
            self.model, self.optimizer, self.criterion, self.scheduler = self.register(
                models=model,
                optimizers=optimizer,
                criterion=torch.nn.MSELoss(),
                schedulers=_scheduler(optimizer, lr_reduce_on_plateau),
            )
            train, validation = (
                DataLoader(LinearDataset(2, 5, size=size), batch_size=config[BATCH_SIZE]) for size in (1000, 400)
            )
            self.register_data(train_loader=train, validation_loader=validation)

    return CustomTrainingOperator


def _scheduler(optimizer: torch.optim.Optimizer, lr_reduce_on_plateau: bool) -> Any:
    if lr_reduce_on_plateau:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min")
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)


def tune_example(operator_cls: type[TrainingOperator], num_workers: int = 1, use_gpu: bool = False) -> Any:
    """Run the trials, and return the best config. The trainer steps the learning rate scheduler after each epoch.

    Args:
        operator_cls: A class that `get_custom_training_operator` returned.
        num_workers: Number of workers per trial.
        use_gpu: True to give each worker a GPU.
    """
    return _best_config(
        training_operator_cls=operator_cls, num_workers=num_workers, use_gpu=use_gpu, scheduler_step_freq="epoch"
    )


def tune_example_manual(operator_cls: type[TrainingOperator], num_workers: int = 1, use_gpu: bool = False) -> Any:
    """Run the trials, and return the best config. Each trial steps its scheduler with the validation loss.

    Args:
        operator_cls: A class that `get_custom_training_operator(lr_reduce_on_plateau=True)` returned.
        num_workers: Number of workers per trial.
        use_gpu: True to give each worker a GPU.
    """

    def step(trainer: TorchTrainer, info: dict[str, Any]) -> dict[str, Any]:
        trained, validated = trainer.train(), trainer.validate()
        trainer.update_scheduler(validated["val_loss"])
        return {**trained, **validated}

    return _best_config(
        override_tune_step=step,
        training_operator_cls=operator_cls,
        num_workers=num_workers,
        use_gpu=use_gpu,
        scheduler_step_freq="manual",
    )


def _best_config(**options: Any) -> Any:
    from ray import tune

    tuner = tune.Tuner(
        TorchTrainer.as_trainable(config={BATCH_SIZE: 128}, **options),
        param_space={"lr": tune.grid_search(list(_LEARNING_RATES))},
        tune_config=tune.TuneConfig(num_samples=_NUM_SAMPLES, metric="val_loss", mode="min"),
        run_config=tune.RunConfig(stop={"training_iteration": _NUM_ITERATIONS}, verbose=0),
    )
    return tuner.fit().get_best_result().config


if __name__ == "__main__":
    from raysgd.core.arguments import parse_arguments

    args = parse_arguments(__doc__)
    print(tune_example(get_custom_training_operator(), args.num_workers, args.use_gpu))
