"""The position in the data: which samples of a pass come next, for a group of any size.

All ranks step together. A *pass* is one order of all samples, the same on every rank. One *step* takes the
next `world_size * batch_size` samples of that order and divides them over the ranks, contiguously and
evenly. So what has been used is always a prefix of the order, and a position is just (pass index,
samples consumed): it stays valid when the group shrinks or grows, and each sample of a pass is used exactly
once whatever happens to the group.

It also means that N workers see in a step exactly what one process with an N times larger batch would see, in
the same order, down to the short last step. There the ranks' shares may differ; `Share.weight` is what makes
the mean of the ranks' gradients the mean over the samples.

Nothing here counts what was consumed: a `DataLoader` reads ahead, so only the training loop knows. It passes
the number back in when a pass is resumed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Sampler

from raysgd._numbers.seeds import seed_of
from raysgd.arrays.division import Division, ShardedJointBatch
from raysgd.torch.data.pass_plan import PassPlan, SpeedsAt, check_range
from raysgd.torch.data.sample_order import BatchesOrder, Indices, JoinedBatches, SampleOrder, SamplerOrder

_SEED_BY_HAND = 0
_WHEN_LOADED = 1


@dataclass(frozen=True)
class JointBatchRule:
    """Says that the batch size of a loader is that of all ranks together.

    Attributes:
        cap: The most samples in a batch of one rank.
        speeds_at: See `PassPlan`.
        num_shards: How many logical shards a joint batch has; 0 where it is divided by ranks.
        multiple: The joint batch has as many times the size of the loader.
    """

    cap: int | None = None
    speeds_at: SpeedsAt | None = None
    num_shards: int = 0
    multiple: int = 1

    @property
    def of_streams(self) -> Callable[[int, int], Division | ShardedJointBatch]:
        """Divides those of streams, whose size is always that of all workers."""
        return replace(self, multiple=1).division

    def division(self, joint_size: int, world_size: int) -> Division | ShardedJointBatch:
        """Return how joint batches of a size are divided."""
        if not self.num_shards:
            return Division(joint_size, world_size, self.cap)
        cap = self.cap or (joint_size // self.multiple if self.multiple > 1 else None)
        num_parts = Division(joint_size, self.num_shards, cap).num_batches(joint_size)
        return ShardedJointBatch(joint_size, world_size, self.num_shards * num_parts, cap)


class SeededIndices(list[int]):
    """The indices of a logical shard, with the seed of what is random when it is loaded."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(self), self.seed)


