"""What `examples/benchmarks/goodput.py` stands on: when it kills, whom, and how it counts samples."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
MODULES = ("_common", "_kills", "_counted", "_torchft", "_contenders", "goodput")
TRAINS = "import sys, time, _kills; _kills.Trail(sys.argv[1]).begin(16); time.sleep(600)"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The benchmark and its parts, which are in no package."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path[:] = before
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def kills(modules: dict[str, Any]) -> Any:
    return modules["_kills"]


@pytest.fixture
def counted(modules: dict[str, Any]) -> Any:
    return modules["_counted"]


@pytest.fixture
def contenders(modules: dict[str, Any]) -> Any:
    return modules["_contenders"]


@pytest.fixture
def goodput(modules: dict[str, Any]) -> Any:
    return modules["goodput"]


# ------------------------------------------------------------------------------------------------------ kills


def test_kills_are_due_at_multiples_of_the_interval_whatever_a_contender_does(kills: Any) -> None:
    schedule = kills.Schedule(15.0, seed=0)
    assert list(islice(schedule.times(100.0), 4)) == [115.0, 130.0, 145.0, 160.0]


def test_a_schedule_ends_after_as_many_kills_as_were_asked_for(kills: Any) -> None:
    schedule = kills.Schedule(2.0, seed=0, max_kills=2)
    seen = [(due, schedule.victim([7])) for due in schedule.times(0.0)]
    assert seen == [(2.0, 7), (4.0, 7)]
    assert schedule.num_kills == 2


def test_a_kill_that_hits_nobody_does_not_count(kills: Any) -> None:
    schedule = kills.Schedule(2.0, seed=0, max_kills=1)
    alive: list[list[int]] = [[], [], [7]]
    assert [schedule.victim(alive[index]) for index, _ in enumerate(schedule.times(0.0))] == [None, None, 7]
    assert schedule.num_kills == 1


def test_the_seed_decides_on_the_victims_and_each_may_be_one(kills: Any) -> None:
    first, second = (kills.Schedule(1.0, seed=3) for _ in range(2))
    victims = [first.victim([1, 2]) for _ in range(50)]
    assert victims == [second.victim([1, 2]) for _ in range(50)]
    assert set(victims) == {1, 2}


def test_those_who_train_are_found_and_nobody_else(kills: Any, tmp_path: Path) -> None:
    trail = kills.Trail(str(tmp_path))
    assert not kills.has_begun(str(tmp_path))
    trail.begin(16)
    assert kills.has_begun(str(tmp_path))
    assert kills.alive_in(str(tmp_path)) == [os.getpid()]


def test_a_later_process_of_the_same_number_is_left_alone(kills: Any, tmp_path: Path) -> None:
    started = kills.started_at(os.getpid())
    (tmp_path / f"alive-{os.getpid()}-{started - 1}").touch()
    assert kills.alive_in(str(tmp_path)) == []


def test_samples_of_all_workers_are_added_up_with_those_of_broken_steps(kills: Any, tmp_path: Path) -> None:
    trail = kills.Trail(str(tmp_path))
    trail.begin(16)
    trail.begin(5)
    (tmp_path / "samples-0").write_text("." * 7)
    assert kills.samples_begun(str(tmp_path)) == 28


def test_time_counts_from_the_first_step_of_all(kills: Any, tmp_path: Path) -> None:
    (tmp_path / "first").write_text("12.5\n10.0\n40.25\n")
    assert kills.wall_of(str(tmp_path), 50.0) == 40.0


def test_a_process_that_trains_is_killed(kills: Any, tmp_path: Path) -> None:
    schedule = kills.Schedule(0.05, seed=0, max_kills=1)
    with kills.killing(str(tmp_path), schedule):
        done = subprocess.run([sys.executable, "-c", TRAINS, str(tmp_path)], cwd=FOLDER)
    assert done.returncode == -9
    assert schedule.num_kills == 1
    assert kills.alive_in(str(tmp_path)) == []


def test_nobody_is_killed_before_the_first_step_or_without_a_schedule(kills: Any, tmp_path: Path) -> None:
    schedule = kills.Schedule(0.0, seed=0)
    with kills.killing(str(tmp_path), schedule), kills.killing(str(tmp_path), None):
        pass
    assert schedule.num_kills == 0


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


def test_growth_of_the_driver_counts_from_the_end_of_the_first_quarter(contenders: Any) -> None:
    looks = [(100.0, 10, 1.0), (150.0, 30, 8.0), (151.0, 31, 9.0), (152.5, 29, 8.5)]
    assert contenders.growth(looks) == {"driver_mib_grown": 2.5, "driver_fds_grown": -1.0, "store_mib_grown": 0.5}


def test_a_look_at_the_driver_sees_its_memory_and_its_files(contenders: Any) -> None:
    before = contenders.look()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(Path(__file__).open())
        after = contenders.look()
    assert before[0] > 10
    assert after[1] - before[1] == pytest.approx(100, abs=20), "other threads of this process have files too"


# ------------------------------------------------------------------------------------------------------ rows


def plans(goodput: Any, *arguments: str) -> list[Any]:
    found: list[Any] = goodput._plans(goodput._parser().parse_args(arguments), [*goodput.OWN_WAYS, *goodput.PEERS])
    return found


def row_of(plan: Any, **figures: float) -> dict[str, Any]:
    return {**asdict(plan), "goodput": 0.9, "samples_lost": 0.0, "samples_twice": 0.0, **figures}


def test_each_contender_has_a_row_at_each_rate(goodput: Any) -> None:
    found = plans(goodput, "--rates", "15:150,60:300")
    assert len(found) == 14
    assert {(plan.every_s, plan.seconds) for plan in found} == {(15.0, 150.0), (60.0, 300.0)}
    assert sum(plan.expected_s for plan in found) < 120 * 60


def test_a_smoke_test_is_short_for_all_contenders(goodput: Any) -> None:
    found = plans(goodput, "--smoke-test")
    assert [plan.max_kills for plan in found] == [1] * 7
    assert sum(plan.num_calm * plan.calm_s + plan.seconds for plan in found) <= 70


def test_only_some_contenders_are_measured_if_they_are_named(goodput: Any) -> None:
    assert {plan.contender for plan in plans(goodput, "--contenders", "raysgd, spare; torchrun")} == {
        "raysgd, spare",
        "torchrun",
    }
    with pytest.raises(SystemExit, match="tarchrun`: known are raysgd, spare;"):
        plans(goodput, "--contenders", "tarchrun")


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
