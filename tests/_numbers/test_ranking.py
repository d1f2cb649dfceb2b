from __future__ import annotations

from math import nan

import pytest

from raysgd._numbers.ranking import Ranking, as_score

LOSSES = [nan, 3.0, 7.0, 5.0]


@pytest.mark.parametrize(
    ("num_to_keep", "order", "kept"),
    [
        (2, "min", [5.0, 3.0]),
        (2, "max", [5.0, 7.0]),
        (1, "min", [3.0]),
        (1, "max", [7.0]),
        (0, "max", []),
        (9, "max", [nan, 3.0, 5.0, 7.0]),
        (None, "min", [nan, 7.0, 5.0, 3.0]),
    ],
)
@pytest.mark.parametrize("spares_newest", [True, False])
def test_the_best_stay_in_ascending_quality(
    num_to_keep: int | None, order: str, kept: list[float], spares_newest: bool
) -> None:
    ranking = Ranking(num_to_keep, order, spares_newest=spares_newest)
    for identity, loss in enumerate(LOSSES):
        ranking.admit(identity, loss)
    found = [LOSSES[identity] for identity in ranking.kept]
    assert str(found) == str(kept)  # NaN does not equal itself
    assert ranking.best == (LOSSES.index(kept[-1]) if kept else None)


def test_the_newest_stays_until_there_is_a_newer_one() -> None:
    ranking = Ranking(1, "max", spares_newest=True)
    assert ranking.admit(0, 9.0) == ()
    assert ranking.admit(1, 1.0) == ()
    assert ranking.kept == [0]
    assert ranking.admit(2, 2.0) == (1,)
    assert ranking.admit(3, 10.0) == (2, 0)
    assert ranking.kept == [3]


def test_a_worse_one_is_not_kept_where_the_newest_is_not_spared() -> None:
    ranking = Ranking(1, "max")
    assert [ranking.admit(0, 9.0), ranking.admit(1, 1.0)] == [(), (1,)]


def test_of_equals_the_newer_is_better() -> None:
    ranking = Ranking(2, "min")
    assert [ranking.admit(identity, 1.0) for identity in range(3)] == [(), (), (0,)]
    assert ranking.kept == [1, 2]


def test_without_scores_they_are_in_the_order_of_time() -> None:
    ranking = Ranking(2, spares_newest=True)
    assert [ranking.admit(identity) for identity in range(4)] == [(), (), (0,), (1,)]
    assert ranking.kept == [2, 3]


@pytest.mark.parametrize("score", [None, nan])
def test_what_cannot_be_compared_is_worst(score: float | None) -> None:
    ranking = Ranking(2, "min", spares_newest=True)
    assert [ranking.admit(0, 100.0), ranking.admit(1, score), ranking.admit(2, 200.0)] == [(), (), (1,)]
    assert ranking.kept == [2, 0]


def test_scores() -> None:
    import numpy as np
    import torch

    assert [as_score(value) for value in (1, True, 2.5, np.float32(0.5), torch.tensor([3.0]))] == [1, 1, 2.5, 0.5, 3]
    assert [as_score(value) for value in (None, "1", b"1", [1], torch.ones(2), object(), 1 + 2j)] == [None] * 7
