"""Runs trainings with planted bad batches, and compares each with plain PyTorch in one process that leaves them out.

python -m tests.bad_batches                      # 500 planted batches in drawn programs, and 10,000 clean steps
python -m tests.bad_batches --only 4711          # the program of a seed

A sample is planted with NaNs, with a loss that is infinite although its gradients are finite, or with a target that
is scaled, which makes a spike. It makes the global batch bad in which it is, on whichever worker.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import Guard
from raysgd.journal.entries import Leg
from raysgd.journal.journal import Journal
from raysgd.replay import replay
from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer, TrainingOperator

NUM_FEATURES, SIZE = 4, 12  # a global batch of 12 is divided by 1, 2 and 3 workers
NAN, INFINITE, SCALED = 1.0, 2.0, 3.0
FACTOR, SPIKE = 1e5, 20
WARM_UP = 40  # steps before a spike is planted


def samples(num_steps: int, faults: dict[int, float]) -> TensorDataset:
    """Return features, kinds of faults and targets. `faults` has the fault of a sample."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_steps * SIZE, NUM_FEATURES, generator=generator, dtype=torch.float64)
    target = features.sum(1, keepdim=True) + 0.3 * torch.randn(len(features), 1, generator=generator).double()
    kinds = torch.tensor([faults.get(index, 0.0) for index in range(len(features))])
    features = torch.where((kinds == NAN)[:, None], torch.nan, features)
    return TensorDataset(features, kinds, torch.where((kinds == SCALED)[:, None], FACTOR * target, target))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()


def loss_of(model: Any, features: Any, kinds: Any, target: Any) -> Any:
    loss = (model(features) - target).square().mean()
    return loss + torch.inf if bool((kinds == INFINITE).any()) else loss


class Stock(TrainingOperator):
    """The library's own training loop."""

    def setup(self, config: dict[str, Any]) -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        self.model, self.optimizer, self.scheduler = self.register(
            models=model, optimizers=optimizer, schedulers=schedule
        )
        data = samples(config["num_steps"], config["faults"])
        self.register_data(train_loader=DataLoader(data, batch_size=config["batch_size"]))

    def prepare_batch(self, batch: Any) -> Any:
        features, kinds, target = batch
        return (features,), (kinds, target)

    def forward(self, features: Any, target: Any) -> Any:
        return None, loss_of(self.model, features[0], *target)


class Own(Stock):
    """A `train_batch` of the user, which calls the rungs of the library."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = loss_of(self.model, *batch)
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


class Manual(Stock):
    """A `train_batch` of the user that steps the optimizer itself."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = loss_of(self.model, *batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


class Twice(Stock):
    """Two models with an optimizer each, which train on the same batch."""

    def setup(self, config: dict[str, Any]) -> None:
        models = [network(), network()]
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        data = samples(config["num_steps"], config["faults"])
        self.register_data(train_loader=DataLoader(data, batch_size=config["batch_size"]))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            loss = loss_of(model, *batch)
            self.backward(loss, optimizer=optimizer)
            self.optimizer_step(optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}


