"""Tells the workers of TensorFlow of each other. Needs no TensorFlow itself."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raysgd.train.backend import Backend, BackendConfig

if TYPE_CHECKING:
    from raysgd.train.worker_group import WorkerGroup


class TensorflowBackend(Backend):
    """Sets `TF_CONFIG` in every worker, also in a single one; strategies of TensorFlow read it."""

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        ports = worker_group.execute(free_port)
        addresses = [
            f"{worker.metadata.node_ip}:{port}" for worker, port in zip(worker_group.workers, ports, strict=True)
        ]
        for rank in range(len(worker_group)):
            worker_group.execute_single(rank, set_cluster, cluster_of(addresses, rank))


def cluster_of(addresses: Sequence[str], rank: int) -> str:
    """The value of `TF_CONFIG` for one worker.

    >>> cluster_of(["a:1"], 0)
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    """
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def set_cluster(value: str) -> None:
    """Sets it in this process."""
    os.environ["TF_CONFIG"] = value


def free_port() -> int:
    """A port that nobody listens on; somebody may before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
