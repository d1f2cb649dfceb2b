"""How batches count, and after which of them the optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raysgd.core.arrays.division import BETWEEN_BATCHES, BatchPlan, plan_of
from raysgd.trainer.worker.step_loop import StepRules, planned


def drawn(num_parts: Sequence[int]) -> list[tuple[None, BatchPlan, bool]]:
    """Return the micro-batches of global batches, the last of which ends a pass."""
    found = [plan_of(2, 4, 2, part == 0, part == num - 1) for num in num_parts for part in range(num)]
    return [(None, plan, number == len(found)) for number, plan in enumerate(found, start=1)]


@pytest.mark.parametrize(
    ("num_parts", "accumulate", "num_steps", "steps"),
    [
        ([1, 1, 1], 1, None, ["1", "1", "1"]),
        ([1, 1, 1], 2, None, ["01", "1"]),
        ([2, 2, 1], 1, None, ["01", "01", "1"]),
        ([2, 1, 2], 2, None, ["001", "01"]),
        ([1, 1, 1, 1], 3, 2, ["01"]),
        ([2, 2, 2], 2, 1, ["01"]),
        ([1, 1], 5, None, ["01"]),
        ([], 2, None, []),
    ],
)
def test_a_step_ends_after_its_global_batches_and_where_a_pass_or_a_call_ends(
    num_parts: list[int], accumulate: int, num_steps: int | None, steps: list[str]
) -> None:
    plans = [plan for _, plan in planned(iter(drawn(num_parts)), accumulate, num_steps)]
    expected = [(index == 0, each == "1") for step in steps for index, each in enumerate(step)]
    assert [(plan.starts_step, plan.ends_step) for plan in plans] == expected


def test_a_batch_counts_in_its_step_by_what_the_ranks_know() -> None:
    plan = BatchPlan(num_samples=3, total_samples=8)
    assert [rules.samples_in_step(plan) for rules in (StepRules(), StepRules(True))] == [None, None]
    assert StepRules(True, accumulate=2).samples_in_step(plan) == 8
    assert StepRules(accumulate=2).samples_in_step(plan) == 3
    assert StepRules(accumulate=2).samples_in_step(plan._replace(num_samples=None)) == 8
    assert not BETWEEN_BATCHES.is_padding
    assert [(plan.is_padding, plan.weight) for plan in (plan_of(0, 4, 2), plan_of(2, 4, 2), plan_of(0, 0, 2))] == [
        (True, 0.0), (False, 1.0), (True, 0.0),
    ]  # fmt: skip
