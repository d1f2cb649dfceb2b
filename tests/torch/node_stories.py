"""What befalls trainers on a cluster of some nodes, as JSON.

    python -m tests.torch.node_stories [two|spare]

tells of a wait for nodes; with `two`, of two trainers at once; with `spare`, of a spare.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from ray.cluster_utils import Cluster

from raysgd import testing
from raysgd.torch import TorchTrainer
from tests.hygiene import RaySurroundings
from tests.torch.ledger import Ledger, uses
from tests.torch.nodes import add_node, cluster_of

SLOW = {"num_samples": 480, "step_s": 0.05}


def two_trainers_lose_a_worker_each() -> dict[str, Any]:
    """At the same time, in two threads of one program."""
    results: dict[int, Any] = {}

    def train(index: int, trainer: TorchTrainer) -> None:
        results[index] = trainer.train()["num_samples"]

    def make() -> TorchTrainer:
        return TorchTrainer(training_operator_cls=Ledger, num_workers=2, config=SLOW)

    with make() as first, make() as second:
        trainers = [first, second]
        for trainer in trainers:
            testing.kill_worker(trainer, 1, at="step:5")
        threads = [threading.Thread(target=train, args=pair) for pair in enumerate(trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "kinds": [_kinds(trainer) for trainer in trainers],
            "sizes": [trainer.num_workers for trainer in trainers],
            "uses": [sorted(uses(trainer)) for trainer in trainers],
            "num_results": len(results),
        }


def a_spare_steps_in_for_a_node(cluster: Cluster) -> dict[str, Any]:
    """The spare is on another node than the worker whose place it takes."""
    with TorchTrainer(training_operator_cls=Ledger, num_workers=2, spare_workers=1, config=SLOW) as trainer:
        deadline = time.monotonic() + 30
        while not trainer.status().num_spares and time.monotonic() < deadline:
            time.sleep(0.1)
        lost = trainer.worker_group.infos[1].node_id
        timer = threading.Timer(0.5, testing.remove_node, [cluster], {"trainer": trainer, "rank": 1})
        timer.start()
        trainer.train()
        timer.join()
        return {
            "kinds": _kinds(trainer),
            "size": trainer.num_workers,
            "uses": sorted(uses(trainer)),
            "is on the lost node": lost in [info.node_id for info in trainer.worker_group.infos],
        }


class _InterruptsTheWait(logging.Handler):
    """Presses Ctrl-C soon after it was said that the trainer waits."""

    pressed_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting" in record.getMessage() and not self.pressed_at:
            self.pressed_at = time.monotonic() + 0.3
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def a_wait_for_nodes_is_interrupted(cluster: Cluster) -> dict[str, Any]:
    """Later there is a node again."""
    handler = _InterruptsTheWait()
    logging.getLogger("raysgd").addHandler(handler)
    with TorchTrainer(training_operator_cls=Ledger, num_workers=3, min_workers=3, config=SLOW) as trainer:
        trainer.train()
        threading.Timer(0.5, testing.remove_node, [cluster], {"trainer": trainer, "rank": 2}).start()
        try:
            trainer.train()
            seconds = None
        except KeyboardInterrupt:
            seconds = time.monotonic() - handler.pressed_at
        logging.getLogger("raysgd").removeHandler(handler)
        ended = trainer.status().events[-1]
        found = {"seconds": seconds, "kind": ended.kind, "cause": ended.cause, "uses then": sorted(uses(trainer))}
        add_node(cluster)
        trainer.train()
        return {**found, "size": trainer.num_workers, "uses": sorted(uses(trainer)), "kinds": _kinds(trainer)}


def _kinds(trainer: TorchTrainer) -> list[str]:
    return [event.kind for event in trainer.status().events if event.kind != "started"]


def tell_of_two() -> dict[str, Any]:
    with cluster_of(4):
        before = RaySurroundings.now()
        return {"two": two_trainers_lose_a_worker_each(), "left over": before.leaks()}


def tell_of_a_spare() -> dict[str, Any]:
    with cluster_of(3) as cluster:
        before = RaySurroundings.now()
        return {"spare": a_spare_steps_in_for_a_node(cluster), "left over": before.leaks()}


def tell_of_a_wait() -> dict[str, Any]:
    with cluster_of(3) as cluster:
        before = RaySurroundings.now()
        return {"wait": a_wait_for_nodes_is_interrupted(cluster), "left over": before.leaks()}


STORIES = {"two": tell_of_two, "spare": tell_of_a_spare, "wait": tell_of_a_wait}

if __name__ == "__main__":
    print(json.dumps(STORIES[sys.argv[1] if sys.argv[1:] else "wait"]()))