class ElasticBatchSampler(Sampler[list[int]]):
    """The batches of one rank, from any position in a pass and for any size of the group.

    Pass it to a `DataLoader` as `batch_sampler`. Before each iteration say where it starts with `begin_pass`.
    An iterator belongs to the plan it was started with: it may run ahead of training, and a later
    `begin_pass` or `reshape` does not disturb it.

    Iterated by hand, before any pass was begun, it goes over all samples once, each time in another order if the
    order is shuffled. The orders are the same on all ranks whatever their seeds are, because the ranks have no
    common one yet.

    Attributes:
        order: The order of the samples.
        batch_size: Samples per rank in a full step; with `joint` those of all ranks. Without a meaning where the order
            is one of batches.
        drop_last: Leave out a last joint step that is not full.
        pad: Give a rank without samples in the last step some to repeat, see `PassPlan`.
        rank: This worker's place in the group.
        world_size: Size of the group.
        joint: How joint batches of one size are divided; None where the size of a rank's batch is given.
        plan: The pass begun last, or None before the first and after `reshape`.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> from raysgd.torch.data.sample_order import SequentialOrder
        >>> order = SequentialOrder(12)
        >>> sampler = ElasticBatchSampler(order, 2, drop_last=False, pad=True, rank=1, world_size=2)
        >>> plan = sampler.begin_pass(0, seed=1)
        >>> list(sampler)
        [[2, 3], [6, 7], [10, 11]]
        >>> sampler.reshape(rank=0, world_size=1)
        >>> plan = sampler.begin_pass(0, seed=1, consumed=plan.consumed_after(2))
        >>> list(sampler)
        [[8, 9], [10, 11]]
    """

    plan: PassPlan | None

    def __init__(
        self,
        order: SampleOrder,
        batch_size: int,
        drop_last: bool,
        pad: bool,
        rank: int,
        world_size: int,
        joint: JointBatchRule | None = None,
    ) -> None:
        self.order = order
        self.joint = joint
        self.drop_last = drop_last
        self.pad = pad
        self._indices: Indices = ()
        self._drawn_for: tuple[SampleOrder, int, int] | None = None
        self._fingerprint: int | None = None
        self._num_by_hand = 0
        self.reshape(rank, world_size, batch_size)

    def begin_pass(self, pass_index: int, seed: int, consumed: int = 0, order: SampleOrder | None = None) -> PassPlan:
        """Start a pass, or resume it after `consumed` samples, and return the plan for the rest of it.

        Args:
            pass_index: Number of the pass, from 0.
            seed: Decides the order together with `pass_index`. Must be the same on every rank.
            consumed: Samples of this pass that were used already, by a group of whatever size.
            order: That of this pass, where it is another one. Must be the same on every rank.

        Raises:
            ValueError: `consumed` is outside the pass, or the user's sampler cannot be used.
        """
        indices = self._draw(order or self.order, seed, pass_index)
        self.plan = self._plan(len(indices), consumed)
        return self.plan

    def fingerprint(self) -> int | None:
        """A number for the order of the pass begun last, where a user's sampler drew it; None where it cannot vary."""
        if self._fingerprint is None and isinstance(self.order, SamplerOrder):
            drawn = self._indices
            content = memoryview(drawn) if isinstance(drawn, array) else repr(drawn).encode()
            digest = hashlib.blake2b(content, digest_size=5).digest()  # so short that sums over all ranks fit 63 bits
            self._fingerprint = int.from_bytes(digest, "big")
        return self._fingerprint

    def reshape(self, rank: int, world_size: int, batch_size: int | None = None) -> None:
        """Take another place in another group; `batch_size=None` keeps the samples per rank.

        The pass in progress ends here: call `begin_pass` with the position to go on from.

        Raises:
            ValueError: A number is out of range.
        """
        check_range("world_size", world_size, minimum=1)
        check_range("rank", rank, minimum=0, maximum=world_size - 1)
        if batch_size is not None:
            check_range("batch_size", batch_size, minimum=1)
            self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.plan = None

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's batches in the rest of the pass; with no pass begun, in one by hand."""
        if self.plan is not None and self.num_shards:
            assert self._drawn_for is not None, "a pass was begun"
            return _seeded(self._indices, self.plan, self.rank, self._drawn_for[1:])
        if self.plan is not None:
            return _batches(self._indices, self.plan, self.rank)
        indices = self._draw(self.order, _SEED_BY_HAND, self._num_by_hand)
        self._num_by_hand += 1
        return _batches(indices, self._plan(len(indices), consumed=0), self.rank)

    def __len__(self) -> int:
        """Return this rank's batches in the pass as begun; with no pass begun, in a whole one."""
        if self.plan is None and isinstance(self.order, BatchesOrder):
            return self.order.num_samples
        plan = self.plan or self._plan(self.order.num_samples, consumed=0)
        return plan.num_batches(self.rank)

    @property
    def most_batches(self) -> int:
        """The number of batches that a rank takes for a full step, one after the other; 2 for several of any number."""
        if isinstance(self.order, BatchesOrder):  # each pass may have others
            return 1 if self.joint is None or self.joint.cap is None else 2
        return self._division.num_batches(self._division.joint_size)

    @property
    def num_shards(self) -> int:
        """The number of logical shards of a joint batch; 0 where it is divided by ranks."""
        division = self._division
        return division.num_shards if isinstance(division, ShardedJointBatch) else 0

    @property
    def _division(self) -> Division | ShardedJointBatch:
        if self.joint is None:
            return Division(self.batch_size * self.world_size, self.world_size, cap=self.batch_size)
        drawn = self._indices
        return self.joint.division(
            drawn.largest if isinstance(drawn, JoinedBatches) else self.batch_size, self.world_size
        )

    def _plan(self, num_samples: int, consumed: int) -> PassPlan:
        speeds_at = None if self.joint is None else self.joint.speeds_at
        bounds = self._indices.bounds if isinstance(self._indices, JoinedBatches) else None
        return PassPlan(num_samples, consumed, self._division, self.drop_last, self.pad, speeds_at, bounds)

    def _draw(self, order: SampleOrder, seed: int, pass_index: int) -> Indices:
        # Resuming a pass is the common case in recovery: the order is known and drawing may cost seconds.
        if self._drawn_for != (order, seed, pass_index):
            self._indices = order.indices(seed, pass_index)
            self._drawn_for, self._fingerprint = (order, seed, pass_index), None
        return self._indices


def _seeded(indices: Indices, plan: PassPlan, rank: int, drawn_for: tuple[int, int]) -> Iterator[list[int]]:
    starts = (share.start for share in plan.shares(rank) if share.start < share.stop)
    for start, batch in zip(starts, _batches(indices, plan, rank), strict=True):
        yield SeededIndices(batch, seed_of(*drawn_for, start, _WHEN_LOADED))


def _batches(indices: Indices, plan: PassPlan, rank: int) -> Iterator[list[int]]:
    for share in plan.shares(rank):
        batch = indices[share.start : share.stop]
        if len(batch):
            yield batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
