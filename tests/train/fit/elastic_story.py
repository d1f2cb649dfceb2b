"""A run of `fit` that loses a node, goes on with one worker, and grows when another node comes.

A program of its own because it needs a Ray cluster of its own. It prints one line of JSON with what was seen. The
driver sits on a node without CPUs; each other one has room for one worker.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from raysgd.train import FailureConfig, RunConfig, ScalingConfig
from raysgd.train.torch import TorchTrainer
from tests.helpers.forked import forks
from tests.helpers.ray_start import patient_ray
from tests.torch.draining import announce_end
from tests.train.fit.loops import await_preemption, count_epochs

LOSS_AT, GAIN_AT, NUM_EPOCHS = 1, 4, 9
STORE_BYTES = 80 * 1024 * 1024
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


class Fate:
    """Lets a node go at one epoch, and another one come at a later one. Sees every report, as a stop condition does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = [self.add_node(), self.add_node()]
        self.seen: list[tuple[int, int]] = []
        self.has_lost = False

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    def __call__(self, trial_id: str, metrics: dict[str, Any]) -> bool:
        self.seen.append((metrics["epoch"], metrics["size"]))
        if metrics["epoch"] == LOSS_AT and not self.has_lost:
            self.has_lost = True
            lost = next(node for node in self.nodes if node.node_id == metrics["node"])
            self.cluster.remove_node(lost, allow_graceful=False)
            while Path(f"/proc/{metrics['pid_of_worker']}").exists():
                time.sleep(0.05)
        if metrics["epoch"] == GAIN_AT:
            self.add_node()
        return False


def preempted(place: str) -> Any:
    """What the functions of a run are told of a node with one of them that is announced to go away."""
    node = next(each["NodeID"] for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU"))
    threading.Timer(5, announce_end, [node]).start()
    result = TorchTrainer(
        await_preemption, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=place)
    ).fit()
    return {**result.return_value, "is_that_node": result.return_value["nodes"] == [node]}


def main(place: str, kind: str) -> None:
    sizes = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
    head = {**sizes, "_system_config": FAST_HEALTH_CHECKS, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        fate = Fate(cluster)
        result = TorchTrainer(
            count_epochs,
            train_loop_config={"num_epochs": NUM_EPOCHS, "kind": kind, "epoch_s": 0.3},
            scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=0),
            run_config=RunConfig(
                name="run", storage_path=place, stop=fate, failure_config=FailureConfig(max_failures=3)
            ),
        ).fit()
        told = preempted(place)
    finally:
        ray.shutdown()
        cluster.shutdown()
    names = sorted(path.name for path in Path(result.path).iterdir() if path.name.startswith("checkpoint_"))
    metrics = {key: result.metrics[key] for key in ("epoch", "training_iteration", "size")}
    print(
        json.dumps(
            {"seen": fate.seen, "metrics": metrics, "checkpoints": names, "error": repr(result.error), "told": told}
        )
    )


if __name__ == "__main__":
    with forks() as found, found.starting(), patient_ray():
        main(sys.argv[1], sys.argv[2])
