"""How the rest of a pass is divided over a group: arithmetic on positions, without any data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Share(NamedTuple):
    """What one rank does in one step, or in one of several batches of it.

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
    """How the rest of a pass is divided over a group. Pure arithmetic on positions, no data.

    Attributes:
        num_samples: Samples in the whole pass.
        consumed: Samples already used, by whatever group used them.
        batch_size: Samples per rank in a full step.
        world_size: Ranks that step together.
        drop_last: Leave out a last step that is not full.
        pad: What a rank does for which the last step has no sample. True: it repeats samples of that step
            with weight 0, so that it can take part in the collectives (training). False: it has no batch
            (evaluation).

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> plan = PassPlan(num_samples=11, consumed=0, batch_size=4, world_size=2, drop_last=False, pad=True)
        >>> plan.num_steps
        2
        >>> [(share.start, share.stop) for share in (plan.share(1, rank=0), plan.share(1, rank=1))]
        [(8, 10), (10, 11)]
    """

    num_samples: int
    consumed: int
    batch_size: int
    world_size: int
    drop_last: bool
    pad: bool

    def __post_init__(self) -> None:
        check_range("num_samples", self.num_samples, minimum=0)
        check_range("consumed", self.consumed, minimum=0, maximum=self.num_samples)
        check_range("batch_size", self.batch_size, minimum=1)
        check_range("world_size", self.world_size, minimum=1)

    @cached_property
    def num_steps(self) -> int:
        """Joint steps still to come in this pass."""
        full, rest = divmod(self.num_samples - self.consumed, self._step_size)
        return full if rest == 0 or self.drop_last else full + 1

    def consumed_after(self, steps: int) -> int:
        """Return the position in the pass after `steps` more joint steps.

        After the last step the pass is over, also where `drop_last` left samples out: then this is
        `num_samples`.

        Raises:
            ValueError: `steps` is negative or more than are left.
        """
        check_range("steps", steps, minimum=0, maximum=self.num_steps)
        if steps == self.num_steps:
            return self.num_samples
        return self.consumed + steps * self._step_size

    def share(self, step: int, rank: int) -> Share:
        """Return what `rank` does in joint step `step`, counted from `consumed`.

        Lower ranks come first in the order, and get the larger share where the samples do not divide evenly.

        Raises:
            ValueError: There is no such step or no such rank.
        """
        check_range("step", step, minimum=0, maximum=self.num_steps - 1)
        check_range("rank", rank, minimum=0, maximum=self.world_size - 1)
        start = self.consumed + step * self._step_size
        stop = min(start + self._step_size, self.num_samples)
        base, num_larger = divmod(stop - start, self.world_size)
        own = base + 1 if rank < num_larger else base
        if own == 0:
            return self._idle_share(start, stop)
        own_start, joint = start + rank * base + min(rank, num_larger), stop - start
        return Share(own_start, own_start + own, own, own * self.world_size / joint, joint)

    def shares(self, rank: int) -> Iterator[Share]:
        """Return what `rank` does in each joint step, one after the other: quicker than one at a time.

        Raises:
            ValueError: There is no such rank.
        """
        check_range("rank", rank, minimum=0, maximum=self.world_size - 1)
        batch_size, step_size = self.batch_size, self._step_size
        num_full = (self.num_samples - self.consumed) // step_size
        first = self.consumed + rank * batch_size
        for start in range(first, first + num_full * step_size, step_size):
            yield Share(start, start + batch_size, batch_size, 1.0, step_size)
        if num_full < self.num_steps:
            yield self.share(num_full, rank)

    def num_batches(self, rank: int) -> int:
        """Return how many batches `rank` sees: one per step, save perhaps the last if nothing is padded."""
        check_range("rank", rank, minimum=0, maximum=self.world_size - 1)
        if self.pad or self.num_steps == 0:
            return self.num_steps
        last = self.share(self.num_steps - 1, rank)
        return self.num_steps if last.num_samples else self.num_steps - 1

    @cached_property
    def _step_size(self) -> int:
        return self.batch_size * self.world_size

    def _idle_share(self, start: int, stop: int) -> Share:
        if not self.pad:
            return Share(stop, stop, num_samples=0, weight=0.0, num_joint=stop - start)
        # Real samples, so that the forward pass is an ordinary one; not more than a worker has memory for.
        return Share(start, min(stop, start + self.batch_size), num_samples=0, weight=0.0, num_joint=stop - start)


def check_range(name: str, value: int, *, minimum: int, maximum: int | None = None) -> None:
    """Raises `ValueError` for a number out of range."""
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"`{name}={value}`: must be {allowed}. Check which group it belongs to.")
