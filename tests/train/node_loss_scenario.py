"""A run that loses a node and gains another, told by a program of its own because it needs a Ray cluster of its own.

It prints one line of JSON with what was seen. The driver sits on a node without CPUs but with GPUs, which stay unused;
each other one has room for one worker.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from raysgd import train
from raysgd.train import Trainer, TrainingCallback
from tests.helpers.forked import forks
from tests.helpers.ray_start import patient_ray

STORE_BYTES = 80 * 1024 * 1024
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
LOSS_AT, GAIN_AT, NUM_STEPS = 1, 4, 8
NUM_GPUS = 3


class Numbers:
    """Data to divide: counts how often that was done."""

    num_splits = 0

    def split(self, n: int, *, equal: bool) -> list[list[int]]:
        self.num_splits += 1
        return [list(range(4))[rank::n] for rank in range(n)]


def size_by_collective() -> int:
    """How many workers take part in a collective."""
    import torch

    total = torch.ones(())
    torch.distributed.all_reduce(total)
    return int(total)


def count_up() -> dict[str, Any]:
    checkpoint = train.load_checkpoint()
    first = checkpoint["number"] + 1 if checkpoint else 0
    for number in range(first, NUM_STEPS):
        node = ray.get_runtime_context().get_node_id()
        met = size_by_collective()
        train.report(number=number, shard=train.get_dataset_shard(), node=node, pid=os.getpid(), met=met)
        train.save_checkpoint(number=number)
        if train.world_size() == 1 and number > GAIN_AT:
            time.sleep(0.3)  # until Ray says that there is a node more
    return {"first": first, "size": train.world_size()}


class Fate(TrainingCallback):
    """Lets a node go at one step, and another one come at a later one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = [self.add_node(), self.add_node()]
        self.steps: list[dict[str, Any]] = []
        self.has_lost = False

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        number = results[0]["number"]
        self.steps.append(
            {"number": number, "shards": [result["shard"] for result in results], "met": results[0]["met"]}
        )
        if number == LOSS_AT and not self.has_lost:
            self.has_lost = True
            lost = next(node for node in self.nodes if node.node_id == results[0]["node"])
            self.cluster.remove_node(lost, allow_graceful=False)
            while Path(f"/proc/{results[0]['pid']}").exists():
                time.sleep(0.05)
        if number == GAIN_AT:
            self.add_node()


def main(logdir: str) -> None:
    sizes = {"num_cpus": 0, "num_gpus": NUM_GPUS, "object_store_memory": STORE_BYTES}
    head = {**sizes, "_system_config": FAST_HEALTH_CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        fate, numbers = Fate(cluster), Numbers()
        trainer = Trainer("torch", num_workers=(1, 2), logdir=Path(logdir), resize_interval_s=0)
        trainer.start()
        returned = trainer.run(count_up, callbacks=[fate], dataset=numbers)
        files = sorted(path.name for path in trainer.latest_checkpoint_dir.iterdir())  # type: ignore[union-attr]
        kinds = [event.kind for event in trainer.history.events]
        trainer.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"steps": fate.steps, "returned": returned, "files": files, "kinds": kinds}))


if __name__ == "__main__":
    with forks() as found, found.starting(), patient_ray():
        main(sys.argv[1])
