"""The stand-ins for a worker group are complete. What a real one does: see `test_worker_group_integration.py`."""

from __future__ import annotations

import pytest

from raysgd.engine.slots import Slots
from raysgd.engine.standby import StandbyWorkers
from raysgd.engine.worker_group import WorkerGroup
from tests.fakes import FakeGroup, FakeSlots, FakeStandbyWorkers


@pytest.mark.parametrize(
    ("fake", "real", "not_needed"),
    [
        (FakeGroup, WorkerGroup, {"is_ended", "is_on_one_node", "store", "submit"}),
        (FakeStandbyWorkers, StandbyWorkers, set()),
        (FakeSlots, Slots, {"are_own", "close", "give_back", "take", "take_usable"}),
    ],
)
def test_each_public_method_has_a_stand_in_but_for_those_that_the_controller_does_not_use(
    fake: type, real: type, not_needed: set[str]
) -> None:
    public = {name for name in vars(real) if not name.startswith("_")}
    assert public - set(vars(fake)) == not_needed
