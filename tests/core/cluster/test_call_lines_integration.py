"""Calls of workers by lines, beside calls of Ray's: what goes which way, and how a loss is seen."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray.cloudpickle import dumps

from raysgd.core.cluster.call_lines import LARGEST, Line, Reference
from raysgd.core.cluster.resources import Resources
from raysgd.core.engine import platform
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.platform import RemoteWorker
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.core.engine.shared.types import GroupReport
from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.fakes import CountingReplica, NullConnection

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

FOR_EVER_S = 3600.0


def value_of(replica: CountingReplica, value: Any) -> Any:
    return value


def of_size(replica: CountingReplica, size: int) -> bytes:
    return bytes(size)


def function_of_script(replica: CountingReplica) -> Any:
    return lambda: replica.world.rank


class Unreadable:
    """Cannot be unpickled, wherever it arrives."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def unreadable(replica: CountingReplica) -> Unreadable:
    return Unreadable()


def fail(replica: CountingReplica) -> None:
    raise KeyError("the user's words")


def fork_and_sleep(replica: CountingReplica) -> None:
    if os.fork() == 0:
        time.sleep(FOR_EVER_S / 100)
        os._exit(0)
    time.sleep(FOR_EVER_S)


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[WorkerGroup]:
    spec = GroupSpec(connection=NullConnection(), make_replica=CountingReplica, resources=Resources(num_cpus=0.5))
    found = WorkerGroup(spec, 2)
    assert found.start().ok
    yield found
    found.kill()


def ask(group: WorkerGroup, function: Any, *args: Any, by_line: bool = True) -> GroupReport:
    return group.on_replica(function, dict.fromkeys(range(2), args), by_line=by_line)


def values(report: GroupReport) -> list[Any]:
    return report.values


def lines(group: WorkerGroup) -> list[Line]:
    return [each._line for each in workers(group) if each._line is not None]


def workers(group: WorkerGroup) -> list[RemoteWorker]:
    return [each for each in group.workers if isinstance(each, RemoteWorker)]


def test_a_line_serves_one_call_after_the_other_until_ray_has_one(group: WorkerGroup) -> None:
    assert values(ask(group, value_of, 1)) == [1, 1]
    first = lines(group)
    assert [values(ask(group, value_of, number)) for number in (2, 3)] == [[2, 2], [3, 3]]
    assert lines(group) == first
    assert not any(line.is_ended for line in first)
    assert values(ask(group, value_of, 4, by_line=False)) == [4, 4]
    assert all(line.is_ended for line in first)
    assert values(ask(group, value_of, 5)) == [5, 5]
    assert group.ask_workers(WorkerProcess.stack) == dict.fromkeys(range(2), "  no call is running\n")


@pytest.mark.parametrize("size", [LARGEST // 2, 2 * LARGEST])
def test_large_arguments_and_answers_go_through_ray(group: WorkerGroup, size: int) -> None:
    for _ in range(2):
        assert [len(found) for found in values(ask(group, of_size, size))] == [size, size]
        assert values(ask(group, value_of, bytes(size))) == [bytes(size)] * 2
        assert values(ask(group, value_of, "small")) == ["small", "small"]


def test_what_only_ray_can_send_goes_through_ray(group: WorkerGroup) -> None:
    assert [found() for found in values(ask(group, function_of_script))] == [0, 1]
    assert values(ask(group, value_of, 1)) == [1, 1]


@pytest.mark.parametrize("by_line", [True, False])
def test_an_answer_that_the_driver_cannot_unpickle_is_an_error_of_the_user_either_way(
    group: WorkerGroup, by_line: bool
) -> None:
    report = ask(group, unreadable, by_line=by_line)
    faults = [found.failure.fault for found in report.outcomes if found.failure and found.failure.kind == "user"]
    assert [(fault.type_name, "no number" in fault.message) for fault in faults] == [("RaySystemError", True)] * 2
    assert values(ask(group, value_of, 1)) == [1, 1]


class LineElsewhere(Line):
    """A line of which the worker gets another name."""

    def __init__(self, attend: Callable[[str], Reference]) -> None:
        super().__init__(lambda name: attend("raysgd-elsewhere"))


def test_a_worker_that_finds_no_line_is_asked_through_ray_from_then_on(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert values(ask(group, value_of, 1, by_line=False)) == [1, 1]
    monkeypatch.setattr(platform, "Line", LineElsewhere)
    for number in range(3):
        assert values(ask(group, value_of, number)) == [number, number]
    assert lines(group) == []
    for each in workers(group):
        each._can_attend = True


def test_a_worker_can_be_sent_while_it_has_a_line(group: WorkerGroup) -> None:
    assert values(ask(group, value_of, 1)) == [1, 1]
    copies = pickle.loads(dumps(workers(group)))
    assert [copy._line for copy in copies] == [None, None]
    assert all(isinstance(each._line, Line) for each in workers(group))


def test_a_worker_that_is_killed_is_seen_at_once_also_if_it_has_forked(group: WorkerGroup) -> None:
    assert values(ask(group, value_of, 1)) == [1, 1]
    pids, asked = [info.pid for info in group.infos], []

    def kill() -> None:
        asked.append(time.monotonic())
        if len(asked) == 3:
            os.kill(pids[1], signal.SIGKILL)

    report = group.on_replica(fork_and_sleep, {1: ()}, by_line=True, on_wait=kill)
    assert [found.failure.kind for found in report.outcomes if found.failure] == ["died"]
    assert len(asked) <= 13, "it was seen by its silence"
    assert values(group.on_replica(value_of, {0: (2,)}, by_line=True)) == [2]
