"""Rounds in which ranks run a forward pass of a model that one of them calls; the ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from raysgd.torch.parallel.fsdp import ForwardRounds, hook_of

TIMEOUT_S = 60.0


class Together:
    """What ranks do together: all have to come."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_S)
        self._brought: list[Any] = [None] * num_ranks

    def exchange(self, rank: int, what: Any) -> list[Any]:
        self._brought[rank] = what
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found


class Model(torch.nn.Module):
    """A divided model: its forward pass takes all ranks, and all must run the same one."""

    def __init__(self, rank: Rank, number: int) -> None:
        super().__init__()
        self.rank, self.number = [rank], number  # in a list: it is no module
        self.register_forward_pre_hook(hook_of(rank.rounds), with_kwargs=True)

    def forward(self, value: int, *, more: int = 0) -> int:
        [rank] = self.rank
        assert {number for number, _ in rank.exchange((self.number, value))} == {self.number}
        rank.num_forwards += 1
        return value + more


class Rank:
    """One rank with two models."""

    def __init__(self, together: Together, number: int) -> None:
        self.together, self.number, self.num_forwards = together, number, 0
        self.rounds = ForwardRounds(self.exchange, lambda call, source: self.exchange(call)[source])
        self.models = [Model(self, 0), Model(self, 1)]

    def exchange(self, what: Any) -> list[Any]:
        return self.together.exchange(self.number, what)

    def evaluate(self, code: Callable[[Rank], Any]) -> Any:
        with self.rounds.opened(self.models):
            return code(self)


def run(codes: Sequence[Callable[[Rank], Any]]) -> list[Future[Any]]:
    together = Together(len(codes))
    with ThreadPoolExecutor(len(codes)) as pool:
        return [pool.submit(Rank(together, number).evaluate, code) for number, code in enumerate(codes)]


def forwards(number: int, of_model: int = 0) -> Callable[[Rank], Rank]:
    def code(rank: Rank) -> Rank:
        for index in range(number):
            assert rank.models[of_model](index, more=10) == index + 10
        return rank

    return code


@pytest.mark.parametrize("numbers", [(1, 1), (0, 2), (3, 1, 0), (5, 0, 2)])
def test_ranks_run_as_many_forward_passes_as_the_one_with_most_batches(numbers: tuple[int, ...]) -> None:
    ranks = [future.result() for future in run([forwards(number) for number in numbers])]
    assert {rank.num_forwards for rank in ranks} == {max(numbers)}


def test_ranks_that_call_different_models_take_turns() -> None:
    ranks = [future.result() for future in run([forwards(2, of_model=1), forwards(3), forwards(1, of_model=1)])]
    assert {rank.num_forwards for rank in ranks} == {5}


def test_a_rank_that_raises_between_two_forward_passes_lets_the_others_finish() -> None:
    def breaks(rank: Rank) -> None:
        rank.models[0](1)
        raise KeyError("of the user")

    broken, fine = run([breaks, forwards(3)])
    with pytest.raises(KeyError, match="of the user"):
        broken.result()
    assert fine.result().num_forwards == 3


def test_outside_of_an_evaluation_there_are_no_rounds() -> None:
    rank = Rank(Together(1), 0)
    rank.models[0](1)
    assert rank.num_forwards == 1
