"""Two runs of a fixed program leave the same record to the last bit, so that two versions can be compared."""

from __future__ import annotations

import pytest

from tests.recordings.__main__ import recorded
from tests.recordings.fixed import PROGRAMS

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", ["gan-killed", *(pytest.param(name, marks=pytest.mark.soak) for name in PROGRAMS)])
def test_a_program_leaves_the_same_record_twice(ray_cluster: None, name: str) -> None:
    first, second = recorded(PROGRAMS[name]), recorded(PROGRAMS[name])
    assert "Error: " not in first or name == "gan-accumulates"
    assert first == second
