"""The stand-ins for a worker group are complete, and what one does in the driver alone.

What one does with processes: see `test_worker_group_integration.py`.
"""

from __future__ import annotations

import pytest

from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.slots import Slots
from raysgd.engine.standby import StandbyWorkers
from raysgd.engine.types import Resources
from raysgd.engine.worker_group import WorkerGroup
from tests.fakes import CountingReplica, FakeGroup, FakeSlots, FakeStandbyWorkers, NullConnection


class Listens(NullConnection):
    """Can open no endpoint."""

    def __init__(self, listens_alone: bool) -> None:
        self._listens_alone = listens_alone

    @property
    def listens_alone(self) -> bool:
        return self._listens_alone

    def open_endpoint(self, host: str, rank: int) -> int:
        raise OSError("no port was free")


@pytest.mark.parametrize(
    ("fake", "real", "not_needed"),
    [
        (FakeGroup, WorkerGroup, {"is_on_one_node", "store", "submit"}),
        (FakeStandbyWorkers, StandbyWorkers, set()),
        (FakeSlots, Slots, {"are_own", "close", "give_back", "take", "take_usable"}),
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
