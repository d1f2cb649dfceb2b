"""Twelve workers divide a model, train, save, lose one of them and go on; each tells how much memory that took.

Run as a module, with the number of blocks of 3.9 MiB that the model consists of, and a folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator
from tests.scale.large_checkpoint_story import Peak

NUM_WORKERS = 12
WIDTH = 1008  # of a block; its rows are divided evenly
BLOCK_MIB = WIDTH * WIDTH * 4 / 2**20


class Divided(TrainingOperator):
    """Blocks without numbers at first, and SGD, which keeps nothing."""

    def setup(self, config: dict[str, Any]) -> None:
        if config["num_blocks"] > 1:
            peak_of_process()
        with torch.device("meta"):
            blocks = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(config["num_blocks"])]
            model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
        )
        data = TensorDataset(torch.randn(NUM_WORKERS, WIDTH), torch.randn(NUM_WORKERS, 1))
        self.register_data(train_loader=DataLoader(data), validation_loader=DataLoader(data))


def peak_of_process() -> Peak:
    """What this process takes for itself, from the first call on; one in a process, whatever replica it has."""
    # Not in this module: what Ray pickles of `__main__` comes with names of its own each time.
    peak: Peak | None = getattr(sys, "_peak_of_story", None)
    if peak is None:
        peak = sys._peak_of_story = Peak("RssAnon", "RssFile")  # type: ignore[attr-defined]
    return peak


def growth_mib(operator: TrainingOperator) -> float:
    """By how much the process of a rank has been larger than before it had the large model."""
    return peak_of_process().growth_gib * 1024


def tell(num_blocks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"state_mib": num_blocks * BLOCK_MIB, "growth_mib": {}, "seconds": {}, "losses": []}
    began = time.monotonic()

    def note(what: str) -> None:
        nonlocal began
        found["seconds"][what] = round(time.monotonic() - began, 1)
        found["growth_mib"][what] = [round(each) for each in trainer.apply_all_operators(growth_mib)]
        began = time.monotonic()

    with TorchTrainer(
        training_operator_cls=Divided,
        config={"num_blocks": 1},
        num_workers=NUM_WORKERS,
        num_cpus_per_worker=0.1,
        strategy="fsdp",
    ) as trainer:
        trainer.train()  # so that what any model takes, as connections and code, is there before
        trainer.validate()
        trainer.reset_config({"num_blocks": num_blocks})
        note("start")
        found["losses"].append(trainer.train()["train_loss"])
        note("train")
        trainer.save(str(folder / "state"))
        note("save")
        os.kill(trainer.apply_all_operators(lambda _: os.getpid())[NUM_WORKERS // 2], signal.SIGKILL)
        found["losses"].append(trainer.train()["train_loss"])
        note("loss")
        result = trainer.train()
        found["losses"] += [result["train_loss"], trainer.validate()["val_loss"]]
        note("going on")
    return {**found, "epoch": result["epoch"]}


def main(num_blocks: int, folder: Path) -> None:
    """Tells the story and prints what it saw."""
    folder.mkdir(parents=True, exist_ok=True)
    store = int((6 * num_blocks * BLOCK_MIB + 512) * 2**20)
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=store)
    try:
        print(json.dumps(tell(num_blocks, folder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
