"""A started group, and what it makes of whatever happens to its workers."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.util import placement_group_table

from raysgd.core.cluster.resources import Resources
from raysgd.core.connections.torch import TorchConnection
from raysgd.core.engine import gathering
from raysgd.core.engine import group as engine_group
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.policies import classify
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.core.engine.shared.types import GroupReport
from raysgd.core.engine.worker import WorkerProcess
from raysgd.core.worker_errors import worker_error
from tests.helpers.failure_plan import FailurePlan
from tests.helpers.fakes import CountingReplica, NullConnection, add, read
from tests.helpers.processes import is_alive, wait_until

pytestmark = pytest.mark.integration
FOR_EVER_S = 120.0  # an answer that must not be waited for comes so late; that it came is what a test sees then


def make_group(num_workers: int = 2, **options: Any) -> WorkerGroup:
    return WorkerGroup(
        GroupSpec(**{"connection": NullConnection(), "make_replica": CountingReplica, **options}), num_workers
    )


@contextmanager
def started(**options: Any) -> Iterator[WorkerGroup]:
    """A group that is ended, whatever became of it."""
    group = make_group(**options)
    assert group.start().ok
    yield group
    group.kill(10)


@pytest.fixture
def group(ray_cluster: None) -> Iterator[WorkerGroup]:
    """Two workers for tests that end some of them."""
    with started() as group:
        yield group


@pytest.fixture(scope="module")
def kept(ray_cluster: None) -> Iterator[WorkerGroup]:
    """Two workers for all tests that leave them as they were."""
    with started(resources=Resources(num_cpus=0.5)) as group:
        yield group


def on_all(group: WorkerGroup, function: Callable[..., Any], *args: Any) -> GroupReport:
    return group.on_replica(function, {rank: args for rank in range(len(group))})


def kinds(report: GroupReport) -> list[str | None]:
    """What became of each rank."""
    return [outcome.failure.kind if outcome.failure else "fine" if outcome.ok else None for outcome in report.outcomes]


def follow(replica: CountingReplica, plan: FailurePlan, seconds: float = 0.0) -> None:
    """Does as the plan says, and stays for so long if that lets it."""
    plan.check(replica.world.rank)
    time.sleep(seconds)


def own_placement_groups() -> list[dict[str, Any]]:
    return [entry for entry in placement_group_table().values() if entry["name"].startswith("raysgd")]


# -------------------------------------------------------------------------------------------- resources


def test_workers_that_need_nothing_run_without_a_reservation(ray_cluster: None) -> None:
    num_before = len(own_placement_groups())
    group = make_group(1, resources=Resources(num_cpus=0))
    try:
        assert group.start().ok
        assert len(own_placement_groups()) == num_before
    finally:
        group.kill(10)


# -------------------------------------------------------------------------------------------- user errors


def test_an_exception_of_any_size_is_seen_at_once(group: WorkerGroup, tmp_path: Path) -> None:
    huge = ValueError("missing keys: " + "layer.weight, " * 100_000)
    plan = FailurePlan(tmp_path).raise_(rank=1, error=huge).hang(rank=0, seconds=FOR_EVER_S)
    report = on_all(group, follow, plan)
    assert kinds(report) == [None, "user"]
    assert classify(report).faults[0].message.startswith(str(huge)[:100])


def make_lock(replica: CountingReplica) -> Any:
    return threading.Lock()


class OnlyThere:
    """Something that can be pickled in a worker and not unpickled in the driver."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (check_process, (os.getpid(),))


def check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise ImportError("no such module here")


def only_there(replica: CountingReplica) -> Any:
    return OnlyThere()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("function", "words"), [(make_lock, "cannot pickle"), (only_there, "no such module here")])
def test_a_value_that_cannot_travel_is_an_error_of_the_user_not_a_death(
    kept: WorkerGroup, function: Callable[..., Any], words: str
) -> None:
    report = on_all(kept, function)
    assert kinds(report) == ["user", "user"]
    assert words in classify(report).faults[0].message
    assert on_all(kept, read).ok


# -------------------------------------------------------------------------------------------- starting


@pytest.mark.usefixtures("patient")
def test_a_hook_that_raises_is_told_with_its_ranks_and_leaves_nothing(ray_cluster: None, tmp_path: Path) -> None:
    plan = FailurePlan(tmp_path).fail(rank=None, times=2)
    group = make_group(initialization_hook=partial(plan.check, 0))
    report = group.start()
    assert kinds(report) == ["user", "user"]
    assert classify(report).ranks == [0, 1]
    assert group.is_ended


