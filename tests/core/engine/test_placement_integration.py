"""What a live cluster says that it has, and reservations in it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysgd.core.cluster.ray_cluster import cluster_view, ensure_ray, is_ray_client
from raysgd.core.cluster.resources import Resources, capacity
from raysgd.core.engine import placement
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.placement import Reservation, Slots
from raysgd.core.engine.shared.interface import FrontEndWords, GroupSpec
from raysgd.exceptions import ReservationTimeoutError
from tests.conftest import NUM_CPUS
from tests.helpers.fakes import CountingReplica, NullConnection, add
from tests.helpers.processes import wait_until
from tests.helpers.ray_start import VARIABLES

pytestmark = pytest.mark.integration

ONE = Resources()


@pytest.fixture
def holder(ray_cluster: None) -> Iterator[Any]:
    """Somebody else's placement group, which takes all but one CPU."""
    group = placement_group([{"CPU": NUM_CPUS - 1}], name="somebody-else")
    assert group.wait(120)
    wait_until(lambda: capacity(cluster_view(), ONE) == 1)
    yield group
    remove_placement_group(group)


def states_of_own_groups() -> list[str]:
    table = placement_group_table().values()
    return [entry["state"] for entry in table if entry["name"].startswith("raysgd")]


def nothing_is_reserved() -> bool:
    return set(states_of_own_groups()) <= {"REMOVED"}


# -------------------------------------------------------------------------------------------- looking


def test_the_view_shows_each_node_with_what_is_in_it_and_what_is_free(ray_cluster: None) -> None:
    wait_until(lambda: capacity(cluster_view(), ONE) == NUM_CPUS)
    [node] = cluster_view().nodes
    assert node.total["CPU"] == node.available["CPU"] == NUM_CPUS
    assert node.total.keys() == {"CPU", "memory"}  # what Ray keeps for itself is left out
    assert node.node_id == ray.get_runtime_context().get_node_id()


def test_the_view_shows_who_holds_what(holder: Any) -> None:
    assert capacity(cluster_view(), ONE) == 1
    [found] = [found for found in cluster_view().holders if found.name == "somebody-else"]
    assert (found.state, found.bundles) == ("CREATED", ({"CPU": NUM_CPUS - 1},))
    assert capacity(cluster_view(), ONE, free_only=False) == NUM_CPUS


def test_a_connection_that_is_there_is_used(ray_cluster: None) -> None:
    before = ray.get_runtime_context().get_job_id()
    ensure_ray()
    assert ray.get_runtime_context().get_job_id() == before
    assert not is_ray_client()


# -------------------------------------------------------------------------------------------- reserving


def test_a_reservation_takes_what_it_says_and_gives_it_back(
    ray_cluster: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_TELL_S", 60.0)
    reservation = Reservation(Resources(num_cpus=1.5), 2)
    reservation.wait(60)
    assert reservation.is_own
    assert warnings_in(caplog) == [], "a cluster that grants in time is not talked about"
    wait_until(lambda: cluster_view().nodes[0].available["CPU"] == NUM_CPUS - 3)
    assert all(reservation.is_granted() for _ in range(100))  # `wait(0)` of Ray says no now and then
    reservation.close(60)
    assert not reservation.is_own
    wait_until(lambda: cluster_view().nodes[0].available["CPU"] == NUM_CPUS)
    reservation.close(60)


def test_the_view_says_when_something_was_given_back_that_is_not_free_yet(ray_cluster: None) -> None:
    reservation = Reservation(Resources(num_cpus=1.5), 2)
    reservation.wait(60)
    wait_until(lambda: any(name.startswith("bundle_group_") for name in ray.available_resources()))
    assert not cluster_view().nodes[0].is_settling
    reservation.close(60)

    def is_free() -> bool:
        [node] = cluster_view().nodes
        assert node.is_settling == (node.available.get("CPU") != NUM_CPUS)
        return not node.is_settling

    wait_until(is_free)


@pytest.mark.parametrize(("packs", "strategy"), [(False, "SPREAD"), (True, "PACK")])
def test_workers_are_apart_or_close_to_each_other(ray_cluster: None, packs: bool, strategy: str) -> None:
    reservation = Reservation(Resources(num_cpus=1), 2, packs=packs)
    try:
        reservation.wait(60)
        groups = placement_group_table().values()
        assert [entry["strategy"] for entry in groups if entry["state"] == "CREATED"] == [strategy]
    finally:
        reservation.close(60)


def test_what_is_not_granted_is_told_in_numbers_and_nothing_stays_reserved(holder: Any) -> None:
    reservation = Reservation(Resources(num_cpus=2), 3, words=FrontEndWords(when_not_granted="(words)"))
    with pytest.raises(TimeoutError) as caught:
        reservation.wait(0.5)
    assert isinstance(caught.value, ReservationTimeoutError)
    message = str(caught.value)
    assert "did not grant 3 workers within 0.5 s" in message
    assert "requested:  3 x {'CPU': 2.0}" in message
    assert f"free {{'CPU': 1.0}} of {{'CPU': {NUM_CPUS}.0}}" in message
    assert f"held by placement group somebody-else (CREATED):  1 x {{'CPU': {NUM_CPUS - 1}.0}}" in message
    assert message.endswith("\n(words)")
    wait_until(nothing_is_reserved)


@pytest.mark.parametrize(
    "need",
    [
        Resources(num_cpus=100),
        Resources(num_gpus=1),
        Resources(custom={"no_such_thing": 1}),
        Resources(labels={"ray.io/node-id": "no-such-node"}),
    ],
)
def test_what_the_cluster_never_had_is_a_timeout_too(need: Resources, ray_cluster: None) -> None:
    group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica, need), 1)
    with pytest.raises(ReservationTimeoutError, match="did not grant 1 workers"):
        group.start(0.3)
    wait_until(nothing_is_reserved)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_reservation_that_ray_removes_while_it_is_awaited_is_not_granted(ray_cluster: None) -> None:
    """As it does with those of a process whose node dies."""
    reservation = Reservation(Resources(num_cpus=10 * NUM_CPUS), 1)
    with pytest.raises(ReservationTimeoutError, match="Ray has removed the reservation of 1 workers"):
        reservation.wait(60, check=lambda: remove_placement_group(reservation._group))


