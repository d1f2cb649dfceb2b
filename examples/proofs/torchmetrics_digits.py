"""Trains a classifier of handwritten digits and measures it with torchmetrics: the F1 score, and the area under curves.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation. Neither value
is a mean over batches or workers: raysgd merges the states of the metric objects of all workers, and computes each
value once. For comparison, scikit-learn computes the F1 score from the predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator


def load_data() -> list[TensorDataset]:
    """Return train and validation data, which are always the same."""
    return [
        TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in load_digits()[:2]
    ]


class MeasuredOperator(ClassificationOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.f1 = MulticlassF1Score(10, average="macro").to(self.device)
        self.area = MulticlassAUROC(10).to(self.device)

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        return load_data()

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = self.prepare_batch(batch)
        scores = self.model(*features)
        self.f1.update(scores, target)
        self.area.update(scores.softmax(dim=1), target)
        return {"f1": self.f1, "area": self.area, "num_samples": len(target)}


def train(num_epochs: int, **options: Any) -> dict[str, float]:
    """Train with these trainer options. Return the metrics, and the F1 score that scikit-learn computes."""
    config = {"lr": 0.003, "batch_size": 64, "seed": 0}
    with TorchTrainer(training_operator_cls=MeasuredOperator, config=config, split_batches=True, **options) as trainer:
        for row in trainer.epochs(num_epochs):
            print(f"  epoch {row['epoch']:2d}: F1 score {row['val_f1']:.4f}, area {row['val_area']:.4f}", flush=True)
        model = trainer.get_model(to_cpu=True)
    images, digits = load_data()[1].tensors
    with torch.no_grad():
        by_hand = f1_score(digits, model(images).argmax(dim=1), average="macro")
    return {"f1": row["val_f1"], "area": row["val_area"], "f1_of_scikit_learn": float(by_hand)}


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 2 if args.smoke_test else 15
    with ray_running(args):
        found = [train(num_epochs, **options) for options in one_process_then_workers(args)]
    alone = {f"{name}_of_one_process": found[0][name] for name in ("f1", "area")}
    print_result(args, **found[-1], **alone, epochs=num_epochs)


if __name__ == "__main__":
    main()
