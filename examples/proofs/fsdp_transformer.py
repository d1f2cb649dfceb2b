"""Trains a transformer that is sharded across the workers (FSDP): each holds a part of the weights and of Adam's
state.

Data: synthetic rows of 12 random numbers from 0 to 31. The model learns to sort them. 2,048 rows are for training,
512 for testing. The score is the fraction of positions with the right number. A model that guesses reaches 0.03.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import ClassificationOperator
from raysgd.utils import BATCH_SIZE

NUM_VALUES, LENGTH, WIDTH = 32, 12, 64


class Sorter(nn.Module):
    """Encodes a row without a mask, so every position sees every number."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.values, self.places = nn.Embedding(NUM_VALUES, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layers = (
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.layers = nn.Sequential(*layers)  # FSDP shards each element of a `Sequential` separately
        self.head = nn.Linear(WIDTH, NUM_VALUES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.values(rows) + self.places)).transpose(1, 2)  # scores in the second dimension


def make_data(num_rows: int, seed: int) -> TensorDataset:
    rows = torch.randint(NUM_VALUES, (num_rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(rows, rows.sort(dim=1).values)


class SortingOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return Sorter()

    def build_data(self, config: dict[str, Any]) -> tuple[TensorDataset, TensorDataset]:
        return make_data(2048, seed=1), make_data(512, seed=2)


def share_held(operator: SortingOperator) -> float:
    """Return the fraction of the model's weights that this worker holds."""
    parts = [getattr(each, "_local_tensor", each).numel() for each in operator.model.parameters()]
    return sum(parts) / sum(each.numel() for each in operator.model.parameters())


def train(num_epochs: int, **options: Any) -> tuple[float, list[float]]:
    """Train with these trainer options. Return the score, and the fraction of the weights that each worker holds."""
    if not options.get("use_local"):
        options.update(strategy="fsdp", strategy_options={"min_block_parameters": 10_000})
    config = {"lr": 0.002, BATCH_SIZE: 64, "seed": 0}
    with TorchTrainer(training_operator_cls=SortingOperator, config=config, **options) as trainer:
        shares = trainer.apply_all_operators(share_held)
        for row in trainer.epochs(num_epochs):
            print(f"  epoch {row['epoch']}: train loss {row['train_loss']:.3f}", flush=True)
        model = trainer.get_model(to_cpu=True).eval()  # the whole model
    rows, in_order = make_data(512, seed=2).tensors
    with torch.no_grad():
        return (model(rows).argmax(dim=1) == in_order).double().mean().item(), shares


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs = 3 if args.smoke_test else 10
    with ray_running(args):
        found = [train(num_epochs, **options) for options in one_process_then_workers(args)]
    (alone, _), (score, shares) = found[0], found[-1]
    print("each worker holds of the weights: " + ", ".join(f"{share:.0%}" for share in shares))
    print_result(args, score=score, score_of_one_process=alone, largest_share=max(shares), epochs=num_epochs)


if __name__ == "__main__":
    main()
