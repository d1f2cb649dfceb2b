"""`balance="speed"` in a worker: measures its steps, tells the others, and lets the shares follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raysgd.torch.parallel.strategy import Summation
from raysgd.worker.data.balance import SpeedPlan, SpeedRule


class Balancing:
    """Shares by speed in one group.

    After some steps the ranks add up what each has measured, beside the next step. All of them then have the same
    numbers, and change their shares at the same position in the data.

    Args:
        rank: The place in the group.
        world_size: Its size.
        own_s: Says for how long this rank has trained so far, without waiting for others.
        start_sum: How the ranks add up.
        rule: When shares change.

    Attributes:
        num_ahead: How many steps the loader may be ahead of the training.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        own_s: Callable[[], float],
        start_sum: Summation,
        rule: SpeedRule | None = None,
    ) -> None:
        self._rank, self._world_size, self._own_s = rank, world_size, own_s
        self._rule = rule or SpeedRule()
        self._plan = SpeedPlan()
        self._start_sum = start_sum
        self.num_ahead = 0
        self._slowest: int | None = None  # in the last measurement, if times differed
        self._is_settled = False  # the first step of a group is not measured: it is slow for other reasons
        self._waiting: tuple[Callable[[], Any], torch.Tensor] | None = None
        self._forget()

    def _forget(self) -> None:
        self._num_steps, self._num_samples, self._since_s = 0, 0, self._own_s()

    def speeds_at(self, position: int) -> Sequence[float]:
        """See `PassPlan`."""
        return self._plan.at(position)

    def begin_pass(self) -> None:
        """Called when a pass is opened or resumed."""
        self._plan.begin_pass()

    def after_batch(self, num_samples: int, is_last: bool, position: int, joint_size: int) -> None:
        """Called by all ranks after each batch.

        Args:
            num_samples: This rank's samples in it.
            is_last: Whether the joint step ended with it.
            position: Where the next one begins.
            joint_size: Samples of a joint step.
        """
        self._num_samples += num_samples
        if is_last:
            self._after_step(position, joint_size)

    def _after_step(self, position: int, joint_size: int) -> None:
        self._num_steps += 1
        if self._plan.reach(position) or not self._is_settled:
            self._is_settled = True
            self._forget()  # measured with other shares, or in the first step
        if self._waiting is not None:
            self._hear(position, joint_size)
        if self._num_steps >= self._rule.every and not self._plan.is_changing:
            self._tell()

    def _tell(self) -> None:
        own_s = self._own_s() - self._since_s
        numbers = torch.zeros(3, self._world_size, dtype=torch.float64)
        numbers[:, self._rank] = torch.tensor([self._num_samples, own_s, self.num_ahead], dtype=torch.float64)
        self._waiting = self._start_sum(numbers), numbers
        self._forget()

    def _hear(self, position: int, joint_size: int) -> None:
        """Takes what all ranks have told, which came while the last step was computed."""
        assert self._waiting is not None
        (wait, numbers), self._waiting = self._waiting, None
        wait()
        samples, seconds, ahead = numbers.tolist()
        speeds = self._rule.corrected(self._plan.now, samples, seconds)
        before, self._slowest = self._slowest, None if speeds is None else seconds.index(max(seconds))
        if speeds is not None and (before == self._slowest or not self._rule.may_be_chance(seconds)):
            self._plan.change(position + int(max(ahead)) * joint_size, speeds)
            self._plan.reach(position)
            self._forget()
