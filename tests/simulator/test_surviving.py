"""What finds a random edit of the engine is counted as the page says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.stories import ROOT
from tests.simulator.edits import KINDS, edits_of, paths
from tests.simulator.explained import EXPLAINED
from tests.simulator.surviving import Result, as_table, survivors, unexplained

pytestmark = pytest.mark.soak

RUN = """
import json
from dataclasses import asdict
from tests.simulator.edits import edits_of
from tests.simulator.surviving import results_of

WANTED = (
    "snapshots.own_states: `num_ranks - len(rank_states)` -> `num_ranks + len(rank_states)`",
    "snapshots.is_due: `num_calls > _MAX_CALLS` -> `num_calls >= _MAX_CALLS`",
    "platform._sigkill: `os.kill(pid, signal.SIGKILL)` -> `pass`",
    "time_spent.TimeLedger.largest_avoidable: `if not inside:` -> `return`",
)
edits = [edit for module in ("snapshots", "platform", "time_spent") for edit in edits_of(module)]
chosen = [next(edit for edit in edits if str(edit) == words) for words in WANTED]
print(json.dumps([asdict(result) for result in results_of(chosen, num_schedules=30, num_traced=10)]))
"""


def test_an_edit_is_found_by_the_simulator_or_by_unit_tests_or_survives() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [(each["by"], each["is_reached"], each["why"]) for each in json.loads(done.stdout)]
    assert [(by, is_reached) for by, is_reached, _ in found] == [
        ("simulator", True),
        ("survives", True),
        ("survives", False),
        ("unit tests", False),
    ]
    assert found[0][2]


def result(kind: str, by: str, is_reached: bool = True) -> Result:
    return Result(f"{kind} {by}", kind, by, 3 if by == "simulator" else None, "", is_reached)  # type: ignore[arg-type]


def test_the_table_counts_each_edit_once_and_tells_those_that_the_simulator_runs() -> None:
    results = [
        *[result(KINDS[0], "simulator")] * 3,
        result(KINDS[0], "unit tests"),
        result(KINDS[1], "survives"),
        result(KINDS[1], "unit tests", is_reached=False),
    ]
    rows = as_table(results).splitlines()[2:]
    assert rows[0] == f"| {KINDS[0]} | 4 | 3 | 1 | 0 |"
    assert rows[1] == f"| {KINDS[1]} | 2 | 0 | 1 | 1 |"
    assert rows[-2:] == ["| all | 6 | 3 | 2 | 1 |", "| all that the simulator runs | 5 | 3 | 1 | 1 |"]


def test_what_survives_is_told_with_its_reason_and_what_has_none_stands_out() -> None:
    results = [result("order", "survives", is_reached=False), result("order", "unit tests")]
    assert survivors(results) == "order survives\n    (not run by the simulator) ?"
    assert unexplained(results) == ["order survives"]


def test_what_is_explained_is_an_edit_that_there_can_be() -> None:
    edits = {str(edit) for module in paths() for edit in edits_of(module)}
    assert sorted(EXPLAINED.keys() - edits) == []
