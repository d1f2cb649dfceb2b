"""How the rest of a pass is divided, for groups of any size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest

from raysgd.core.arrays.division import BatchPlan, BatchShare, Division
from raysgd.torch.data.sampling import PassPlan


def make_plan(
    num_samples: int, batch_size: int = 2, world_size: int = 2, *, consumed: int = 0, pad: bool = True
) -> PassPlan:
    """One where the size of a worker's batch is given."""
    return PassPlan(num_samples, consumed, of_workers(batch_size, world_size), drop_last=False, pad=pad)


def share(start: int, stop: int, num_samples: int, weight: float, total: int) -> BatchShare:
    return BatchShare(start, stop, BatchPlan(num_samples, total, weight, is_padding=not num_samples))


def of_workers(batch_size: int, world_size: int) -> Division:
    return Division(batch_size * world_size, world_size, cap=batch_size)


def of_a_step(plan: PassPlan, step: int) -> list[list[BatchShare]]:
    """The batches of each rank."""
    return [steps_of(plan, rank)[step] for rank in range(plan.division.world_size)]


def steps_of(plan: PassPlan, rank: int) -> list[list[BatchShare]]:
    """The batches of a rank in each step."""
    steps: list[list[BatchShare]] = []
    for part, share in plan.shares(rank):
        share = share._replace(start=part.start + share.start, stop=part.start + share.stop)
        steps += [[]] * share.plan.starts_global_batch
        steps[-1] = [*steps[-1], share]
    return steps


def shares_of(plan: PassPlan, step: int) -> list[BatchShare]:
    """Those of all ranks, one each."""
    return [share for [share] in of_a_step(plan, step)]


def used(plan: PassPlan, num_steps: int) -> list[int]:
    """The positions that all ranks use in the first steps."""
    return [
        position
        for step in range(num_steps)
        for shares in of_a_step(plan, step)
        for share in shares
        if share.plan.num_samples
        for position in range(share.start, share.stop)
    ]


def random_plans(num_plans: int, seed: int, **fixed: bool) -> Iterator[PassPlan]:
    """Of all kinds."""
    draw = random.Random(seed)
    for _ in range(num_plans):
        num_samples = draw.randint(0, 60)
        division = random_division(draw)
        options = {"drop_last": draw.random() < 0.5, "pad": draw.random() < 0.5, **fixed}
        yield PassPlan(num_samples, draw.randint(0, num_samples), division, **options)


def random_division(draw: random.Random) -> Division:
    world_size = draw.randint(1, 7)
    if draw.random() < 0.5:
        return of_workers(draw.randint(1, 6), world_size)
    return Division(draw.randint(1, 20), world_size, draw.choice([None, draw.randint(1, 5)]))


# Tables


@pytest.mark.parametrize(
    ("joined", "expected"),
    [
        (6, [share(0, 2, 2, 1.0, 6), share(2, 4, 2, 1.0, 6), share(4, 6, 2, 1.0, 6)]),
        (5, [share(0, 2, 2, 6 / 5, 5), share(2, 4, 2, 6 / 5, 5), share(4, 5, 1, 3 / 5, 5)]),
        (4, [share(0, 2, 2, 6 / 4, 4), share(2, 4, 2, 6 / 4, 4), share(0, 2, 0, 0.0, 4)]),
        (3, [share(0, 1, 1, 1.0, 3), share(1, 2, 1, 1.0, 3), share(2, 3, 1, 1.0, 3)]),
        (2, [share(0, 2, 2, 3.0, 2), share(0, 2, 0, 0.0, 2), share(0, 2, 0, 0.0, 2)]),
        (1, [share(0, 1, 1, 3.0, 1), share(0, 1, 0, 0.0, 1), share(0, 1, 0, 0.0, 1)]),
    ],
)
def test_a_step_is_divided_contiguously_with_the_larger_shares_first(joined: int, expected: list[BatchShare]) -> None:
    assert shares_of(make_plan(joined, world_size=3), step=0) == expected


def test_without_padding_a_rank_without_samples_has_no_batch() -> None:
    plan = make_plan(7, world_size=3, pad=False)
    assert plan.num_steps == 2
    assert shares_of(plan, 1) == [share(6, 7, 1, 3.0, 1), *[share(6, 6, 0, 0.0, 1)] * 2]
    assert [plan.num_batches(rank) for rank in range(3)] == [2, 1, 1]


def test_padding_is_never_larger_than_a_batch() -> None:
    plan = make_plan(3, batch_size=1, world_size=4)
    assert list(plan.shares(rank=3)) == [(range(3), share(0, 1, 0, 0.0, 3))]