def test_what_no_node_can_ever_hold_is_said_once_and_waited_for(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ReservationTimeoutError):
        Reservation(Resources(num_cpus=100), 2).wait(0.1)
    [warning] = warnings_in(caplog)
    assert warning.startswith("No node is large enough for a worker, even when nothing else runs:\n  requested:  2 x")
    assert warning.endswith("Waiting up to 0.1 s for nodes to join.")


WAITING = """
from raysgd.core.engine.placement import Reservation
from raysgd.core.cluster.ray_cluster import ensure_ray
from raysgd.core.cluster.resources import Resources

ensure_ray()
try:
    Reservation(Resources(num_gpus=1000), 1).wait(100_000)
except TimeoutError as error:
    print(error)
"""


def test_what_can_never_be_held_is_not_waited_for_where_raysgd_has_started_ray() -> None:
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, "-c", WAITING], env=environment, capture_output=True, text=True, timeout=240)
    # Ray's autoscaler writes to the same place where this takes it several seconds.
    assert "No node is large enough for a worker, even when nothing else runs:\n" in done.stdout, done.stderr
    assert "To use a cluster, run the program on one of its machines" in done.stdout


@pytest.mark.program
def test_a_wrong_token_is_named_as_the_cause(ray_cluster: None) -> None:
    address = ray.get_runtime_context().gcs_address
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}  # they make Ray try longer
    environment = {**others, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    program = "import raysgd; raysgd.attach('run-7')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    words = f"PermissionError: Failed to connect to Ray cluster at {address}: the cluster rejects the token"
    assert words in done.stderr


def test_what_others_hold_is_told_in_one_line_once_it_takes_long(
    holder: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_TELL_S", 0.05)
    with pytest.raises(ReservationTimeoutError):
        Reservation(ONE, 3).wait(0.3)
    assert warnings_in(caplog) == [
        "waiting for resources: 3 workers with {'CPU': 1.0} each, resources for 1 are free now; giving up after 0.3 s"
    ]


def test_what_other_nodes_have_is_not_told_if_nodes_need_a_label(
    ray_cluster: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_TELL_S", 0.05)
    with pytest.raises(ReservationTimeoutError):
        Reservation(Resources(labels={"zone": "b"}), 1).wait(0.3)
    told = "1 workers with {'CPU': 1.0} each, on nodes with the labels {'zone': 'b'}; giving up after 0.3 s"
    assert warnings_in(caplog) == [f"waiting for resources: {told}"]


def test_ctrl_c_while_resources_are_awaited_is_heard_at_once_and_leaves_nothing_reserved(ray_cluster: None) -> None:
    group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica, Resources(num_cpus=100)), 1)
    press = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

    def press_once_it_waits() -> None:
        wait_until(lambda: "PENDING" in states_of_own_groups())
        press.start()

    watching = threading.Thread(target=press_once_it_waits)
    watching.start()
    with pytest.raises(KeyboardInterrupt):
        group.start(200)
    watching.join()
    press.join()
    wait_until(nothing_is_reserved)


# -------------------------------------------------------------------------------------------- tasks of a worker


@ray.remote(num_cpus=1)
def twice(value: int) -> int:
    return 2 * value


def ask_for_twice(replica: CountingReplica, value: int) -> int:
    task: Any = twice
    found: int = ray.get(task.remote(value), timeout=120)
    return found


def test_a_task_inside_a_worker_finds_room_beside_the_full_reservation(ray_cluster: None) -> None:
    group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica), 2)
    group.start(120)
    try:
        report = group.on_replica(ask_for_twice, {0: (3,), 1: (4,)})
        assert report.values == [6, 8]
    finally:
        group.stop(10)


