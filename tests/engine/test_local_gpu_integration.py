"""Which GPU a driver computes on that is a worker itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What `local_gpu_scenario` saw."""
    command = [sys.executable, "-m", "tests.engine.local_gpu_scenario"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def test_driver_and_remote_worker_have_different_gpus(seen: dict[str, Any]) -> None:
    for group in (seen["first"], seen["second"]):  # the first gave its GPUs back, or there were none for the second
        [own] = group["driver"]
        assert {own, group["remote"]} == {"0", "1"}
        assert group["free during"] == 0.0


def test_the_variables_of_the_driver_stay_as_they_are(seen: dict[str, Any]) -> None:
    assert seen["first"]["driver's variable"] is None


def test_a_driver_that_is_the_only_worker_reserves_nothing(seen: dict[str, Any]) -> None:
    assert seen["alone"] is None
