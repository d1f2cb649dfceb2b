"""Twelve workers divide a model that none of them could hold; one of them is killed, and they go on.

Run as a module, with the number of blocks of 4 MiB and a folder. Prints the size of the model, and how far the memory
of each worker grew beyond what it was before the model was made.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import testing
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.scale.large_checkpoint_story import Peak

NUM_WORKERS = 12
WIDTH = 1024
KILLED_RANK = 5
HEARTBEAT_S = 240.0  # while as many processes load PyTorch on a few cores, each is silent for long
_peak: Peak | None = None  # that of this process, whichever operator comes first


class Deep(TrainingOperator):
    """As many equal blocks as the config says, made without memory, and SGD."""

    def setup(self, config: dict[str, Any]) -> None:
        global _peak
        _peak = _peak or Peak()
        with torch.device("meta"):
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(config["num_blocks"])])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        data = TensorDataset(torch.randn(2 * NUM_WORKERS, WIDTH), torch.randn(2 * NUM_WORKERS, WIDTH))
        self.register_data(train_loader=DataLoader(data, batch_size=1), validation_loader=DataLoader(data))


def growth_gib(operator: Deep) -> float:
    """By how much the memory of this process grew at most since the first model was made."""
    assert _peak is not None
    return _peak.gib - _peak.began_gib


def main(num_blocks: int, folder: str) -> None:
    """Tells the story."""
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, logging_level=logging.ERROR)
    try:
        with TorchTrainer(
            training_operator_cls=Deep,
            config={"num_blocks": num_blocks},
            num_workers=NUM_WORKERS,
            use_gpu=False,
            parallel="fsdp",
            snapshot_every_s=0,
            heartbeat_s=HEARTBEAT_S,
        ) as trainer:
            trainer.train()
            trainer.save(Path(folder) / "parts")
            growth_before = trainer.apply_all_operators(growth_gib)
            testing.kill_worker(trainer, KILLED_RANK, at="step:1")
            trainer.train()
            trainer.validate()
            trainer.save(Path(folder) / "parts")
            [event] = [event for event in trainer.status().events if event.kind == "rebuilt"]
            found = {
                "model_gib": num_blocks * (WIDTH + 1) * WIDTH * 4 / 2**30,
                "growth_before_gib": growth_before,
                "growth_gib": trainer.apply_all_operators(growth_gib),
                "num_kept": event.num_kept,
            }
        print(json.dumps(found))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    from tests.scale import divided_model_story  # the workers find its class there

    divided_model_story.main(int(sys.argv[1]), sys.argv[2])
