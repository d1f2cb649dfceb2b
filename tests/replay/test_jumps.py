"""Jumps of losses: found where something happens, and hardly ever where nothing does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from raysgd.replay.jumps import FEWEST, Jump, jumps_in

NUM_STEPS = 10_000
STEPS = np.arange(NUM_STEPS)
FALLING = 0.05 + 4 * np.exp(-STEPS / 1500)
Curve = Callable[[np.random.Generator], np.ndarray[Any, Any]]
CLEAN: dict[str, Curve] = {
    "normal": lambda chance: FALLING * (1 + 0.1 * chance.standard_normal(NUM_STEPS)).clip(0.01),
    "lognormal": lambda chance: FALLING * np.exp(0.4 * chance.standard_normal(NUM_STEPS)),
    "gamma": lambda chance: FALLING * chance.gamma(2.0, 0.5, NUM_STEPS),
    "exponential": lambda chance: FALLING * chance.exponential(1.0, NUM_STEPS),
    "waves": lambda chance: FALLING * (1 + 0.5 * np.sin(STEPS / 300)) * np.exp(0.1 * chance.normal(size=NUM_STEPS)),
    "flat": lambda chance: 0.693 + 1e-4 * chance.standard_normal(NUM_STEPS),
    "cut of the rate": lambda chance: np.where(STEPS < 5000, 2, 0.5) * np.exp(0.05 * chance.normal(size=NUM_STEPS)),
    "below zero": lambda chance: -STEPS / 1000 + chance.standard_normal(NUM_STEPS),
    "heavy tails": lambda chance: FALLING * np.exp(0.1 * chance.standard_t(5, NUM_STEPS)),
}


def jumps_of(losses: Sequence[float]) -> list[Jump]:
    """Return the jumps in the losses of steps that are numbered from 0."""
    return jumps_in(range(len(losses)), losses)


@pytest.mark.long
@pytest.mark.parametrize("name", CLEAN)
def test_clean_steps_raise_at_most_one_false_alarm_in_10000(name: str) -> None:
    num_alarms = sum(len(jumps_of(CLEAN[name](np.random.default_rng(seed)).tolist())) for seed in range(5))
    assert num_alarms <= 5


def train(optimizer: type[Any], batch_size: int, lr: float) -> list[float]:
    """Return the losses of 10,000 steps of a small network on images of digits."""
    pixels, digits = load_digits(return_X_y=True)
    features, target = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    stepping, losses, order = optimizer(model.parameters(), lr=lr), list[float](), torch.empty(0, dtype=torch.long)
    for _ in range(NUM_STEPS):
        if len(order) < batch_size:
            order = torch.randperm(len(features))
        batch, order = order[:batch_size], order[batch_size:]
        loss = torch.nn.functional.cross_entropy(model(features[batch]), target[batch])
        stepping.zero_grad()
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "batch_size", "lr"),
    [(torch.optim.SGD, 8, 0.05), (torch.optim.SGD, 64, 0.1), (torch.optim.Adam, 4, 1e-3)],
)
def test_a_real_run_raises_at_most_one(optimizer: type[Any], batch_size: int, lr: float) -> None:
    assert len(jumps_of(train(optimizer, batch_size, lr))) <= 1


def noisy(num_steps: int = 400) -> list[float]:
    return (np.linspace(2, 1, num_steps) * np.exp(0.1 * np.random.default_rng(0).normal(size=num_steps))).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5, 300])
def test_a_loss_that_is_not_finite_is_found_at_once(value: float, at: int) -> None:
    losses = noisy()
    losses[at] = value
    (jump,) = jumps_of(losses)
    assert (jump.first, jump.last) == (at, at)
    assert not math.isfinite(jump.highest)


def test_steps_after_a_nan_belong_to_its_jump() -> None:
    (jump,) = jumps_of([*noisy(100), *[math.nan] * 200])
    assert (jump.first, jump.last) == (100, 299)


def test_a_high_loss_is_found_with_its_range() -> None:
    losses = noisy()
    losses[200], losses[203] = 9.0, 12.0
    (jump,) = jumps_of(losses)
    assert (jump.first, jump.last, jump.highest) == (200, 203, 12.0), "together they are one"
    assert 1.4 < jump.usual < 1.9 < jump.limit < 9


def test_a_jump_has_the_numbers_of_its_steps() -> None:
    losses, numbers = noisy(), range(2, 802, 2)  # each step has two batches
    losses[200] = losses[203] = 9.0
    (jump,) = jumps_in(numbers, losses)
    assert (jump.first, jump.last) == (402, 408)


@pytest.mark.parametrize(("at", "is_found"), [(FEWEST - 1, False), (FEWEST, True)])
def test_the_first_steps_have_no_range(at: int, is_found: bool) -> None:
    losses = noisy()
    losses[at] = 50.0
    assert [jump.first for jump in jumps_of(losses)] == [at] * is_found


def test_a_loss_that_stays_high_has_a_new_range_after_a_while() -> None:
    high = [10 * loss for loss in noisy(600)]
    high[500] = 400.0
    assert [(jump.first, jump.last) for jump in jumps_of([*noisy(), *high])] == [(400, 499), (900, 900)]


@pytest.mark.parametrize("at", [0, 30])
def test_a_nan_before_a_new_range_does_not_prevent_it(at: int) -> None:
    high = [100 * loss for loss in noisy(600)]
    (jump,) = jumps_of([*noisy(), *high[:at], math.nan, *high[at:]])
    assert (jump.first, jump.last) == (400, 400 + at + 100)


@pytest.mark.parametrize("losses", [[], [1.0], [0.0] * 300, [math.nan] * 3])
def test_short_and_constant_losses_are_no_trouble(losses: Sequence[float]) -> None:
    assert len(jumps_of(losses)) == any(math.isnan(loss) for loss in losses)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_jump_of_negative_losses_is_found_at_any_scale(scale: float) -> None:
    losses = (-1 + 0.02 * np.random.default_rng(0).normal(size=400)) * scale
    losses[300] += 0.5 * scale
    (jump,) = jumps_of(losses.tolist())
    assert jump.first == 300
    assert jump.usual == pytest.approx(-scale, rel=0.05)
    assert jump.limit < losses[300]


def test_losses_near_the_largest_number_have_a_range() -> None:
    [jump] = jumps_of([1.7e308] * 60 + [math.inf])
    assert (jump.first, jump.limit) == (60, math.inf)
