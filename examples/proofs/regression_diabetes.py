"""Predicts how far diabetes has progressed after a year, with `RegressionOperator`, in one process and on two workers.

Data: the diabetes data of scikit-learn: 442 real patients with ten measurements each. 354 are for training. The other
88 only test the result. Score: the fraction of the variance that is explained (R2), which is 0 for a model that
always predicts the mean. With so few patients, the score depends a lot on the choice of the test data.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import RegressionOperator


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return train and test data, which are always the same."""
    measurements, progress = load_diabetes(return_X_y=True)
    parts = train_test_split(measurements, progress, test_size=0.2, random_state=0)
    train_x, test_x, train_y, test_y = (torch.tensor(part, dtype=torch.float32) for part in parts)
    spread = train_x.std(dim=0)  # of the training patients only, like the mean below
    return TensorDataset(train_x / spread, train_y), TensorDataset(test_x / spread, test_y)


class Diabetes(RegressionOperator):
    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        with torch.no_grad():
            model[2].weight.mul_(50)  # targets go from 25 to 346
            model[2].bias.fill_(load_data()[0].tensors[1].mean())
        return model

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        return load_data()


def train(num_epochs: int, **options: Any) -> dict[str, Any]:
    """Train with these trainer options. Return the metrics of the held-out patients."""
    config = {"lr": 0.01, "weight_decay": 0.001, "batch_size": 32, "seed": 0}
    with TorchTrainer(training_operator_cls=Diabetes, config=config, split_batches=True, **options) as trainer:
        for row in trainer.epochs(num_epochs, validation_freq=5):
            if "val_r2" in row:
                print(
                    f"epoch {row['epoch']:2d}: train loss {row['train_loss']:6.0f}, R2 {row['val_r2']:.3f}", flush=True
                )
        return trainer.validate()


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 20 if args.smoke_test else 40
    with ray_running(args):
        found = [train(num_epochs, **options) for options in one_process_then_workers(args)]
    print(
        f"explained share of the variance: {found[-1]['val_r2']:.3f}, mean absolute error: {found[-1]['val_mae']:.1f}"
    )
    print_result(
        args,
        test_r2=found[-1]["val_r2"],
        test_r2_of_one_process=found[0]["val_r2"],
        test_mae=found[-1]["val_mae"],
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
