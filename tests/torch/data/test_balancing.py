"""Shares by speed in the workers: all of them change alike, and each sample stays with one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from raysgd.arrays.division import Division
from raysgd.torch.data.balancing import Balancing
from raysgd.torch.data.batch_sampler import PassPlan

JOINT_SIZE = 64


class Rounds:
    """Adds up what all ranks tell in their n-th exchange; whoever waits has to do so when all have told."""

    def __init__(self, size: int) -> None:
        self._told: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def start_of(self, rank: int) -> Callable[[torch.Tensor], Callable[[], Any]]:
        def start(numbers: torch.Tensor) -> Callable[[], Any]:
            self._told[rank].append(numbers.clone())
            index = len(self._told[rank]) - 1
            return lambda: numbers.copy_(torch.stack([of_rank[index] for of_rank in self._told]).sum(dim=0))

        return start


class Ranks:
    """The ranks of one group, which take the steps of a pass together.

    Args:
        seconds: How long each rank takes for a sample.
        num_ahead: How many steps the loader of each rank is ahead.
    """

    def __init__(self, seconds: Sequence[float], num_ahead: Sequence[int] = ()) -> None:
        self.seconds, rounds, size = seconds, Rounds(len(seconds)), len(seconds)
        self.seconds_at: Callable[[int], Sequence[float]] = lambda step: self.seconds
        self._own_s = [0.0] * size
        self.all = [
            Balancing(rank, size, partial(self._own_s.__getitem__, rank), rounds.start_of(rank)) for rank in range(size)
        ]
        for balancing, ahead in zip(self.all, num_ahead, strict=False):
            balancing.num_ahead = ahead
        self.division = Division(JOINT_SIZE, size)

    def run(self, num_samples: int, consumed: int = 0) -> tuple[list[list[int]], list[int]]:
        """Each rank's samples in each step, and the positions that all ranks used.

        The shares of a step are asked for as early as the loader of the rank draws it.
        """
        counts, used = [], []
        drawn: list[list[list[int]]] = [[] for _ in self.all]
        for balancing in self.all:
            balancing.begin_pass()
        plans = [
            PassPlan(num_samples, consumed, self.division, drop_last=False, pad=True, speeds_at=balancing.speeds_at)
            for balancing in self.all
        ]
        for step in range(plans[0].num_steps):
            for rank, (balancing, plan) in enumerate(zip(self.all, plans, strict=True)):
                while len(drawn[rank]) <= min(step + balancing.num_ahead, plan.num_steps - 1):
                    [share] = plan.shares_of_step(len(drawn[rank]), rank)
                    drawn[rank].append(list(range(share.start, share.stop)) if share.num_samples else [])
            counts.append([len(drawn[rank][step]) for rank in range(len(self.all))])
            used += [position for of_rank in drawn for position in of_rank[step]]
            for rank, balancing in enumerate(self.all):
                self._own_s[rank] += counts[-1][rank] * self.seconds_at(step)[rank]
                position = plans[rank].consumed_after(step + 1)
                balancing.after_batch(counts[-1][rank], True, position, JOINT_SIZE)
        return counts, used


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.0], [64]),
        ([1.0, 2.0], [43, 21]),
        ([1.0, 2.0, 2.0], [32, 16, 16]),
        ([1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0], [10, 10, 10, 5, 10, 10, 9]),
    ],
)
def test_within_ten_steps_all_workers_take_as_long_as_each_other(seconds: list[float], expected: list[int]) -> None:
    counts, used = Ranks(seconds).run(20 * JOINT_SIZE)
    assert max(counts[0]) - min(counts[0]) <= 1, "even shares before anything was measured"
    assert counts[10] == counts[-1] == expected
    assert used == list(range(20 * JOINT_SIZE))


@pytest.mark.parametrize("num_workers", [2, 3, 7])
def test_workers_that_are_alike_keep_even_shares(num_workers: int) -> None:
    counts, _ = Ranks([1.0 + 0.01 * rank for rank in range(num_workers)]).run(30 * JOINT_SIZE)
    assert all(max(of_step) - min(of_step) <= 1 for of_step in counts)


def test_a_small_difference_counts_when_it_is_found_twice() -> None:
    counts, _ = Ranks([1.0, 1.2]).run(30 * JOINT_SIZE)
    assert counts[8] == [32, 32]
    assert counts[-1] == [35, 29]
    by_chance = Ranks([1.0, 1.0])
    by_chance.seconds_at = lambda step: [1.2, 1.0] if (step - 1) // 4 % 2 else [1.0, 1.2]
    counts, _ = by_chance.run(60 * JOINT_SIZE)
    assert all(of_step == [32, 32] for of_step in counts)


@pytest.mark.parametrize("num_workers", [2, 3, 7])
def test_loaders_that_read_ahead_differently_change_shares_at_one_position(num_workers: int) -> None:
    ranks = Ranks([1.0, *[3.0] * (num_workers - 1)], num_ahead=[0, 5, 2, 1, 0, 3, 4])
    counts, used = ranks.run(40 * JOINT_SIZE)
    assert used == list(range(40 * JOINT_SIZE)), "each sample belongs to one worker, whatever the speeds are"
    assert counts[8][0] == counts[0][0] < counts[-1][0]


@pytest.mark.parametrize("num_left", [1, 2, 3])
def test_after_a_loss_the_others_begin_with_even_shares_behind_what_was_used(num_left: int) -> None:
    first = Ranks([1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 1.0])
    _, used = first.run(12 * JOINT_SIZE)
    left = Ranks(first.seconds[:num_left])
    counts, rest = left.run(32 * JOINT_SIZE, consumed=12 * JOINT_SIZE)
    assert max(counts[0]) - min(counts[0]) <= 1
    assert used + rest == list(range(32 * JOINT_SIZE))


def test_a_worker_that_becomes_fast_again_gets_its_share_back() -> None:
    ranks = Ranks([1.0, 4.0])
    counts, _ = ranks.run(20 * JOINT_SIZE)
    assert counts[-1][1] < 16
    ranks.seconds = [1.0, 1.0]
    counts, _ = ranks.run(40 * JOINT_SIZE)
    assert abs(counts[-1][1] - 32) <= 3
