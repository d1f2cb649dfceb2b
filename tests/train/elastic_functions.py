"""Training functions that go on where they are when other workers are lost. They run in workers, which import this."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.air.session import current_session
from raysgd.core.engine.shared.types import World
from raysgd.streams.stream import Pipeline
from raysgd.train import torch as helpers
from raysgd.train._torch.loaders import of_stream, over_global_batches
from tests.streams.made import MadeStream
from tests.train.lab import claim

NUM_SAMPLES, JOINT = 46, 12  # the last global batch has 10


class Counting(torch.nn.Module):
    """A line, and for each sample a weight that tells how often a step was taken on it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1, affine=False, momentum=0.01)
        self.line = torch.nn.Linear(1, 1)
        self.counts = torch.nn.Embedding(NUM_SAMPLES, 1)
        torch.nn.init.zeros_(self.counts.weight)
        self.double()  # sums of thousands of steps are to be exact

    def forward(self, indices: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.norm(inputs)  # has buffers that are exchanged, and leaves the result alone
        return self.line(inputs), self.counts(indices)


def samples() -> TensorDataset:
    x = torch.linspace(-1, 1, NUM_SAMPLES, dtype=torch.float64).unsqueeze(1)
    return TensorDataset(torch.arange(NUM_SAMPLES), x, 2 * x + 1)


def sample_stream(is_known: bool = True) -> Pipeline:
    """The same samples, out of four shards."""

    def sample(row: tuple[str, int]) -> tuple[Any, ...]:
        number = 10 * int(row[0].removeprefix("shard-")) + row[1]
        x = np.float64([-1 + 2 * number / (NUM_SAMPLES - 1)])
        return np.int64(number), x, 2 * x + 1

    return MadeStream([10, 10, 10, 16], is_known).shuffle(16).map(sample).batch(JOINT)


def die_once(folder: Path, name: str) -> None:
    """Ends this process in the hard way, unless one died under this name before."""
    if claim(folder / name):
        os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds: float, folder: Path, name: str) -> None:
    """Does so in a while, wherever the function is then."""
    if not (folder / name).exists():
        timer = threading.Timer(seconds, die_once, (folder, name))
        timer.daemon = True
        timer.start()


