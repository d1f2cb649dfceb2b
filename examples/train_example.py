"""Fits a line with creator functions: the older way of writing a training, which still works.

Data: points on the line y = 2 x + 5, computed and without noise, so what must come out is known. The creator functions
are in `raysgd.torch.examples.train_example`; each takes the config and returns a part of the training.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running

from raysgd import TorchTrainer, TrainingOperator
from raysgd.torch.examples.train_example import data_creator, model_creator, optimizer_creator, scheduler_creator

# The functions become an operator class, which may also be subclassed.
LineOperator = TrainingOperator.from_creators(
    model_creator=model_creator,
    optimizer_creator=optimizer_creator,
    data_creator=data_creator,
    loss_creator=torch.nn.MSELoss,
    scheduler_creator=scheduler_creator,
)


def fit_line(num_epochs: int, **options: Any) -> dict[str, float]:
    """Returns the slope and the intercept that were found, and the loss on the validation points."""
    with TorchTrainer(
        training_operator_cls=LineOperator,
        config={"lr": 1e-2, "hidden_size": 1, "batch_size": 4},
        scheduler_step_freq="epoch",
        joint_batch="constant",
        seed=0,
        **options,
    ) as trainer:
        for _ in range(num_epochs):
            trained = trainer.train()
            print(f"epoch {trained['epoch']}: train loss {trained['train_loss']:.4f}", flush=True)
        validated = trainer.validate()
        model = trainer.get_model(to_cpu=True)
    return {"slope": model.weight.item(), "intercept": model.bias.item(), "val_loss": validated["val_loss"]}


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 1 if args.smoke_test else 5
    with ray_running(args):
        found = [fit_line(num_epochs, **options) for options in one_process_then_workers(args)]
    for line in found:
        print(f"found y = {line['slope']:.3f} x + {line['intercept']:.3f}; the points are on y = 2 x + 5")
    print_result(args, **found[-1], val_loss_of_one_process=found[0]["val_loss"], epochs=num_epochs)


if __name__ == "__main__":
    main()
