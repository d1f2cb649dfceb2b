"""The stand-ins for a worker group are complete, and what one does in the driver alone.

What one does with processes: see `test_worker_group_integration.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from raysgd.engine.group.group_calls import GroupCalls
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.members import Members
from raysgd.engine.group.standby import StandbyWorkers
from raysgd.engine.group.worker_group import WorkerGroup
from raysgd.engine.placement import Slots
from raysgd.engine.platform import Platform
from raysgd.engine.processes.transfers import SharedValue
from raysgd.engine.shared.connection import NoConnection
from raysgd.engine.shared.types import Failure, GroupReport, Outcome, Rendezvous, Resources, WorkerInfo, World
from raysgd.engine.worker import LocalWorker
from raysgd.exceptions import WorkerFault
from tests.helpers.fakes import CountingReplica, FakeGroup, FakeSlots, FakeStandbyWorkers, NullConnection


class Listens(NullConnection):
    """Can open no endpoint."""

    def __init__(self, listens_alone: bool) -> None:
        self._listens_alone = listens_alone

    @property
    def listens_alone(self) -> bool:
        return self._listens_alone

    def open_endpoint(self, host: str, rank: int) -> int:
        raise OSError("no port was free")


class Joining(NoConnection):
    """Notes the groups that it leaves; the other rank of the first one is gone by the time this one joins."""

    def __init__(self) -> None:
        self.size = self.num_left = 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        if world.is_distributed:
            self.size = world.size
            raise ConnectionError("the other rank is gone")

    def leave(self) -> None:
        self.num_left += bool(self.size)
        self.size = 0


class DyingWorker:
    """A remote worker that dies when this is asked of it."""

    is_local = False

    def __init__(self, method: str) -> None:
        self._method = method

    def submit(self, method: str, *args: Any) -> Outcome:
        words = "ActorDiedError", "it died", "the worker process", ""
        died = Failure("died", WorkerFault(1, "node", None, *words))
        return Outcome(1, failure=died) if method == self._method else Outcome(1, 4711)


class AnsweringPlatform(Platform):
    """One whose remote calls are over at once."""

    def any_ready(self, references: Sequence[Any], timeout_s: float | None) -> Collection[Any]:
        return references

    def outcome(self, rank: int, reference: Any) -> Outcome:
        return reference

    def store(self, value: Any) -> SharedValue:
        return SharedValue(value, f"reference to {value}")


@pytest.mark.parametrize(
    ("fake", "real", "not_needed"),
    [
        (FakeGroup, WorkerGroup, {"is_on_one_node", "store", "submit", "take_over", "to_keep"}),
        (FakeStandbyWorkers, StandbyWorkers, {"cancel", "lend"}),
        (FakeSlots, Slots, {"are_own", "close", "give_back", "node_of", "take", "take_over", "take_usable"}),
    ],
)
def test_each_public_method_has_a_stand_in_but_for_those_that_the_controller_does_not_use(
    fake: type, real: type, not_needed: set[str]
) -> None:
    public = {name for name in vars(real) if not name.startswith("_")}
    assert public - set(vars(fake)) == not_needed


@pytest.mark.parametrize("listens_alone", [True, False])
def test_a_driver_that_is_the_only_worker_listens_only_if_its_connection_needs_that(listens_alone: bool) -> None:
    spec = GroupSpec(Listens(listens_alone), CountingReplica, Resources(1, 1), use_local=True)
    group = WorkerGroup(spec, 1)
    assert group.start().ok != listens_alone
    group.stop(1.0)


class Calls:
    """Calls to the driver and others."""

    def __init__(self, *others: DyingWorker) -> None:
        self.connection, self._members = Joining(), Members()
        self._driver = LocalWorker(self.connection)
        spec = GroupSpec(self.connection, CountingReplica, regroups=True, use_local=True)
        self._calls = GroupCalls(spec, self._members, AnsweringPlatform())
        self.give_ranks(*others)

    def give_ranks(self, *others: Any) -> None:
        workers = [self._driver, *others]
        self._members.give_ranks(workers, [WorkerInfo("node", "10.0.0.1", 1)] * len(workers))

    def connect(self) -> GroupReport:
        def build(rendezvous: Rendezvous) -> dict[int, Any]:
            arguments = rendezvous, CountingReplica, False
            workers = zip(self._members.worlds, self._members.workers, strict=True)
            return {world.rank: worker.submit("build", world, *arguments) for world, worker in workers}

        return self._calls.connect(build)


def test_a_driver_that_goes_on_as_the_only_worker_leaves_the_group_that_it_was_in() -> None:
    calls = Calls(DyingWorker("build"))
    assert not calls.connect().ok
    assert (calls.connection.size, calls.connection.num_left) == (2, 0)
    calls.give_ranks()
    assert calls.connect().ok
    assert (calls.connection.size, calls.connection.num_left) == (0, 1)


def test_where_a_rank_dies_before_others_join_it_they_have_not_answered() -> None:
    report = Calls(DyingWorker("open_endpoint")).connect()
    assert [found.answered for found in report.outcomes] == [False, True]
    assert report.outcomes[1].failure is not None


def test_a_value_that_was_stored_while_the_driver_was_alone_reaches_those_who_joined_it() -> None:
    group = WorkerGroup(GroupSpec(NullConnection(), CountingReplica, use_local=True), 1, AnsweringPlatform())
    assert group.start().ok
    stored = group.store("a state")
    assert group.share(stored) == ["a state"]
    group._members.workers.append(DyingWorker(""))  # type: ignore[arg-type]
    assert group.share(stored) == ["a state", "reference to a state"]
    group._members.workers.pop()
    group.stop(1.0)
