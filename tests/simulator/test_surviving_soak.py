"""Two hundred random edits of the engine: what neither the simulator nor a unit test finds has a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.stories import ROOT
from tests.simulator.edits import edits_of, paths
from tests.simulator.explained import EXPLAINED
from tests.simulator.surviving import as_table, read, survivors, unexplained

MOST_UNEXPLAINED = 10
"""A change of the engine brings other edits: those of what it changed."""


@pytest.mark.soak
def test_what_is_explained_is_an_edit_that_there_can_be() -> None:
    edits = {str(edit) for module in paths() for edit in edits_of(module)}
    assert sorted(EXPLAINED.keys() - edits) == []


@pytest.mark.soak
def test_nearly_every_random_edit_is_found_or_is_known_not_to_matter(tmp_path: Path) -> None:
    file = tmp_path / "results"
    command = [sys.executable, "-m", "tests.simulator.surviving", "--results", str(file)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = read(file)
    assert len(unexplained(results)) <= MOST_UNEXPLAINED, f"{as_table(results)}\n\n{survivors(results)}"