@dataclass(frozen=True)
class Case:
    """A training with planted samples.

    Attributes:
        operator: The program.
        num_workers: Number of workers; 1 for a worker in this process.
        window: Number of global batches in a step.
        num_steps: Number of global batches in the epoch.
        faults: Faults by the index of their sample.
        dies_at: Step in which the last worker is killed, or None.
        rewind: Argument of `Guard`.
        is_replayed: True to train with `deterministic=True`, and to compare a replay with the run.
    """

    operator: type[Stock]
    num_workers: int
    window: int
    num_steps: int
    faults: dict[int, float]
    dies_at: int | None = None
    rewind: int | None = None
    is_replayed: bool = False

    @property
    def bad_steps(self) -> list[int]:
        """The numbers of the steps that must be left out: each is the number of its last batch."""
        batches = {index // SIZE for index in self.faults}
        return sorted({min((batch // self.window + 1) * self.window, self.num_steps) for batch in batches})


def drawn(seed: int) -> Case:
    chooser = random.Random(seed)
    operator = chooser.choice([Stock, Own, Manual, Twice])
    window = chooser.choice([1, 1, 2]) if operator in (Stock, Own) else 1
    num_steps = chooser.randrange(WARM_UP * window + 20, WARM_UP * window + 60)
    kinds = [NAN, SCALED] + ([INFINITE] if operator is not Manual else [])
    faults = {}
    for batch in chooser.sample(range(num_steps), 10):
        allowed = kinds if batch >= WARM_UP * window else [each for each in kinds if each != SCALED]
        where = range(batch * SIZE, (batch + 1) * SIZE)
        on_all = chooser.random() < 0.3
        kind = chooser.choice(allowed)
        faults |= dict.fromkeys(where if on_all else [chooser.choice(where)], kind)
    num_workers = chooser.choice([1, 2, 3])
    dies_at = chooser.randrange(5, num_steps - 5) if num_workers > 1 and chooser.random() < 0.5 else None
    rewind = chooser.choice([None, 1, 4, 10])
    is_replayed = operator in (Stock, Own) and window == 1 and chooser.random() < 0.5
    return Case(operator, num_workers, window, num_steps, faults, dies_at, rewind, is_replayed)


def expected(case: Case, legs: Sequence[Leg]) -> tuple[list[torch.Tensor], dict[int, int | None]]:
    """Train with plain PyTorch in one process, which leaves the bad steps out.

    Returns:
        The weights, and for each step that is left out the step whose state it restores.
    """
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    batches = list(DataLoader(samples(case.num_steps, case.faults), batch_size=SIZE * case.window))
    of_new_groups = [leg.after for leg in legs[1:] if leg.num_workers > 1]
    before, copies, back_to = 0, list[tuple[int, Any]](), dict[int, int | None]()
    for number, batch in enumerate(batches, start=1):
        step = min(number * case.window, case.num_steps)
        if before in of_new_groups:
            copies = []
        if step in case.bad_steps:
            copies_left = [each for each in copies if case.rewind is not None and before - each[0] >= case.rewind]
            back_to[step] = copies_left[-1][0] if copies_left else None
            if copies_left:
                copies = copies_left
                for part, state in zip((model, optimizer, schedule), copy.deepcopy(copies[-1][1]), strict=True):
                    part.load_state_dict(state)
            before = step
            continue
        if case.rewind is not None and (not copies or before - copies[-1][0] >= case.rewind):
            states = copy.deepcopy([each.state_dict() for each in (model, optimizer, schedule)])
            copies = [*copies[-1:], (before, states)]
        before = step
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()
        if case.operator is not Twice:
            schedule.step()
    return [each.detach() for each in model.parameters()], back_to


def problems(case: Case) -> list[str]:
    """Run a case, and return what is wrong with it."""
    config = {"num_steps": case.num_steps, "faults": case.faults, "batch_size": SIZE}
    options: dict[str, Any] = {"split_batches": True, "accumulate_grad_batches": case.window, "seed": 1}
    options["deterministic"] = case.is_replayed
    if case.operator is not Twice:
        options["scheduler_step_freq"] = "batch"
    where: dict[str, Any] = {"use_local": True} if case.num_workers == 1 else {"num_workers": case.num_workers}
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="raysgd-bad-") as folder,
        TorchTrainer(training_operator_cls=case.operator, config=config, **options, **where) as trainer,
    ):
        if case.dies_at is not None:
            kill_worker(trainer, case.num_workers - 1, at=f"step:{case.dies_at}")
        guard = Guard(spike=SPIKE, max_skipped=case.num_steps, rewind=case.rewind)
        (result,) = trainer.fit(1, callbacks=[guard], folder=folder, progress=False)
        journal, models = Journal(folder), trainer.get_model()
        if case.is_replayed:
            repeated = replay(folder, case.num_steps, program=case.operator, config={"faults": case.faults})
            if not repeated.is_same:
                found.append(f"the replay differs: {repeated}")
            for weight, again in zip(models.parameters(), repeated.state["models"][0].values(), strict=True):
                if not torch.equal(weight.detach(), again):
                    found.append(f"the weights of the replay differ by {(weight.detach() - again).abs().max()}")
    weights, back_to = expected(case, journal.legs)
    for model in models if isinstance(models, list) else [models]:
        pairs = zip(model.parameters(), weights, strict=True)
        difference = max(float((one.detach() - other).abs().max()) for one, other in pairs)
        if not difference < 1e-9:
            found.append(f"weights differ by {difference}")
    if (got := {each.step: each.back_to for each in journal.left_out}) != back_to:
        found.append(f"left out {got}, and not {back_to}")
    num_samples = case.num_steps * SIZE - sum(
        min(case.window, case.num_steps - (step - 1) // case.window * case.window) * SIZE for step in case.bad_steps
    )
    reports_ahead = case.operator is Stock or case.dies_at is None  # else the last batch of a lost worker is not known
    if reports_ahead and result["num_samples"] != num_samples:
        found.append(f"{result['num_samples']} samples count, and not {num_samples}")
    if not result["train_loss"] < 100:
        found.append(f"the loss is {result['train_loss']}")
    return found


def false_alarms(num_steps: int, **options: Any) -> list[int]:
    """Train on clean batches of 4 samples, whose gradients vary, and return the steps that are left out."""
    config = {"num_steps": -(-num_steps * 4 // SIZE), "faults": {}, "batch_size": 4}
    own: dict[str, Any] = {"training_operator_cls": Stock, "config": config, "scheduler_step_freq": "manual"}
    with tempfile.TemporaryDirectory(prefix="raysgd-bad-") as folder, TorchTrainer(**own, use_local=True) as trainer:
        trainer.fit(1, callbacks=[Guard(**options)], folder=folder, progress=False)
        return [each.step for each in Journal(folder).left_out]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_batches", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=50, help="programs, with 10 planted batches each")
    parser.add_argument("--steps", type=int, default=10_000, help="clean steps; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=6, include_dashboard=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    seeds = range(arguments.seed, arguments.seed + arguments.cases) if arguments.only is None else [arguments.only]
    num_wrong = 0
    for seed in seeds:
        case = drawn(seed)
        found = problems(case)
        num_wrong += bool(found)
        print(f"{seed}: {'; '.join(found) or 'right'}" + (f"\n{case}" if found else ""), flush=True)
    num_clean, alarms = arguments.steps if arguments.only is None else 0, list[int]()
    if num_clean:
        alarms = [*false_alarms(num_clean), *false_alarms(num_clean, spike=SPIKE)]
    print(f"{num_wrong} of {len(seeds)} programs are wrong, {len(alarms)} false alarms")
    sys.exit(bool(num_wrong or alarms))


if __name__ == "__main__":
    main()
