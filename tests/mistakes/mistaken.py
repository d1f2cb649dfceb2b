"""Operators and functions with a mistake each. Workers import this module."""

from __future__ import annotations

import pdb
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from raysgd.torch import TrainingOperator
from tests.torch.operators_for_tests import LinearOperator, dataset


class Careless(LinearOperator):
    """Makes the mistake in `setup` or in a batch that its config, or the info of a call, names."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        mistake = config.get("mistake")
        if mistake is not None:
            getattr(self, mistake)(config)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        mistake = batch_info.get("mistake")
        if mistake is not None and batch_info.get("rank", self.world_rank) == self.world_rank:
            returned: dict[str, Any] = getattr(self, mistake)(batch)
            return returned
        return super().train_batch(batch, batch_info)

    # -------------------------------------------------------------------------------------------------- in `setup`

    def reads_a_missing_key(self, config: dict[str, Any]) -> None:
        self.rate = config["learning_rat"]

    def uses_a_missing_gpu(self, config: dict[str, Any]) -> None:
        self.buffer = torch.zeros(3, device="cuda:7")

    def opens_a_missing_file(self, config: dict[str, Any]) -> None:
        self.labels = Path("/there/is/no/labels.txt").read_text()

    def registers_samples(self, config: dict[str, Any]) -> None:
        self.register_data(train_loader=dataset(4))

    def registers_a_class(self, config: dict[str, Any]) -> None:
        self.register(models=torch.nn.Linear(1, 1), optimizers=torch.optim.SGD)

    def registers_the_class_of_a_loss(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        self.register(models=model, optimizers=optimizer, criterion=torch.nn.MSELoss)

    def registers_by_position(self, config: dict[str, Any]) -> None:
        self.register(torch.nn.Linear(1, 1), None, None)  # type: ignore[call-overload]

    def has_a_broken_dataset(self, config: dict[str, Any]) -> None:
        self.register_data(train_loader=DataLoader(Broken(), batch_size=2))

    def has_a_broken_loader(self, config: dict[str, Any]) -> None:
        self.register_data(train_loader=DataLoader(Broken(), batch_size=2, num_workers=1))

    def has_samples_of_two_sizes(self, config: dict[str, Any]) -> None:
        samples: Any = [(torch.zeros(size), torch.zeros(1)) for size in (3, 3, 4, 4)]
        self.register_data(train_loader=DataLoader(samples, batch_size=4, collate_fn=stacked))

    # ------------------------------------------------------------------------------------------------ in a batch

    def returns_nothing(self, batch: Any) -> None:
        self.model(batch[0])

    def returns_a_number(self, batch: Any) -> float:
        return float(self.model(batch[0]).mean())

    def multiplies_wrong_shapes(self, batch: Any) -> Any:
        return self.model(batch[0].transpose(0, 1)[:, :2])

    def compares_other_types(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[2].squeeze(1))

    def calls_a_missing_method(self, batch: Any) -> Any:
        return batch.to_device("cpu")

    def moves_to_a_missing_gpu(self, batch: Any) -> Any:
        return self.model(batch[0].to("cuda:7"))

    def stops_in_a_debugger(self, batch: Any) -> None:
        pdb.set_trace()
        self.model(batch[0])

    def leaves_the_program(self, batch: Any) -> None:
        raise SystemExit(3)

    def divides_by_zero(self, batch: Any) -> float:
        return len(batch) / 0


class Broken(Dataset[Any]):
    """Has fewer samples than it says."""

    def __getitem__(self, index: int) -> Any:
        return dataset(1)[7]

    def __len__(self) -> int:
        return 6


def stacked(samples: list[Any]) -> Any:
    """Make a batch, as if all samples had one size."""
    return torch.stack([features for features, _ in samples]), torch.stack([target for _, target in samples])


class WithoutLoss(TrainingOperator):
    """Keeps its loss under another name than the stock methods read."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(3, 1)
        self.net, self.optimizer, self.loss_fn = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters()), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(dataset(4)))


class WithoutValidation(LinearOperator):
    """Registers nothing to validate on."""

    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        super().register_data(train_loader=train_loader)


def takes_two(config: dict[str, Any], rank: int) -> None:
    """Takes more than workers pass."""
