"""Two series of losses and norms: the same bits, rounding, or different from a step on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from raysgd.journal.entries import Leg
from raysgd.journal.journal import StepRecord
from raysgd.replay.comparing import IN_16_BITS, IN_32_BITS, Rounding, compare, rounding_of
from tests.journal.made import made_leg

NAN, INF = math.nan, math.inf
Series = list[tuple[float, float | None]]
RUN: Series = [(2.0, 1.0), (1.5, 0.8), (1.0, 0.5), (0.5, 0.4)]


def records(series: Series) -> list[StepRecord]:
    return [StepRecord(step, loss, norm, 8) for step, (loss, norm) in enumerate(series, start=1)]


def changed(**at: tuple[float, float]) -> Series:
    """Return the run with other losses and norms in some steps, as factors."""
    return [
        (loss * factors[0], norm * factors[1])
        for step, (loss, norm) in enumerate(RUN, start=1)
        for factors in [at.get(f"step_{step}", (1.0, 1.0))]
        if norm is not None
    ]


@pytest.mark.parametrize(
    ("other", "rounding", "bits_at", "step", "what"),
    [
        # the same
        (RUN, None, None, None, None),
        (RUN, IN_32_BITS, None, None, None),
        # bits are expected: each difference counts, but the rounding of a mean
        (changed(step_3=(1 + 2**-52, 1)), None, 3, None, None),
        (changed(step_3=(1 + 1e-15, 1)), None, 3, 3, "loss"),
        (changed(step_3=(1, 1 + 1e-7)), None, 3, 3, "norm"),
        # rounding
        (changed(step_2=(1 + 1e-7, 1)), IN_32_BITS, 2, None, None),
        (changed(step_1=(1 + 1e-6, 1), step_2=(1 + 5e-5, 1), step_3=(1 + 2e-3, 1)), IN_32_BITS, 1, None, None),
        (changed(step_1=(1, 1 + 1e-6), step_2=(1, 1 + 5e-5), step_3=(1, 1 + 2e-3)), IN_32_BITS, 1, None, None),
        (changed(step_2=(1.005, 1.005)), IN_16_BITS, 2, None, None),
        (changed(step_2=(1.005, 1), step_3=(1.09, 1), step_4=(1.5, 1)), IN_16_BITS, 2, None, None),
        # more than rounding
        (changed(step_2=(1 + 1e-7, 1), step_4=(1 + 1e-4, 1)), IN_32_BITS, 2, 4, "loss"),
        (changed(step_2=(1 + 1e-7, 1), step_3=(1, 1 + 1e-4), step_4=(2, 2)), IN_32_BITS, 2, 3, "norm"),
        (changed(step_2=(1.005, 1)), IN_32_BITS, 2, 2, "loss"),
        (changed(step_2=(1.05, 1)), IN_16_BITS, 2, 2, "loss"),
        (changed(step_2=(1.005, 1), step_3=(1.3, 1)), IN_16_BITS, 2, 3, "loss"),
        # what is no number
        ([*RUN[:3], (NAN, 0.4)], IN_16_BITS, 4, 4, "loss"),
        ([*RUN[:3], (0.5, INF)], IN_16_BITS, 4, 4, "norm"),
        ([*RUN[:3], (0.5, None)], None, None, None, None),
    ],
)
def test_a_jump_is_a_difference_and_growth_is_rounding(
    other: Series, rounding: Rounding | None, bits_at: int | None, step: int | None, what: str | None
) -> None:
    for pair in [(records(RUN), records(other)), (records(other), records(RUN))]:
        found = compare(*pair, rounding)
        assert (found.bits_at, found.step, found.what) == (bits_at, step, what)


def trained(num_parts: int, row_at: int = 0) -> list[StepRecord]:
    """Train a network that enlarges small differences, with batches whose gradients are added up in parts.

    It is smooth: on some processors, one rounding turns a ReLU on, which is a jump.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) if number % 2 == 0 else torch.nn.Tanh() for number in range(12)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.03), []
    rows, labels = torch.randn(96, 32), torch.randint(0, 4, (96,))
    for step in range(1, 81):
        batch = torch.randperm(96)[:24]
        features, target = rows[batch], labels[batch]
        features[0] += 0.5 * (step == row_at)
        optimizer.zero_grad()
        total = 0.0
        for own, of_own in zip(features.chunk(num_parts), target.chunk(num_parts), strict=True):
            loss = torch.nn.functional.cross_entropy(model(own), of_own, reduction="sum") / 24
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        found.append(StepRecord(step, total, norm.item(), 24))
    return found


@pytest.mark.parametrize("num_parts", [2, 3])
def test_rounding_of_a_run_that_enlarges_it_is_told_from_another_row(num_parts: int) -> None:
    run, healthy = trained(1), compare(trained(1), trained(num_parts), IN_32_BITS)
    assert healthy.step is None
    assert healthy.largest > 1e-2
    assert healthy.cause == "which grew from step to step, as rounding does"
    assert compare(run, trained(num_parts, row_at=30), IN_32_BITS).step == 30


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_values_that_are_no_numbers_can_be_equal(value: float) -> None:
    found = compare(records([(value, value)]), records([(value, value)]), None)
    assert (found.bits_at, found.step, found.largest) == (None, None, 0.0)


def test_losses_near_zero_are_compared_with_the_usual_size() -> None:
    pair = records([(1e-8, 1e-8)]), records([(2e-8, 2e-8)])
    assert compare(*pair, IN_32_BITS).step == 1
    assert compare(*pair, IN_32_BITS, (2.0, 2.0)).step is None
    assert compare(*pair, None, (2.0, 2.0)).step == 1


def test_means_with_other_weights_are_not_compared() -> None:
    other = [StepRecord(each.step, 9.0, each.norm, 4) if each.step == 2 else each for each in records(RUN)]
    found = compare(records(RUN), other, None)
    assert (found.bits_at, found.incomplete) == (None, (2,))


def test_the_largest_difference_is_relative() -> None:
    found = compare(records(RUN), records(changed(step_2=(0.75, 1), step_3=(0.9, 1))), IN_32_BITS)
    assert found.largest == pytest.approx(0.25)
    assert found.values == (1.5, 1.125)


@pytest.mark.parametrize(
    ("legs", "are_exact", "expected"),
    [
        ([made_leg()], True, None),
        ([made_leg(precision="bf16")], True, None),
        ([made_leg(), made_leg(precision="fp32")], False, IN_32_BITS),
        ([made_leg(precision="fp16"), made_leg(precision="bf16")], False, IN_16_BITS),
        ([made_leg(), made_leg(precision="bf16")], False, IN_32_BITS),
        ([made_leg(), made_leg(use_gpu=True)], False, IN_16_BITS),
        ([made_leg(use_fp16=True)], False, IN_16_BITS),
        ([made_leg(use_gpu=True)], False, IN_16_BITS),
    ],
)
def test_the_precision_decides_how_much_is_rounding(legs: list[Leg], are_exact: bool, expected: Any) -> None:
    assert rounding_of(legs, are_exact=are_exact) == expected
