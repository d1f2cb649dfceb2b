"""Every phase of a training times every victim: a choice of the table, and all of it under `make soak`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.forked import Forks, NoForks
from tests.helpers.stories import run_story
from tests.torch.chaos_table import ALL, CHOSEN, NODE, NUM_WORKERS, PHASES, VICTIMS

pytestmark = pytest.mark.integration

Cell = tuple[str, str]


def told(*arguments: str, timeout_s: float) -> dict[Cell, dict[str, Any]]:
    """The cells that `chaos_table` filled."""
    done = run_story("tests.torch.chaos_table", *arguments, timeout_s=timeout_s)
    cells = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(cell["phase"], cell["victim"]): cell for cell in cells}


@pytest.fixture(scope="module")
def chosen(worker_forks: Forks | NoForks) -> dict[Cell, dict[str, Any]]:
    """The table as far as there is time for it, on workers forked by what all other tests use, too."""
    return told(timeout_s=480)


def assert_that_nothing_was_lost(cell: dict[str, Any]) -> None:
    assert cell["books"] == [cell["epoch"]], "each sample of each pass once"
    assert cell["equal"], "all ranks are alike"
    phase, victim = cell["phase"], cell["victim"]
    if phase == "validate":
        assert cell["result"] > 0  # what a lost rank measured is lost with it
    else:
        assert len(cell["result"]) == 1, "what the call gave is the state between two passes"
    assert cell["workers"] == NUM_WORKERS or victim == NODE
    if phase == "start-up":
        return
    assert cell["failures"] >= 1
    whole = [kind for kind in cell["events"] if kind == "restored"]
    if victim == "all":
        assert whole, "nobody is left to go on with"
    elif phase != "continue":
        assert not whole, "the survivors go on where they are"


def test_the_choice_has_every_phase_and_every_victim() -> None:
    assert {phase for phase, _ in CHOSEN} == set(PHASES) - {"state_dict"}
    assert {victim for _, victim in CHOSEN} == set(VICTIMS)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("cell", CHOSEN, ids="/".join)
def test_a_loss_loses_nothing(cell: Cell, chosen: dict[Cell, dict[str, Any]]) -> None:
    assert_that_nothing_was_lost(chosen[cell])


GOING_AWAY = ("going away", "a node")


@pytest.mark.timeout(500)
def test_a_node_that_is_going_away_is_left_in_good_order(chosen: dict[Cell, dict[str, Any]]) -> None:
    found = chosen[GOING_AWAY]
    assert found["kinds"] == ["left"]
    assert found["sizes"] == [2, 2], "in the epoch in which it was announced, and in the next one"
    assert found["uses"] == [2]
    assert found["num_samples"] == [960, 960], "the metrics of the worker that left are in the result"
    assert found["num_failures"] == 0
    assert not found["was still used"]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_loss_loses_anything() -> None:
    table = told("--all", timeout_s=7000)
    assert list(table) == [*ALL, GOING_AWAY]
    for cell in ALL:
        assert_that_nothing_was_lost(table[cell])
