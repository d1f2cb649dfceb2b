from __future__ import annotations

import os
from typing import Any

import pytest

from raysgd.air.reports import FILLED_IN, MetricsFiller


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def make_filler() -> MetricsFiller:
    filler = MetricsFiller("1a2b3_00000", {"train_loop_config": {"lr": 1}}, Clock())
    filler.begin_attempt({})
    return filler


def test_the_names_of_what_is_filled_in_are_known() -> None:
    assert make_filler().fill({}, "checkpoint_000000").keys() == FILLED_IN


def test_a_report_has_what_ray_tune_adds() -> None:
    filled = make_filler().fill({"loss": 0.5}, None)
    assert filled.pop("date").startswith("2023-11-1")
    assert filled.pop("hostname")
    assert filled.pop("node_ip")
    assert filled == {
        "loss": 0.5,
        "checkpoint_dir_name": None,
        "done": False,
        "training_iteration": 1,
        "trial_id": "1a2b3_00000",
        "timestamp": 1_700_000_001,
        "pid": os.getpid(),
        "time_this_iter_s": 0.5,
        "time_total_s": 0.5,
        "time_since_restore": 0.5,
        "iterations_since_restore": 1,
        "config": {"train_loop_config": {"lr": 1}},
        "experiment_tag": "0",
    }


def test_an_attempt_counts_on_from_its_checkpoint() -> None:
    filler = make_filler()
    filler.fill({}, None)
    at_checkpoint = filler.fill({}, None)
    filler.fill({}, None)
    filler.begin_attempt(at_checkpoint)
    filler.fill({}, None)
    filled = filler.fill({}, None)
    assert (filled["training_iteration"], filled["iterations_since_restore"]) == (4, 2)
    assert (filled["time_total_s"], filled["time_since_restore"]) == (2.0, 1.0)


def test_the_two_times_of_the_function_stay_and_other_keys_do_not(caplog: pytest.LogCaptureFixture) -> None:
    reported = {"time_this_iter_s": 7.0, "timestamp": 5, "pid": -1, "training_iteration": 99, "config": 1}
    filler = make_filler()
    filled = filler.fill(reported, None)
    filler.fill(reported, None)
    assert caplog.text.count("replaced by what a run fills in: `config`, `pid`, `training_iteration`. Report") == 1
    assert (filled["time_this_iter_s"], filled["time_total_s"], filled["timestamp"]) == (7.0, 7.0, 5)
    assert (filled["pid"], filled["training_iteration"]) == (os.getpid(), 1)
    assert reported["pid"] == -1


def test_a_function_can_say_that_it_is_done() -> None:
    assert make_filler().fill({"done": True}, None)["done"] is True


@pytest.mark.parametrize(
    ("line", "iteration", "time_total_s"),
    [
        ({"training_iteration": 3, "time_total_s": 1.5}, 4, 2.5),
        ({}, 1, 1.0),
        ({"training_iteration": "many", "time_total_s": None}, 1, 1.0),
        ({"training_iteration": float("nan"), "time_total_s": float("inf")}, 1, 1.0),
    ],
)
def test_an_attempt_goes_on_behind_a_line_that_may_be_damaged(
    line: dict[str, Any], iteration: int, time_total_s: float
) -> None:
    filler = make_filler()
    filler.begin_attempt(line)
    filled = filler.fill({"time_this_iter_s": 1.0}, None)
    assert (filled["training_iteration"], filled["time_total_s"]) == (iteration, time_total_s)