# -------------------------------------------------------------------------------------------- stopping


def test_a_worker_that_is_busy_is_given_a_moment_to_close_and_then_ended(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_group, "_CLOSE_TIMEOUT_S", 0.2)
    group.submit(0, WorkerProcess.on_replica, follow, False, None, FailurePlan(Path()), FOR_EVER_S)
    pids = [info.pid for info in group.infos]
    group.stop(10)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


# -------------------------------------------------------------------------------------------- with the driver


@pytest.fixture
def mixed(ray_cluster: None) -> Iterator[WorkerGroup]:
    """The driver as rank 0 and a process as rank 1, with nothing between them."""
    with started(use_local=True) as group:
        yield group


@pytest.fixture
def connected(ray_cluster: None) -> Iterator[WorkerGroup]:
    """The same, in a real process group."""
    with started(use_local=True, connection=TorchConnection(timeout_s=120)) as group:
        yield group


def sum_up(replica: CountingReplica, plan: FailurePlan) -> float:
    import torch

    plan.check(replica.world.rank)
    tensor = torch.tensor([10.0**replica.world.rank])
    torch.distributed.all_reduce(tensor)
    return tensor.item()


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raysgd-listener"]


@pytest.mark.parametrize(("verb", "kind"), [("die", "died"), ("fail", "user")])
def test_a_driver_that_waits_for_a_process_is_freed_when_that_one_fails(
    connected: WorkerGroup, verb: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_CONNECTION_GRACE_S", 120.0)  # Ray may be long in reporting a death
    report = on_all(connected, sum_up, getattr(FailurePlan(tmp_path), verb)(rank=1))
    diagnosis = classify(report)
    assert (diagnosis.kind, diagnosis.ranks) == (kind, [1])
    assert "Timed out" not in report.outcomes[0].failure.fault.message  # it did not have to wait for that
    assert not report.all_answered
    assert listeners() == []


def test_the_driver_and_a_process_work_together_and_no_one_waits_for_a_process_when_the_driver_fails(
    connected: WorkerGroup, tmp_path: Path
) -> None:
    report = on_all(connected, sum_up, FailurePlan(tmp_path / "none"))
    assert report.values == [11.0, 11.0]
    assert listeners() == []
    report = on_all(connected, sum_up, FailurePlan(tmp_path).fail(rank=0))
    assert kinds(report) == ["user", None]


def test_an_interruption_of_the_driver_reaches_the_caller_and_ends_the_listening(
    mixed: WorkerGroup, tmp_path: Path
) -> None:
    plan = FailurePlan(tmp_path).raise_(rank=0, error=KeyboardInterrupt()).hang(rank=1, seconds=FOR_EVER_S)
    with pytest.raises(KeyboardInterrupt):
        on_all(mixed, follow, plan)
    wait_until(lambda: listeners() == [])


def test_the_driver_alone_needs_no_ray_and_reserves_nothing() -> None:
    group = make_group(1, use_local=True)
    assert group.start().ok
    assert group.is_driver_only
    assert on_all(group, add, 2.0).values[0] == 2.0
    replica = group.local_replica
    group.stop(10)
    assert replica.is_shut_down


# -------------------------------------------------------------------------------------------- what is sent


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that only the driver finds."""
    (tmp_path / "only_in_the_driver.py").write_text("def touch(replica=None):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("only_in_the_driver")
    del sys.modules["only_in_the_driver"]


def assert_says_what_to_do(report: GroupReport) -> None:
    diagnosis = classify(report)
    assert diagnosis.kind == "user"
    error = worker_error(diagnosis.faults)
    assert isinstance(error, ModuleNotFoundError)
    assert "only_in_the_driver" in str(error)
    assert "runtime_env" in str(error)
    assert list(diagnosis.ranks) == [0, 1]


@pytest.mark.usefixtures("patient")
def test_a_function_that_the_workers_cannot_import_is_explained(kept: WorkerGroup, elsewhere: Any) -> None:
    assert_says_what_to_do(on_all(kept, elsewhere.touch))
    assert on_all(kept, read).ok


def test_a_stored_value_is_put_once_and_goes_to_whatever_group_there_is(kept: WorkerGroup) -> None:
    stored = kept.store({"x": np.zeros(100_000)})
    assert kept.share(stored) == [stored.reference] * 2
    assert not stored.value["x"].flags.writeable
    alone = make_group(1, use_local=True)
    assert alone.start().ok
    try:
        assert alone.share(stored) == [stored.value]
        assert alone.store(3).value == 3
    finally:
        alone.kill()
