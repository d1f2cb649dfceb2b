"""The idioms of training loops end as in one process or are refused.

What each idiom does is in `tests.torch.idioms`; `tests.torch.idiom_table` prints the table of `docs/architecture.md`. A
test runs many in one live trainer, whose workers come and go.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pytest

from tests.torch.idiom_table import PLACES, Death, laboratory, run_idiom
from tests.torch.idioms import IDIOMS

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("RAYSGD_CHAOS_SEED", "1"))
CALM = ["Idiom", "GanAccumulates", "WganPenalty", "SamVector", "OverlappingOnce", "CountedLabels", "Recurrent", "Codes"]
REFUSED = ["PlainLabels", "PenalizedLabels", "AutogradGrad"]
TORN = {
    "Own": Death(3, "before step", 1, 1),
    "SamSwaps": Death(7, "in backward", 2, 0),
    "GanSecondBatch": Death(9, "after step", 1, 1),
}


def test_idioms_equal_one_process_or_are_refused(ray_cluster: None) -> None:
    with laboratory(2) as lab:
        found = {name: lab.run(name, TORN.get(name)) for name in [*CALM, *TORN, *REFUSED]}
    faults = {name: outcome.fault(IDIOMS[name], "float64") for name, outcome in found.items()}
    assert faults == dict.fromkeys(found, "")
    assert [name for name, outcome in found.items() if outcome.error] == REFUSED
    assert {name: outcome.recovery for name, outcome in found.items() if outcome.recovery} == dict.fromkeys(
        TORN, ("continued",)
    )


@pytest.mark.soak
@pytest.mark.parametrize("num_workers", [2, 3])
def test_no_death_makes_a_silent_difference(ray_cluster: None, num_workers: int) -> None:
    _check(num_workers, IDIOMS, PLACES, "float64")


@pytest.mark.soak
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_same_holds_in_single_precision(ray_cluster: None, num_workers: int) -> None:
    _check(num_workers, ["Gan", "SamData", "OwnMomentum", "OwnClassWeights", "Accumulating"], PLACES[2:3], "float32")


def _check(num_workers: int, names: Iterable[str], places: Sequence[str], dtype: str) -> None:
    with laboratory(num_workers) as lab:
        found = {name: run_idiom(lab, name, places, SEED, dtype) for name in names}
    faults = {name: [each.fault(IDIOMS[name], dtype) for each in outcomes] for name, outcomes in found.items()}
    assert {name: each for name, each in faults.items() if any(each)} == {}
