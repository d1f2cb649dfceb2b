"""Ranks that are told apart by two numbers of each weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raysgd.exceptions import RanksDifferError
from raysgd.trainer.messages.comparison import (
    ComparisonPace,
    WeightSums,
    check_equal,
    models_to_compare,
    sums_of_array,
    tolerance_of,
)

WEIGHT = np.random.default_rng(0).normal(size=10_000)


def told(*weights: Any, num_bytes: int = 4, is_exact: bool = False, name: str = "weight") -> WeightSums:
    names = tuple(f"`{name} {index}` of model 1 (`Net`)" for index in range(len(weights)))
    shapes = tuple(np.shape(weight) for weight in weights)
    rows = [sums_of_array(np.asarray(weight, dtype=np.float64)) for weight in weights]
    numbers = np.array(rows).astype(np.int64 if is_exact else np.float64)
    return WeightSums(names, shapes, numbers, (tolerance_of(num_bytes),) * len(weights), 0.0)


@pytest.mark.parametrize(
    "ranks",
    [
        [told(WEIGHT), told(WEIGHT * (1 + 1e-6))],
        [told(WEIGHT), told(WEIGHT + 1e-6 * np.random.default_rng(1).normal(size=WEIGHT.size))],
        [told(WEIGHT - WEIGHT.mean()), told(WEIGHT - WEIGHT.mean() + 1e-7)],
        [told([0.0, 0.0]), told([0.0, 0.0])],
        [told([]), told([])],
        [told([np.nan, 1.0]), told([np.nan, 1.0])],
        [told([np.inf]), told([np.inf])],
        [told([1.0], num_bytes=2), told([1.1], num_bytes=2)],
        [told(WEIGHT, [1e-4]), told(WEIGHT, [1.01e-4])],
        [told([3.0], is_exact=True), told([3.0], is_exact=True)],
        [told(WEIGHT, name="dense"), told(WEIGHT, name="dense_1")],
        [told(WEIGHT), None],
        [None, None],
        [told(WEIGHT)],
    ],
    ids=str,
)
def test_ranks_that_round_in_another_order_and_those_that_were_not_asked_do_not_differ(ranks: list[Any]) -> None:
    check_equal(dict(enumerate(ranks)), "")


@pytest.mark.parametrize(
    "ranks",
    [
        [told(WEIGHT), told(WEIGHT * 1.001)],
        [told(WEIGHT), told(WEIGHT + 1e-2 * np.random.default_rng(1).normal(size=WEIGHT.size))],
        [told(WEIGHT - WEIGHT.mean()), told(WEIGHT - WEIGHT.mean() + 1e-3)],
        [told([0.0]), told([1e-20])],
        [told([1.0]), told([-1.0])],
        [told([np.nan]), told([1.0])],
        [told([np.inf]), told([1.0])],
        [told([1.0], [np.inf]), told([2.0], [np.inf])],
        [told([1.0], num_bytes=2), told([2.0], num_bytes=2)],
        [told([0.1], WEIGHT), told([0.2], WEIGHT)],
        [told([3.0], is_exact=True), told([4.0], is_exact=True)],
    ],
    ids=str,
)
def test_ranks_with_other_weights_differ(ranks: list[Any]) -> None:
    with pytest.raises(RanksDifferError, match=r"compared with rank 0, these differ: `weight 0` .* on rank 1\."):
        check_equal(dict(enumerate(ranks)), "")


def test_the_error_names_weights_and_ranks_reasons_and_the_way_out() -> None:
    ones, twos = [[1.0]] * 6, [[2.0]] * 5
    ranks = {0: told(*ones), 1: told([1.0], *twos), 2: told(*ones), 3: told(*ones[:5], [2.0])}
    with pytest.raises(RanksDifferError) as raised:
        check_equal(ranks, "the weather")
    text = str(raised.value)
    assert "`weight 1` of model 1 (`Net`) on rank 1, `weight 2` of model 1 (`Net`) on rank 1" in text
    assert " and 2 more. " in text
    assert "reasons: the weather; random numbers" in text
    assert "set `compares_ranks = False` in your operator class" in text


def test_ranks_that_have_other_parameters_differ() -> None:
    for other in (told(WEIGHT, WEIGHT), told(WEIGHT.reshape(100, 100))):
        with pytest.raises(RanksDifferError, match="rank 1 have other parameters than rank 0"):
            check_equal({0: told(WEIGHT), 1: other}, "")


def test_an_operator_says_which_of_its_models_are_compared() -> None:
    first, second = object(), object()
    models = [first, second]
    assert models_to_compare(models, True) == [(1, first), (2, second)]
    assert models_to_compare(models, False) == models_to_compare(models, ()) == []
    assert models_to_compare(models, (second,)) == [(2, second)]
    for wrong in (first, "model", None, (object(),), (first, 1)):
        with pytest.raises(ValueError, match=r"allowed are True, False and a tuple of registered models"):
            models_to_compare(models, wrong)


def test_comparisons_take_half_a_hundredth_of_the_time() -> None:
    pace, compared_after = ComparisonPace(), []
    for index in range(500):
        costs_s = [0.5, 1.0] if pace.is_due else []
        compared_after += [index] if costs_s else []
        pace.note_call(1.0, costs_s)
    assert compared_after == [0, 200, 400]
    pace.note_call(1000.0, [1.0, 1.0])
    assert pace.is_due
