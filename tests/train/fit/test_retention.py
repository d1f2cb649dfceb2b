from __future__ import annotations

from math import nan

import pytest

from raysgd.train.fit.retention import Retention

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
    retention = Retention(num_to_keep, order, spares_newest=spares_newest)
    for identity, loss in enumerate(LOSSES):
        retention.admit(identity, loss)
    found = [LOSSES[identity] for identity in retention.kept]
    assert str(found) == str(kept)  # NaN does not equal itself
    assert retention.best == (LOSSES.index(kept[-1]) if kept else None)


def test_the_newest_stays_until_there_is_a_newer_one() -> None:
    retention = Retention(1, "max", spares_newest=True)
    assert retention.admit(0, 9.0) == ()
    assert retention.admit(1, 1.0) == ()
    assert retention.kept == [0]
    assert retention.admit(2, 2.0) == (1,)
    assert retention.admit(3, 10.0) == (2, 0)
    assert retention.kept == [3]


def test_a_worse_one_is_not_kept_where_the_newest_is_not_spared() -> None:
    retention = Retention(1, "max")
    assert [retention.admit(0, 9.0), retention.admit(1, 1.0)] == [(), (1,)]


def test_of_equals_the_newer_is_better() -> None:
    retention = Retention(2, "min")
    assert [retention.admit(identity, 1.0) for identity in range(3)] == [(), (), (0,)]
    assert retention.kept == [1, 2]


def test_without_scores_they_are_in_the_order_of_time() -> None:
    retention = Retention(2, spares_newest=True)
    assert [retention.admit(identity) for identity in range(4)] == [(), (), (0,), (1,)]
    assert retention.kept == [2, 3]


@pytest.mark.parametrize("score", [None, nan])
def test_what_cannot_be_compared_is_worst(score: float | None) -> None:
    retention = Retention(2, "min", spares_newest=True)
    assert [retention.admit(0, 100.0), retention.admit(1, score), retention.admit(2, 200.0)] == [(), (), (1,)]
    assert retention.kept == [2, 0]
