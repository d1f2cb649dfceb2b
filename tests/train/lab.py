"""Training functions for tests. They run in workers, which import this module."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from raysgd import train


def count_up(config: dict[str, Any]) -> int:
    """Reports and saves numbers from where it was left; dies, or raises, as it is told. Returns where it began."""
    checkpoint = train.load_checkpoint()
    first = checkpoint["number"] + 1 if checkpoint else 0
    for number in range(first, config["num_steps"]):
        train.report(number=number, rank=train.world_rank(), size=train.world_size())
        for rank, step, flag in config.get("deaths", ()):
            if (train.world_rank(), number) == (rank, step) and claim(flag):
                os.kill(os.getpid(), signal.SIGKILL)
        if number % config.get("save_every", 1) == 0:
            train.save_checkpoint(number=number, loss=config.get("losses", [0.0] * 99)[number])
    return first


def claim(flag: Path) -> bool:
    """Whether this is the first time, over all processes."""
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fail_on_rank_1() -> None:
    """Rank 1 raises at once; the others report without end."""
    if train.world_rank() == 1:
        raise KeyError("bad sample 7")
    while True:
        train.report(number=1)


def numbers(results: list[list[dict[str, Any]]]) -> list[list[int]]:
    """Of every step the numbers of all workers."""
    return [[result["number"] for result in step] for step in results]


def fit(config: dict[str, Any]) -> list[float]:
    """Fits a line with the helpers for PyTorch; returns the weights in the end."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from raysgd.train import torch as helpers

    helpers.accelerate(amp=config["amp"])
    torch.manual_seed(train.world_rank())
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    loader = helpers.prepare_data_loader(DataLoader(TensorDataset(x, 2 * x + 1), batch_size=4, shuffle=True))
    model = helpers.prepare_model(torch.nn.Linear(1, 1))
    optimizer = helpers.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    for epoch in range(config["num_epochs"]):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            helpers.backward(loss)
            optimizer.step()
        train.report(loss=float(loss))
    train.save_checkpoint(model=model, state=model.state_dict())
    return [float(parameter.detach()) for parameter in model.parameters()]


def fit_divided(config: dict[str, Any]) -> list[float]:
    """Fits a line with a model that is divided, or whole, from a checkpoint on if there is one; returns the weights."""
    import torch

    from raysgd.train.torch import backward, gather_state, load_state, prepare_model, prepare_optimizer

    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Linear(3, 1))
    early = torch.optim.Adam(whole.parameters())
    model = prepare_model(whole, parallel_strategy=config["strategy"], parallel_strategy_kwargs=config.get("options"))
    if config["strategy"] == "fsdp":
        with pytest.raises(ValueError, match="create the optimizer afterwards"):
            prepare_optimizer(early)
    optimizer = prepare_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    first, checkpoint = 0, train.load_checkpoint()
    if checkpoint is not None:
        first = checkpoint["epoch"]
        load_state(model, checkpoint["model"])
        load_state(optimizer, checkpoint["optimizer"])
    x = torch.linspace(-1, 1, 8)[train.world_rank() :: train.world_size()].unsqueeze(1)
    for epoch in range(first, config["num_epochs"]):
        optimizer.zero_grad()
        backward(torch.nn.functional.mse_loss(model(x), 2 * x + 1))
        optimizer.step()
        state = {"model": gather_state(model), "optimizer": gather_state(optimizer)}
        train.save_checkpoint(epoch=epoch + 1, **state)
    return [float(x) for parameter in model.parameters() for x in _local(parameter).flatten()]


def _local(parameter: Any) -> Any:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