@pytest.mark.parametrize("consumed", [-1, 9])
def test_a_position_outside_the_pass_is_refused(consumed: int) -> None:
    with pytest.raises(ValueError, match=f"consumed={consumed}.*from 0 to 8"):
        make_plan(8, consumed=consumed)


def test_a_step_says_where_it_begins_and_ends() -> None:
    plan = PassPlan(20, 0, Division(12, 2, cap=2), drop_last=False, pad=True)
    assert [(share.plan.starts_global_batch, share.plan.ends_global_batch) for _, share in plan.shares(0)] == [
        (True, False), (False, False), (False, True), (True, False), (False, True),
    ]  # fmt: skip


# Properties


def test_each_step_joins_to_what_one_process_with_the_global_batch_would_see() -> None:
    for plan in random_plans(400, seed=1):
        rest = range(plan.consumed, plan.num_samples)
        size = plan.division.global_size
        alone = [list(rest[at : at + size]) for at in range(0, len(rest), size)]
        if plan.drop_last:
            alone = [batch for batch in alone if len(batch) == size]
        ends = [len(used(plan, steps)) for steps in range(plan.num_steps + 1)]
        positions = used(plan, plan.num_steps)
        assert [positions[start:stop] for start, stop in pairwise(ends)] == alone, plan


def test_weights_average_to_one_and_are_exactly_one_for_equal_shares_and_only_for_those() -> None:
    num_uneven = 0
    for plan in random_plans(400, seed=3):
        for step in range(plan.num_steps):
            for together in zip(*of_a_step(plan, step), strict=True):
                weights = [share.plan.weight for share in together]
                assert sum(weights) / plan.division.world_size == pytest.approx(1.0)
                if len({share.plan.num_samples for share in together}) == 1:
                    assert weights == [1.0] * plan.division.world_size
                else:
                    num_uneven += 1
                    assert 1.0 not in weights, "ranks agree on whether shares are even"
    assert num_uneven > 20


def test_padding_repeats_samples_of_its_own_step() -> None:
    num_padded = 0
    for plan in random_plans(400, seed=5, pad=True):
        for step in range(plan.num_steps):
            start = plan.consumed + step * plan.division.global_size
            joined = range(start, min(start + plan.division.global_size, plan.num_samples))
            padding = [share for shares in of_a_step(plan, step) for share in shares if not share.plan.num_samples]
            num_padded += len(padding)
            for share in padding:
                assert joined.start <= share.start < share.stop <= joined.stop
    assert num_padded > 20


def test_the_batches_of_a_rank_are_its_shares_that_are_not_empty() -> None:
    for plan in random_plans(400, seed=6):
        for rank in range(plan.division.world_size):
            assert plan.num_batches(rank) == sum(share.start < share.stop for _, share in plan.shares(rank))


def test_the_position_after_each_step_is_the_prefix_used_so_far() -> None:
    for plan in random_plans(400, seed=7):
        for step in range(plan.num_steps):
            assert plan.consumed_after(step) == plan.consumed + len(used(plan, step))
        assert plan.consumed_after(plan.num_steps) == plan.num_samples
        assert plan.drop_last or plan.consumed + len(used(plan, plan.num_steps)) == plan.num_samples


def test_any_sequence_of_groups_sees_global_batches_of_given_sizes() -> None:
    draw = random.Random(11)
    for _ in range(300):
        sizes, consumed = [draw.randint(1, 20) for _ in range(draw.randint(1, 8))], 0
        bounds = [0, *accumulate(sizes)]
        seen: list[int] = []
        while consumed < bounds[-1]:
            world_size = draw.randint(1, 7)
            division = Division(max(sizes), world_size, draw.choice([None, 1, 2, 3, 8]))
            plan = PassPlan(bounds[-1], consumed, division, False, True, bounds)
            assert plan.num_steps == len(bounds) - 1 - bounds.index(consumed)
            num_steps = draw.randint(0, plan.num_steps)
            for step in range(num_steps):
                joint = [share for shares in of_a_step(plan, step) for share in shares if share.plan.num_samples]
                assert sum(share.plan.num_samples for share in joint) == sizes[len(seen)]
                assert sorted(p for share in joint for p in range(share.start, share.stop)) == list(
                    range(plan.consumed_after(step), plan.consumed_after(step + 1))
                )
                seen.append(sizes[len(seen)])
            for rank in range(world_size):
                assert plan.num_batches(rank) == len(list(plan.shares(rank)))
            consumed = plan.consumed_after(num_steps)
        assert seen == sizes
    assert PassPlan(9, 0, Division(8, 2), False, True, bounds=[0, 8, 9]).has_single_samples
    assert not PassPlan(11, 0, Division(8, 2), False, True, bounds=[0, 8, 11]).has_single_samples
