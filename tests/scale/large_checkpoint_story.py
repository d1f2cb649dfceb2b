"""Workers keep states of gigabytes while the driver ends whoever gives no sign of life for four seconds.

Run as a module, with the interface, "function" or "class", the gigabytes, and a folder for the checkpoints.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from tests.helpers.doors import controller_of

HEARTBEAT_S = 4.0
NUM_STATES = 3
_GIB = 2**30


class Peak:
    """The largest size of this process in GiB.

    Args:
        kinds: What counts, as the system calls it. Without "RssShmem", what it shares with Ray's object store does not.

    Attributes:
        began_gib: Its size when this was made.
        gib: The largest since then.
    """

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds or ("RssAnon",)
        self.began_gib = self.gib = self._now_gib()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def growth_gib(self) -> float:
        """How much larger it was at most than when this was made."""
        return self.gib - self.began_gib

    def _watch(self) -> None:
        while True:
            self.gib = max(self.gib, self._now_gib())
            time.sleep(0.02)

    def _now_gib(self) -> float:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        return sum(int(line[1]) for line in lines if line[0].rstrip(":") in self._kinds) * 1024 / _GIB


def keep_saving(config: dict[str, Any]) -> float:
    """Saves one state after the other; returns the peak of its process."""
    import torch

    from raysgd import train

    peak = Peak()
    weights = [torch.randn(int(config["gib"] * _GIB / 16)) for _ in range(4)]
    for number in range(NUM_STATES):
        train.save_checkpoint(number=number, weights=weights)
        train.report(number=number)
    return peak.gib


def with_functions(gib: float, folder: str) -> dict[str, Any]:
    from raysgd.train import CheckpointStrategy, Trainer

    trainer = Trainer("torch", heartbeat_s=HEARTBEAT_S, logdir=folder)
    trainer.start()
    peak = Peak()
    keep_latest = CheckpointStrategy(num_to_keep=1)
    [of_worker] = trainer.run(keep_saving, {"gib": gib}, checkpoint_strategy=keep_latest)
    assert trainer.latest_checkpoint is not None
    found = {"epoch": trainer.latest_checkpoint["number"] + 1, "worker_gib": of_worker, "driver_gib": peak.gib}
    kinds = [event.kind for event in trainer.history.events]
    trainer.shutdown()
    return {**found, "kinds": kinds}


def with_operators(gib: float, folder: str) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    from raysgd import Recovery
    from raysgd.torch import TorchTrainer, TrainingOperator

    class Large(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("rest", torch.randn(int(gib * _GIB / 4)))

    class Operator(TrainingOperator):
        def setup(self, config: Any) -> None:
            self.peak, model = Peak(), Large()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
            self.criterion = torch.nn.MSELoss()
            data: Any = [(torch.ones(1), torch.ones(1))] * 4
            self.register_data(train_loader=DataLoader(data))

    trainer = TorchTrainer(training_operator_cls=Operator, recovery=Recovery(heartbeat_s=HEARTBEAT_S))
    peak = Peak()
    for _ in range(NUM_STATES):
        trainer.train()
    trainer.save(str(Path(folder) / "state.pt"))
    [of_worker] = trainer.apply_all_operators(lambda operator: operator.peak.gib)
    kinds = [event.kind for event in controller_of(trainer).history.events]
    epoch = trainer.train()["epoch"] - 1
    trainer.shutdown()
    return {"epoch": epoch, "worker_gib": of_worker, "driver_gib": peak.gib, "kinds": kinds}


INTERFACES: dict[str, Callable[[float, str], dict[str, Any]]] = {"function": with_functions, "class": with_operators}


def main(interface: str, gib: float, folder: str) -> None:
    """Tells the story and prints what it saw."""
    store = int((4 * gib + 1) * _GIB)
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=store)
    try:
        print(json.dumps(INTERFACES[interface](gib, folder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
