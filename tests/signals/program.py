"""The program that signals end: it trains, saves, resumes, and tells what came of it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery, TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback, Checkpointing, CSVLogger, Run
from raysgd.core.numbers.results import CallProgress
from raysgd.operators import GANOperator
from tests.helpers.forked import lent_forks
from tests.helpers.ray_start import patient_ray
from tests.torch.streamed import StreamOperator

NUM_SAMPLES, BATCH_SIZE, NUM_FEATURES = 240, 12, 4


def features_of(num_samples: int, seed: int) -> torch.Tensor:
    """Return features, in double precision: sums of other sizes then differ in the last digits only."""
    return torch.randn(num_samples, NUM_FEATURES, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


class Slow(TrainingOperator):
    """Trains with steps that take a while; the stock `train_batch` tells others what it has measured."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 13, 0.9),
        )
        features = features_of(NUM_SAMPLES, 1)
        data = TensorDataset(features, features.sum(dim=1, keepdim=True))
        self.register_data(
            train_loader=DataLoader(data, BATCH_SIZE, shuffle=True), validation_loader=DataLoader(data, 60)
        )

    def optimizer_step(self) -> None:
        super().optimizer_step()
        time.sleep(self.config["step_s"])


class Accumulates(Slow):
    """Adds up the gradients of three batches."""

    def accumulate_grad_batches(self, epoch_idx: int) -> int:
        return 3


class Large(Slow):
    """Has a state of 20 MB, which comes to the driver through the store of Ray."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.model.register_buffer("ballast", torch.zeros(2_500_000, dtype=torch.double))


class SlowStream(StreamOperator):
    """Trains on a stream, which is shuffled."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        time.sleep(self.config["step_s"])


class SlowGAN(GANOperator):
    """Takes two steps for each batch. The noise is in the data, so it does not depend on the number of workers."""

    def build_discriminator(self, config: dict[str, Any]) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def build_generator(self, config: dict[str, Any]) -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(NUM_FEATURES, NUM_FEATURES).double()

    def build_data(self, config: dict[str, Any]) -> Any:
        data = TensorDataset(features_of(NUM_SAMPLES, 1), features_of(NUM_SAMPLES, 2))
        return DataLoader(data, BATCH_SIZE, shuffle=True), DataLoader(data, 60)

    def real_samples(self, batch: Any) -> torch.Tensor:
        self._noise = batch[1]
        return super().real_samples(batch)

    def sample_noise(self, num_samples: int, rng: torch.Generator | None = None) -> torch.Tensor:
        noise: torch.Tensor = self._noise
        return noise

    def optimizer_step(self, optimizer: Any = None) -> None:
        super().optimizer_step(optimizer)
        time.sleep(self.config["step_s"] / 2)  # also between the two steps of a batch


OPERATORS: dict[str, Any] = {
    "plain": Slow,
    "accumulate": Accumulates,
    "large": Large,
    "stream": SlowStream,
    "gan": SlowGAN,
}
STEPS = {"plain": 20, "accumulate": 20, "large": 20, "stream": 24, "gan": 20}
"""Batches of an epoch."""


class Tells(Callback):
    """Writes how far the run is, for who ends it."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.folder, self.num_steps = folder, num_steps

    def tell(self, **found: Any) -> None:
        with open(self.folder / "told.jsonl", "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **found}) + "\n")

    def on_run_begin(self, run: Run) -> None:
        self.tell(begin=run.epoch * self.num_steps + run.step)

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        if progress.kind == "train":
            self.tell(step=(run.epoch - 1) * self.num_steps + progress.num_steps)

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.tell(saved=run.epoch * self.num_steps + run.step)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.tell(end=type(error).__name__)


HOOKS = (
    "on_run_begin",
    "on_epoch_begin",
    "on_progress",
    "on_step_metrics",
    "on_epoch_trained",
    "on_result",
    "on_checkpoint",
    "on_run_end",
)
BODY = "the body"
"""Of a loop over epochs, which the program then leaves."""


def signaling(hook: str, at: int, tells: Tells) -> Callback:
    """Return a callback that sends this process a signal when it is called for a number of times."""
    num_calls = itertools.count(1)

    def call(self: Callback, *args: Any) -> None:
        if next(num_calls) == at:
            tells.tell(signal=hook)
            signal.raise_signal(signal.SIGTERM)

    made: Callback = type("Signaling", (Callback,), {hook: call})()
    return made


def main() -> None:
    """Train until all epochs are done, or a signal comes."""
    import ray

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=list(OPERATORS), default="plain")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--every-n-steps", type=int, default=None)
    parser.add_argument("--use-local", action="store_true")
    parser.add_argument("--snapshot-every-n-steps", type=int, default=None)
    parser.add_argument("--signal-in", choices=[*HOOKS, BODY])
    parser.add_argument("--signal-at", type=int, default=1)
    asked = parser.parse_args()
    folder = asked.folder
    own = {} if "RAY_ADDRESS" in os.environ else {"address": "local", "num_cpus": 4, "include_dashboard": False}
    with lent_forks().starting(), patient_ray():
        ray.init(log_to_driver=False, **own)  # type: ignore[arg-type]
    with TorchTrainer(
        training_operator_cls=OPERATORS[asked.kind],
        num_workers=asked.workers,
        use_local=asked.use_local,
        split_batches=True,
        seed=3,
        deterministic=asked.deterministic,
        scheduler_step_freq="batch" if issubclass(OPERATORS[asked.kind], Slow) else "epoch",
        config={"step_s": asked.step_s, "kind": "shuffled"},
        num_cpus_per_worker=0.5,
        recovery=Recovery(snapshot_every_n_steps=asked.snapshot_every_n_steps),
    ) as trainer:
        saving = Checkpointing(folder / "files", every_n_steps=asked.every_n_steps)
        tells = Tells(folder, STEPS[asked.kind])
        callbacks = [tells, saving, CSVLogger(folder / "metrics.csv")]
        callbacks += [signaling(asked.signal_in, asked.signal_at, tells)] if asked.signal_in in HOOKS else []
        given = {"callbacks": callbacks, "resume_from": "auto", "folder": folder, "log_every_n_steps": 7}
        if asked.signal_in == BODY:
            for number, _ in enumerate(trainer.epochs(asked.epochs, **given), 1):
                if number == asked.signal_at:
                    tells.tell(signal=BODY)
                    signal.raise_signal(signal.SIGTERM)
                    break
            history = trainer.history
        else:
            history = trainer.fit(asked.epochs, progress=False, **given)
        rows = [{name: value for name, value in row.items() if "seconds" not in name} for row in history]
        torch.save({"state": trainer.state_dict(), "rows": rows}, folder / "done.pt")


if __name__ == "__main__":
    main()
