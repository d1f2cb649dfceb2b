"""A story of two nodes, told by a program of its own because it needs a Ray cluster of its own.

It prints one line of JSON with what was seen. The driver sits on a node without CPUs; the workers take the CPUs of
the others, one worker each.
"""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from raysgd.core.cluster.ray_cluster import cluster_view
from raysgd.core.cluster.resources import Resources, capacity
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.policies import ScalingPolicy
from raysgd.core.engine.shared.interface import Call, GroupSpec
from tests.helpers.fakes import CountingReplica, NullConnection, add
from tests.helpers.forked import lent_forks
from tests.helpers.ray_start import patient_ray

CPUS_PER_NODE = 3
NUM_SMALL = 4
NEED = Resources(num_cpus=2)
STORE_BYTES = 80 * 1024 * 1024
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=STORE_BYTES)


def wait_for_end_of(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)


def where(replica: CountingReplica) -> tuple[int, str]:
    return replica.world.rank, ray.get_runtime_context().get_node_id()


class Story:
    """What happens, and what was seen of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = [add_node(cluster), add_node(cluster)]
        self.controller = ElasticController(
            GroupSpec(NullConnection(), partial(CountingReplica, is_large=True), NEED, reservation_timeout_s=60),
            ScalingPolicy(max_workers=2, first_delay_s=0.2),
        )
        self.seen: dict[str, Any] = {}

    def train(self, amount: float) -> list[float]:
        call = Call(add, lambda worlds: [(amount,)] * len(worlds), changes_state=True)
        return self.controller.run(call, max_retries=1)

    def node_of(self, rank: int) -> Any:
        node_id = self.controller.ensure_group().infos[rank].node_id
        return next(node for node in self.nodes if node.node_id == node_id)

    def tell(self) -> dict[str, Any]:
        self.seen["capacity"] = capacity(cluster_view(), NEED, free_only=False)
        self.look_at_many_small_workers()
        self.begin()
        self.lose_the_node_of_rank_0()
        self.gain_a_node()
        self.controller.stop()
        return self.seen

    def look_at_many_small_workers(self) -> None:
        """Ray deals them out to the nodes in turns."""
        group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica, reservation_timeout_s=60), NUM_SMALL)
        assert group.start().ok
        self.seen["small"] = [(world.node_rank, world.local_rank) for world in group.worlds]
        answers = group.on_replica(where, dict.fromkeys(range(NUM_SMALL), ())).values
        self.seen["small where they say"] = answers
        self.seen["small where they are"] = [(rank, info.node_id) for rank, info in enumerate(group.infos)]
        group.stop(10.0)

    def begin(self) -> None:
        self.controller.start()
        group = self.controller.ensure_group()
        self.seen["nodes"] = len({info.node_id for info in group.infos})
        self.seen["node ranks"] = [(world.node_rank, world.num_nodes) for world in group.worlds]
        self.seen["first"] = self.train(1.0)

    def lose_the_node_of_rank_0(self) -> None:
        self.controller.snapshot()  # else there would be nothing to lose but what is run again
        lost, pid = self.node_of(0), self.controller.ensure_group().infos[0].pid
        self.cluster.remove_node(lost, allow_graceful=False)
        self.nodes.remove(lost)
        wait_for_end_of(pid)
        self.seen["after the loss"] = self.train(10.0)
        self.seen["cause"] = self.controller.history.events[-1].cause
        self.seen["address"] = lost.node_ip_address
        self.seen["failures"] = self.controller.history.num_failures

    def gain_a_node(self) -> None:
        self.nodes.append(add_node(self.cluster))
        while [holder.state for holder in cluster_view().holders] != ["CREATED"] * len(self.nodes):
            time.sleep(0.05)  # Ray grants what was requested for the worker that is missing
        self.seen["after the gain"] = self.train(100.0)
        self.seen["failures in the end"] = self.controller.history.num_failures


def main() -> None:
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "_system_config": FAST_HEALTH_CHECKS}
    with lent_forks().starting(), patient_ray():
        cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            seen = Story(cluster).tell()
        finally:
            ray.shutdown()
            cluster.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
