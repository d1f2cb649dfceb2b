"""Shards a user's `DataLoader` over the workers by rebuilding it with an `ElasticBatchSampler`.

A loader that cannot be rebuilt is used unchanged, and the reason is recorded. The processes of a rebuilt loader exit
immediately when the worker that started them dies. Without this, PyTorch's loader processes would exit up to 5 s later.

ADR 2 explains why the user's order is kept.

`PassPlan` determines which samples of a pass each rank gets next, for a worker group of any size. All ranks step
together. A *pass* is one time through the data, in an order that is identical on every rank. A *step* takes the next
`world_size * batch_size` samples of that order and splits them over the ranks, contiguously and evenly. The consumed
samples are therefore always a prefix of the order, and the position in the data is just two numbers: the index of the
pass, and how many samples were consumed. A position stays valid when the group shrinks or grows, so each sample of a
pass is still used exactly once.

In each step, N workers see exactly the samples that one process with an N times larger batch would see, in the same
order. This includes the last step, which may be smaller and split unevenly: `BatchPlan.weight` makes the mean of the
ranks' gradients equal to the mean over the samples.

This module does not count consumed samples. A `DataLoader` prefetches, so only the training loop knows how many samples
were consumed. To resume a pass, the loop passes this number to `plan_pass`. Planning a pass is arithmetic on positions
and needs no data.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
)

from raysgd.core.arrays.division import BatchShare, Division, ShardedGlobalBatch
from raysgd.core.numbers.seeds import seed_of
from raysgd.streams.loaders import end_with_parent
from raysgd.torch.data.sample_order import (
    BatchesOrder,
    Indices,
    JoinedBatches,
    SampleOrder,
    SamplerOrder,
    divides_data,
    length_of,
    order_of,
)
from raysgd.torch.objects import rng

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassPlan:
    """A plan for the rest of a pass: its global batches, and how each global batch is split over the ranks.

    A global batch is what all ranks train on in one step.

    Attributes:
        num_samples: Number of samples in the whole pass.
        consumed: Number of samples that were already used, by a group of any size.
        division: Rule for splitting a global batch over the ranks.
        drop_last: True to leave out an incomplete last step.
        pad: What a rank gets in a step in which only other ranks have samples. True: samples of the step, repeated with
            weight 0 (for training). False: no batch (for evaluation).
        bounds: Positions at which the pass's global batches start, then the position at which the last one ends. None
            if all global batches, except perhaps the last, have the same size.

    Raises:
        ValueError: A value is out of range.

    Examples:
        >>> plan = PassPlan(20, consumed=0, division=Division(18, world_size=7), drop_last=False, pad=False)
        >>> [len(list(plan.shares(rank))) for rank in range(7)], plan.consumed_after(1)
        ([2, 2, 2, 2, 2, 2, 2], 18)
        >>> [(part.start + share.start, part.start + share.stop) for part, share in plan.shares(rank=5)]
        [(14, 16), (18, 18)]
    """

    num_samples: int
    consumed: int
    division: Division
    drop_last: bool
    pad: bool
    bounds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # Replay makes plans of files, whose numbers may be anything.
        check_range("num_samples", self.num_samples, minimum=0)
        check_range("consumed", self.consumed, minimum=0, maximum=self.num_samples)
        check_range("world_size", self.division.world_size, minimum=1)
        check_range("global_size", self.division.global_size, minimum=1)

    @cached_property
    def _starts(self) -> Sequence[int]:
        """Positions, in the order of the pass, at which the remaining global steps start."""
        if self.bounds is not None:
            return [self.consumed, *self.bounds[bisect_right(self.bounds, self.consumed) :]][:-1]
        size = self.division.global_size
        return range(self.consumed, self.num_samples - (size - 1) * self.drop_last, size)

    @property
    def num_steps(self) -> int:
        """Number of global steps in the rest of the pass."""
        return len(self._starts)

    def _span(self, step: int) -> tuple[int, int]:
        """Return a global step's first position in the order of the pass, and the position after its last sample."""
        start, coming = self._starts[step], step + 1
        if coming < len(self._starts):
            return start, self._starts[coming]
        return start, min(start + self.division.global_size, self.num_samples)

    def consumed_after(self, steps: int) -> int:
        """Return how many samples of the pass are consumed after `steps` more global steps.

        After the last step, samples that `drop_last` leaves out count as consumed.

        Raises:
            ValueError: `steps` is negative or exceeds the number of remaining steps.
        """
        num_steps = len(self._starts)
        check_range("steps", steps, minimum=0, maximum=num_steps)
        return self.num_samples if steps == num_steps else self._starts[steps]

    @property
    def has_single_samples(self) -> bool:
        """True if some rank must get a batch with a single sample in the rest of the pass."""
        cap = self.division.cap
        return any(size == 1 or cap == 1 or (cap == 2 and size % 2 == 1) for size in self._sizes)

    @property
    def has_empty_shares(self) -> bool:
        """True if some rank gets a batch without samples in the rest of the pass."""
        ranks = range(self.division.world_size)
        parts = (part for size in self._sizes for rank in ranks for part in self.division.parts(size, rank))
        return any(part.start == part.stop for part in parts)

    @cached_property
    def _sizes(self) -> Counter[int]:
        """For each size of a global batch, the number of remaining global batches of that size."""
        sizes, first = Counter[int](), 0
        if self.bounds is None and self.num_steps > 1:  # all global batches but the last have the same size
            first = sizes[self.division.global_size] = self.num_steps - 1
        sizes.update(stop - start for start, stop in map(self._span, range(first, self.num_steps)))
        return sizes

    def shares(self, rank: int) -> Iterator[tuple[range, BatchShare]]:
        """Yield the batches of `rank` in order, including batches without samples.

        Global batches of the same size have the same `BatchShare` objects, so a step does not create any.

        Yields:
            The position of the global batch's first sample in the order of the pass, and the `BatchShare`.
        """
        size, shares = -1, []
        ends = [self._span(self.num_steps - 1)[1]] if self._starts else []
        for start, stop in pairwise(chain(self._starts, ends)):
            if stop - start != size:
                size = stop - start
                shares = self._shares_of_batch(rank, size)
            for share in shares:
                yield range(start, stop), share

    def shares_of_step(self, step: int, rank: int) -> tuple[int, list[BatchShare]]:
        """Return the batches of `rank` in the global step `step`, where 0 is the first of the remaining steps.

        Returns:
            The position of the global batch's first sample in the order of the pass, and the batches.

        Raises:
            ValueError: `step` is out of range.
        """
        check_range("step", step, minimum=0, maximum=self.num_steps - 1)
        start, stop = self._span(step)
        return start, self._shares_of_batch(rank, stop - start)

    def num_batches(self, rank: int) -> int:
        """Return the number of batches that `rank` loads in the rest of the pass, including padding."""
        return sum(
            num_steps * sum(share.stop > share.start for share in self._shares_of_batch(rank, size))
            for size, num_steps in self._sizes.items()
        )

    def _shares_of_batch(self, rank: int, size: int) -> list[BatchShare]:
        """Return the batches that a rank gets from a global batch, with positions relative to its first sample."""
        # Pad with real samples, so that the forward pass works as usual. Batch norm needs at least two samples.
        num_shown = min(2, self.division.cap or 2, size) if self.pad else 0
        shares = self.division.parts(size, rank)
        return [each._replace(start=0, stop=num_shown) if each.plan.is_padding else each for each in shares]


