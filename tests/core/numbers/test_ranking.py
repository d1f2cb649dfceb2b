from __future__ import annotations

from math import nan
from typing import Any

import pytest

from raysgd.core.numbers.ranking import BestCheckpoints, SavedCheckpoint, as_score

LOSSES: list[float | None] = [nan, 3.0, 7.0, 5.0]


def saved(*scores: float | None) -> list[SavedCheckpoint[None]]:
    return [SavedCheckpoint(number, score, None) for number, score in enumerate(scores)]


def numbers(found: list[SavedCheckpoint[Any]]) -> list[int]:
    return [each.number for each in found]


@pytest.mark.parametrize(
    ("rule", "best", "kept"),
    [
        (BestCheckpoints(2, "min"), [3, 1], [1, 3]),
        (BestCheckpoints(2, "max"), [3, 2], [2, 3]),
        (BestCheckpoints(1, "min"), [1], [1]),
        (BestCheckpoints(1, "max"), [2], [2]),
        (BestCheckpoints(0), [], []),
        (BestCheckpoints(9, "max"), [0, 1, 3, 2], [0, 1, 2, 3]),
        (BestCheckpoints(None, "min"), [0, 2, 3, 1], [0, 1, 2, 3]),
        (BestCheckpoints(1, "min", num_newest=1), [1], [1, 3]),
        (BestCheckpoints(0, num_newest=1), [], [3]),
        (BestCheckpoints(0, num_newest=2), [], [2, 3]),
        (BestCheckpoints(0, num_newest=None), [], [0, 1, 2, 3]),
    ],
)
def test_the_best_and_the_newest_stay(rule: BestCheckpoints, best: list[int], kept: list[int]) -> None:
    checkpoints = saved(*LOSSES)
    assert numbers(rule.best(checkpoints)) == best
    stay, dropped = rule.divide(reversed(checkpoints))
    assert (numbers(stay), numbers(dropped)) == (kept, [number for number in range(4) if number not in kept])


@pytest.mark.parametrize("score", [1.0, None, nan])
def test_of_equals_the_newer_is_better(score: float | None) -> None:
    assert numbers(BestCheckpoints(2, "min").best(saved(score, score, score))) == [1, 2]


@pytest.mark.parametrize("score", [None, nan])
def test_what_cannot_be_compared_is_worst(score: float | None) -> None:
    assert numbers(BestCheckpoints(None, "min").best(saved(100.0, score, 200.0))) == [1, 2, 0]


def test_what_is_not_judged_yet_stays_and_takes_no_place() -> None:
    kept, dropped = BestCheckpoints(1, "max").divide(saved(2.0, None, 1.0, None), pending=[1, 3])
    assert (numbers(kept), numbers(dropped)) == ([0, 1, 3], [2])


def test_scores() -> None:
    import numpy as np
    import torch

    assert [as_score(value) for value in (1, True, 2.5, np.float32(0.5), torch.tensor([3.0]))] == [1, 1, 2.5, 0.5, 3]
    assert [as_score(value) for value in (None, "1", b"1", [1], torch.ones(2), object(), 1 + 2j)] == [None] * 7
