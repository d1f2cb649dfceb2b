"""The record: 2,000 kills, one every 2 s, and 50 lost nodes; the weights are those of a run that was left in peace.

An hour and a quarter. `RAYSGD_RECORD` names a folder in which the record is kept, so that it can be done in parts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = [pytest.mark.integration, pytest.mark.soak]

NUM_KILLS, NUM_NODES = 2000, 50


def next_part(folder: Path, *options: str) -> dict[str, Any]:
    return found_by(run_story("tests.torch.record_run", str(folder), *options, timeout_s=3600))


def assert_that_nothing_was_lost(record: dict[str, Any]) -> None:
    assert record["samples_off"] == 0, record
    assert record["largest_difference"] <= 1e-5, record


@pytest.mark.timeout(900)
def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    options = ("--kills", "8", "--nodes", "1", "--part", "4", "--every", "3")
    first, second = (next_part(tmp_path, *options) for _ in range(2))
    assert_that_nothing_was_lost(second)
    assert (first["parts"], second["parts"]) == (1, 2)
    assert second["passes"] > first["passes"]
    assert second["trainings"] == 1
    assert next_part(tmp_path, *options) == second, "it is complete"


@pytest.mark.timeout(900)
def test_a_record_without_its_states_begins_a_new_training(tmp_path: Path) -> None:
    options = ("--kills", "4", "--nodes", "0", "--part", "2", "--every", "3")
    first = next_part(tmp_path, *options)
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    second = next_part(tmp_path, *options)
    assert_that_nothing_was_lost(second)
    assert (second["trainings"], second["parts"]) == (2, 2)
    assert second["passes"] == first["passes"] + second["passes_of_training"]


@pytest.mark.timeout(6 * 3600)
def test_two_thousand_kills_change_nothing(tmp_path: Path) -> None:
    folder = Path(os.environ.get("RAYSGD_RECORD", tmp_path))
    record: dict[str, Any] = {"kills": 0}
    while record["kills"] < NUM_KILLS:
        record = next_part(folder, "--kills", str(NUM_KILLS), "--nodes", str(NUM_NODES))
        assert_that_nothing_was_lost(record)
    assert record["nodes"] >= NUM_NODES - record["parts"]
    assert record["kills_of_rank_0"] > 0
    assert record["pairs"] > 0
    assert max(record["fds_grown"]) <= 20, "files stay open"
    assert max(record["mib_grown"]) <= 20, "memory grows"
    assert max(record["store_mib_grown"]) <= 10, "the object store fills"
