"""The idioms of training loops end as in one process or are refused, and healthy programs are never refused.

What each idiom does is in `tests.torch.idioms`; `tests.torch.idiom_table` prints the table of `docs/rely.md`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.torch import random_programs
from tests.torch.idiom_table import PLACES, Death, Laboratory, laboratory, run_idiom, shipped
from tests.torch.idioms import IDIOMS
from tests.torch.random_programs import run_programs

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("RAYSGD_CHAOS_SEED", "1"))
CALM = ["Idiom", "GanAccumulates", "WganPenalty", "SamVector", "OverlappingOnce", "CountedLabels", "Recurrent", "Codes"]
REFUSED = ["PlainLabels", "PenalizedLabels", "AutogradGrad"]
TORN = {
    "Own": Death(3, "before step", 1, 1),
    "SamSwaps": Death(7, "in backward", 2, 0),
    "GanSecondBatch": Death(9, "after step", 1, 1),
}
NUM_PROGRAMS = 200


@pytest.fixture(scope="module")
def two_workers(ray_cluster: None) -> Iterator[Laboratory]:
    with laboratory(2) as lab:
        yield lab


@pytest.fixture(scope="module")
def three_workers(ray_cluster: None) -> Iterator[Laboratory]:
    with laboratory(3) as lab:
        yield lab


@pytest.mark.parametrize("name", [*CALM, *TORN, *REFUSED])
def test_an_idiom_equals_one_process_or_is_refused(two_workers: Laboratory, name: str) -> None:
    outcome = two_workers.run(name, TORN.get(name))
    assert not outcome.fault(IDIOMS[name], "float64")
    assert bool(outcome.error) == (name in REFUSED)
    assert outcome.recovery == (("rejoined",) if name in TORN else ())


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", IDIOMS)
def test_no_death_of_two_workers_makes_a_silent_difference(two_workers: Laboratory, name: str) -> None:
    outcomes = run_idiom(two_workers, name, PLACES, SEED)
    assert not [each.fault(IDIOMS[name], "float64") for each in outcomes if each.fault(IDIOMS[name], "float64")]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", IDIOMS)
def test_no_death_of_three_workers_makes_a_silent_difference(three_workers: Laboratory, name: str) -> None:
    outcomes = run_idiom(three_workers, name, PLACES, SEED)
    assert not [each.fault(IDIOMS[name], "float64") for each in outcomes if each.fault(IDIOMS[name], "float64")]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["Gan", "SamData", "OwnMomentum", "OwnClassWeights", "Accumulating"])
def test_the_same_holds_in_single_precision(three_workers: Laboratory, name: str) -> None:
    outcomes = run_idiom(three_workers, name, ["in backward"], SEED, "float32")
    assert not [each.fault(IDIOMS[name], "float32") for each in outcomes if each.fault(IDIOMS[name], "float32")]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_no_worker_of_a_healthy_program_is_told_that_its_weights_differ(ray_cluster: None, num_workers: int) -> None:
    numbers = range(num_workers - 2, NUM_PROGRAMS, 3)
    with shipped(random_programs.__name__):
        found = [(config, error) for config, _, error in run_programs(num_workers, SEED, numbers) if error]
    assert not found
