"""Programs about schedulers of learning rates, and about rates that change while one is at work.

- `scheduler`: its class, or what is made of several.
- `freq`: when it steps: after each step, or each call; `manual` is by `trainer.update_scheduler`.
- `change`: what happens between two calls: `rate` (`update_config`), `cut` (the same, twice), `load` (save, train,
  load), `take` (another trainer with another rate takes the state), or `reload` (a class with another rate).
- `after`: which call it happens after.
- `groups`: how many groups of parameters; the second one has a rate of its own, which is not in the config.
- `models`: how many models, each with an optimizer and a scheduler.

A rate that changes is that of a run with the new rate from the start: the schedule goes on where it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator
from tests.programs.grammar import Choices, Value, Words
from tests.programs.outcomes import Outcome, Row
from tests.programs.parts import (
    OPTIMIZERS,
    RATE,
    Kind,
    Mean,
    arm,
    batches_of_calls,
    chunks,
    flat,
    is_killed,
    network,
    steps_of,
    table,
)

NUM_ROWS, BATCH_SIZE = 24, 4
OWN_RATE, OTHER_RATE, THIRD_RATE = 0.03, 0.17, 0.05
INPUTS = table(1, NUM_ROWS, 3)
TARGETS = INPUTS.sum(1, keepdim=True) + table(2, NUM_ROWS, 1) / 3

Made = Callable[[torch.optim.Optimizer, float, int], Any]
"""Optimizer, rate, the number of steps in which something happens -> a scheduler."""

SCHEDULERS: dict[str, Made] = {
    "exponential": lambda o, lr, n: lr_scheduler.ExponentialLR(o, 0.8),
    "step": lambda o, lr, n: lr_scheduler.StepLR(o, n, 0.5),
    "milestones": lambda o, lr, n: lr_scheduler.MultiStepLR(o, [1, n, n + 1], 0.6),
    "constant": lambda o, lr, n: lr_scheduler.ConstantLR(o, 0.3, n),
    "linear": lambda o, lr, n: lr_scheduler.LinearLR(o, 0.2, 1.0, n + 1),
    "polynomial": lambda o, lr, n: lr_scheduler.PolynomialLR(o, 3 * n, 2.0),
    "lambda": lambda o, lr, n: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o, lr, n: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9 if step % 2 else 0.7),
    "cosine": lambda o, lr, n: lr_scheduler.CosineAnnealingLR(o, 4 * n, eta_min=0.0),
    "cosine-least": lambda o, lr, n: lr_scheduler.CosineAnnealingLR(o, 4 * n, eta_min=lr / 10),
    "restarts": lambda o, lr, n: lr_scheduler.CosineAnnealingWarmRestarts(o, n, 2),
    "cyclic": lambda o, lr, n: lr_scheduler.CyclicLR(o, lr, 3 * lr, n, cycle_momentum=_has_momentum(o)),
    "onecycle": lambda o, lr, n: lr_scheduler.OneCycleLR(o, lr, 6 * n, cycle_momentum=_has_momentum(o)),
    "plateau": lambda o, lr, n: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "swa": lambda o, lr, n: SWALR(o, swa_lr=lr / 2, anneal_epochs=n),
    "warm-cosine": lambda o, lr, n: _one_after_another(
        o, n, lr_scheduler.LinearLR(o, 0.1, 1.0, n), lr_scheduler.CosineAnnealingLR(o, 4 * n)
    ),
    "warm-lambda": lambda o, lr, n: _one_after_another(
        o, n, lr_scheduler.ConstantLR(o, 0.1, n), lr_scheduler.LambdaLR(o, lambda step: 0.9**step)
    ),
    "warm-step": lambda o, lr, n: _one_after_another(
        o, n, lr_scheduler.LinearLR(o, 0.1, 1.0, n), lr_scheduler.StepLR(o, 2, 0.5)
    ),
    "chained": lambda o, lr, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, n), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "chained-lambda": lambda o, lr, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, 1.0, n), lr_scheduler.MultiplicativeLR(o, lambda step: 0.9)], o
    ),
}


def _has_momentum(optimizer: Any) -> bool:
    group = optimizer.param_groups[0]
    return "betas" in group or bool(group.get("momentum"))


def _one_after_another(optimizer: Any, milestone: int, *schedulers: Any) -> Any:
    return lr_scheduler.SequentialLR(optimizer, list(schedulers), [milestone])


class Trained:
    """What is trained, with the library and without.

    Args:
        words: Of the program.
        rate: Of the config.
    """

    def __init__(self, words: Words, rate: float) -> None:
        self.words = words
        self.models = [network(1, seed) for seed in range(int(words["models"]))]
        self.begin(rate)

    def begin(self, rate: float) -> None:
        """Make optimizers and schedulers."""
        words = self.words
        num_steps = 4 if words["freq"] == "batch" else 2
        make, schedule = OPTIMIZERS[str(words["optimizer"])], SCHEDULERS[str(words["scheduler"])]
        self.optimizers = [make(self._groups(model, rate), rate) for model in self.models]
        self.schedulers = [schedule(each, rate, num_steps) for each in self.optimizers]

    def _groups(self, model: Any, rate: float) -> list[dict[str, Any]]:
        if self.words["groups"] == 1:
            return [{"params": list(model.parameters())}]
        first, last = model[0], model[2]
        return [{"params": list(first.parameters())}, {"params": list(last.parameters()), "lr": OWN_RATE}]


def rates_of(optimizers: Any) -> dict[str, float]:
    """Return the learning rates, and what is changed with them, as metrics."""
    found: dict[str, float] = {}
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            found[f"rate_{number}_{at}"] = float(group["lr"])
            found[f"momentum_{number}_{at}"] = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return found


class Scheduled(TrainingOperator):
    """The program with one model in the stock step. Config: `words`, `lr`."""

    scheduler_metric = "train_loss"
    factor = 1.0

    def setup(self, config: dict[str, Any]) -> None:
        words = self.words = config["words"]
        trained = Trained(words, config["lr"] * self.factor)
        is_one = words["models"] == 1
        models, optimizers, schedulers = (
            each[0] if is_one else each for each in (trained.models, trained.optimizers, trained.schedulers)
        )
        registered = self.register(
            models=models, optimizers=optimizers, criterion=torch.nn.MSELoss(), schedulers=schedulers
        )
        self.models, self.optimizers, self.criterion, self.scheduler = registered
        self.model = self.models if is_one else self.models[0]
        self.optimizer = self.optimizers if is_one else self.optimizers[0]
        self.optimizers = [self.optimizers] if is_one else self.optimizers
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), BATCH_SIZE)
        self.register_data(train_loader=loader, validation_loader=loader)

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss, rates_of(self.optimizers)


class ScheduledHigher(Scheduled):
    """The same with another rate."""

    factor = OTHER_RATE / RATE


class ScheduledPair(Scheduled):
    """The program with two models, which train in turn."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (inputs, target), losses = batch, []
        rates = rates_of(self.optimizers)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            loss = self.criterion(model(inputs), target)
            self.backward(loss, optimizer=optimizer)
            self.optimizer_step(optimizer)
            losses.append(loss.detach())
        return {"train_loss": losses[0], "num_samples": len(inputs), **rates}


