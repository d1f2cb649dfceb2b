"""Whether a step may count as done, after what became of its exchanges with other ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistNetworkError

from raysgd.torch.parallel.exchanges import Exchanges

LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:41803")


class Group:
    """Connections that hold until somebody says otherwise."""

    def __init__(self) -> None:
        self.is_broken = False
        self.exchanges = Exchanges(is_broken=lambda: self.is_broken)

    def exchange(self, *errors: Exception | None) -> None:
        """The gradients of a model, a bucket for each of `errors`, as a backward pass waits for them and goes on."""
        for index, error in enumerate(errors):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            watched = self.exchanges.track(future, is_last=index == len(errors) - 1)
            future.set_result(torch.ones(1)) if error is None else future.set_exception(error)
            assert watched.done()
            if error is None:
                assert watched.value() == 1.0
            else:
                with pytest.raises(type(error)):
                    watched.wait()


def test_steps_count_as_long_as_nothing_is_broken_whatever_was_exchanged_in_them() -> None:
    group = Group()
    for errors in ((None, None), (), (None,)):
        group.exchange(*errors)
        group.exchanges.check()


def test_a_step_whose_exchanges_came_through_counts_though_the_group_broke_behind_them() -> None:
    group = Group()
    group.exchange(None, None)
    group.is_broken = True
    group.exchanges.check()


@pytest.mark.parametrize("errors", [(LOST,), (None, LOST), (LOST, None)])
def test_a_step_with_an_exchange_that_failed_does_not_count_and_none_does_after_it(
    errors: tuple[Exception | None, ...],
) -> None:
    group = Group()
    group.exchange(None)
    group.exchanges.check()
    group.exchange(*errors)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            group.exchanges.check()
        group.exchange(None)


def test_an_exception_that_says_nothing_about_the_group_is_the_business_of_user_code() -> None:
    group = Group()
    group.exchange(RuntimeError("in a hook of the user"))
    group.exchanges.check()


def test_a_step_without_an_exchange_does_not_count_in_a_group_that_is_broken() -> None:
    group = Group()
    group.exchange(None)
    group.exchanges.check()
    group.is_broken = True
    with pytest.raises(DistNetworkError, match="user code went on"):
        group.exchanges.check()


def test_what_is_lost_of_a_former_group_later_does_not_break_the_next_one() -> None:
    group = Group()
    late: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    group.exchanges.track(late, is_last=True)
    former, group.exchanges = group.exchanges, group.exchanges.of_next_group()
    late.set_exception(LOST)
    assert former.has_broken
    group.exchanges.check()