def train_counting(config: dict[str, Any]) -> dict[str, Any]:
    """Trains, and dies where it is told; rank 0 writes down the weights. Returns where it began, and how it went on.

    Each death has a rank, a place and its number, and a name.
    """
    folder, began_as = Path(config["folder"]), train.world_rank()
    deaths = [death for death in config["deaths"] if death["rank"] == began_as]

    def at(place: str, number: int) -> None:
        for death in deaths:
            if death.get("at") == (place, number):
                die_once(folder, death["name"])

    def leaves_out(place: str, number: int) -> bool:
        """Whether this rank alone takes no step here, once. With a batch, it is one ahead of the others."""
        return began_as == 1 and config.get("leaves_out") == (place, number) and claim(folder / "left out")

    flaw = config.get("flaw")
    torch.manual_seed(0)
    model, first = Counting(), 0
    if is_to_step_in() and flaw == "model":
        model.more = torch.nn.Linear(2, 2)
    checkpoint = train.load_checkpoint() if config.get("saves") else None
    if checkpoint:
        first = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model"])
    loader: Any = DataLoader(samples(), batch_size=JOINT // train.world_size(), shuffle=True)
    data = train.get_dataset_shard() if config.get("data") else None
    loader = helpers.prepare_data_loader(data if config.get("data") == "stream" else loader, exact=True)
    if checkpoint and "place" in checkpoint:
        loader.load_state_dict(checkpoint["place"])
    is_new = is_to_step_in()
    model = helpers.prepare_model(model)
    optimizers = [helpers.prepare_optimizer(each) for each in optimizers_of(model, config.get("has_two", False))]
    optimizer = optimizers[0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + (flaw == "scheduler") * 0.01 * step)
    if flaw == "parts" and is_new:
        helpers.prepare_state(scheduler)
    if flaw == "function" and is_new:
        raise RuntimeError("this one cannot step in")
    number, failed = 0, 0
    for epoch in epochs_of(loader, first, config):
        loader.sampler.set_epoch(epoch)
        for indices, inputs, targets in loader:
            if leaves_out("batch", number):
                continue
            at("forward", number)
            time.sleep(config.get("step_s", 0.0))
            while number == config.get("awaits_at") and train.world_size() < config.get("awaited", 3):
                time.sleep(0.02)
            if config.get("decays"):
                decay(model)
            for another in optimizers[1:]:
                train_on(model, another, indices, inputs, targets, leaves_out("between", number))
                at("between", number)
            output, counts = model(indices, inputs)
            loss = torch.nn.functional.mse_loss(output, targets) + counts.mean()
            model.zero_grad()
            at("backward", number)
            loss.backward()
            if config.get("exchanges"):
                torch.distributed.all_reduce(torch.ones(1))
            if flaw == "hidden":
                with suppress(Exception):
                    torch.distributed.all_reduce(torch.ones(1))
            at("step", number)
            if not leaves_out("step", number):
                optimizer.step()
            at("stepped", number)
            if not helpers.step_committed():
                failed += 1
                continue
            number += 1
            scheduler.step()
        epoch = loader.epoch - 1 if config.get("admits") else epoch
        if config.get("data") == "parts":
            at("rows", epoch)
            assert sum(1 for _ in data.iter_rows())
        at("report", epoch)
        for death in deaths:
            if death.get("at") == ("reporting", epoch):
                die_after(0.0, folder, death["name"])
        train.report(epoch=epoch, rank=train.world_rank(), size=train.world_size())
        at("reported", epoch)
        if config.get("saves"):
            place = {"place": loader.state_dict()} if config.get("data") == "stream" else {}
            train.save_checkpoint(epoch=epoch, model=helpers.gather_state(model), **place)
        at("saved", epoch)
    if train.world_rank() == 0:
        (folder / "weights.json").write_text(json.dumps(weights_of(helpers.gather_state(model))))
    tracked = helpers.gather_state(model)["norm.num_batches_tracked"].item()
    ranks = {"began_as": began_as, "rank": train.world_rank()}
    return {"first": first, "failed": failed, "steps": number, "tracked": tracked, **ranks}


def optimizers_of(model: torch.nn.Module, has_two: bool) -> list[torch.optim.Optimizer]:
    """One for all that is trained; or one for what counts samples, and one that steps before it."""
    parameters = dict(model.named_parameters())
    others = [parameters.pop(name) for name in [*parameters] if has_two and "line" in name]
    found: list[torch.optim.Optimizer] = [torch.optim.SGD(parameters.values(), lr=0.1)]
    return [*found, *([torch.optim.Adam(others, lr=0.1)] if others else [])]


def train_on(
    model: torch.nn.Module, optimizer: Any, indices: Any, inputs: Any, targets: Any, leaves_out: bool = False
) -> None:
    """Takes a step, or comes up to it only."""
    output, counts = model(indices, inputs)
    model.zero_grad()
    (torch.nn.functional.mse_loss(output, targets) + counts.mean()).backward()
    if not leaves_out:
        optimizer.step()


def is_to_step_in() -> bool:
    """Whether this worker has not met the others yet."""
    membership: Any = getattr(current_session(), "membership", None)
    return membership is not None and membership.is_new


def epochs_of(loader: Any, first: int, config: dict[str, Any]) -> Iterator[int]:
    """The epochs: as the function counts them, or the loader, where others are to step in."""
    if not config.get("admits"):
        yield from range(first, config["num_epochs"])
        return
    loader.epoch = first
    while loader.epoch < config["num_epochs"]:
        yield loader.epoch


def weights_of(state: dict[str, torch.Tensor]) -> list[float]:
    """All trained weights in a row."""
    return [each for name, value in state.items() if "norm" not in name for each in value.flatten().tolist()]


def decay(model: torch.nn.Module) -> None:
    """Changes weights before an exchange of the same batch."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def undisturbed(num_epochs: int, decays: bool = False, is_streamed: bool = False, has_two: bool = False) -> list[float]:
    """The weights after steps of the same global batches, each taken by one process alone."""
    torch.manual_seed(0)
    model = Counting()
    optimizers = optimizers_of(model, has_two)
    loader = over_global_batches(DataLoader(samples(), batch_size=JOINT, shuffle=True), World(0, 1), None)
    joint: Any = loader.batch_sampler
    stream = of_stream(sample_stream(), World(0, 1), exact=False)
    for epoch in range(num_epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        joint.draw()
        joint.open(joint.consumed, World(0, 1))
        for indices, inputs, targets in stream if is_streamed else loader:
            if decays:
                decay(model)
            for optimizer in reversed(optimizers):
                train_on(model, optimizer, indices, inputs, targets)
    return weights_of(model.state_dict())


def train_unprepared(config: dict[str, Any]) -> None:
    """Takes steps with something that is not prepared, or past what was."""
    loader: Any = DataLoader(samples(), batch_size=4)
    if config["missing"] == "lengths":
        loader = sample_stream(is_known=False)
    loader = helpers.prepare_data_loader(loader, exact=config["missing"] != "loader")
    model = Counting()
    if config["missing"] != "model":
        model = helpers.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config["missing"] != "optimizer":
        optimizer = helpers.prepare_optimizer(optimizer)
    another = torch.optim.Adam(model.parameters(), lr=0.1)
    is_past_ddp = config["missing"] == "exchange"
    model = model.module if is_past_ddp else model
    for indices, inputs, _ in chain.from_iterable(repeat(loader, 1000 if is_past_ddp else 1)):
        output, counts = model(indices, inputs)
        (output.mean() + counts.mean()).backward()
        optimizer.step()
        if config["missing"] == "another":
            another.step()
