"""What befalls a divided model on a cluster that loses nodes, as JSON."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from raysgd import testing
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.torch.nodes import cluster_of
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator


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
        kinds = [event.kind for event in trainer.status().events if event.kind != "started"]
        return {**found, "kinds": kinds}


def _num_nodes_of_parts(trainer: TorchTrainer) -> list[int]:
    """Takes a snapshot; on how many nodes each part of it is, the driver's as 100."""
    here = ray.get_runtime_context().get_node_id()
    found = []
    for places in controller_of(trainer).snapshot().shared_state.places:
        located = get_object_locations([place.reference for place in places])
        nodes = {node for facts in located.values() for node in facts["node_ids"]}
        found.append(sum(100 if node == here else 1 for node in nodes))
    return found


if __name__ == "__main__":
    with cluster_of(4) as cluster:
        print(json.dumps(parts_outlive_two_nodes(cluster)))
