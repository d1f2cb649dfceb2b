"""Division of the rest of a pass over a group: arithmetic on positions, without any data.

Each step takes the next samples of the order, as many as the joint batch has. A position is the number of samples used
so far, so it means the same for any group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from raysgd.arrays.division import BatchShare, Division, ShardedJointBatch

SpeedsAt = Callable[[int], Sequence[float]]
"""Position in the pass -> how fast each rank is in the step that begins there; empty for even shares."""


class Share(NamedTuple):
    """One rank's share of a step, or of one of several batches of it.

    Attributes:
        start: First position of the rank's samples in the order of the pass.
        stop: Position after its last sample.
        num_samples: Samples that count: `stop - start`, or 0 where the slice is only padding.
        weight: Factor for this rank's gradient before the plain mean over ranks is taken. 1.0 exactly when
            all ranks have the same number of samples; the weights of a step's ranks always average to 1.
        num_joint: Samples of all ranks together.
        is_first: Whether the step begins with it; a rank may take several batches for a step, one after the other.
        is_last: Whether the step ends with it.
    """

    start: int
    stop: int
    num_samples: int
    weight: float
    num_joint: int
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class PassPlan:
    """The division of the rest of a pass over a group, by joint batches of one size, or of given ones.

    Attributes:
        num_samples: Samples in the whole pass.
        consumed: Samples already used, by whatever group used them.
        division: How a joint batch is divided.
        drop_last: Leave out a last step that is not full.
        pad: What a rank does that has no sample where others have some. True: it repeats samples of that step with
            weight 0 (training). False: it has no batch (evaluation).
        speeds_at: How fast each rank is; asked when a step is divided, and has to answer alike on all ranks. None for
            even shares.
        bounds: Where joint batches of the whole pass begin, and where the last one ends; None for those of one size.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> plan = PassPlan(20, consumed=0, division=Division(18, world_size=7), drop_last=False, pad=False)
        >>> [len(list(plan.shares(rank))) for rank in range(7)], plan.consumed_after(1)
        ([2, 2, 2, 2, 2, 2, 2], 18)
        >>> [(share.start, share.stop) for share in plan.shares(rank=5)]
        [(14, 16), (18, 18)]
    """

    num_samples: int
    consumed: int
    division: Division | ShardedJointBatch
    drop_last: bool
    pad: bool
    speeds_at: SpeedsAt | None = None
    bounds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_range("num_samples", self.num_samples, minimum=0)
        check_range("consumed", self.consumed, minimum=0, maximum=self.num_samples)
        check_range("world_size", self.division.world_size, minimum=1)
        check_range("joint_size", self.division.joint_size, minimum=1)

    @cached_property
    def num_steps(self) -> int:
        """Joint steps still to come in this pass."""
        if self._rest is not None:
            return len(self._rest) - 1
        full, rest = divmod(self.num_samples - self.consumed, self.division.joint_size)
        return full if rest == 0 or self.drop_last else full + 1

    @cached_property
    def _rest(self) -> Sequence[int] | None:
        """The bounds that are still to come, from the position on."""
        if self.bounds is None:
            return None
        return [self.consumed, *self.bounds[bisect_right(self.bounds, self.consumed) :]]

    def _span(self, step: int) -> tuple[int, int]:
        """Return where a joint step begins and ends, counted from `consumed`."""
        if self._rest is not None:
            return self._rest[step], self._rest[step + 1]
        start = self.consumed + step * self.division.joint_size
        return start, min(start + self.division.joint_size, self.num_samples)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Return the same for one joint step after the other."""
        if self._rest is not None:
            yield from pairwise(self._rest)
            return
        size = self.division.joint_size
        for start in range(self.consumed, self.consumed + self.num_steps * size, size):
            yield start, min(start + size, self.num_samples)

    def consumed_after(self, steps: int) -> int:
        """Return the position in the pass after `steps` more joint steps; after the last one the pass is over.

        Raises:
            ValueError: `steps` is negative or more than are left.
        """
        check_range("steps", steps, minimum=0, maximum=self.num_steps)
        if steps == self.num_steps:
            return self.num_samples
        return self._span(steps)[0]

    @property
    def has_single_samples(self) -> bool:
        """True if a batch of a rank has one sample somewhere in the rest, because sizes leave no other split."""
        cap = self.division.cap
        return any(size == 1 or cap == 1 or (cap == 2 and size % 2 == 1) for size in self._sizes)

    @property
    def has_empty_shares(self) -> bool:
        """True if a batch of a rank has no sample somewhere in the rest."""
        ranks = range(self.division.world_size)
        parts = (part for size in self._sizes for rank in ranks for part in self.division.parts(size, rank, ()))
        return any(part.start == part.stop for part in parts)

    @property
    def _sizes(self) -> set[int]:
        """The sizes of joint batches in the rest."""
        num = self.num_steps
        spans = map(self._span, sorted({0, num - 1}) if num else ()) if self._rest is None else pairwise(self._rest)
        return {stop - start for start, stop in spans}

    def shares(self, rank: int) -> Iterator[Share]:
        """Return the batches of `rank`, one after the other, also those without a sample.

        Raises:
            ValueError: There is no such rank.
        """
        check_range("rank", rank, minimum=0, maximum=self.division.world_size - 1)
        before: tuple[Any, ...] = ()
        shares: list[Share] = []
        for start, stop in self._spans():
            terms = stop - start, () if self.speeds_at is None else self.speeds_at(start)
            if terms != before:
                shares, before = self._shares_of_batch(rank, *terms), terms
            for share in shares:
                yield Share(start + share.start, start + share.stop, *share[2:])

    def shares_of_step(self, step: int, rank: int) -> list[Share]:
        """Return the batches that `rank` takes in joint step `step`, counted from `consumed`.

        Raises:
            ValueError: There is no such step or no such rank.
        """
        check_range("step", step, minimum=0, maximum=self.num_steps - 1)
        check_range("rank", rank, minimum=0, maximum=self.division.world_size - 1)
        start, stop = self._span(step)
        rest = PassPlan(stop, start, self.division, False, self.pad, self.speeds_at)
        return list(rest.shares(rank))

    def _shares_of_batch(self, rank: int, size: int, speeds: Sequence[float]) -> list[Share]:
        """Return what a rank takes of a joint batch, with positions counted from its first sample."""
        parts = self.division.parts(size, rank, speeds)
        return [self._share(size, index, parts) for index in range(len(parts))]

    def _share(self, size: int, index: int, parts: Sequence[BatchShare]) -> Share:
        first, stop, together = parts[index]
        own, place = stop - first, (index == 0, index == len(parts) - 1)
        if own:
            return Share(first, stop, own, own * self.division.world_size / together, together, *place)
        # Real samples, so that the forward pass is an ordinary one; two, because batch norms refuse a single one.
        num_shown = min(2, self.division.cap or 2, size) if self.pad else 0
        return Share(0, num_shown, 0, 0.0, together, *place)

    def num_batches(self, rank: int) -> int:
        """Return how many batches `rank` sees in the rest of the pass."""
        if self._rest is not None:
            return sum(map(_is_batch, self.shares(rank)))
        full = (self.num_samples - self.consumed) // self.division.joint_size
        steps = [(full, 0)] if full else []
        steps += [(1, full)] if full < self.num_steps else []
        return sum(count * sum(map(_is_batch, self.shares_of_step(step, rank))) for count, step in steps)


def _is_batch(share: Share) -> bool:
    return share.stop > share.start


def check_range(name: str, value: int, *, minimum: int, maximum: int | None = None) -> None:
    """Raises `ValueError` for a number out of range."""
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"`{name}={value}`: must be {allowed}. Check which group it belongs to.")
