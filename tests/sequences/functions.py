"""Functions that go on without a restart, whose models count how often each sample was used. Workers import this."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from raysgd import train
from raysgd.train import Trainer, TrainingCallback
from raysgd.train import torch as helpers
from tests.sequences import deaths
from tests.sequences.books import CLOSE, NUM_SAMPLES, Wrong
from tests.sequences.grammar import NUM_WORKERS, Grammar, Word
from tests.sequences.subjects import LATE_S, Subject
from tests.sequences.torch_trainers import Counts, Numbers, negative_mean

GLOBAL_BATCH = 24
PLACES = ("item", "model", "backward", "step", "stepped", "report", "saved")


def meet(config: dict[str, Any]) -> int:
    """Return the process."""
    deaths.install(config["folder"])
    return os.getpid()


def train_counts(config: dict[str, Any]) -> list[float]:
    """Train some epochs, and save after each. Return the weights.

    Config: `folder` of deaths, `weights` to begin with, `num_epochs`, and `counts_itself`: whether the function counts
    the epochs, so that no one can step in.
    """
    deaths.install(config["folder"])
    deaths.begin()
    model: Any = Counts()
    model.weight.data[:, 0] = torch.tensor(config["weights"], dtype=torch.float64)
    checkpoint, first = train.load_checkpoint(), 0
    if checkpoint:
        first = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model"])
    loader: Any = DataLoader(Numbers(0, NUM_SAMPLES), GLOBAL_BATCH // train.world_size(), shuffle=True)
    loader = helpers.prepare_data_loader(loader, exact=True)
    model = helpers.prepare_model(model)
    optimizer: Any = helpers.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=float(GLOBAL_BATCH)))
    for epoch in _epochs(loader, first, config):
        loader.sampler.set_epoch(epoch)
        for indices, targets in loader:
            loss = negative_mean(model(indices), targets)
            optimizer.zero_grad()
            deaths.at("backward")
            loss.backward()
            deaths.at("step")
            optimizer.step()
            deaths.at("stepped")
        done = epoch if config["counts_itself"] else loader.epoch - 1
        deaths.at("report")
        train.report(epoch=done)
        train.save_checkpoint(epoch=done, model=helpers.gather_state(model))
        deaths.at("saved")
    weights: list[float] = helpers.gather_state(model)["weight"].flatten().tolist()
    return weights


def _epochs(loader: Any, first: int, config: dict[str, Any]) -> Iterator[int]:
    if config["counts_itself"]:
        yield from range(first, config["num_epochs"])
        return
    loader.epoch = first
    while loader.epoch < config["num_epochs"]:
        yield loader.epoch


class Reports(TrainingCallback):
    """Notes the epochs that are reported."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        self.epochs.append(results[0]["epoch"])


class FunctionSubject(Subject):
    """A `Trainer` of functions. Its calls are runs, each of which begins with the weights of the last one."""

    grammar = Grammar(
        {"run": 3, "range": 2}, {"run": 4, "range": 4}, PLACES, {"kill": 3, "lose": 2, "soon": 3, "call": 5, "hook": 5}
    )

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, number)
        self._trainer = Trainer(
            "torch",
            (1, NUM_WORKERS),
            resources_per_worker={"CPU": 0.5},
            logdir=folder / "runs",
            elastic=True,
            max_retries=9,
            spare_workers=int(number % 3 == 2),
        )
        self._trainer.start()
        self._pids: Sequence[int] = ()
        self._num_epochs = 0
        self._weights: list[float] = []

    def start_over(self) -> None:
        self.grow()
        self._weights, self._num_epochs = [0.0] * len(Counts().weight), 0

    def pids(self) -> list[int]:
        return [*self._pids]

    def grow(self) -> None:
        deadline = time.monotonic() + LATE_S
        while True:
            self._pids = self._trainer.run(meet, {"folder": str(self.folder / "deaths")})
            if len(self._pids) == NUM_WORKERS:
                return
            if time.monotonic() > deadline:
                raise Wrong(f"no worker came in {LATE_S:g} s")
            time.sleep(0.1)

    def call(self, word: Word, is_whole: bool) -> None:
        num_epochs, reports = word.number or 2, Reports()
        config = {
            "folder": str(self.folder / "deaths"),
            "weights": self._weights,
            "num_epochs": num_epochs,
            "counts_itself": word.name == "range",
        }
        events = self.events()
        returned = self._trainer.run(train_counts, config, callbacks=[reports])
        self._num_epochs += num_epochs
        for weights in returned:
            self._check_weights(weights)
        self._weights = returned[0]
        was_restarted = "restored" in self.events()[len(events) :]  # then an epoch may be reported twice
        epochs = sorted(set(reports.epochs)) if was_restarted else reports.epochs
        if epochs != [*range(num_epochs)]:
            raise Wrong(f"{word} reported the epochs {reports.epochs}")
        self._pids = [pid for pid in self._pids if deaths.lives(pid)]

    def _check_weights(self, weights: Sequence[float]) -> None:
        used = weights[:NUM_SAMPLES]
        if max(abs(number - self._num_epochs) for number in used) > CLOSE or any(weights[NUM_SAMPLES:]):
            raise Wrong(f"each sample was used {min(used):g} to {max(used):g} times, expected {self._num_epochs}")

    def check(self) -> None:
        self._check_weights(self._weights)

    def events(self) -> list[str]:
        return [str(event.kind) for event in self._trainer.history.events]

    def close(self) -> None:
        self._trainer.shutdown()


SUBJECTS = {"functions": FunctionSubject}