def check_range(name: str, value: int, *, minimum: int, maximum: int | None = None) -> None:
    """Check that a number is in a range.

    Args:
        name: Name of the number, for the error message.
        value: The number.
        minimum: Smallest allowed value.
        maximum: Largest allowed value; None for no limit.

    Raises:
        ValueError: The number is out of range.
    """
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"`{name}={value}`: must be {allowed}. Check which group it belongs to.")


_SEED_BY_HAND = 0
_WHEN_LOADED = 1


@dataclass(frozen=True)
class GlobalBatchRule:
    """Rule for splitting global batches over the ranks, if their size does not depend on the number of ranks.

    Attributes:
        cap: Largest number of samples in one batch of a rank; None for no limit.
        num_shards: With `deterministic=True`, the number of logical shards into which each global batch is divided. A
            shard that exceeds `cap` is divided further. 0 if global batches are divided only by rank.
        multiple: Number of the user's loader batches that are combined into one global batch.
    """

    cap: int | None = None
    num_shards: int = 0
    multiple: int = 1

    @property
    def of_streams(self) -> Callable[[int, int], Division]:
        """The method `division` for streams. It ignores `multiple`, because a stream's batch is a global batch."""
        return replace(self, multiple=1).division

    def division(self, global_size: int, world_size: int) -> Division:
        """Return the rule for splitting global batches of `global_size` samples over `world_size` workers."""
        if not self.num_shards:
            return Division(global_size, world_size, self.cap)
        cap = self.cap or (global_size // self.multiple if self.multiple > 1 else None)
        num_parts = Division(global_size, self.num_shards, cap).num_batches(global_size)
        return ShardedGlobalBatch(global_size, world_size, cap, self.num_shards * num_parts)


class SeededIndices(list[int]):
    """The sample indices of a logical shard, and a seed to set before the samples are loaded."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(self), self.seed)


class ElasticBatchSampler(Sampler[list[int]]):
    """Yields the batches of one rank, from any position in a pass and for a group of any size.

    Pass the sampler to a `DataLoader` as `batch_sampler`. Before each iteration, call `plan_pass` with the start
    position.

    An iterator keeps the plan that it was created with. Later calls to `plan_pass` or `reshape` do not affect the
    iterator, even if a loader prefetches from it.

    Without a plan, which is the case before the first call to `plan_pass` and after `reshape`, an iteration yields
    this rank's batches of a whole pass. Shuffled data gets a new order in each such iteration. Because the ranks may
    not have agreed on a seed, the order comes from a fixed seed, which is the same on all ranks.

    Attributes:
        order: Order of the samples.
        batch_size: Number of samples of one rank in a full step or, with `rule`, of all ranks. Not used if a user's
            batch sampler forms the batches.
        drop_last: True to leave out an incomplete last global step.
        pad: True to give repeated samples to a rank that has no samples in a step. See `PassPlan`.
        rank: This worker's rank in the group.
        world_size: Size of the group.
        rule: Rule for splitting global batches; None if the batch size is per rank.
        plan: Plan of the latest pass; None before the first pass and after `reshape`.

    Raises:
        ValueError: A value is out of range.

    Examples:
        >>> from raysgd.torch.data.sample_order import SequentialOrder
        >>> order = SequentialOrder(12)
        >>> sampler = ElasticBatchSampler(order, 2, drop_last=False, pad=True, rank=1, world_size=2)
        >>> plan = sampler.plan_pass(0, seed=1)
        >>> list(sampler)
        [[2, 3], [6, 7], [10, 11]]
        >>> sampler.reshape(rank=0, world_size=1)
        >>> plan = sampler.plan_pass(0, seed=1, consumed=plan.consumed_after(2))
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
        rule: GlobalBatchRule | None = None,
    ) -> None:
        self.order = order
        self.rule = rule
        self.drop_last = drop_last
        self.pad = pad
        self._indices: Indices = ()
        self._drawn_for: tuple[SampleOrder, int, int] | None = None
        self._fingerprint: int | None = None
        self._num_by_hand = 0
        self.reshape(rank, world_size, batch_size)

    def plan_pass(self, pass_index: int, seed: int, consumed: int = 0) -> PassPlan:
        """Start a pass, or resume the pass after `consumed` samples, and return the plan for the rest of the pass.

        Args:
            pass_index: Index of the pass, from 0.
            seed: Seed for the order of the samples. It must be identical on every rank.
            consumed: Number of samples of this pass that were already used, by a group of any size.
            order: Order for this pass instead of the sampler's `order`. It must be identical on every rank.

        Raises:
            ValueError: `consumed` is out of range, or the user's sampler cannot be used.
        """
        self.plan = self._plan(len(self._draw(seed, pass_index)), consumed)
        return self.plan

    def fingerprint(self) -> int | None:
        """Return a hash of the latest pass's order if a user's sampler generated the order; otherwise None."""
        if self._fingerprint is None and isinstance(self.order, SamplerOrder):
            drawn = self._indices
            content = memoryview(drawn) if isinstance(drawn, array) else repr(drawn).encode()
            # Use only 40 bits, because the ranks compare their hashes by sums, which must fit into 63 bits.
            digest = hashlib.blake2b(content, digest_size=5).digest()
            self._fingerprint = int.from_bytes(digest, "big")
        return self._fingerprint

    def reshape(self, rank: int, world_size: int, batch_size: int | None = None) -> None:
        """Change the rank, the group size and, unless `batch_size` is None, the batch size.

        This ends the current pass. To resume the pass, call `plan_pass` with its index and its consumed samples.

        Raises:
            ValueError: A value is out of range.
        """
        if batch_size is not None:
            self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.plan = None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches in the rest of the current pass, or in a whole pass if none was started."""
        if self.plan is not None and self.num_shards:
            assert self._drawn_for is not None, "a pass was begun"
            return batches_of_rank(self._indices, self.plan, self.rank, self._drawn_for[1:])
        if self.plan is not None:
            return batches_of_rank(self._indices, self.plan, self.rank)
        indices = self._draw(_SEED_BY_HAND, self._num_by_hand)
        self._num_by_hand += 1
        return batches_of_rank(indices, self._plan(len(indices), consumed=0), self.rank)

    def __len__(self) -> int:
        """Return the number of this rank's batches in the current plan, or in a whole pass if none was started.

        If none was started and a user's batch sampler forms the batches, return the length of that batch sampler.
        """
        if self.plan is None and isinstance(self.order, BatchesOrder):
            return self.order.num_samples
        plan = self.plan or self._plan(self.order.num_samples, consumed=0)
        return plan.num_batches(self.rank)

    @property
    def most_batches(self) -> int:
        """Number of batches that a rank processes in a full step.

        With a user's batch sampler, the number is not known in advance. In that case, the value is 2 if a rank may
        process several batches in a step, and otherwise 1.
        """
        if isinstance(self.order, BatchesOrder):  # a user's batch sampler may choose other batch sizes in each pass
            return 1 if self.rule is None or self.rule.cap is None else 2
        return self._division.num_batches(self._division.global_size)

    @property
    def num_shards(self) -> int:
        """With `deterministic=True`, the number of logical shards in each global batch; otherwise 0."""
        return self._division.num_shards

    @property
    def _division(self) -> Division:
        if self.rule is None:
            return Division(self.batch_size * self.world_size, self.world_size, cap=self.batch_size)
        drawn = self._indices
        return self.rule.division(
            drawn.largest if isinstance(drawn, JoinedBatches) else self.batch_size, self.world_size
        )

    def _plan(self, num_samples: int, consumed: int) -> PassPlan:
        bounds = self._indices.bounds if isinstance(self._indices, JoinedBatches) else None
        return PassPlan(num_samples, consumed, self._division, self.drop_last, self.pad, bounds)

    def _draw(self, seed: int, pass_index: int) -> Indices:
        # Recovery usually resumes the same pass. Reuse its order, because generating it may take seconds.
        drawn_for = self.order, seed, pass_index
        if self._drawn_for != drawn_for:
            self._indices = self.order.indices(seed, pass_index)
            self._drawn_for, self._fingerprint = drawn_for, None
        return self._indices


def batches_of_rank(
    indices: Indices, plan: PassPlan, rank: int, drawn_for: tuple[int, int] | None = None
) -> Iterator[list[int]]:
    """Yield the sample indices of each batch of `rank` in the rest of a pass, without batches that have no samples.

    Args:
        indices: The indices of all samples in the pass, in order.
        plan: How the rest of the pass is divided.
        rank: The rank.
        drawn_for: The seed and index of the pass, from which each batch gets a seed. None for batches without seeds.
    """
    for part, share in plan.shares(rank):
        if share.start < share.stop:
            first = part.start + share.start
            own = indices[first : part.start + share.stop]
            yield list(own) if drawn_for is None else SeededIndices(own, seed_of(*drawn_for, first, _WHEN_LOADED))


@dataclass(frozen=True)
class ShardedLoader:
    """A user's loader, rebuilt so that each rank loads only its shard of the samples.

    Attributes:
        loader: Loader with the user's dataset and options, and `sampler` as its `batch_sampler`.
        sampler: Batch sampler that selects this rank's samples, and reshards them if the number of workers changes.
        own_sampler: The user's sampler, which yields sample indices or entire batches of indices.
        seed_hint: Seed that this worker suggests for the order of the samples: the initial seed of a generator in
            the user's loader or its samplers or, without such a generator, PyTorch's initial seed. The ranks'
            suggestions may differ, so all ranks use the suggestion of one rank.
        num_samples: Number of samples in a pass, over all ranks. With a user's batch sampler, the number of batches.
        signature: String that describes the data. The ranks compare it to check that they shard the same data.
    """

    loader: DataLoader[Any]
    sampler: ElasticBatchSampler
    own_sampler: Any
    seed_hint: int
    num_samples: int
    signature: str

    @property
    def batch_size(self) -> int | None:
        """Batch size of one worker or, if the sampler has a `rule`, of all workers together.

        None if a user's batch sampler determines the sizes.
        """
        return None if isinstance(self.sampler.order, BatchesOrder) else self.sampler.batch_size


@dataclass(frozen=True)
class UndividedLoader:
    """A loader that the library does not shard. Every rank iterates over all batches of the loader.

    Attributes:
        loader: The user's loader.
        reason: Why the loader is not sharded, as a phrase for a log message.
        warn: True to log a warning, because the user may have expected a sharded loader.
    """

    loader: Any
    reason: str
    warn: bool

    @property
    def divides_data(self) -> bool:
        """True if the user's sampler already shards the data."""
        return self.reason == _DIVIDES


