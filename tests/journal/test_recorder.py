"""What a worker notes of its steps, without a trainer: sums and weights, and no look at a device."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.journal.recorder import LegReport, StepRecorder, StepReport
from raysgd.torch.objects.moving import read_tensors

ATTEMPT = (3, 1)


@pytest.fixture
def operator() -> Any:
    return SimpleNamespace(global_step=0)


@pytest.fixture
def recorder(operator: Any) -> StepRecorder:
    made = StepRecorder()
    made.on_begin(operator)
    made._on_leg(operator, {"attempt": list(ATTEMPT), "obstacle": None})
    return made


def report(recorder: StepRecorder) -> Any:
    (_, leg), (number, found) = recorder.reports(0, read_tensors)
    assert isinstance(leg, LegReport)
    assert number == 2
    return found


@pytest.mark.parametrize(
    ("metrics", "total", "weight"),
    [
        ({"train_loss": torch.tensor(0.5), "num_samples": 8}, 4.0, 8),
        ({"loss": np.float64(0.5), "accuracy": 1.0, "num_samples": 8}, 4.0, 8),
        ({"d_loss": 0.5, "g_loss": 2.0}, 0.5, 1),
        ({"train_loss": 0.5, "num_samples": 8, "batch_weight": 3}, 1.5, 3),
        ({"train_loss": 0.5, "num_samples": 8, "batch_weight_of_train_loss": torch.tensor(6)}, 3.0, 6),
        ({"train_loss": math.nan, "num_samples": 0}, 0.0, 0),
        ({"accuracy": 0.5, "num_samples": 8}, 0.0, 0),
        ("no metrics", 0.0, 0),
    ],
)
def test_a_loss_counts_by_its_weight(
    recorder: StepRecorder, operator: Any, metrics: Any, total: float, weight: float
) -> None:
    recorder._on_batch(operator, metrics, True)
    assert report(recorder) == StepReport(ATTEMPT, 1, total, weight, None)


def test_a_step_of_several_batches_is_their_sum(recorder: StepRecorder, operator: Any) -> None:
    recorder._on_norm(torch.tensor(0.25))
    recorder._on_batch(operator, {"train_loss": 1.0, "num_samples": 4}, False)
    operator.global_step = 1
    recorder._on_batch(operator, {"train_loss": 2.0, "num_samples": 2}, True)
    assert report(recorder) == StepReport(ATTEMPT, 2, 8.0, 6, 0.25)


def test_a_step_that_broke_off_is_forgotten(recorder: StepRecorder, operator: Any) -> None:
    recorder._on_batch(operator, {"train_loss": 9.0}, False)
    recorder._on_leg(operator, {"attempt": [3, 2], "obstacle": None})
    recorder._on_batch(operator, {"train_loss": 1.0}, True)
    assert recorder.reports(2, read_tensors) == [(3, StepReport((3, 2), 1, 1.0, 1, None))]


def test_reports_are_kept_until_the_driver_has_them(recorder: StepRecorder, operator: Any) -> None:
    for operator.global_step in range(3):
        recorder._on_batch(operator, {"train_loss": 1.0}, True)
    assert [number for number, _ in recorder.reports(0, read_tensors)] == [1, 2, 3, 4]
    assert [number for number, _ in recorder.reports(0, read_tensors)] == [1, 2, 3, 4], "an answer may be lost"
    assert [number for number, _ in recorder.reports(3, read_tensors)] == [4]
    assert [number for number, _ in recorder.reports(0, read_tensors)] == [4]


def test_a_tensor_on_a_device_is_copied_and_not_read(recorder: StepRecorder, operator: Any) -> None:
    with torch.device("meta"):  # reading such a tensor raises
        metrics = {"train_loss": torch.ones(()), "batch_weight": torch.ones(())}
        norm = torch.ones(())
    recorder._on_norm(norm)
    recorder._on_batch(operator, metrics, True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        recorder.reports(0, read_tensors)


def test_the_largest_norm_of_several_optimizers_counts(recorder: StepRecorder, operator: Any) -> None:
    for norm in (1.0, math.nan, 3.0):
        recorder._on_norm(norm)
    recorder._on_norm(None)  # an override of `clip_grad_norm` returns nothing
    recorder._on_batch(operator, {"train_loss": 1.0}, True)
    assert math.isnan(report(recorder).norm)
