"""Which GPU a driver computes on that is a worker itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.stories import found_by, run_story

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What `local_gpu_scenario` saw."""
    return found_by(run_story("tests.core.engine.local_gpu_scenario", timeout_s=250))


def test_driver_and_remote_worker_have_different_gpus(seen: dict[str, Any]) -> None:
    for group in (seen["first"], seen["second"]):  # the first gave its GPUs back, or there were none for the second
        [own] = group["driver"]
        assert group["told to what later workers get"] is None
        assert {own, group["remote"]} == {"0", "1"}
        assert group["free during"] == 0.0


def test_the_variables_of_the_driver_stay_as_they_are(seen: dict[str, Any]) -> None:
    assert seen["first"]["driver's variable"] is None


def test_a_trial_goes_by_its_bundles_and_others_by_all_gpus_whether_free_or_not(seen: dict[str, Any]) -> None:
    assert seen["trials"] == [1.0, 0.5, 0.25, 0.0]
    assert seen["no trial"] == 0.5


def test_a_driver_that_is_the_only_worker_reserves_nothing(seen: dict[str, Any]) -> None:
    assert seen["alone"] is None
