"""Answers of workers after which a call of `train` does not count."""

from __future__ import annotations

import pytest

from raysgd.exceptions import UnevenStepsError
from raysgd.torch.driver.framework import check_alike
from raysgd.trainer.messages.comparison import JointWork
from raysgd.trainer.messages.epochs import EpochAnswer


def answer(num_steps: int, num_done: int | None) -> EpochAnswer:
    work = None if num_done is None else JointWork({"optimizer 1 stepped": num_done}, (num_done,))
    return EpochAnswer(None, {}, num_steps, joint_work=work)


@pytest.mark.parametrize("num_done", [(None, None), (4, 4), (4, None)])
def test_workers_that_did_the_same_count_as_do_those_that_took_over(num_done: tuple[int | None, ...]) -> None:
    check_alike([answer(3, num) for num in num_done])


def test_workers_that_drew_different_numbers_of_batches_are_told_so() -> None:
    with pytest.raises(UnevenStepsError, match=r"\[1, 2\] batches"):
        check_alike([answer(1, 1), answer(2, 1)])


def test_workers_that_did_different_things_with_as_many_batches_are_told_so_too() -> None:
    with pytest.raises(UnevenStepsError, match=r"on ranks 0, 2 optimizer 1 stepped 4 times; on rank 1 .* 3 times"):
        check_alike([answer(3, 4), answer(3, 3), answer(3, 4)])