def shard_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    training: bool,
    pin_memory: bool = False,
    rule: GlobalBatchRule | None = None,
) -> ShardedLoader | UndividedLoader:
    """Rebuild a map-style `DataLoader` to load only this rank's shard, or return it unchanged with a reason.

    The order of the user's loader is kept. A sequential order stays sequential over many workers, a shuffled order is
    reshuffled in each pass, and a user's sampler determines the order of all workers' samples. The loader's
    `batch_size` is the batch size of one worker. With `rule`, the global batch has `rule.multiple` times this size for
    any number of workers, and each batch of a user's batch sampler is split over the workers.

    All loading options are kept except `in_order=False`. Batches must arrive in order, because a batch that arrives
    early would count for the wrong step. If the user set `in_order=False`, a warning is logged.

    Args:
        loader: Object that the user registered or passed to a call.
        rank: Rank of this worker.
        world_size: Number of workers.
        training: True to give a padding batch to ranks that have no samples in a step, so that all ranks can take part
            in the gradient all-reduce. False to give these ranks no batch, so that evaluation uses every sample once.
        pin_memory: True to put batches into pinned memory, from which a GPU can copy them while it computes, even if
            the user's loader does not do this.
        rule: Rule for splitting each global batch, the batch of one step of all workers, among the workers. None if the
            loader's `batch_size` is the batch size of one worker.

    Examples:
        >>> sharded = shard_loader(DataLoader(range(8), batch_size=2), rank=1, world_size=2, training=True)
        >>> plan = sharded.sampler.plan_pass(0, seed=0)
        >>> [batch.tolist() for batch in sharded.loader]
        [[2, 3], [6, 7]]
    """
    obstacle = _obstacle(loader)
    if obstacle is not None:
        return obstacle
    batches, own_sampler = loader.batch_sampler, _own_sampler(loader)
    is_of_batches = own_sampler is batches
    if is_of_batches and (rule is None or rule.num_shards):
        return UndividedLoader(loader, "custom `batch_sampler`, which only `split_batches=True` shards", warn=True)
    order = BatchesOrder(own_sampler) if is_of_batches else order_of(own_sampler)
    size, drop_last = (1, False) if is_of_batches else (batches.batch_size, batches.drop_last)
    size *= 1 if rule is None else rule.multiple
    sampler = ElasticBatchSampler(order, size, drop_last, training, rank, world_size, rule)
    signature = f"{order.num_samples} samples, {order.name}, batch_size={sampler.batch_size}, {drop_last=}"
    return ShardedLoader(
        loader=_rebuild(loader, sampler, pin_memory),
        sampler=sampler,
        own_sampler=own_sampler,
        seed_hint=seed_hint_of(loader, torch.initial_seed()),
        num_samples=order.num_samples,
        signature=signature,
    )


