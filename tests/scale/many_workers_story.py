"""Thirty-two real workers train; one of them is killed in the middle of a pass, and another one takes its place.

Run as a module. Prints what the samples, the group and its history were like afterwards.
"""

from __future__ import annotations

import json
import logging

import ray

from raysgd import Recovery, testing
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.torch.ledger import Ledger

NUM_WORKERS = 32
BATCH_SIZE = 2
NUM_STEPS = 5
KILLED_RANK = 17
HEARTBEAT_S = 240.0  # while as many processes load PyTorch on a few cores, each is silent for long


def main() -> None:
    """Tells the story."""
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, logging_level=logging.ERROR)
    config = {"batch_size": BATCH_SIZE, "num_samples": NUM_WORKERS * BATCH_SIZE * NUM_STEPS}
    try:
        with TorchTrainer(
            training_operator_cls=Ledger,
            config=config,
            num_workers=NUM_WORKERS,
            recovery=Recovery(heartbeat_s=HEARTBEAT_S),
        ) as trainer:
            trainer.train()
            testing.kill_worker(trainer, KILLED_RANK, at="step:2")
            trainer.train()
            used = trainer.apply_all_operators(lambda operator: sorted(set((-operator.net.used).tolist())))
            found = {
                "used": used,
                "num_workers": trainer.num_workers,
                "kinds": [event.kind for event in controller_of(trainer).history.events],
            }
        print(json.dumps(found))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
