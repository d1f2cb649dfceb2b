"""What a worker records about its steps, without a trainer: sums and weights, from what the meters have read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.core.numbers.meters import NUM_SAMPLES, AverageMeterCollection
from raysgd.journal.recorder import LineReport, StepBlock, StepRecorder, exact_sum
from raysgd.journal.steps import NO_NORM
from raysgd.torch.objects import metric_objects
from raysgd.torch.objects.models import read_tensors

ATTEMPT = (3, 1)


@pytest.fixture
def operator() -> Any:
    return SimpleNamespace(global_step=0, _raysgd=SimpleNamespace(to_floats=read_tensors))


@pytest.fixture
def recorder(operator: Any) -> StepRecorder:
    made = StepRecorder()
    made.on_begin(operator)
    made._on_leg(operator, {"attempt": list(ATTEMPT), "obstacle": None})
    return made


def held(metrics: dict[str, Any]) -> Any:
    """Return the metrics of a batch as the meters of an operator have read them."""
    meters, values = AverageMeterCollection(read_tensors, metric_objects.capture), dict(metrics)
    meters.add_pending(values, values.pop(NUM_SAMPLES, 1))
    return meters.pending[-1][0]


def rows(block: Any) -> list[tuple[Any, ...]]:
    """Return step, total, weight and norm of each step of a report."""
    assert isinstance(block, StepBlock)
    assert block.attempt == ATTEMPT
    rows: list[tuple[Any, ...]] = block.parts.tolist()
    return rows


def reports(recorder: StepRecorder, operator: Any, after: int = 0) -> tuple[int, list[Any]]:
    """Return the number of the last report that the driver has then, and the reports after the given one."""
    news = recorder._news(operator, {recorder.name: after})
    assert (news.name, news.lost) == (recorder.name, recorder.lost)
    return news.last, news.reports


def recorded(recorder: StepRecorder, operator: Any) -> list[tuple[Any, ...]]:
    _, (leg, block) = reports(recorder, operator)
    assert isinstance(leg, LineReport)
    return rows(block)


class Metric:
    """Accumulates batches itself, as the metrics of torchmetrics do."""

    def compute(self) -> float:
        return 9.0

    def merge_state(self, others: Any) -> None: ...


@pytest.mark.parametrize(
    ("metrics", "total", "weight"),
    [
        ({"train_loss": torch.tensor(0.5), "num_samples": 8}, 4.0, 8),
        ({"loss": np.float64(0.5), "accuracy": 1.0, "num_samples": 8}, 4.0, 8),
        ({"aux_loss": 2.0, "loss": 0.5, "num_samples": 8}, 4.0, 8),
        ({"d_loss": 0.5, "g_loss": 2.0}, 0.5, 1),
        ({"loss_meter": Metric(), "g_loss": 2.0}, 2.0, 1),
        ({"train_loss": 0.5, "num_samples": 8, "batch_weight": 3}, 1.5, 3),
        ({"train_loss": 0.5, "num_samples": 8, "batch_weight_of_train_loss": torch.tensor(6)}, 3.0, 6),
        ({"train_loss": math.nan, "num_samples": 0}, 0.0, 0),
        ({"accuracy": 0.5, "num_samples": 8}, 0.0, 0),
        ({}, 0.0, 0),
    ],
)
def test_a_loss_counts_by_its_weight(
    recorder: StepRecorder, operator: Any, metrics: Any, total: float, weight: float
) -> None:
    recorder._on_batch(operator, held(metrics), True)
    assert recorded(recorder, operator) == [(1, total, weight, NO_NORM)]


def test_a_step_of_several_batches_is_their_sum(recorder: StepRecorder, operator: Any) -> None:
    recorder._on_norm(torch.tensor(0.25))
    recorder._on_batch(operator, held({"train_loss": 1.0, "num_samples": 4}), False)
    operator.global_step = 1
    recorder._on_batch(operator, held({"train_loss": 2.0, "num_samples": 2}), True)
    operator.global_step = 2
    recorder._on_batch(operator, None, True)  # padding
    assert recorded(recorder, operator) == [(2, 8.0, 6, 0.25), (3, 0.0, 0, NO_NORM)]


def test_a_step_that_broke_off_is_forgotten(recorder: StepRecorder, operator: Any) -> None:
    recorder._on_batch(operator, held({"train_loss": 9.0}), False)
    recorder._on_leg(operator, {"attempt": [3, 2], "obstacle": None})
    recorder._on_batch(operator, held({"train_loss": 1.0}), True)
    last, (block,) = reports(recorder, operator, 2)
    assert last == 3
    assert isinstance(block, StepBlock)
    assert (block.attempt, block.parts[["step", "total"]].tolist()) == ((3, 2), [(1, 1.0)])


def test_steps_of_two_attempts_are_two_reports(recorder: StepRecorder, operator: Any) -> None:
    recorder._on_batch(operator, held({"train_loss": 9.0}), True)
    recorder._on_leg(operator, {"attempt": [3, 2], "obstacle": None})
    recorder._on_batch(operator, held({"train_loss": 1.0}), True)
    last, found = reports(recorder, operator)
    assert last == 4
    assert [(type(each), each.attempt) for each in found] == [
        (LineReport, (3, 1)),
        (StepBlock, (3, 1)),
        (LineReport, (3, 2)),
        (StepBlock, (3, 2)),
    ]


def test_reports_are_kept_until_the_driver_has_them(recorder: StepRecorder, operator: Any) -> None:
    for operator.global_step in range(3):
        recorder._on_batch(operator, held({"train_loss": 1.0}), True)
    for _ in range(2):  # an answer may be lost
        assert [step for step, *_ in recorded(recorder, operator)] == [1, 2, 3]
    last, (block,) = reports(recorder, operator, 3)
    assert (last, [step for step, *_ in rows(block)]) == (4, [3])
    last, (block,) = reports(recorder, operator, 0)
    assert (last, [step for step, *_ in rows(block)]) == (4, [3]), "the driver has the others"
    assert reports(recorder, operator, 4) == (4, [])


def test_the_oldest_steps_are_discarded_if_too_many_wait_but_not_the_start_of_their_leg(
    recorder: StepRecorder, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysgd.journal.recorder._MOST_WAITING", 4)
    for operator.global_step in range(6):
        assert recorder.lost == (None if operator.global_step < 4 else (1, operator.global_step - 3))
        recorder._on_batch(operator, held({"train_loss": 1.0}), True)
    assert [step for step, *_ in recorded(recorder, operator)] == [4, 5, 6]
    assert recorder.lost == (1, 3)


def test_a_tensor_on_a_device_is_not_read_in_the_step(recorder: StepRecorder, operator: Any) -> None:
    with torch.device("meta"):  # reading such a tensor raises
        metrics = held({"train_loss": torch.ones(()), "batch_weight_of_train_loss": torch.ones(())})
        norm = torch.ones(())
    recorder._on_norm(norm)
    recorder._on_batch(operator, metrics, True)
    read = list[int]()

    def to_floats(tensors: list[Any]) -> list[float]:
        read.append(len(tensors))
        return [0.5, 8.0][: len(tensors)]

    operator._raysgd.to_floats = to_floats
    _, (_, block) = reports(recorder, operator)
    assert rows(block) == [(1, 4.0, 8.0, 0.5)]
    assert read == [2, 1]


def test_the_largest_norm_of_several_optimizers_counts(recorder: StepRecorder, operator: Any) -> None:
    for norm in (1.0, math.nan, 3.0):
        recorder._on_norm(norm)
    recorder._on_norm(None)  # an override of `clip_grad_norm` returns nothing
    recorder._on_batch(operator, held({"train_loss": 1.0}), True)
    ((*_, norm),) = recorded(recorder, operator)
    assert math.isnan(norm)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], 0.0),
        ([0.1] * 10, 1.0),
        ([1e308, 1e308], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
    ],
)
def test_a_sum_does_not_depend_on_the_order(numbers: list[float], expected: float) -> None:
    assert exact_sum(numbers) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
