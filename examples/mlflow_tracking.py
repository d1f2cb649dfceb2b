"""Tracks trainings with MLflow: one run in one process and one on two workers, in the same experiment.

Data: the 1,797 real digits, 8x8 pixels each, that come with scikit-learn. 64 % are trained on, 16 % measure. MLflow
keeps its runs in a temporary folder; to keep them, or to use a server, set `tracking_uri`. No network is needed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import mlflow
import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.callbacks import MLflowLogger
from raysgd.operators import ClassificationOperator
from raysgd.utils import BATCH_SIZE

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it when runs are kept in a folder


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        parts = load_digits()[:2]
        return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in parts]


def train(num_epochs: int, folder: Path, **options: Any) -> str:
    """Trains with these options of a trainer; returns the id of the run that MLflow has of it."""
    tags = {"workers": str(options["num_workers"])}
    logger = MLflowLogger("digits", tracking_uri=(folder / "mlruns").as_uri(), tags=tags)
    config = {"lr": 0.003, BATCH_SIZE: 64, "seed": 0}
    with TorchTrainer(
        training_operator_cls=DigitsOperator, config=config, joint_batch="constant", **options
    ) as trainer:
        trainer.fit(num_epochs, callbacks=[logger], folder=folder)
    assert logger.run_id is not None
    return logger.run_id


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 2 if args.smoke_test else 15
    with ray_running(args), tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        ids = [train(num_epochs, Path(folder), **options) for options in one_process_then_workers(args)]
        client = mlflow.MlflowClient(tracking_uri=(Path(folder) / "mlruns").as_uri())
        accuracies = []
        for run_id in ids:  # as MLflow has them
            run, history = client.get_run(run_id), client.get_metric_history(run_id, "val_accuracy")
            accuracies.append([metric.value for metric in sorted(history, key=lambda metric: metric.step)])
            values = ", ".join(f"{value:.3f}" for value in accuracies[-1])
            print(f"{run.data.tags['workers']} worker(s), {run.info.status}, lr {run.data.params['lr']}: {values}")
    print_result(
        args,
        accuracy=accuracies[-1][-1],
        accuracy_of_one_process=accuracies[0][-1],
        tracked_epochs=[len(values) for values in accuracies],
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
