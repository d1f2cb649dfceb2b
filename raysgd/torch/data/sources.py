"""Sources of one worker's batches, and the cursor that draws the batches of a source.

For a loader that the library shards, each rank knows in advance how many samples all ranks have in each step. To train
on any other loader, the ranks all-reduce the sizes of their batches before each step, while they train on the previous
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch.distributed import DistNetworkError

from raysgd.core.arrays.division import NO_BATCH, PlannedBatch, plan_of, with_seeds
from raysgd.core.numbers.seeds import seed_of
from raysgd.streams.source import StreamSource
from raysgd.torch.data.batch_sampler import PassPlan
from raysgd.torch.data.batches import count_samples
from raysgd.torch.data.sample_order import BatchesOrder, SamplerOrder, length_of
from raysgd.torch.data.sampling import ShardedLoader
from raysgd.torch.parallel.ranks import RankSums
from raysgd.torch.parallel.strategy import Summation
from raysgd.trainer.worker.step_loop import DataCursor

logger = logging.getLogger(__name__)

_END = object()


class DividedLoaderSource:
    """Source for a loader that the library shards over the ranks.

    A PyTorch loader draws a random seed for its worker processes whenever an iteration starts. Here, the loader draws
    the seed from a separate random number generator for each rank. As a result, ranks do not repeat each other's
    augmentations. Also, resuming an interrupted pass does not change the states of the global generators, which the
    model uses.

    Args:
        sharded: The user's loader, rebuilt to load this rank's batches.
        seed: Seed for the order of the samples in all passes. It must be identical on all ranks.

    Attributes:
        seed: Seed for the order of the samples in all passes.
        order: Order of the samples, such as a `ShuffledOrder`, which all passes use.
        has_own_order: True if a user's sampler generates the order. Such a sampler may generate another order for the
            same pass.
        num_samples: Number of samples in a pass, over all ranks. With a user's batch sampler, the number of batches.
        check_plan: Function that is called when a pass starts or resumes. It gets the plan for the rest of the pass.
    """

    is_divided, left_out = True, 0

    def __init__(self, sharded: ShardedLoader, seed: int) -> None:
        self._sharded = sharded
        self._ranks: RankSums | None = None
        self._order_before: int | None = None
        sharded.loader.generator = self._generator = torch.Generator()
        self._check_order: Callable[[bool], None] | None = None
        self.check_plan: Callable[[PassPlan], None] | None = None
        self.seed = seed
        self.order, self.num_samples = sharded.sampler.order, sharded.num_samples
        self.has_own_order = isinstance(self.order, SamplerOrder)

    def join(self, ranks: RankSums) -> None:
        if self._ranks is ranks:
            return
        if self.has_own_order:
            start_sum = ranks.start_sum if ranks.is_global else None
            self._check_order = partial(self._check_drawn, start_sum, ranks.world_size)
        self._ranks = ranks

    def _check_drawn(self, start_sum: Summation | None, world_size: int, is_resumed: bool) -> None:
        """Check that a user's sampler yielded the samples in the same order on all ranks.

        In a pass that resumes after a failure, also warn if the order differs from the order before the failure.

        Args:
            start_sum: Function that starts to sum a tensor over the ranks; None for a single rank.
            world_size: Number of ranks.
            is_resumed: True if the pass resumes.

        Raises:
            ValueError, DistNetworkError: The orders of the ranks differ.
        """
        own, before = self._sharded.sampler.fingerprint(), self._order_before
        name, self._order_before = self.order.name, None
        assert own is not None, "only a rank's own order is checked"
        if start_sum is not None and not _are_alike(own, start_sum, world_size):
            # In a resumed pass, raise a connection error, which restarts all workers with new samplers.
            kind = DistNetworkError if is_resumed else ValueError
            raise kind(
                f"The workers' {name} drew different orders. The library divides one order of all "
                "samples, which the sampler has to draw alike on every worker: from the global generators of torch, "
                "numpy and `random`, its own `generator` of torch, or what `set_epoch` told it, and from nothing that "
                "it counts by itself or that depends on the rank. If it divides the data itself, pass "
                "`add_dist_sampler=False`."
            )
        if before not in (None, own):
            logger.warning(
                "the train data's %s draws another order than in the epoch that is resumed: some samples are "
                "repeated, others are skipped",
                name,
            )

    def state(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return the entries for a snapshot: the seed, the size of a pass and, within a pass, the name of its order.

        If a user's sampler generated the order of the pass, a hash of the order is added, to check it on resuming.

        Args:
            consumed: Number of samples of the pass that were used.
            is_mid_pass: True if the snapshot is taken within a pass.
        """
        origin: dict[str, Any] = {"seed": self.seed, **self._size}
        if not is_mid_pass:
            return origin
        origin["order_name"] = self.order.name
        order = self._order_before or self._sharded.sampler.fingerprint()
        return origin if order is None else {**origin, "order": order}

    def load_state(self, position: Mapping[str, Any]) -> bool:
        """Restore the position in the data from a snapshot.

        Return False if the position does not fit: the size of the data has changed since then or, within a pass, the
        kind of order.

        Args:
            position: Position from the snapshot, with the entries that `state` returned.
        """
        if any(position.get(name) != number for name, number in self._size.items()):
            logger.warning("the size of the train data has changed since the state was saved: starting a new epoch")
            return False
        before = position.get("order_name", self.order.name)
        if position["is_mid_pass"] and before != self.order.name:
            logger.warning(
                "the order of the train data has changed since the state was saved inside an epoch, from %s to %s: "
                "starting a new epoch",
                before,
                self.order.name,
            )
            return False
        self.seed = position["seed"]
        self._order_before = position.get("order") if position["is_mid_pass"] else None
        return True

    def layout(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return plain data from which the journal (`raysgd.journal`) can later find the samples of each step."""
        sampler = self._sharded.sampler
        return {
            "kind": "loader",
            "order": self.order.name,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "is_of_batches": isinstance(self.order, BatchesOrder),
            "batch_size": sampler.batch_size,
            "drop_last": sampler.drop_last,
            "rule": None if sampler.rule is None else asdict(sampler.rule),
        }

    @property
    def _size(self) -> dict[str, int]:
        """Size of a pass, as stored in snapshots: the number of samples or, with a user's batch sampler, of batches."""
        is_of_batches = isinstance(self.order, BatchesOrder)
        return {"num_batches" if is_of_batches else "num_samples": self.num_samples}

    @property
    def most_batches(self) -> int:
        """Number of batches that a rank processes, one after the other, in a global step."""
        return self._sharded.sampler.most_batches

    @property
    def num_shards(self) -> int:
        """With `deterministic=True`, the number of logical shards in each global batch; otherwise 0."""
        return self._sharded.sampler.num_shards

    @cached_property
    def is_repeatable(self) -> bool:
        """True if a new worker would get the samples in the same order as this worker.

        False, for example, if the user's sampler counts its passes itself.
        """
        is_so = not isinstance(self.order, SamplerOrder) or self.order.is_repeatable(self.seed)
        if not is_so and self._ranks is not None and self._ranks.rank == 0:
            logger.warning(
                "%s draws another order each time: if a worker is lost in this call, it begins again", self.order.name
            )
        return is_so

    def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
        sampler = self._sharded.sampler
        if not self.has_own_order and (now := len(self._sharded.own_sampler)) != self.num_samples:
            raise ValueError(
                f"the data of a loader have {now} samples, and had {self.num_samples} when the loader was made, by "
                "which the workers divide them: pass the data of now to `train(dataset=...)`; or a `sampler` of your "
                "own to the loader, which is drawn in each pass, such as `RandomSampler(data, replacement=True)`."
            )
        plan, rank = sampler.begin_pass(pass_index, self.seed, consumed, self.order), sampler.rank
        if self._check_order is not None:
            self._check_order(consumed > 0)
        if self.check_plan is not None:
            self.check_plan(plan)
        self._generator.manual_seed(seed_of(self.seed, pass_index, consumed, rank))
        batches, num_shards, steps_left = iter(self._sharded.loader), sampler.num_shards, plan.num_steps
        for start, share in plan.shares(rank):
            batch_plan = share.plan
            batch = NO_BATCH if batch_plan.is_padding and not plan.pad else next(batches)
            if num_shards:
                batch_plan = with_seeds(batch_plan, self.seed, pass_index, start, share.start)
            steps_left -= batch_plan.ends_global_batch
            yield PlannedBatch(batch, batch_plan, steps_left == 0)
        next(batches, None)  # exhaust the loader, so that it ends its worker processes

    def num_steps(self) -> int | None:
        plan = self._sharded.sampler.plan
        return len(self._sharded.sampler) if plan is None else plan.num_steps

    def consumed_after(self, num_steps: int) -> int:
        plan = self._sharded.sampler.plan
        return 0 if plan is None else plan.consumed_after(min(num_steps, plan.num_steps))


def _are_alike(own: int, start_sum: Summation, world_size: int) -> bool:
    """Return True if all ranks pass the same 40-bit number `own`. All ranks must call this function together."""
    halves = divmod(own, 2**20)  # 20-bit numbers, so that the sum of their squares does not overflow
    numbers = torch.tensor([(half, half**2) for half in halves])
    start_sum(numbers)()
    return all(squares * world_size == total**2 for total, squares in numbers.tolist())


class PlainSource:
    """Source for an iterable of batches that the library does not shard.

    In training, several ranks may have different numbers of batches, but all must take the same number of steps
    (lockstep). A rank that runs out of batches repeats its last batch with weight 0 until all ranks have run out.
    Otherwise, other ranks would wait forever in a collective.

    Args:
        loader: This rank's batches.
        is_in_lockstep: True if all ranks must take the same number of steps.

    Attributes:
        is_divided: True if the library shards the data. See `raysgd.trainer.worker.feed.DataFeed`.
        left_out: Number of rows that the source left out because they could not be read.
        most_batches: Number of batches that a rank processes, one after the other, in a global step.
        num_shards: With `deterministic=True`, the number of logical shards in each global batch; otherwise 0.
    """

    is_divided, left_out = False, 0
    most_batches = 1
    num_shards = 0
    _ranks: RankSums

    def __init__(self, loader: Any, is_in_lockstep: bool = False) -> None:
        self._loader, self._is_in_lockstep = loader, is_in_lockstep

    def join(self, ranks: RankSums) -> None:
        """Use `ranks` from now on: this worker's rank in the next call's worker group, and sums over that group."""
        self._ranks = ranks

    def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
        """Start a pass from its first batch, and return an iterator over the batches.

        Args:
            pass_index: Index of the pass, from 0.
            consumed: Not used, because this source cannot start in the middle of a pass.
        """
        tell_epoch(self._loader, pass_index)
        if self._is_in_lockstep:
            return _in_lockstep(iter(self._loader), self._ranks.start_sum, self._ranks.world_size)
        return map(PlannedBatch, self._loader)

    def layout(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return plain data that marks the samples of each step as unknown in the journal (`raysgd.journal`)."""
        return {"kind": "undivided", "name": type(self._loader).__name__}

    def num_steps(self) -> int | None:
        """Return the number of this rank's batches in a pass; None if it is unknown.

        In lockstep, a pass may have more steps.
        """
        return length_of(self._loader)

    def consumed_after(self, num_steps: int) -> int:
        """Return 0, because it is unknown how many samples all ranks use in `num_steps` steps."""
        return 0


def _in_lockstep(batches: Iterator[Any], start_sum: Summation, world_size: int) -> Iterator[PlannedBatch]:
    coming = next(batches, _END)
    hear = ask(start_sum, _samples_in(coming))
    last = _END
    while True:
        num_ranks, num_samples = hear()
        if not num_ranks:
            return
        has_own, last = coming is not _END, last if coming is _END else coming
        if last is _END:
            raise ValueError(
                "The train loader of this rank is empty while other ranks have data, so it has no batch to step with. "
                "Give every rank at least one batch."
            )
        own = count_samples(last) if has_own else 0
        coming = next(batches, _END) if has_own else _END
        # Start the all-reduce for the next step now, so that it runs while this rank trains on the current step.
        hear = ask(start_sum, _samples_in(coming))
        yield PlannedBatch(last, plan_of(own, num_samples, world_size))


LoaderSource: TypeAlias = DividedLoaderSource | PlainSource | StreamSource
"""The source of the batches of a pass."""


def ask(start_sum: Summation, num_samples: int | None) -> Callable[[], tuple[int, int]]:
    """Start an all-reduce that counts the ranks with a batch in the next step, and the samples in all these batches.

    Args:
        start_sum: Function that starts to sum a tensor over the ranks.
        num_samples: Number of samples in this rank's batch; None if this rank has no batch.

    Returns:
        A function that waits for the all-reduce and returns the number of ranks and the number of samples.
    """
    counts = torch.tensor([num_samples is not None, num_samples or 0], dtype=torch.int64)
    wait = start_sum(counts)

    def hear() -> tuple[int, int]:
        wait()
        num_ranks, num_samples_of_all = counts.tolist()
        return num_ranks, num_samples_of_all

    return hear


def _samples_in(batch: Any) -> int | None:
    return None if batch is _END else count_samples(batch)


class TorchCursor(DataCursor):
    """Draws the batches of a source, and counts the samples used in the pass."""

    _began_at = 0
    # Set when this worker leaves its group during a pass: the number of samples in that pass, and how many of them were
    # used. None again once a pass starts in the next group.
    _before: tuple[int | None, int] | None = None

    @property
    def completed(self) -> int:
        return self.samples_used()[1]

    def samples_used(self) -> tuple[int | None, int, int]:
        """Return three sample counts over all ranks: of the whole pass, its completed steps, and the step in progress.

        The first count is None if it is unknown. Another thread may call this method during training.
        """
        to_resume, num_steps, num_open = self._to_resume, self._num_steps_in_pass, self.num_open
        if self._before is not None:
            return *self._before, 0
        num_due = self.source.num_steps()
        due = None if num_due is None else self.source.consumed_after(num_due)
        if to_resume is not None:
            return due, to_resume[1], 0
        if not num_steps:
            return due, self._began_at, 0
        used = self.source.consumed_after(max(0, num_steps - num_open))
        return due, used, self.source.consumed_after(num_steps) - used if num_open else 0

    def break_off(self) -> None:
        super().break_off()
        self._before = self.samples_used()[:2]
        self._num_steps_in_pass = self._began_at = 0

    def _begin_pass(self, consumed: int) -> Iterator[PlannedBatch]:
        self._began_at, self._before = consumed, None
        return iter(self.source.open(self.pass_index, consumed))


def tell_epoch(loader: Any, pass_index: int) -> None:
    """Call `set_epoch(pass_index)` on the loader's sampler or, if it has no such method, on its batch sampler."""
    for holder in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if holder is not None and hasattr(holder, "set_epoch"):
            holder.set_epoch(pass_index)
            return
