"""Trains on two nodes that Ray simulates on this machine, kills one in the middle of an epoch, and adds another node.

Data: the 1,797 real digits of scikit-learn, 8x8 pixels each. 64 % are for training, 16 % for validation. Half of the
workers die with their node. The others continue with the same global batch, and new workers join on the added node.
The program creates its own cluster, because it kills a node, so `--address` is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from _common import load_digits, parse_arguments, print_result, ray_running
from ray.cluster_utils import Cluster
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.callbacks import Callback, Run
from raysgd.operators import ClassificationOperator
from raysgd.testing import remove_node

CONFIG = {"lr": 0.001, "batch_size": 16, "seed": 0}  # 16 samples in each step, over all workers
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 6}
HEAD = {"num_cpus": 0, "include_dashboard": False, "_system_config": SOON}  # Ray notices a lost node in 3 s, not 15


class DigitsOperator(ClassificationOperator):
    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))

    def build_data(self, config: dict[str, Any]) -> list[TensorDataset]:
        parts = load_digits()[:2]
        return [TensorDataset(torch.tensor(images).flatten(1), torch.tensor(digits)) for images, digits in parts]


class LoseNode(Callback):
    """Kills the node of the last rank in the middle of an epoch, and adds a node after that epoch."""

    def __init__(self, cluster: Cluster, epoch: int, node: dict[str, int]) -> None:
        self.cluster, self.epoch, self.node, self.is_lost = cluster, epoch, node, False

    def on_progress(self, run: Run, progress: Any) -> None:
        if run.epoch >= self.epoch and progress.kind == "train" and progress.num_steps and not self.is_lost:
            print(f"  killing a node in step {progress.num_steps}", flush=True)
            remove_node(self.cluster, trainer=run.trainer, rank=run.trainer.num_workers - 1)
            self.is_lost = True

    def on_epoch_trained(self, run: Run) -> None:
        if self.is_lost and len(self.cluster.worker_nodes) < 2:
            print("  adding a node", flush=True)
            self.cluster.add_node(**self.node)


def train(num_epochs: int, callbacks: list[Callback], **options: Any) -> dict[str, Any]:
    """Train with these trainer options. Return the model, its accuracy, the used samples and the failures."""
    used = []
    with TorchTrainer(training_operator_cls=DigitsOperator, config=CONFIG, split_batches=True, **options) as trainer:
        for row in trainer.epochs(num_epochs, callbacks=callbacks):
            loss, accuracy = row["train_loss"], row["val_accuracy"]
            print(f"  epoch {row['epoch']:2d}: loss {loss:.3f}, accuracy {accuracy:.3f}, workers {trainer.num_workers}")
            data = trainer.status().data
            used.append((data.used, data.due))
        failures = [event for event in trainer.status().events if event.is_failure]
        return {"model": trainer.get_model(to_cpu=True), "accuracy": accuracy, "used": used, "failures": failures}


def main() -> None:
    args = parse_arguments(__doc__, num_workers=4)
    if args.num_workers < 2:
        raise SystemExit(f"--num-workers {args.num_workers}: need at least 2, because half of them die.")
    num_epochs, on_a_node = 3 if args.smoke_test else 15, -(-args.num_workers // 2)
    node = {"num_cpus": on_a_node, "num_gpus": on_a_node * args.use_gpu}
    print("training in one process")
    alone = train(num_epochs, [], use_local=True, use_gpu=args.use_gpu)
    print(f"training on {args.num_workers} workers on two nodes", flush=True)
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(2):
            cluster.add_node(**node)
        args.address = cluster.address
        with ray_running(args):
            lose_node = LoseNode(cluster, 2, node)
            found = train(num_epochs, [lose_node], num_workers=args.num_workers, use_gpu=args.use_gpu)
    finally:
        cluster.shutdown()
    pairs = zip(found["model"].parameters(), alone["model"].parameters(), strict=True)
    apart = max((first - second).abs().max().item() for first, second in pairs)
    once = all(used == due for used, due in found["used"])
    print_result(
        args,
        f"A node was killed: each digit was {'' if once else 'NOT '}used once in each epoch, and the weights are those "
        f"of one process up to {apart:.0e}.",
        accuracy=found["accuracy"],
        accuracy_of_one_process=alone["accuracy"],
        lost_workers=sum(event.old_size - event.new_size for event in found["failures"]),
        each_used_once=once,
        difference_to_one_process=apart,
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
