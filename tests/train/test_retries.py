from __future__ import annotations

import pytest

from raysgd.exceptions import WorkersLostError
from raysgd.train._retries import LossCounter, restarts_allowed


@pytest.mark.parametrize(("max_retries", "expected"), [(3, 2), (2, 1), (1, 0), (0, 0), (-1, float("inf"))])
def test_the_last_retry_is_the_one_that_raises(max_retries: int, expected: float) -> None:
    assert restarts_allowed(max_retries) == expected


def test_the_last_loss_is_raised_with_what_allows_more() -> None:
    retries = LossCounter(2)
    retries.pay(OSError("worker 1 died"))
    with pytest.raises(WorkersLostError, match=r"worker 1 died. With `max_retries=2` .* loss number 2.*-1 any number"):
        retries.pay(OSError("worker 1 died"))
    assert retries.num_losses == 2
    retries.renew()
    assert retries.num_losses == 0


def test_a_loss_that_the_engine_refuses_says_what_allows_more() -> None:
    retries = LossCounter(1)

    def lose() -> None:
        retries.budget.refuse()
        raise WorkersLostError("lost rank 0")

    with pytest.raises(WorkersLostError, match=r"lost rank 0\nWith `max_retries=1`"), retries.named():
        lose()


def test_another_error_says_nothing_of_it() -> None:
    with pytest.raises(WorkersLostError) as caught, LossCounter(1).named():
        raise WorkersLostError("too few workers")
    assert "max_retries" not in str(caught.value)
