"""How the rest of a pass is divided, for groups of any size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd.torch.pass_plan import PassPlan, Share


def make_plan(
    num_samples: int,
    batch_size: int = 2,
    world_size: int = 2,
    *,
    consumed: int = 0,
    drop_last: bool = False,
    pad: bool = True,
) -> PassPlan:
    return PassPlan(num_samples, consumed, batch_size, world_size, drop_last, pad)


def shares_of(plan: PassPlan, step: int) -> list[Share]:
    return [plan.share(step, rank) for rank in range(plan.world_size)]


def positions(share: Share) -> list[int]:
    return list(range(share.start, share.stop)) if share.num_samples else []


def random_plans(num_plans: int, *, seed: int) -> Iterator[PassPlan]:
    draw = random.Random(seed)
    for _ in range(num_plans):
        num_samples = draw.randint(0, 60)
        yield PassPlan(
            num_samples=num_samples,
            consumed=draw.randint(0, num_samples),
            batch_size=draw.randint(1, 6),
            world_size=draw.randint(1, 7),
            drop_last=draw.random() < 0.5,
            pad=draw.random() < 0.5,
        )


# Tables


@pytest.mark.parametrize(
    ("num_samples", "consumed", "drop_last", "num_steps"),
    [
        (0, 0, False, 0),
        (8, 0, False, 2),
        (9, 0, False, 3),
        (9, 0, True, 2),
        (3, 0, True, 0),
        (9, 4, False, 2),
        (9, 5, False, 1),
        (9, 8, False, 1),
        (9, 8, True, 0),
        (9, 9, False, 0),
    ],
)
def test_the_steps_still_to_come_are_counted_from_the_position(
    num_samples: int, consumed: int, drop_last: bool, num_steps: int
) -> None:
    assert make_plan(num_samples, consumed=consumed, drop_last=drop_last).num_steps == num_steps


@pytest.mark.parametrize(
    ("joined", "expected"),
    [
        (6, [Share(0, 2, 2, 1.0, 6), Share(2, 4, 2, 1.0, 6), Share(4, 6, 2, 1.0, 6)]),
        (5, [Share(0, 2, 2, 6 / 5, 5), Share(2, 4, 2, 6 / 5, 5), Share(4, 5, 1, 3 / 5, 5)]),
        (4, [Share(0, 2, 2, 6 / 4, 4), Share(2, 3, 1, 3 / 4, 4), Share(3, 4, 1, 3 / 4, 4)]),
        (3, [Share(0, 1, 1, 1.0, 3), Share(1, 2, 1, 1.0, 3), Share(2, 3, 1, 1.0, 3)]),
        (2, [Share(0, 1, 1, 3 / 2, 2), Share(1, 2, 1, 3 / 2, 2), Share(0, 2, 0, 0.0, 2)]),
        (1, [Share(0, 1, 1, 3.0, 1), Share(0, 1, 0, 0.0, 1), Share(0, 1, 0, 0.0, 1)]),
    ],
)
def test_a_step_is_divided_contiguously_with_the_larger_shares_first(joined: int, expected: list[Share]) -> None:
    assert shares_of(make_plan(joined, world_size=3), step=0) == expected


def test_without_padding_a_rank_without_samples_has_no_batch() -> None:
    plan = make_plan(7, world_size=3, pad=False)
    assert plan.num_steps == 2
    assert shares_of(plan, 1) == [Share(6, 7, 1, 3.0, 1), Share(7, 7, 0, 0.0, 1), Share(7, 7, 0, 0.0, 1)]
    assert [plan.num_batches(rank) for rank in range(3)] == [2, 1, 1]


def test_with_padding_every_rank_has_a_batch_in_every_step() -> None:
    plan = make_plan(7, world_size=3, pad=True)
    assert [plan.num_batches(rank) for rank in range(3)] == [2, 2, 2]


def test_padding_is_never_larger_than_a_batch() -> None:
    plan = make_plan(3, batch_size=1, world_size=4)
    assert plan.share(0, rank=3) == Share(0, 1, 0, 0.0, 3)


def test_a_dropped_tail_counts_as_consumed_once_the_last_step_is_done() -> None:
    plan = make_plan(11, consumed=1, drop_last=True)
    assert [plan.consumed_after(steps) for steps in range(plan.num_steps + 1)] == [1, 5, 11]


def test_an_empty_pass_has_no_steps_and_no_batches() -> None:
    plan = make_plan(0)
    assert (plan.num_steps, plan.consumed_after(0), plan.num_batches(0)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": -1}, "num_samples=-1"),
        ({"consumed": -1}, "consumed=-1"),
        ({"consumed": 9}, "consumed=9.*from 0 to 8"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"world_size": 0}, "world_size=0"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(**{"num_samples": 8, **changes})


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (2, 0), (0, -1), (0, 2)])
def test_a_share_outside_the_plan_is_refused(step: int, rank: int) -> None:
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        make_plan(8).share(step, rank)


def test_positions_outside_the_plan_and_batches_of_unknown_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="steps=3"):
        make_plan(8).consumed_after(3)
    with pytest.raises(ValueError, match="rank=2"):
        make_plan(8).num_batches(2)


# Properties


def test_each_step_joins_to_what_one_process_with_the_joined_batch_would_see() -> None:
    for plan in random_plans(400, seed=1):
        rest = range(plan.consumed, plan.num_samples)
        joint = plan.batch_size * plan.world_size
        alone = [list(rest[at : at + joint]) for at in range(0, len(rest), joint)]
        if plan.drop_last:
            alone = [batch for batch in alone if len(batch) == joint]
        together = [
            [position for share in shares_of(plan, step) for position in positions(share)]
            for step in range(plan.num_steps)
        ]
        assert together == alone, plan


def test_shares_differ_by_at_most_one_and_never_exceed_the_batch() -> None:
    for plan in random_plans(400, seed=2):
        for step in range(plan.num_steps):
            sizes = [share.num_samples for share in shares_of(plan, step)]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            assert sizes[0] <= plan.batch_size


def test_weights_average_to_one_and_are_exactly_one_for_equal_shares() -> None:
    num_uneven = 0
    for plan in random_plans(400, seed=3):
        for step in range(plan.num_steps):
            shares = shares_of(plan, step)
            weights = [share.weight for share in shares]
            assert sum(weights) / plan.world_size == pytest.approx(1.0)
            if len({share.num_samples for share in shares}) == 1:
                assert weights == [1.0] * plan.world_size
            else:
                num_uneven += 1
    assert num_uneven > 20


def test_weighted_means_of_shares_average_to_the_mean_over_the_samples() -> None:
    values = torch.arange(60, dtype=torch.float64) ** 2
    for plan in random_plans(200, seed=4):
        for step in range(plan.num_steps):
            shares = [share for share in shares_of(plan, step) if share.start < share.stop]
            mean_of_means = sum(s.weight * values[s.start : s.stop].mean() for s in shares) / plan.world_size
            joined = [position for share in shares for position in positions(share)]
            assert float(mean_of_means) == pytest.approx(float(values[joined].mean()))


def test_padding_repeats_samples_of_its_own_step() -> None:
    num_padded = 0
    for plan in random_plans(400, seed=5):
        for step in range(plan.num_steps):
            shares = shares_of(plan, step)
            joined = {position for share in shares for position in positions(share)}
            for share in shares:
                if share.num_samples == 0 and plan.pad:
                    repeated = set(range(share.start, share.stop))
                    assert repeated
                    assert repeated <= joined
                    assert len(repeated) <= plan.batch_size
                    num_padded += 1
    assert num_padded > 20


def test_the_batches_of_a_rank_are_its_shares_that_are_not_empty() -> None:
    for plan in random_plans(400, seed=6):
        for rank in range(plan.world_size):
            shares = [plan.share(step, rank) for step in range(plan.num_steps)]
            non_empty = [share.stop > share.start for share in shares]
            assert plan.num_batches(rank) == sum(non_empty)
            assert all(non_empty[: plan.num_batches(rank)])


def test_the_position_after_each_step_is_the_prefix_used_so_far() -> None:
    for plan in random_plans(400, seed=7):
        used = plan.consumed
        for step in range(plan.num_steps):
            assert plan.consumed_after(step) == used
            used += sum(share.num_samples for share in shares_of(plan, step))
        assert plan.consumed_after(plan.num_steps) == plan.num_samples
        assert plan.drop_last or used == plan.num_samples


def test_each_sample_is_used_exactly_once_however_often_the_group_changes() -> None:
    draw = random.Random(8)
    for _ in range(300):
        num_samples = draw.randint(0, 80)
        consumed = 0
        used: list[int] = []
        while consumed < num_samples:
            plan = make_plan(num_samples, draw.randint(1, 5), draw.randint(1, 6), consumed=consumed)
            steps = draw.randint(0, plan.num_steps)
            for step in range(steps):
                used += [position for share in shares_of(plan, step) for position in positions(share)]
            consumed = plan.consumed_after(steps)
        assert used == list(range(num_samples))


def test_the_samples_of_a_joint_step_are_those_of_all_ranks() -> None:
    for plan in random_plans(400, seed=9):
        for step in range(plan.num_steps):
            shares = shares_of(plan, step)
            assert {share.num_joint for share in shares} == {sum(share.num_samples for share in shares)}


def test_the_shares_of_a_rank_one_after_the_other_are_those_one_at_a_time() -> None:
    for plan in random_plans(400, seed=10):
        for rank in range(plan.world_size):
            assert list(plan.shares(rank)) == [plan.share(step, rank) for step in range(plan.num_steps)], plan
    with pytest.raises(ValueError, match="rank=2"):
        next(make_plan(8).shares(2))
