"""How the rest of a pass is divided by joint batches of one size, whatever the group is."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from raysgd.replicas.division import Division
from raysgd.torch.joint_plan import JointPlan, SpeedsAt, no_speeds
from raysgd.torch.pass_plan import PassPlan, Share


def random_plans(num_plans: int, seed: int, **fixed: bool) -> Iterator[JointPlan]:
    draw = random.Random(seed)
    for _ in range(num_plans):
        num_samples, world_size = draw.randint(0, 60), draw.randint(1, 7)
        division = Division(draw.randint(1, 20), world_size, draw.choice([None, draw.randint(1, 5)]))
        options = {"drop_last": draw.random() < 0.5, "pad": draw.random() < 0.5, **fixed}
        speeds_at = changing_speeds(draw, world_size) if draw.random() < 0.5 else no_speeds
        yield JointPlan(num_samples, draw.randint(0, num_samples), division, speeds_at=speeds_at, **options)


def changing_speeds(draw: random.Random, world_size: int) -> SpeedsAt:
    slow, fast = ([draw.uniform(0.2, 4.0) for _ in range(world_size)] for _ in range(2))
    return lambda position: fast if position > 20 else slow


def steps_of(plan: JointPlan, rank: int) -> list[list[Share]]:
    return [plan.shares_of_step(step, rank) for step in range(plan.num_steps)]


def used(plan: JointPlan, num_steps: int) -> list[int]:
    """The positions that all ranks use in the first steps."""
    return [
        position
        for step in range(num_steps)
        for rank in range(plan.division.world_size)
        for share in plan.shares_of_step(step, rank)
        if share.num_samples
        for position in range(share.start, share.stop)
    ]


def test_eighteen_samples_over_seven_ranks() -> None:
    plan = JointPlan(36, 0, Division(18, 7), drop_last=False, pad=True)
    assert [share.num_samples for rank in range(7) for share in plan.shares_of_step(0, rank)] == [3, 3, 3, 3, 2, 2, 2]
    assert [plan.consumed_after(steps) for steps in range(3)] == [0, 18, 36]


def test_a_rank_without_samples_repeats_some_in_training_and_has_no_batch_in_evaluation() -> None:
    training = JointPlan(4, 0, Division(2, 3), drop_last=False, pad=True)
    evaluation = JointPlan(4, 0, Division(2, 3), drop_last=False, pad=False)
    assert steps_of(training, rank=2) == [[Share(0, 2, 0, 0.0, 2)], [Share(2, 4, 0, 0.0, 2)]]
    assert steps_of(evaluation, rank=2) == [[Share(0, 0, 0, 0.0, 2)], [Share(2, 2, 0, 0.0, 2)]]
    assert (training.num_batches(2), evaluation.num_batches(2)) == (2, 0)


def test_a_step_says_where_it_begins_and_ends() -> None:
    plan = JointPlan(20, 0, Division(12, 2, cap=2), drop_last=False, pad=True)
    assert [(share.is_first, share.is_last) for share in plan.shares(0)] == [
        (True, False), (False, False), (False, True), (True, False), (False, True),
    ]  # fmt: skip


def test_the_shares_one_after_the_other_are_those_of_the_steps() -> None:
    for plan in random_plans(300, seed=1):
        for rank in range(plan.division.world_size):
            shares = [share for step in steps_of(plan, rank) for share in step]
            assert list(plan.shares(rank)) == shares
            if plan.speeds_at is no_speeds or plan.pad:
                assert plan.num_batches(rank) == sum(share.start < share.stop for share in shares)


def test_any_sequence_of_groups_uses_each_sample_of_a_pass_once() -> None:
    draw = random.Random(5)
    for _ in range(200):
        num_samples, joint_size, consumed = draw.randint(1, 100), draw.randint(1, 25), 0
        positions: list[int] = []
        while consumed < num_samples:
            world_size = draw.randint(1, 7)
            division = Division(joint_size, world_size, draw.choice([None, 1, 3, 8]))
            speeds_at = changing_speeds(draw, world_size) if draw.random() < 0.5 else no_speeds
            plan = JointPlan(num_samples, consumed, division, drop_last=False, pad=True, speeds_at=speeds_at)
            num_steps = draw.randint(0, plan.num_steps)
            positions += used(plan, num_steps)
            consumed = plan.consumed_after(num_steps)
        assert positions == list(range(num_samples))


def test_where_batches_divide_the_plan_is_that_of_the_size_of_one_rank() -> None:
    for plan in random_plans(300, seed=2):
        size, world_size = plan.division.joint_size, plan.division.world_size
        if size % world_size or plan.division.cap is not None or plan.speeds_at is not no_speeds:
            continue
        former = PassPlan(plan.num_samples, plan.consumed, size // world_size, world_size, plan.drop_last, plan.pad)
        assert (plan.num_steps, plan.consumed_after(plan.num_steps // 2)) == (
            former.num_steps,
            former.consumed_after(plan.num_steps // 2),
        )
        for step in range(plan.num_steps):
            for rank in range(world_size):
                [share] = plan.shares_of_step(step, rank)
                if share.num_samples:
                    assert share == former.share(step, rank)


def test_weighted_means_average_to_the_mean_over_the_samples_of_all_ranks_batches() -> None:
    values = torch.arange(60, dtype=torch.float64) ** 2
    for plan in random_plans(200, seed=3, pad=True):
        for step in range(plan.num_steps):
            of_ranks = [plan.shares_of_step(step, rank) for rank in range(plan.division.world_size)]
            total, seen = 0.0, 0
            for together in zip(*of_ranks, strict=True):
                means = sum(share.weight * values[share.start : share.stop].mean() for share in together)
                total += float(means) / plan.division.world_size * together[0].num_joint
                seen += together[0].num_joint
            start = plan.consumed + step * plan.division.joint_size
            assert total / seen == pytest.approx(float(values[start : start + seen].mean()))


@pytest.mark.parametrize(
    ("consumed", "joint_size", "message"), [(-1, 4, "consumed=-1"), (9, 4, "consumed=9"), (0, 0, "joint_size=0")]
)
def test_impossible_plans_are_refused(consumed: int, joint_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JointPlan(8, consumed, Division(joint_size, 2), drop_last=False, pad=True)


def test_what_is_outside_the_plan_is_refused() -> None:
    plan = JointPlan(8, 0, Division(4, 2), drop_last=False, pad=True)
    for step, rank in ((2, 0), (-1, 0), (0, 2)):
        with pytest.raises(ValueError, match="must be from 0 to 1"):
            plan.shares_of_step(step, rank)
    with pytest.raises(ValueError, match="steps=3"):
        plan.consumed_after(3)
