"""Healthy programs of chance, of the examples' kinds: architecture, optimizer and batch size, with workers killed.

    python -m tests.torch.random_programs --programs 200 --seed 7

Workers with other numbers of threads round in another order, so none of them may be told that its weights differ.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery, testing
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.torch.idiom_table import grow_back, ray_with_forks, shipped

NUM_CALLS, NUM_STEPS = 2, 12
NUM_CLASSES, SIDE, LENGTH, NUM_TOKENS = 5, 8, 10, 30


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, width), nn.Linear(width, NUM_CLASSES)
        self.inner = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.inner(self.embedding(tokens))[0][:, -1])
        return output


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, width), nn.Linear(width, NUM_CLASSES)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.inner(self.embedding(tokens)).mean(1))
        return output


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = images + self.inner(images)
        return output


def _convolutional(width: int) -> nn.Module:
    first = nn.Conv2d(1, width, 3)
    return nn.Sequential(first, _Residual(width), _Residual(width), nn.Flatten(), nn.LazyLinear(NUM_CLASSES))


def _grouped(width: int) -> nn.Module:
    layers = [nn.Conv2d(1, width, 3, stride=2), nn.GroupNorm(4, width), nn.GELU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*layers, nn.LazyLinear(NUM_CLASSES))


def _dense(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.LazyLinear(width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, NUM_CLASSES))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "dense": _dense,
    "convolutional": _convolutional,
    "group norm": _grouped,
    "recurrent": _Recurrent,
    "attention": _Attention,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.3, momentum=0.9, nesterov=True),
    "Adam": lambda weights: torch.optim.Adam(weights, 0.01),
    "AdamW": lambda weights: torch.optim.AdamW(weights, 0.03, weight_decay=0.1),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, 0.003),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, 0.1),
}


class Drawn(TrainingOperator):
    """What its config says, with as many threads on each worker."""

    def __new__(cls, config: dict[str, Any], **_: Any) -> Drawn:
        made: Drawn = super().__new__(DrawnByHand if config["is_own"] else Drawn)
        return made

    def setup(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"][self.world_rank % len(config["threads"])])
        generator = torch.Generator().manual_seed(config["number"])
        is_text = config["model"] in ("recurrent", "attention")
        features = torch.randn(NUM_STEPS * config[BATCH_SIZE] - 3, 1, SIDE, SIDE, generator=generator)
        if is_text:
            features = torch.randint(NUM_TOKENS, (len(features), LENGTH), generator=generator)
        target = torch.randint(NUM_CLASSES, (len(features),), generator=generator)
        model = MODELS[config["model"]](config["width"])
        with torch.no_grad():
            model(features[:2])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=OPTIMIZERS[config["optimizer"]](model.parameters()),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(
            train_loader=DataLoader(TensorDataset(features, target), batch_size=config[BATCH_SIZE], shuffle=True)
        )


class DrawnByHand(Drawn):
    """The same with a step by hand."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


def drawn(seed: int, number: int) -> dict[str, Any]:
    """Return a program, as a config."""
    chance = random.Random(f"{seed} {number}")
    return {
        "number": number,
        "model": chance.choice(list(MODELS)),
        "optimizer": chance.choice(list(OPTIMIZERS)),
        "width": chance.choice([8, 16, 32, 64]),
        "is_own": chance.random() < 0.4,
        "threads": [chance.choice([1, 2]) for _ in range(4)],
        BATCH_SIZE: chance.randint(8, 40),
    }


def run_programs(
    num_workers: int, seed: int, numbers: Sequence[int]
) -> Iterator[tuple[dict[str, Any], list[str], str]]:
    """Run programs one after the other in a live trainer; yield each with what followed a death, and what it raised."""
    first = drawn(seed, numbers[0])
    with TorchTrainer(
        training_operator_cls=Drawn,
        config=first,
        num_workers=num_workers,
        num_cpus_per_worker=0.5,
        use_gpu=False,
        split_batches=True,
        scheduler_step_freq="manual",
        seed=seed,
        recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0, snapshot_every_s=0),
    ) as trainer:
        events = controller_of(trainer).history.events
        for number in numbers:
            chance, config, error = random.Random(f"{seed} kill {number}"), drawn(seed, number), ""
            num_before = len(events)
            try:
                grow_back(trainer, num_workers)
                trainer.reset_config(config)
                testing.kill_worker(
                    trainer, chance.randrange(num_workers), at=f"step:{chance.randrange(NUM_CALLS * NUM_STEPS - 2)}"
                )
                for _ in range(NUM_CALLS):
                    trainer.train()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            yield config, [event.kind for event in [*events][num_before:] if event.is_failure], error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all chance")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    kinds, began = Counter[str](), time.monotonic()
    with ray_with_forks(), shipped(Drawn.__module__):
        for num_workers in (2, 3, 4):
            end = arguments.first + arguments.programs
            numbers = [number for number in range(arguments.first, end) if number % 3 + 2 == num_workers]
            for config, happened, error in run_programs(num_workers, arguments.seed, numbers):
                kinds.update(happened or ["calm"])
                kinds["raised"] += bool(error)
                print(f"{time.monotonic() - began:6.1f} s {num_workers} {config} {happened} {error}", flush=True)
    print(dict(kinds))


if __name__ == "__main__":
    main()
