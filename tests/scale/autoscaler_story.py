"""A cluster without nodes for workers, whose autoscaler starts nodes when they are asked for.

Run as a module. The autoscaler is Ray's; its nodes are processes of this machine. Prints how many workers there were
after each call, and how many more it was asked to start at the end: this kind of autoscaler does not see that its nodes
have come, and may take those of the first workers for the ones that are still missing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util import placement_group_table

from raysgd.core.cluster.resources import Resources
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.policies import ScalingPolicy
from raysgd.core.engine.shared.interface import Call, GroupSpec
from tests.helpers.fakes import CountingReplica, NullConnection, add

MIN_WORKERS, MAX_WORKERS = 2, 3
LONGEST_S = 120.0
GROWING_S = 20.0
PROVIDER = {"type": "fake_multinode", "launch_multiple": True, "disable_node_updaters": True}
PATIENT = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "600"}
STORE_BYTES = 80 * 1024 * 1024


def config_of(address: str) -> dict[str, Any]:
    """What the autoscaler may start: nodes for one worker each."""
    node = {"resources": {"CPU": 1, "object_store_memory": STORE_BYTES}, "node_config": {}}
    return {
        "cluster_name": "scale",
        "max_workers": MAX_WORKERS,
        "provider": {**PROVIDER, "gcs_address": address},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {**node, "min_workers": 0, "max_workers": MAX_WORKERS},
        },
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 10,
        "upscaling_speed": 1.0,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "cluster_synced_files": [],
        **{
            f"{name}_commands": []
            for name in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        },
    }


@contextmanager
def autoscaling_cluster() -> Iterator[str]:
    """Yields the address. Nothing of it is left afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    with tempfile.TemporaryDirectory(prefix="a-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(config_of(address)))
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        command += [f"--autoscaling-config={config}", "--num-cpus=0", "--include-dashboard=false"]
        command += [f"--temp-dir={folder}", f"--object-store-memory={STORE_BYTES}"]
        environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", **PATIENT}
        head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            yield address
        finally:
            _end(head.pid)


def _end(pid: int) -> None:
    """Ends a process and all that it has started."""
    process = psutil.Process(pid)
    family = [*process.children(recursive=True), process]
    for each in family:
        each.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)


def connect(address: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while True:
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def grown() -> dict[str, Any]:
    """How many workers there are at each call, until there are as many as can be, or long enough."""
    sizes: list[int] = []
    controller = ElasticController(
        GroupSpec(NullConnection(), CountingReplica, Resources(num_cpus=1)),
        ScalingPolicy(MAX_WORKERS, MIN_WORKERS),
    )
    try:
        controller.start(as_fits=True)
        deadline = time.monotonic() + GROWING_S
        while time.monotonic() < deadline and sizes[-1:] != [MAX_WORKERS]:
            time.sleep(1.0)
            sizes.append(len(controller.run(Call(add, lambda worlds: [(1.0,)] * len(worlds), changes_state=True))))
        pending = [entry for entry in placement_group_table().values() if entry["state"] == "PENDING"]
        return {"sizes": sizes, "num_pending": sum(len(entry["bundles"]) for entry in pending)}
    finally:
        controller.stop(force=True)


def main() -> None:
    """Tells the story."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # head and driver would have to share a token
    with autoscaling_cluster() as address:
        connect(address)
        try:
            print(json.dumps(grown()))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
