"""What befalls trainers on a cluster of some nodes, as JSON.

    python -m tests.torch.node_stories [two|spare|parts]

tells of a wait for nodes; with `two`, of two trainers at once; with `spare`, of a spare; with `parts`, of a divided
model.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from raysgd import testing
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.helpers.hygiene import RaySurroundings
from tests.torch.ledger import Ledger, uses
from tests.torch.nodes import add_node, cluster_of
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator

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


class Wide(LinearOperator):
    """A model of 6 MiB, and twice that for its optimizer."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 2**18), torch.nn.Linear(2**18, 1))


def sum_of_state(operator: Any) -> float:
    """Of all numbers that this rank has of model and optimizer."""
    slots = [each for slot in operator.optimizer.state.values() for each in slot.values() if each.ndim]
    own = [each.to_local() for each in (*operator.model.parameters(), *slots)]
    return sum(each.double().sum().item() for each in own)


def parts_outlive_two_nodes(cluster: Cluster) -> dict[str, Any]:
    """One after the other, each with what its worker had of the last snapshot."""
    found: dict[str, Any] = {"before": [], "after": [], "sizes": [], "nodes of parts": []}
    with TorchTrainer(
        training_operator_cls=Wide, num_workers=4, config={"optimizer": "adam"}, strategy="fsdp"
    ) as trainer:
        for lost in (3, 1):
            trainer.train()
            found["nodes of parts"].append(_num_nodes_of_parts(trainer))
            found["before"].append(sum(trainer.apply_all_operators(sum_of_state)))
            pid = trainer.worker_group.infos[lost].pid
            testing.remove_node(cluster, trainer=trainer, rank=lost)
            with suppress(ProcessLookupError):  # it outlives its node for a moment
                os.kill(pid, signal.SIGKILL)
            found["after"].append(sum(trainer.apply_all_operators(sum_of_state)))
            found["sizes"].append(trainer.num_workers)
        return {**found, "kinds": _kinds(trainer)}


def _num_nodes_of_parts(trainer: TorchTrainer) -> list[int]:
    """Takes a snapshot; on how many nodes each part of it is, the driver's as 100."""
    here = ray.get_runtime_context().get_node_id()
    found = []
    for places in controller_of(trainer).snapshot().shared_state.places:
        located = get_object_locations([place.reference for place in places])
        nodes = {node for facts in located.values() for node in facts["node_ids"]}
        found.append(sum(100 if node == here else 1 for node in nodes))
    return found


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
        found = a_spare_steps_in_for_a_node(cluster)
        add_node(cluster)  # as many CPUs as before
        return {"spare": found, "left over": before.leaks()}


def tell_of_parts() -> dict[str, Any]:
    with cluster_of(4) as cluster:
        return parts_outlive_two_nodes(cluster)


def tell_of_a_wait() -> dict[str, Any]:
    with cluster_of(3) as cluster:
        before = RaySurroundings.now()
        return {"wait": a_wait_for_nodes_is_interrupted(cluster), "left over": before.leaks()}


STORIES = {"two": tell_of_two, "spare": tell_of_a_spare, "parts": tell_of_parts, "wait": tell_of_a_wait}

if __name__ == "__main__":
    print(json.dumps(STORIES[sys.argv[1] if sys.argv[1:] else "wait"]()))
