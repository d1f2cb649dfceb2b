"""What `examples/benchmarks/goodput.py` stands on: when it kills, whom, and how it counts samples."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.examples.conftest import FOLDER

TRAINS = "import sys, time, _kills; _kills.Trail(sys.argv[1]).begin(16); time.sleep(600)"


@pytest.fixture
def kills(benchmark: Any) -> Any:
    return benchmark("_kills")


@pytest.fixture
def counted(benchmark: Any) -> Any:
    return benchmark("_counted")


@pytest.fixture
def goodput(benchmark: Any) -> Any:
    return benchmark("goodput")


# ------------------------------------------------------------------------------------------------------ kills


def test_a_process_that_trains_is_killed(kills: Any, tmp_path: Path) -> None:
    schedule = kills.Schedule(0.05, seed=0, max_kills=1)
    with kills.killing(str(tmp_path), schedule):
        done = subprocess.run([sys.executable, "-c", TRAINS, str(tmp_path)], cwd=FOLDER)
    assert done.returncode == -9
    assert schedule.num_kills == 1
    assert kills.alive_in(str(tmp_path)) == []


# ------------------------------------------------------------------------------------------------------ samples


def test_lost_samples_do_not_make_up_for_those_used_twice(counted: Any) -> None:
    assert counted.books(torch.tensor([3.0, 3.0, 3.0]), 3) == {"samples_lost": 0, "samples_twice": 0}
    assert counted.books(torch.tensor([1.0, 5.0, 4.0]), 3) == {"samples_lost": 2, "samples_twice": 3}


def batch_of(counted: Any, *numbers: int) -> Any:
    data = counted.make_data()
    return next(iter(DataLoader([data[number] for number in numbers], batch_size=len(numbers))))


def step(counted: Any, model: Any, optimizer: Any, *numbers: int) -> None:
    optimizer.zero_grad()
    counted.loss_of(model, batch_of(counted, *numbers)).backward()
    optimizer.step()
    model.count()


def test_the_model_counts_the_samples_of_each_step(counted: Any) -> None:
    model = counted.Counted()
    optimizer = counted.optimizer_of(model)
    for numbers in ((0, 1), (2, 3), (2, 3)):
        step(counted, model, optimizer, *numbers)
    assert model.used[:5].tolist() == [1, 1, 2, 2, 0]
    assert counted.books(model.used.detach()[:4], 1) == {"samples_lost": 0, "samples_twice": 2}


def test_a_step_that_was_broken_off_leaves_no_marks(counted: Any) -> None:
    model = counted.Counted()
    optimizer = counted.optimizer_of(model)
    counted.loss_of(model, batch_of(counted, 0, 1)).backward()
    step(counted, model, optimizer, 2, 3)
    assert model.used[:4].tolist() == [0, 0, 1, 1]


# ------------------------------------------------------------------------------------------------------ rows


def plans(goodput: Any, *arguments: str) -> list[Any]:
    found: list[Any] = goodput._plans(goodput._parser().parse_args(arguments), [*goodput.OWN_WAYS, *goodput.PEERS])
    return found


def row_of(plan: Any, **figures: float) -> dict[str, Any]:
    return {**asdict(plan), "goodput": 0.9, "samples_lost": 0.0, "samples_twice": 0.0, **figures}


def test_lost_samples_are_no_goodput(goodput: Any, counted: Any) -> None:
    run = {"wall_s": 20.0, "samples_lost": 0.0}
    assert goodput.goodput_of(run, pass_s=5.0, num_passes=3) == 0.75
    half = {**run, "samples_lost": 1.5 * counted.NUM_SAMPLES}
    assert goodput.goodput_of(half, pass_s=5.0, num_passes=3) == 0.375


def test_rows_that_are_in_the_file_are_not_measured_again(goodput: Any, tmp_path: Path) -> None:
    wanted = plans(goodput)[:3]
    for plan in wanted:
        goodput.Rows(tmp_path / "rows.json").add(row_of(plan))
    rows = goodput.Rows(tmp_path / "rows.json")
    assert goodput.measured(wanted, rows, report=None) == {plan: row_of(plan) for plan in wanted}
    assert rows.of(replace(wanted[0], seed=1)) is None
    assert rows.of(replace(wanted[0], seconds=2.0)) is None


def test_a_lost_sample_ends_the_benchmark(goodput: Any) -> None:
    wanted = plans(goodput)
    found = {plan: row_of(plan) for plan in wanted}
    goodput.check(wanted, found)
    going_on = next(plan for plan in wanted if plan.contender == "raysgd, going on")
    with pytest.raises(SystemExit, match="going on, one kill each 15 s: 2 samples were lost and 0 used twice"):
        goodput.check(wanted, {**found, going_on: row_of(going_on, samples_lost=2.0)})


def test_a_run_of_our_own_that_fails_ends_the_benchmark_and_one_of_others_does_not(goodput: Any) -> None:
    wanted = plans(goodput)
    found = {plan: row_of(plan) for plan in wanted if plan.contender in goodput.OWN_WAYS}
    goodput.check(wanted, found)
    with pytest.raises(SystemExit, match="raysgd, spare, one kill each 15 s: the run failed"):
        goodput.check(wanted, dict(list(found.items())[1:]))
