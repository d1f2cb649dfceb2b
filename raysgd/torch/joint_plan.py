"""How the rest of a pass is divided where the joint batch is given: arithmetic on positions, without any data.

Where `PassPlan` knows the batch of one rank, `JointPlan` knows that of all. Each step takes the next samples of the
order, as many as the joint batch has, whatever the group is. So positions mean the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raysgd.replicas.division import Division, Part, Shards
from raysgd.torch.pass_plan import Share, check_range

SpeedsAt = Callable[[int], Sequence[float]]
"""Position in the pass -> how fast each rank is in the step that begins there; empty for even shares."""


def no_speeds(position: int) -> Sequence[float]:
    """Even shares, wherever."""
    return ()


@dataclass(frozen=True)
class JointPlan:
    """How the rest of a pass is divided over a group, by joint batches of one size.

    Attributes:
        num_samples: Samples in the whole pass.
        consumed: Samples already used, by whatever group used them.
        division: How a joint batch is divided.
        drop_last: Leave out a last step that is not full.
        pad: What a rank does that has no sample where others have some. True: it repeats samples of that step with
            weight 0 (training). False: it has no batch (evaluation).
        speeds_at: How fast each rank is; asked when a step is divided, and has to answer alike on all ranks.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> plan = JointPlan(20, consumed=0, division=Division(18, world_size=7), drop_last=False, pad=False)
        >>> [len(list(plan.shares(rank))) for rank in range(7)], plan.consumed_after(1)
        ([2, 2, 2, 2, 2, 2, 2], 18)
        >>> [(share.start, share.stop) for share in plan.shares(rank=5)]
        [(14, 16), (18, 18)]
    """

    num_samples: int
    consumed: int
    division: Division | Shards
    drop_last: bool
    pad: bool
    speeds_at: SpeedsAt = no_speeds

    def __post_init__(self) -> None:
        check_range("num_samples", self.num_samples, minimum=0)
        check_range("consumed", self.consumed, minimum=0, maximum=self.num_samples)
        check_range("joint_size", self.division.joint_size, minimum=1)
        check_range("world_size", self.division.world_size, minimum=1)

    @cached_property
    def num_steps(self) -> int:
        """Joint steps still to come in this pass."""
        full, rest = divmod(self.num_samples - self.consumed, self.division.joint_size)
        return full if rest == 0 or self.drop_last else full + 1

    def consumed_after(self, steps: int) -> int:
        """Return the position in the pass after `steps` more joint steps; after the last one the pass is over.

        Raises:
            ValueError: `steps` is negative or more than are left.
        """
        check_range("steps", steps, minimum=0, maximum=self.num_steps)
        if steps == self.num_steps:
            return self.num_samples
        return self.consumed + steps * self.division.joint_size

    def shares(self, rank: int) -> Iterator[Share]:
        """Return the batches of `rank`, one after the other, also those without a sample.

        Raises:
            ValueError: There is no such rank.
        """
        check_range("rank", rank, minimum=0, maximum=self.division.world_size - 1)
        before: tuple[Any, ...] = ()
        parts: list[Part] = []
        for start in self._starts():
            terms = self._size_at(start), self.speeds_at(start)
            if terms != before:
                parts, before = self.division.parts(terms[0], rank, terms[1]), terms
            for index in range(len(parts)):
                yield self._share(start, index, parts)

    def _starts(self) -> range:
        size = self.division.joint_size
        return range(self.consumed, self.consumed + self.num_steps * size, size)

    def _size_at(self, start: int) -> int:
        return min(self.division.joint_size, self.num_samples - start)

    def shares_of_step(self, step: int, rank: int) -> list[Share]:
        """Return the batches that `rank` takes in joint step `step`, counted from `consumed`.

        Raises:
            ValueError: There is no such step or no such rank.
        """
        check_range("step", step, minimum=0, maximum=self.num_steps - 1)
        check_range("rank", rank, minimum=0, maximum=self.division.world_size - 1)
        start = self._starts()[step]
        parts = self.division.parts(self._size_at(start), rank, self.speeds_at(start))
        return [self._share(start, index, parts) for index in range(len(parts))]

    def _share(self, start: int, index: int, parts: Sequence[Part]) -> Share:
        first, stop, together = parts[index]
        own, place = stop - first, (index == 0, index == len(parts) - 1)
        if own:
            weight = own * self.division.world_size / together
            return Share(start + first, start + stop, own, weight, together, *place)
        # Real samples, so that the forward pass is an ordinary one; two, because batch norms refuse a single one.
        num_shown = min(2, self._size_at(start)) if self.pad else 0
        return Share(start, start + num_shown, 0, 0.0, together, *place)

    def num_batches(self, rank: int) -> int:
        """Return how many batches `rank` sees in the rest of the pass."""
        full = (self.num_samples - self.consumed) // self.division.joint_size
        steps = [(full, 0)] if full else []
        steps += [(1, full)] if full < self.num_steps else []
        return sum(count * sum(map(_is_batch, self.shares_of_step(step, rank))) for count, step in steps)


def _is_batch(share: Share) -> bool:
    return share.stop > share.start