def _obstacle(loader: Any) -> UndividedLoader | None:
    return next((UndividedLoader(loader, reason, warn) for applies, reason, warn in _RULES if applies(loader)), None)


def _has_own_iteration(loader: DataLoader[Any]) -> bool:
    names = ("__iter__", "_get_iterator")
    return any(getattr(type(loader), name, None) is not getattr(DataLoader, name, None) for name in names)


def _own_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a user's loader or, if the user passed a custom batch sampler, the batch sampler."""
    # If the user passed `batch_sampler=BatchSampler(...)`, `loader.sampler` is only PyTorch's unused default.
    batches: Any = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _divides(loader: DataLoader[Any]) -> bool:
    sampler = _own_sampler(loader)
    return divides_data(sampler) or divides_data(getattr(sampler, "sampler", None))


_DIVIDES = "its sampler shards the data"


# Conditions under which a loader is not sharded. Each row has a function that checks the condition, the reason to
# report, and True to log a warning. The functions are called in this order, and may assume that all earlier conditions
# are false.
_RULES: tuple[tuple[Callable[[Any], bool], str, bool], ...] = (
    (lambda loader: not isinstance(loader, DataLoader), "not a torch DataLoader", False),
    (lambda loader: isinstance(loader.dataset, IterableDataset), "its dataset is iterable", False),
    (_has_own_iteration, "its class overrides the iteration of DataLoader", True),
    (lambda loader: loader.batch_sampler is None, "it forms no batches (`batch_size=None`)", True),
    (_divides, _DIVIDES, False),
    (lambda loader: length_of(loader.dataset) is None, "its dataset has no length", True),
    (lambda loader: length_of(_own_sampler(loader)) is None, "its sampler has no length", True),
)


