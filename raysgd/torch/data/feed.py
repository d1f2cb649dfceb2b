"""`TorchFeed`: opens one worker's data as cursors, which draw the batches of a source and know the position in it.

For a loader that the library shards, each rank knows in advance how many samples all ranks have in each step. To train
on any other loader, the ranks all-reduce the sizes of their batches before each step, while they train on the previous
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch.distributed import DistNetworkError

from raysgd.core.arrays.division import NO_BATCH, PlannedBatch, plan_of, with_seeds
from raysgd.core.arrays.user_data import CallData, Convert, RayLoader, RepeatedBatches
from raysgd.core.numbers.seeds import seed_of
from raysgd.exceptions import NoDataError
from raysgd.streams.global_reader import Numbers, StartSum
from raysgd.streams.source import StreamData, StreamSource, stream_data
from raysgd.streams.stream import Stream
from raysgd.torch.data import call_data
from raysgd.torch.data.batches import TensorCollate, as_batch, count_samples
from raysgd.torch.data.sample_order import BatchesOrder, SamplerOrder, length_of
from raysgd.torch.data.sampling import GlobalBatchRule, PassPlan, ShardedLoader, UndividedLoader, seed_hint_of
from raysgd.torch.parallel.strategy import Strategy, Summation
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.feed import DataFeed, has_divided_source, in_lockstep

logger = logging.getLogger(__name__)


class RankSums:
    """This worker's rank in its worker group, and sums over all ranks of the group.

    Each new worker group needs a new object.

    Args:
        parallel: Strategy, such as DDP, whose communication computes the sums.
        rank: Rank of this worker.
        world_size: Number of workers.

    Attributes:
        rank: Rank of this worker.
        world_size: Number of workers.
    """

    def __init__(self, parallel: Strategy, rank: int = 0, world_size: int = 1) -> None:
        self._parallel = parallel
        self.rank, self.world_size = rank, world_size

    @property
    def is_global(self) -> bool:
        """True if this worker takes synchronized optimizer steps with other workers."""
        return self.world_size > 1 and self._parallel.sync.averages

    @cached_property
    def start_sum(self) -> Summation:
        """Function that starts to sum a tensor over the ranks, in the background.

        The first read creates a process group, so all ranks must read this property for the first time together.
        """
        return self._parallel.summation()

    def adding(self) -> StartSum:
        """Return a function that starts to sum a NumPy array over the ranks, in the background.

        The returned function starts a sum and returns another function, which waits for that sum and returns it.

        Raises:
            ValueError: There is only one worker, or the workers do not communicate.
        """
        if not self.is_global:
            raise ValueError(
                'With `strategy="none"` workers do not communicate, but a stream with a filter, or with shards of '
                "unknown length, needs this. Omit `strategy`, or pass a stream without these."
            )
        start_sum = self.start_sum

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            wait = start_sum(torch.from_numpy(numbers))

            def summed() -> Numbers:
                wait()
                return numbers

            return summed

        return start


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
        num_samples: Number of samples in a pass, over all ranks. None if it is unknown until the pass begins.
        check_plan: Function that is called when a pass starts or resumes. It gets the plan for the rest of the pass.
    """

    is_divided, left_out = True, 0

    def __init__(self, sharded: ShardedLoader, seed: int) -> None:
        self._sharded = sharded
        self._ranks: RankSums | None = None
        self._start_sum: Summation | None = None  # compares the orders that the ranks' samplers have drawn
        self._order_before: int | None = None
        sharded.loader.generator = self._generator = torch.Generator()
        self.check_plan: Callable[[PassPlan], None] | None = None
        self.seed = seed
        self.order, self._size = sharded.sampler.order, sharded.num_samples
        self.num_samples = None if isinstance(self.order, BatchesOrder) else self._size
        self.has_own_order = isinstance(self.order, SamplerOrder)

    def join(self, ranks: RankSums) -> None:
        self._ranks = ranks
        self._start_sum = ranks.start_sum if self.has_own_order and ranks.is_global else None

    def _check_drawn(self, ranks: RankSums, is_resumed: bool) -> None:
        """Check that a user's sampler yielded the samples in the same order on all ranks.

        In a pass that resumes after a failure, also warn if the order differs from the order before the failure.

        Args:
            ranks: The ranks.
            is_resumed: True if the pass resumes.

        Raises:
            ValueError, DistNetworkError: The orders of the ranks differ.
        """
        own, before = self._sharded.sampler.fingerprint(), self._order_before
        name, self._order_before = self.order.name, None
        assert own is not None, "only a rank's own order is checked"
        if self._start_sum is not None and not _are_alike(own, self._start_sum, ranks.world_size):
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
        origin: dict[str, Any] = {"seed": self.seed, **self._size_to_save}
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
        if any(position.get(name) != number for name, number in self._size_to_save.items()):
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
            "num_samples": self._size,
            "is_of_batches": isinstance(self.order, BatchesOrder),
            "batch_size": sampler.batch_size,
            "drop_last": sampler.drop_last,
            "rule": None if sampler.rule is None else asdict(sampler.rule),
        }

    @property
    def _size_to_save(self) -> dict[str, int]:
        """Size of a pass, as stored in snapshots: the number of samples or, with a user's batch sampler, of batches."""
        is_of_batches = isinstance(self.order, BatchesOrder)
        return {"num_batches" if is_of_batches else "num_samples": self._size}

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
        if not self.has_own_order and (now := len(self._sharded.own_sampler)) != self._size:
            raise ValueError(
                f"the data of a loader have {now} samples, and had {self._size} when the loader was made, by "
                "which the workers divide them: pass the data of now to `train(dataset=...)`; or a `sampler` of your "
                "own to the loader, which is drawn in each pass, such as `RandomSampler(data, replacement=True)`."
            )
        plan, rank = sampler.plan_pass(pass_index, self.seed, consumed), sampler.rank
        if self.has_own_order and self._ranks is not None:
            self._check_drawn(self._ranks, consumed > 0)
        if self.check_plan is not None:
            self.check_plan(plan)
        self.num_samples = plan.num_samples
        self._generator.manual_seed(seed_of(self.seed, pass_index, consumed, rank))
        batches, num_shards, steps_left = iter(self._sharded.loader), sampler.num_shards, plan.num_steps
        for part, share in plan.shares(rank):
            batch_plan = share.plan
            batch = NO_BATCH if batch_plan.is_padding and not plan.pad else next(batches)
            if num_shards:
                batch_plan = with_seeds(batch_plan, self.seed, pass_index, part.start, share.start)
            steps_left -= batch_plan.ends_global_batch
            used_after = part.stop if steps_left else plan.num_samples
            yield PlannedBatch(batch, batch_plan, steps_left == 0, used_after)
        next(batches, None)  # exhaust the loader, so that it ends its worker processes

    def num_steps(self) -> int | None:
        plan = self._sharded.sampler.plan
        return len(self._sharded.sampler) if plan is None else plan.num_steps


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
        if not self._is_in_lockstep:
            return map(PlannedBatch, self._loader)
        ranks = self._ranks
        joint = in_lockstep(iter(self._loader), partial(ask, ranks.start_sum), "loader")
        return (
            PlannedBatch(batch, plan_of(count_samples(batch) if is_own else 0, num_samples, ranks.world_size))
            for batch, is_own, (_, num_samples) in joint
        )

    def layout(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return plain data that marks the samples of each step as unknown in the journal (`raysgd.journal`)."""
        return {"kind": "undivided", "name": type(self._loader).__name__}

    def num_steps(self) -> int | None:
        """Return the number of this rank's batches in a pass; None if it is unknown.

        In lockstep, a pass may have more steps.
        """
        return length_of(self._loader)


LoaderSource: TypeAlias = DividedLoaderSource | PlainSource | StreamSource
"""The source of the batches of a pass."""


def ask(start_sum: Summation, batch: Any) -> Callable[[], tuple[int, int] | None]:
    """Start an all-reduce that counts the ranks with a batch in the next step, and the samples in all these batches.

    Args:
        start_sum: Function that starts to sum a tensor over the ranks.
        batch: This rank's batch, or `NO_BATCH`.

    Returns:
        A function that waits for the all-reduce, and returns both numbers, or None if no rank has a batch.
    """
    has_batch = batch is not NO_BATCH
    counts = torch.tensor([has_batch, count_samples(batch) if has_batch else 0], dtype=torch.int64)
    wait = start_sum(counts)

    def hear() -> tuple[int, int] | None:
        wait()
        num_ranks, num_samples = counts.tolist()
        return (num_ranks, num_samples) if num_ranks else None

    return hear


def tell_epoch(loader: Any, pass_index: int) -> None:
    """Call `set_epoch(pass_index)` on the loader's sampler or, if it has no such method, on its batch sampler."""
    for holder in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if holder is not None and hasattr(holder, "set_epoch"):
            holder.set_epoch(pass_index)
            return


class TorchFeed(DataFeed):
    """Opens cursors over the loaders that the operator registered, or over data that the user passes.

    The user may pass data for one call to `train` or `validate` as the call's argument `dataset`.

    Args:
        data_of: Function that gets "train" or "validation" and returns the data that the operator registered under this
            name, or None.
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        world_size: Number of workers.
        rank: Rank of this worker.
        rule: Rule for splitting global batches among the workers; None if each batch of a loader is for one worker.
        make_batch: Function that creates batches from arrays that the user passes.
    """

    def __init__(
        self,
        data_of: Callable[[str], ShardedLoader | UndividedLoader | StreamData | None],
        parallel: Strategy,
        world_size: int,
        rank: int = 0,
        rule: GlobalBatchRule | None = None,
        make_batch: Convert = as_batch,
    ) -> None:
        super().__init__()
        self._data_of = data_of
        self._parallel = parallel
        self.rule = rule
        self._make_batch = make_batch
        self._group = RankSums(parallel, rank, world_size)

    @property
    def _ranks(self) -> RankSums:
        return self._group

    @property
    def _registered_stream(self) -> StreamData | None:
        data = self._data_of("train")
        return data if isinstance(data, StreamData) else None

    def _source(self, name: str, request: EpochRequest, *, training: bool) -> LoaderSource:
        is_of_call, seed = request.shard_key is not None, request.seed
        data = self._data_of_call(name, training) if is_of_call else self._data_of(name)
        if data is None:
            return PlainSource(RepeatedBatches(partial(_refuse_missing, name)))
        if isinstance(data, StreamData):
            return StreamSource(data, self._ranks, seed, TensorCollate())
        if isinstance(data, ShardedLoader):
            return DividedLoaderSource(data, seed_hint_of(self.made_of_call[name], seed) if is_of_call else seed)
        loader = data.loader if isinstance(data, UndividedLoader) else data
        return PlainSource(loader, is_in_lockstep=training and self._parallel.sync.averages)

    def _data_of_call(self, name: str, training: bool) -> ShardedLoader | StreamData | Any:
        loader, ranks = self.made_of_call[name], self._ranks
        if isinstance(loader, Stream):
            assert self.rule is not None, "checked in the driver"
            return stream_data(loader, name, self.rule.of_streams, ranks.world_size)
        if self.data_of_call[name].goes_to_all:
            return call_data.divided(loader, ranks.rank, ranks.world_size, training, self.rule)
        return loader

    def _make(self, name: str, share: CallData) -> Any:
        return call_data.batches_of(share, self.collate_fn(name), self._make_batch)

    def collate_fn(self, name: str) -> Any:
        """Return the `collate_fn` of the loader registered under `name`, or else of the other registered loader.

        Return None if neither loader creates batches from samples.

        Args:
            name: "train" or "validation".
        """
        other = "train" if name == "validation" else "validation"
        return call_data.collate_fn_of(getattr(self._data_of(each), "loader", None) for each in (name, other))

    def ray_loader(self, name: str) -> RayLoader | None:
        loader = getattr(self._data_of(name), "loader", None)
        return loader if isinstance(loader, RayLoader) else None

    def take_rank(self, rank: int, size: int, batch_size: int | None, instead_of: int | None) -> None:
        """Reshard the registered data after the number of workers has changed.

        Streams over other data, and an unfinished validation, are discarded.

        Args:
            rank: This worker's new rank.
            size: New number of workers.
            batch_size: New `BATCH_SIZE` in this worker's config; None if the config has none.
            instead_of: Previous `BATCH_SIZE` in this worker's config. Loaders with this batch size get `batch_size`
                instead. All other loaders keep their batch size.
        """
        self._group = RankSums(self._parallel, rank, size)
        self._call_cursor = self._left_to_validate = None
        for name in ("train", "validation"):
            data = self._data_of(name)
            if isinstance(data, ShardedLoader):
                data.sampler.rule = self.rule
                data.sampler.reshape(rank, size, batch_size if data.sampler.batch_size == instead_of else None)

    def limit_batches(self, size: int) -> None:
        super().limit_batches(size)
        assert self.rule is not None, "`micro_batch_size` needs global batches"
        self.rule = replace(self.rule, cap=size)
        self.break_off()
        self.take_rank(self._group.rank, self._group.world_size, None, None)

    def is_divided(self, cursor: Any) -> bool:
        if cursor is not None and cursor is self._call_cursor:
            return self.obstacle_of_call(cursor) is None
        return super().is_divided(cursor)

    def obstacle_of_call(self, cursor: Any) -> str | None:
        if cursor is not self._call_cursor or cursor is None:
            return None
        if not has_divided_source(cursor):
            return "the data of this call are not sharded by the library"
        source = cursor.source
        if isinstance(source, DividedLoaderSource) and not source.is_repeatable:
            name = source.order.name
            return f"the order of the data of this call comes from {name}, which draws a new order each time"
        return None

    def obstacle(self, name: str) -> str | None:
        data = self._data_of(name)
        if isinstance(data, UndividedLoader):
            return f"the {name} loader is not sharded by the library ({data.reason})"
        return None


def _refuse_missing(name: str) -> Iterator[Any]:
    """Raise `NoDataError`. Called when a call iterates over a loader that the operator did not register.

    Args:
        name: "train" or "validation".
    """
    way_out = ", or pass `dataset` to `train`." if name == "train" else " before you call `validate`."
    raise NoDataError(f"`{name}_loader` was not registered: pass it to `register_data` in `setup`{way_out}")
