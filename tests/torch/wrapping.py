"""Small models, one step of them, and a change of the group, for the tests of how replicas are kept equal."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raysgd.core.connections.torch import end_process_group
from raysgd.torch.parallel.strategy import DDP, Strategy
from raysgd.torch.parallel.tensors import unwrap


def a_model() -> torch.nn.Module:
    return torch.nn.Linear(2, 1, bias=False)


def gradient(parallel: Strategy, model: torch.nn.Module) -> list[float]:
    """The gradient of one step on inputs of 1."""
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return unwrap(model).weight.grad.tolist()[0]  # type: ignore[no-any-return, union-attr]


def change_group() -> None:
    end_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def reformed(parallel: DDP) -> None:
    """What happens to models whose group was left and formed anew."""
    change_group()
    parallel.reform()


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
