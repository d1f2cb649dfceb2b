"""A Ray cluster of several nodes on this machine, for programs that lose some of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.cloudpickle
from ray.cluster_utils import Cluster

from tests.helpers.forked import forks
from tests.helpers.ray_start import patient_ray
from tests.torch import ledger, operators_for_tests

STORE_BYTES = 80 * 1024 * 1024
FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 6,
}


def add_node(cluster: Cluster) -> Any:
    """One more node, with room for one worker."""
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[Cluster]:
    """A head without CPUs, where the driver is, and `num_nodes` with one each."""
    os.environ.update({"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "_system_config": FAST_HEALTH_CHECKS}
    with forks() as found, found.starting(), patient_ray():
        cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
        for module in (ledger, operators_for_tests):
            ray.cloudpickle.register_pickle_by_value(module)  # workers have no path to the tests
        try:
            for _ in range(num_nodes):
                add_node(cluster)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
