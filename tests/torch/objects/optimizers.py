"""PyTorch's optimizers, each with models that it can train."""

from __future__ import annotations

from typing import Any

import torch

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"amsgrad": True}, {"fused": True}, {"fused": True, "amsgrad": True}, {"foreach": True}],
    "AdamW": [{}, {"fused": True}, {"lr": torch.tensor(0.01)}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "fused": True}, {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "LBFGS": [{"max_iter": 3}, {"line_search_fn": "strong_wolfe"}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.1}, {"fused": True}],
    "ASGD": [{"t0": 0}],
}
"""The options to try, by the names of the classes. Others are tried without."""


def classes() -> list[type]:
    """Return the classes in `torch.optim`, also those of later versions."""
    found = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer]


def model_for(kind: type) -> torch.nn.Module:
    """Return a small model whose parameters this kind of optimizer can train."""
    torch.manual_seed(0)
    if kind is torch.optim.SparseAdam:
        return torch.nn.Embedding(7, 3, sparse=True)
    has_bias = kind is not getattr(torch.optim, "Muon", None)
    return torch.nn.Sequential(torch.nn.Linear(5, 4, bias=has_bias), torch.nn.Linear(4, 1, bias=has_bias))


def step(model: torch.nn.Module, optimizer: Any) -> None:
    """Train the model on one batch."""

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        is_table = isinstance(model, torch.nn.Embedding)
        value: torch.Tensor = (model(torch.tensor([1, 2]) if is_table else torch.ones(3, 5)) - 1).square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)
