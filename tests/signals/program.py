"""The program that signals end: it trains, saves, resumes, and tells what came of it."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback, Checkpointing, CSVLogger, Run
from raysgd.core.numbers.results import CallProgress

NUM_SAMPLES, BATCH_SIZE = 240, 12
NUM_STEPS = NUM_SAMPLES // BATCH_SIZE


class Slow(TrainingOperator):
    """Trains with steps that take a while; the stock `train_batch` tells others what it has measured."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 13, 0.9),
        )
        features = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(features, features.sum(dim=1, keepdim=True))
        self.register_data(
            train_loader=DataLoader(data, BATCH_SIZE, shuffle=True), validation_loader=DataLoader(data, 60)
        )

    def optimizer_step(self) -> None:
        super().optimizer_step()
        time.sleep(self.config["step_s"])


class Accumulates(Slow):
    def accumulate_grad_batches(self, epoch_idx: int) -> int:
        return 3


class Tells(Callback):
    """Writes how far the run is, for who ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tell(self, **found: Any) -> None:
        with open(self.folder / "told.jsonl", "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **found}) + "\n")

    def on_run_begin(self, run: Run) -> None:
        self.tell(begin=run.epoch * NUM_STEPS + run.step)

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        if progress.kind == "train":
            self.tell(step=(run.epoch - 1) * NUM_STEPS + progress.num_steps)

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.tell(saved=run.epoch * NUM_STEPS + run.step)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.tell(end=type(error).__name__)


def main() -> None:
    """Train until all epochs are done, or a signal comes."""
    import ray

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["plain", "accumulate"], default="plain")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--every-n-steps", type=int, default=None)
    asked = parser.parse_args()
    folder = asked.folder
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    operator = Accumulates if asked.kind == "accumulate" else Slow
    with TorchTrainer(
        training_operator_cls=operator,
        num_workers=asked.workers,
        split_batches=True,
        seed=3,
        scheduler_step_freq="batch",
        config={"step_s": asked.step_s},
        num_cpus_per_worker=0.5,
    ) as trainer:
        saving = Checkpointing(folder / "files", every_n_steps=asked.every_n_steps)
        callbacks = [Tells(folder), saving, CSVLogger(folder / "metrics.csv")]
        history = trainer.fit(
            asked.epochs, callbacks=callbacks, resume_from="auto", folder=folder, log_every_n_steps=7, progress=False
        )
        rows = [{name: value for name, value in row.items() if "seconds" not in name} for row in history]
        torch.save({"state": trainer.state_dict(), "rows": rows}, folder / "done.pt")


if __name__ == "__main__":
    main()