def _rebuild(loader: DataLoader[Any], sampler: ElasticBatchSampler, pin_memory: bool) -> DataLoader[Any]:
    options = kept_options(loader, "persistent_workers")
    options["pin_memory"] = loader.pin_memory or pin_memory
    if loader.num_workers:
        options["worker_init_fn"] = ending_with_parent(loader.worker_init_fn)
    device = getattr(loader, "pin_memory_device", "")
    if device and "pin_memory_device" in inspect.signature(DataLoader).parameters:
        options["pin_memory_device"] = device
    if not getattr(loader, "in_order", True):
        logger.warning(
            "`in_order=False` has no effect on a loader that is sharded over workers, because a batch that overtakes "
            "another would be counted for the wrong step."
        )
    dataset = SeededRows(loader.dataset) if sampler.num_shards else loader.dataset
    return DataLoader(dataset, batch_sampler=sampler, **options)


def seed_hint_of(loader: Any, seed: int) -> int:
    """Return the initial seed of a `torch.Generator` in the user's loader or its samplers; `seed` if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = (getattr(holder, "generator", None) for holder in holders)
    own = next((each for each in generators if isinstance(each, torch.Generator)), None)
    return seed if own is None else own.initial_seed()


_KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)


def kept_options(loader: Any, *more: str) -> dict[str, Any]:
    """Return the options of a user's `DataLoader`, to create another loader over the same dataset.

    Args:
        loader: The user's loader.
        *more: Names of options to include in addition to `_KEPT_OPTIONS`.
    """
    return {name: getattr(loader, name) for name in (*_KEPT_OPTIONS, *more)}


def ending_with_parent(user_function: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return a `worker_init_fn` that calls `user_function`, and makes the loader process exit when its parent dies."""
    return partial(_begin_process, user_function)


def _begin_process(user_function: Callable[[int], None] | None, worker_id: int) -> None:
    end_with_parent()
    if user_function is not None:
        user_function(worker_id)


class SeededRows(Dataset[Any]):
    """Wraps a map-style dataset and seeds the random number generators before each batch is loaded.

    As a result, random augmentation and random numbers in `collate_fn` depend only on the batch, not on the rank.
    Attributes that this class lacks are looked up in the wrapped dataset.

    Args:
        dataset: The user's dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the samples of a batch. If `indices` has a seed, first seed the random number generators."""
        if isinstance(indices, SeededIndices):
            rng.seed_alike(indices.seed)
        whole = getattr(self._dataset, "__getitems__", None)
        return whole(list(indices)) if whole else [self._dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while unpickling, the attribute is not set yet, so reading it would recurse forever
            raise AttributeError(name)
        return getattr(self._dataset, name)
