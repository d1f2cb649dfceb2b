"""Trains one model on data that never leaves its worker: federated averaging over live workers.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each; 64 % are split over four clients and 20 % are for
testing. Each client has mostly its own digits, as hospitals or phones do. A worker is a client: it trains for an
epoch on its own data, and sends only its weights. The driver averages them and sends them back. For comparison, one
process trains on the data of all clients together, for the same number of epochs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from _common import load_digits, parse_arguments, print_result, ray_running
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

Weights = dict[str, torch.Tensor]


def data_of(client: int, num_clients: int) -> TensorDataset:
    """Return the data of a client. About three quarters are its own digits; the others may be any digit."""
    (images, digits), *_ = load_digits()
    home = np.where(np.random.default_rng(0).random(len(digits)) < 0.75, digits, np.arange(len(digits))) % num_clients
    own = home == client
    return TensorDataset(torch.tensor(images[own]).flatten(1), torch.tensor(digits[own]))


class Client(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=DataLoader(data_of(self.world_rank, self.world_size), 16, shuffle=True))


def weights_of(client: Client) -> tuple[int, Weights]:
    """Return the values that leave a client: its number of samples, and its weights."""
    state = {name: value.cpu() for name, value in client.model.state_dict().items()}
    return len(client.train_loader.dataset), state


def take_weights(weights: Weights, client: Client) -> None:
    client.model.load_state_dict(weights)


def averaged(answers: list[tuple[int, Weights]]) -> Weights:
    """Return the mean of the clients' weights. A client with more samples counts more."""
    total = sum(size for size, _ in answers)
    return {name: sum(size / total * weights[name] for size, weights in answers) for name in answers[0][1]}


def accuracy(model: nn.Module) -> float:
    images, digits = (torch.tensor(part) for part in load_digits()[2])
    with torch.no_grad():
        return (model.eval()(images.flatten(1)).argmax(dim=1) == digits).double().mean().item()


def train(num_rounds: int, **options: Any) -> tuple[float, float]:
    """Train. Return the accuracy of the averaged model, and of the first client before the last averaging."""
    own_way = {"strategy": "none", "add_dist_sampler": False}  # raysgd neither averages gradients nor shards data
    with TorchTrainer(training_operator_cls=Client, **own_way, **options) as trainer:
        for index in range(1, num_rounds + 1):
            trainer.train()
            of_one_client = accuracy(trainer.get_model(to_cpu=True))
            weights = averaged(trainer.apply_all_operators(weights_of))
            trainer.apply_all_operators(partial(take_weights, weights))
            together = accuracy(trainer.get_model(to_cpu=True))
            if index % 5 == 0 or index == num_rounds:
                print(f"  round {index:2d}: accuracy {together:.3f}; of one client {of_one_client:.3f}", flush=True)
    return together, of_one_client


def main() -> None:
    args = parse_arguments(__doc__, num_workers=4)
    num_rounds = 5 if args.smoke_test else 30
    print("one process with all data", flush=True)
    alone, _ = train(num_rounds, num_workers=1, use_local=True, use_gpu=args.use_gpu)
    together, of_one_client = alone, alone
    with ray_running(args):
        if args.num_workers > 1:
            print(f"{args.num_workers} clients", flush=True)
            together, of_one_client = train(num_rounds, num_workers=args.num_workers, use_gpu=args.use_gpu)
    print_result(
        args,
        test_accuracy=together,
        test_accuracy_of_one_process=alone,
        test_accuracy_of_one_client=of_one_client,
        rounds=num_rounds,
    )


if __name__ == "__main__":
    main()
