"""The learning-rate range test: on losses that are made up, and on a worker in this process.

Covers `raysgd.messages.range_test`: the worker is one of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.exceptions import InvalidCountError
from raysgd.messages.range_test import LrCurve, RangeTest, smooth
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import DropoutOperator, equal

Make = Callable[..., TorchTrainer]


def a_test(**options: Any) -> RangeTest:
    return RangeTest(**{"start": 0.001, "end": 1.0, "num_steps": 7, "stop_at": 4.0, **options})


def test_rates_grow_by_the_same_factor() -> None:
    rates = a_test().rates
    assert (rates[0], rates[-1]) == (0.001, 1.0)
    assert all(later / earlier == pytest.approx(10**0.5) for earlier, later in pairwise(rates))


def test_losses_of_all_workers_are_averaged_by_samples_and_short_passes_are_continued() -> None:
    asked: list[int] = []

    def two_workers(rates: Sequence[float]) -> list[list[tuple[float, float]]]:
        asked.append(len(rates))
        return [[(1.0, 3.0), (5.0, 2.0)][: len(rates)], [(2.0, 1.0), (7.0, 0.0)][: len(rates)]]

    curve = a_test(num_steps=5, stop_at=100).run(two_workers)
    assert asked == [5, 3, 1]
    assert curve.losses == (1.25, 5.0, 1.25, 5.0, 1.25)
    assert len(curve.rates) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e6])
def test_it_ends_where_the_loss_diverges(bad: float) -> None:
    calls: list[int] = []

    def diverges(rates: Sequence[float]) -> list[list[tuple[float, float]]]:
        calls.append(len(rates))
        return [[(1.0 if len(calls) < 2 else bad, 1.0)] * len(rates)]

    curve = a_test(num_steps=100).run(diverges)
    assert len(curve.losses) == 20


def test_without_batches_there_is_nothing_to_find() -> None:
    with pytest.raises(ValueError, match="got no batches to train on"):
        a_test().run(lambda rates: [[]])


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10 ** (index / 10 - 4) for index in range(60)]
    losses = [2 / (1 + (rate / 0.01) ** 2) + (rate / 10) ** 4 for rate in rates]
    curve = LrCurve.of(rates, losses)
    assert curve.suggestion is not None
    assert 0.005 < curve.suggestion < 0.05
    assert LrCurve.of(rates[:20], [1.0 + rate for rate in rates[:20]]).suggestion is None, "it never falls"
    assert repr(LrCurve.of([], [])) == "LrCurve(0 steps, suggestion: none)"
    assert smooth([3.0] * 4) == [3.0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0}, "`start=0`: need a number larger than 0"),
        ({"end": math.nan}, "`end=nan`: need a number"),
        ({"start": 2.0}, "rates grow from `start` to `end`"),
        ({"num_steps": 0}, "`num_steps=0`: need an integer of at least 1"),
    ],
)
def test_what_cannot_work_is_refused(options: Any, message: str) -> None:
    with pytest.raises((ValueError, InvalidCountError), match=message):
        a_test(**options)


class Watched(DropoutOperator):
    """Two groups with different rates, a schedule in the middle of it, and its rates in the metrics."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        first, *others = self.model.parameters()
        optimizer = torch.optim.Adam([{"params": [first]}, {"params": others, "lr": 0.2}], lr=0.1)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=self.model,
            optimizers=optimizer,
            criterion=self.criterion,
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        )
        self.rates: list[Any] = []

    def optimizer_step(self, optimizer: Any = None) -> None:
        self.rates.append(tuple(group["lr"] for group in self.optimizer.param_groups))
        super().optimizer_step(optimizer)


class TestOnAWorker:
    def test_the_state_is_put_back_to_the_last_bit(self, make_local: Make, tmp_path: Path) -> None:
        results = []
        for finds in (True, False):
            trainer = make_local(Watched, scheduler_step_freq="epoch")
            torch.manual_seed(1)
            trainer.train()
            trainer.train(num_steps=2)
            if finds:
                operator: Any = trainer.get_local_operator()
                operator.rates.clear()
                curve = trainer.find_lr(1e-4, 10.0, 23)
                assert operator.rates == [(rate, pytest.approx(2 * rate)) for rate in curve.rates]
                assert "train_batch" not in vars(operator)
                curve.plot(tmp_path / "curve.png")
                assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
            results.append((trainer.train(), trainer.train(), trainer.state_dict()))
        assert equal(results[0], results[1])

    def test_an_operator_that_fails_leaves_the_state_as_it_was(self, make_local: Make) -> None:
        trainer = make_local(Watched, scheduler_step_freq="epoch")
        trainer.train()
        before = trainer.state_dict()
        with pytest.raises(ValueError, match=r'`find_lr\(metric="los"\)`.* It reports `train_loss`, `num_samples`'):
            trainer.find_lr(metric="los")
        assert equal(trainer.state_dict(), before)