# -------------------------------------------------------------------------------------------- inside another


@ray.remote(num_cpus=1)
class Trial:
    """Code that runs inside a placement group, as a trial of Tune does."""

    def run(self, function: Callable[[], Any]) -> Any:
        return function()


def in_a_trial(num_bundles: int, function: Callable[[], Any], captures: bool = True) -> Any:
    """Runs `function()` in an actor with the first bundle of a group, meant for what it starts too if it `captures`."""
    group = placement_group([{"CPU": 1}] * num_bundles, name="trial")
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=captures
    )
    try:
        trial: Any = Trial
        actor = trial.options(scheduling_strategy=strategy).remote()  # held: an actor nobody holds may end unstarted
        return ray.get(actor.run.remote(function), timeout=200)
    finally:
        remove_placement_group(group)


def train_two_workers() -> tuple[list[float], list[str], list[str], int]:
    before = states_of_own_groups()
    spec = GroupSpec(NullConnection(), CountingReplica)
    num_fitting = capacity(cluster_view(), spec.resources)
    group = WorkerGroup(spec, 2)
    group.start(120)
    values = group.on_replica(add, {0: (1.0,), 1: (2.0,)}).values
    group.stop(10)
    outer = ray.util.get_current_placement_group()
    state = placement_group_table(outer)["state"]
    return values, before, [*states_of_own_groups(), state], num_fitting


def test_inside_somebody_elses_group_that_one_is_used_and_left_as_it_was(ray_cluster: None) -> None:
    values, before, after, num_fitting = in_a_trial(3, train_two_workers)
    assert values == [1.0, 2.0]
    assert after == [*before, "CREATED"]
    assert num_fitting == 3


def ask_for_twice_outside() -> int:
    group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica, within=None), 1)
    group.start(120)
    try:
        [answer] = group.on_replica(ask_for_twice, {0: (3,)}).values
        return int(answer)
    finally:
        group.stop(10)


def test_a_task_inside_a_worker_that_left_somebody_elses_group_finds_room_beside_its_own(ray_cluster: None) -> None:
    assert in_a_trial(1, ask_for_twice_outside) == 6


def reserve_one() -> tuple[bool, int]:
    reservation = Reservation(Resources(), 1)
    try:
        reservation.wait(60)
        return reservation.is_own, len(cluster_view().holders)
    finally:
        reservation.close(60)


def test_inside_a_group_that_is_not_meant_for_what_is_started_there_an_own_one_is_made(ray_cluster: None) -> None:
    assert in_a_trial(1, reserve_one, captures=False) == (True, 2)


def start_with_slow_hook(found: Path) -> bool:
    """The hook is not over before all workers were found to have room."""
    await_placement = WorkerGroup._await_placement

    def then_tell(*args: Any) -> None:
        await_placement(*args)
        found.touch()

    group = WorkerGroup(
        GroupSpec(NullConnection(), CountingReplica, initialization_hook=partial(wait_until, found.exists)), 1
    )
    try:
        with mock.patch.object(WorkerGroup, "_await_placement", then_tell):
            return group.start(60.0).ok
    finally:
        group.kill(10)


def test_a_slow_hook_is_not_taken_for_a_lack_of_room(ray_cluster: None, tmp_path: Path) -> None:
    assert in_a_trial(2, partial(start_with_slow_hook, tmp_path / "found"))


def test_a_group_of_somebody_else_that_is_too_small_is_a_timeout_with_a_table(ray_cluster: None) -> None:
    def start_three() -> str:
        group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica), 3)
        try:
            group.start(1.0)
        except TimeoutError as error:
            return str(error)
        return "it started"

    message = in_a_trial(2, start_three)
    assert "of 3 workers were not placed within 1 s" in message
    assert "requested:  3 x {'CPU': 1.0}" in message
    assert "node this reservation:" in message


# -------------------------------------------------------------------------------------------- asking


def test_what_is_asked_for_is_reserved_as_soon_as_somebody_else_gives_it_back(holder: Any) -> None:
    slots = Slots(partial(Reservation, ONE))
    try:
        slots.ask_up_to(2, 0)
        wait_until(lambda: slots.take_granted() is None and len(slots) == 1)
        remove_placement_group(holder)
        wait_until(lambda: slots.take_granted() is None and len(slots) == 2)
        assert sum(state != "REMOVED" for state in states_of_own_groups()) == 2
    finally:
        slots.close(10)
    wait_until(nothing_is_reserved)


def test_a_wait_for_room_ends_when_it_is_there(holder: Any) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        remove_placement_group(holder)
        time.sleep(seconds)

    Slots(partial(Reservation, ONE)).await_room(2, 60.0, sleep)
    assert sum(pauses) < 60
    wait_until(nothing_is_reserved)
