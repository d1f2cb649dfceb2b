"""Trains a classifier of handwritten digits in fp32 and in mixed precision: bf16 on CPUs, fp16 with `--use-gpu`.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation. Weights stay
in fp32, and the forward pass computes with half the bits. Each step accumulates the gradients of two batches and clips
them, which works the same in all formats.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import load_digits, one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        parts = load_digits()[:2]
        return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in parts]


def train(num_epochs: int, precision: str, **options: Any) -> tuple[float, set[str]]:
    """Train with these trainer options. Return the last accuracy, and the types of all weights."""
    with TorchTrainer(
        training_operator_cls=DigitsOperator,
        config={"lr": 0.003, "batch_size": 32, "seed": 0},
        split_batches=True,
        precision=precision,
        accumulate_grad_batches=2,
        clip_grad_norm=1.0,
        **options,
    ) as trainer:
        for row in trainer.epochs(num_epochs):
            loss, accuracy = row["train_loss"], row["val_accuracy"]
            print(f"  {precision} epoch {row['epoch']:2d}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        return accuracy, {str(weight.dtype) for weight in trainer.get_model().parameters()}


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs, half, found = 2 if args.smoke_test else 15, "fp16" if args.use_gpu else "bf16", []
    with ray_running(args):
        for options in one_process_then_workers(args):
            found.append([train(num_epochs, precision, **options) for precision in ("fp32", half)])
    ([full_alone, _], [mixed_alone, _]), ([full, _], [mixed, types]) = found[0], found[-1]
    print_result(
        args,
        f"{half} gets {mixed:.3f} of the digits right, fp32 {full:.3f}. The weights are {', '.join(types)} in both.",
        accuracy=mixed,
        accuracy_of_one_process=mixed_alone,
        accuracy_in_fp32=full,
        accuracy_in_fp32_of_one_process=full_alone,
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
