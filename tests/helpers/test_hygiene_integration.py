from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from tests.conftest import NUM_CPUS
from tests.helpers import hygiene
from tests.helpers.hygiene import RaySurroundings
from tests.helpers.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.soak]


class Idle:
    def ready(self) -> None: ...


def idle_actor(num_cpus: int) -> Any:
    return ray.remote(Idle).options(num_cpus=num_cpus).remote()


def wait_until_free(num_cpus: int) -> None:
    """Ray tells a little late of what was taken or given back."""
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == num_cpus)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hygiene, "PATIENCE_S", 1.0)


def test_the_shared_cluster_has_the_resources_it_promises(ray_cluster: None) -> None:
    wait_until_free(NUM_CPUS)
    assert ray.cluster_resources()["CPU"] == NUM_CPUS
    assert RaySurroundings.now().leaks() == []


def test_an_actor_that_lives_on_is_named_also_without_resources(ray_cluster: None) -> None:
    before = RaySurroundings.now()
    actor = idle_actor(num_cpus=0)
    ray.get(actor.ready.remote())
    [leak] = before.leaks()
    ray.kill(actor)
    assert leak.startswith("actor Idle (ALIVE")


def test_a_reservation_that_is_kept_is_named(ray_cluster: None) -> None:
    wait_until_free(NUM_CPUS)
    before = RaySurroundings.now()
    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    wait_until_free(NUM_CPUS - 1)
    leaks = before.leaks()
    remove_placement_group(group)
    assert [leak.partition(" (")[0] for leak in leaks if "placement group" in leak] == [
        f"placement group {group.id.hex()}"
    ]
    assert "1 of CPU, still in use" in leaks


def test_what_was_there_before_does_not_count(ray_cluster: None) -> None:
    actor = idle_actor(num_cpus=1)
    ray.get(actor.ready.remote())
    wait_until_free(NUM_CPUS - 1)
    assert RaySurroundings.now().leaks() == []
    ray.kill(actor)
