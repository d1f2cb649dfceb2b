"""A driver that is a worker itself on a machine with two GPUs, told by a program with a Ray cluster of its own.

The GPUs are Ray's word only: it hands out their ids whether or not there is any. One line of JSON says what was seen.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysgd.core.cluster.ray_cluster import gpus_of_cluster
from raysgd.core.cluster.resources import DriverView, Resources, choose_gpus
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.core.engine.shared.types import Rendezvous, World
from tests.helpers.fakes import CountingReplica, NullConnection
from tests.helpers.forked import lent_forks
from tests.helpers.ray_start import patient_ray


class NotesGPUs(NullConnection):
    """Remembers which GPUs it was told to use."""

    told: Sequence[str] | None = None

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:
        self.told = list(gpu_ids)

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        JOINED.append(self.told)


JOINED: list[Sequence[str] | None] = []
"""Which GPUs the connections knew that joined in this process."""


def visible(replica: Any) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def num_free_gpus_in_the_end() -> float:
    """How many are free once Ray says that none is, or says otherwise for long."""
    deadline = time.monotonic() + 60
    while (found := float(ray.available_resources().get("GPU", 0.0))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def tell() -> dict[str, Any]:
    connection = NotesGPUs()
    spec = GroupSpec(connection, CountingReplica, Resources(1, 1), use_local=True, reservation_timeout_s=60)
    group = WorkerGroup(spec, 2)
    report = group.start()
    assert report.ok, report
    answers = group.on_replica(visible, {0: (), 1: ()}).values
    seen = {
        "driver": JOINED[-1],
        "told to what later workers get": connection.told,
        "remote": answers[1],
        "driver's variable": answers[0],
        "free during": num_free_gpus_in_the_end(),
    }
    group.stop(10.0)
    return seen


def share_in_trial(of_bundles: Sequence[float]) -> float:
    """How many GPUs `use_gpu="auto"` gives each of two workers of a trial for which this is reserved."""
    group = ray.util.placement_group([{"CPU": 0.5}, *({"CPU": 0.5, "GPU": share} for share in of_bundles)])
    ray.get(group.ready())
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    chosen = ray.remote(choose_gpus).options(num_cpus=0.5, scheduling_strategy=inside)
    share: float = ray.get(chosen.remote("auto", 2, DriverView(), gpus_of_cluster)).num_gpus
    ray.util.remove_placement_group(group)
    return share


def main() -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with lent_forks().starting(), patient_ray():
        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        first, second = tell(), tell()
        alone = GroupSpec(NotesGPUs(), CountingReplica, Resources(1, 1), use_local=True)
        group = WorkerGroup(alone, 1)
        group.start()
        seen: dict[str, Any] = {"first": first, "second": second, "alone": JOINED[-1]}
        group.stop(1.0)
        seen["trials"] = [share_in_trial(of_bundles) for of_bundles in ((1, 1), (0.5, 0.5), (0.25, 0.25), ())]
        seen["no trial"] = choose_gpus("auto", 3, DriverView(), gpus_of_cluster).num_gpus
    finally:
        ray.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