class ScheduledPairHigher(ScheduledPair):
    factor = OTHER_RATE / RATE


class Schedulers(Kind):
    """See the module."""

    name = "schedulers"
    core = ("scheduler", "freq", "change", "after")
    choices: ClassVar[Choices] = {
        "scheduler": tuple(SCHEDULERS),
        "freq": ("batch", "batch", "epoch"),
        "change": ("no", "rate", "load", "take", "reload", "cut"),
        "after": (0, 1),
        "calls": ("all,all,all", "1,all,all"),
        "optimizer": tuple(OPTIMIZERS),
        "groups": (1, 1, 2),
        "models": (1, 1, 2),
        "accumulate": (1, 1, 2),
    }

    def settled(self, words: Words) -> dict[str, Value]:
        new = dict(words)
        if new["scheduler"] == "plateau":
            new["freq"] = "epoch" if new["freq"] == "epoch" else "manual"
        elif new["freq"] == "manual":
            new["freq"] = "batch"
        if new["models"] == 2:
            new["accumulate"] = 1
        if new["change"] == "no":
            new["after"] = 0
        return new

    def operator(self, words: Words) -> type[Any]:
        return Scheduled if words["models"] == 1 else ScheduledPair

    def options(self, words: Words) -> dict[str, Any]:
        return {
            "config": {"words": dict(words), "lr": RATE},
            "split_batches": True,
            "scheduler_step_freq": words["freq"],
            "accumulate_grad_batches": words["accumulate"],
            "seed": 3,
        }

    def run(self, trainer: Any, words: Words) -> Outcome:
        outcome, other = Outcome(), None
        try:
            for call, num_steps in enumerate(steps_of(words)):
                if trainer is not other:
                    arm(trainer, words, call)
                outcome.rows.append(dict(trainer.train(num_steps=num_steps)))
                outcome.rows.append(dict(trainer.validate()))
                if words["freq"] == "manual":
                    trainer.update_scheduler(outcome.rows[-1]["val_loss"])
                if words["change"] == "take" and words["after"] == call:
                    options = self.options(words)
                    config = {**options.pop("config"), "lr": OTHER_RATE}
                    other = TorchTrainer(self.operator(words), config=config, use_local=True, use_gpu=False, **options)
                    other.take_state_of(trainer)
                    trainer = other
                elif words["after"] == call:
                    self._change(trainer, words)
            models = trainer.get_model()
            return outcome.keep(*(models if isinstance(models, list | tuple) else [models]))
        finally:
            if other is not None:
                other.shutdown()

    def _change(self, trainer: Any, words: Words) -> None:
        if words["change"] in ("rate", "cut"):
            trainer.update_config(lr=OTHER_RATE)
        if words["change"] == "cut":
            trainer.update_config(lr=THIRD_RATE)
        if words["change"] == "reload":
            trainer.reload(ScheduledHigher if words["models"] == 1 else ScheduledPairHigher)
        if words["change"] == "load":
            with tempfile.TemporaryDirectory() as folder:
                trainer.save(Path(folder, "saved.pt"))
                trainer.train(num_steps=3)
                trainer.load(Path(folder, "saved.pt"))

    def plain(self, words: Words) -> Outcome:
        trained, outcome = Trained(words, RATE), Outcome()
        asked: list[tuple[float, ...]] = []
        criterion = torch.nn.MSELoss()

        def step(*values: float) -> None:
            """Step all schedulers, and note by what."""
            asked.append(values)
            for scheduler in trained.schedulers:
                scheduler.step(*values)

        batches = batches_of_calls(words, lambda _: chunks(range(NUM_ROWS), BATCH_SIZE))
        for call, (epoch, of_call) in enumerate(batches):
            means: dict[str, Mean] = {}
            for window in chunks(of_call, int(words["accumulate"])):
                numbers, rates = flat(window), rates_of(trained.optimizers)
                losses = []
                for model, optimizer in zip(trained.models, trained.optimizers, strict=True):
                    loss = criterion(model(INPUTS[numbers]), TARGETS[numbers])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                for name, value in {"train_loss": losses[0], **rates}.items():
                    means.setdefault(name, Mean()).add(value, len(numbers))
                if words["freq"] == "batch":
                    step()
            row: Row = {"epoch": epoch, "num_samples": sum(map(len, of_call))}
            row.update({name: mean.value for name, mean in means.items()})
            if words["freq"] == "epoch":
                step(*[row["train_loss"]] * (words["scheduler"] == "plateau"))
            with torch.no_grad():
                loss_now = criterion(trained.models[0](INPUTS), TARGETS).item()
            is_partly = words["models"] == 2 and is_killed(words, call)
            outcome.rows.append({"epoch": epoch} if is_partly else row)
            outcome.rows.append({"val_loss": loss_now, "num_samples": NUM_ROWS, **rates_of(trained.optimizers)})
            if words["freq"] == "manual":
                step(loss_now)
            if words["after"] == call and words["change"] not in ("no", "load"):
                begin_with(THIRD_RATE if words["change"] == "cut" else OTHER_RATE, trained, asked)
        return outcome.keep(*trained.models)


def begin_with(rate: float, trained: Trained, steps: list[tuple[float, ...]]) -> None:
    """Let the optimizers go on as if they had had another rate from the start."""
    states = [optimizer.state for optimizer in trained.optimizers]
    trained.begin(rate)
    for optimizer, state in zip(trained.optimizers, states, strict=True):
        optimizer.state = state
    for values in steps:
        for scheduler in trained.schedulers:
            scheduler.step(*values)


KIND = Schedulers()
