"""Rounds in which ranks put together what one of them needs; the ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from raysgd.torch.parallel.forward_rounds import ForwardRound, ForwardRounds

NUM_PARTS = 3  # the model, and two blocks inside of it
TIMEOUT_S = 60.0


class Together:
    """What ranks do together: all have to come, and to come for the same."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_S)
        self._brought: list[Any] = []
        self._lock = threading.Lock()

    def exchange(self, what: Any) -> list[Any]:
        with self._lock:
            self._brought.append(what)
        self._barrier.wait()
        found = list(self._brought)
        if self._barrier.wait() == 0:
            self._brought = []
        self._barrier.wait()
        return found


class Rank:
    """One rank: counts what it has put together, and checks that all did."""

    def __init__(self, together: Together) -> None:
        self.together = together
        self.num_exchanges = 0
        self.parts = [FakePart(self, index) for index in range(NUM_PARTS)]
        self.rounds = ForwardRounds()

    def maximum(self, numbers: torch.Tensor) -> None:
        for other in self.together.exchange(numbers.clone()):
            torch.maximum(numbers, other, out=numbers)

    def forward(self) -> None:
        """What hooks do in a forward pass: the model, then each block, which is left before the next one."""
        model, *blocks = self.parts
        self.rounds.enter(model)
        for block in blocks:
            self.rounds.enter(block)
            assert block.is_held
            block.take_apart()
        assert model.is_held
        model.take_apart()

    def evaluate(self, code: Callable[[Rank], Any]) -> Any:
        with self.rounds.opened(self.parts, self.maximum):
            return code(self)


class FakePart:
    def __init__(self, rank: Rank, index: int) -> None:
        self.rank, self.index, self.is_held = rank, index, False

    def put_together(self) -> None:
        assert not self.is_held, "nothing can be put together where it is already"
        assert set(self.rank.together.exchange(self.index)) == {self.index}
        self.rank.num_exchanges += 1
        self.is_held = True

    def take_apart(self) -> None:
        self.is_held = False


def run(codes: Sequence[Callable[[Rank], Any]]) -> list[Future[Any]]:
    together = Together(len(codes))
    with ThreadPoolExecutor(len(codes)) as pool:
        return [pool.submit(Rank(together).evaluate, code) for code in codes]


def forwards(number: int) -> Callable[[Rank], Rank]:
    def code(rank: Rank) -> Rank:
        for _ in range(number):
            rank.forward()
        rank.rounds.pause()
        return rank

    return code


@pytest.mark.parametrize("numbers", [(1, 1), (0, 2), (3, 1, 0), (5, 0, 2)])
def test_ranks_run_as_many_forward_passes_as_they_have_batches(numbers: tuple[int, ...]) -> None:
    ranks = [future.result() for future in run([forwards(number) for number in numbers])]
    assert all(not part.is_held for rank in ranks for part in rank.parts)
    assert len({rank.num_exchanges for rank in ranks}) == 1
    assert max(numbers) * NUM_PARTS <= ranks[0].num_exchanges <= sum(numbers) * NUM_PARTS


def test_equal_ranks_put_nothing_together_for_others() -> None:
    ranks = [future.result() for future in run([forwards(4)] * 3)]
    assert ranks[0].num_exchanges == 4 * NUM_PARTS


def test_a_rank_that_is_inside_of_a_model_goes_first() -> None:
    """One rank calls a block by itself, while the other is on its way through the model to the same block."""

    def calls_block(rank: Rank) -> int:
        block = rank.parts[2]
        for _ in range(2):
            rank.rounds.enter(block)
            block.take_apart()
        return rank.num_exchanges

    both = run([forwards(2), calls_block])
    assert both[0].result().num_exchanges == 6
    assert both[1].result() <= 6


def test_what_follows_the_last_batch_runs_on_all_ranks_at_once() -> None:
    def code(number: int) -> Callable[[Rank], list[int]]:
        def then_talks(rank: Rank) -> list[int]:
            forwards(number)(rank)
            return sorted(rank.together.exchange(number))  # would take part in a round, if one were under way

        return then_talks

    assert [future.result() for future in run([code(0), code(3), code(1)])] == [[0, 1, 3]] * 3


def test_a_rank_that_stops_early_or_goes_on_after_the_pause_keeps_nobody_waiting() -> None:
    def stops_early(rank: Rank) -> None:
        rank.forward()

    def goes_on(rank: Rank) -> None:
        forwards(2)(rank)
        rank.forward()

    for future in run([stops_early, goes_on, forwards(0)]):
        future.result()


def test_a_rank_that_raises_inside_of_a_block_lets_the_others_finish() -> None:
    def breaks(rank: Rank) -> None:
        rank.rounds.enter(rank.parts[0])
        rank.rounds.enter(rank.parts[1])
        raise KeyError("of the user")

    broken, fine = run([breaks, forwards(3)])
    with pytest.raises(KeyError, match="of the user"):
        broken.result()
    assert all(not part.is_held for part in fine.result().parts)


def test_outside_of_an_evaluation_there_are_no_rounds() -> None:
    rank = Rank(Together(2))
    rank.rounds.enter(rank.parts[0])
    rank.rounds.pause()
    assert rank.num_exchanges == 0


@pytest.mark.parametrize(
    ("wanted", "held", "chosen"),
    [
        ((0, 0, 0), (0, 0, 0), None),
        ((0, 0, 0), (1, 0, 0), None),
        ((1, 0, 0), (0, 0, 0), 0),
        ((1, 1, 0), (0, 0, 0), 0),
        ((1, 0, 1), (1, 0, 0), 2),
        ((0, 1, 1), (1, 1, 0), 2),
    ],
)
def test_the_first_part_that_nobody_is_inside_of_is_chosen(
    wanted: tuple[int, ...], held: tuple[int, ...], chosen: int | None
) -> None:
    assert ForwardRound([*map(bool, wanted)], [*map(bool, held)], is_awaited=False).chosen == chosen


def test_ranks_that_wait_for_one_another_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"wait for one another.*Call models by `self.model\(x\)`"):
        _ = ForwardRound([True, True], [True, True], is_awaited=False).chosen
