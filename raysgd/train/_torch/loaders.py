"""Prepares data loaders in training functions: each worker gets its shard of the samples, on its own device.

With `elastic=True`, a loader yields global batches. A global batch has the samples of one step across all ranks. Its
samples are divided among the current ranks. If a worker is lost during a batch, the batch is repeated with the
remaining workers.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from raysgd.air.session import helper_session
from raysgd.core.arrays import trees
from raysgd.core.arrays.division import Division
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.seeds import seed_of
from raysgd.streams.stream import Stream
from raysgd.torch.data.batches import TensorCollate
from raysgd.torch.data.feed import RankSums
from raysgd.torch.data.sample_order import Indices, SamplerOrder, ShuffledOrder, divides_data, length_of, order_of
from raysgd.torch.data.sampling import PassPlan, batches_of_rank
from raysgd.torch.parallel.strategy import DDP
from raysgd.train._torch.global_steps import GlobalSteps
from raysgd.train._torch.prepared import shared_accelerator
from raysgd.train._worker.shards import StreamPart

logger = logging.getLogger(__name__)


def prepare_data_loader(
    data_loader: DataLoader[Any] | Stream | StreamPart,
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    exact: bool = False,
) -> Any:
    """Prepare a loader to yield this worker's shard of the samples, in batches on the worker's device.

    Call `loader.sampler.set_epoch(epoch)` before each epoch to get a different order every time. A custom sampler, such
    as `WeightedRandomSampler`, draws the same samples on all workers, and each worker uses its shard of the drawn
    samples. All workers get the same number of samples. If the samples cannot be divided evenly, the first samples are
    repeated, unless `exact` is set.

    Args:
        data_loader: The loader, or a stream, or a shard of a stream from `get_dataset_shard`. With a stream, workers
            agree on where the stream ends. `loader.state_dict()` is then a position in the stream, which any number of
            workers can load.
        add_dist_sampler: True to shard a map-style dataset across the workers.
        move_to_device: True to move the batches to the device.
        auto_transfer: True to copy the next batch while the current batch is processed. Only on GPUs, and not for
            loaders that track a position, such as streams.
        exact: True to use each sample exactly once, as in an evaluation. Workers may then get different numbers of
            batches, so training a `DistributedDataParallel` model needs `model.join()` around the loop over the loader.
            With `elastic=True`, all workers get the same number of batches. The size of a global batch is `batch_size`
            times the number of workers at the start of the function. Each global batch is divided among the remaining
            workers, and each worker's gradient is weighted by its number of samples. With a stream, the stream sets
            the size of a global batch.

    Raises:
        ValueError: The class of the loader's `batch_sampler` cannot be sharded, the sampler has no length, or, with
            `elastic=True`, the batches could not be repeated.
    """
    accelerator = shared_accelerator()
    world = helper_session().world
    data: Any = data_loader
    is_stream = isinstance(data, Stream | StreamPart)
    is_global = is_stream or (add_dist_sampler and exact and is_divisible(data))
    steps = accelerator.steps if is_global else None
    if is_stream:
        data = of_stream(data, world, exact, goes_on=steps is not None)
    elif steps is not None:
        data = over_global_batches(data, world, accelerator.seed)
    elif add_dist_sampler:
        data = divided(data, world, accelerator.seed, exact)
    if move_to_device:
        data = DeviceLoader(data, accelerator.device, auto_transfer)
    return data if steps is None else RepeatingLoader(data, steps)


def of_stream(stream: Stream | StreamPart, world: World, exact: bool, goes_on: bool = False) -> Any:
    """Return this rank's shard of a stream, as batches of tensors.

    Args:
        stream: A stream, or a shard of a stream from `get_dataset_shard`.
        world: This worker's rank and the number of workers.
        exact: See `prepare_data_loader`.
        goes_on: True if the function continues without a restart when other workers are lost (`elastic=True`).

    Raises:
        ValueError: `goes_on` is True, but batches of this stream could not be repeated.
    """
    part = StreamPart(stream, world.size) if isinstance(stream, Stream) else stream
    if goes_on and not (exact and part.is_known):
        raise ValueError(
            "`elastic=True` needs a stream whose rows are counted before they are read, so that a batch can be "
            'repeated: its shards declare their lengths, and it has no `filter` and no `on_error="skip"`. Pass it as '
            "`prepare_data_loader(stream, exact=True)`, or omit `elastic`."
        )
    joined = part.joined(RankSums(DDP(), world.rank, world.size), TensorCollate(), exact=exact and not goes_on)
    return GlobalStream(joined) if goes_on else joined


def divided(loader: DataLoader[Any], world: World, seed: int | None, exact: bool = False) -> DataLoader[Any]:
    """Return a loader over this rank's shard of the data.

    Return the user's loader if there is only one worker, or if the data cannot be sharded or is sharded already.

    Args:
        loader: The user's loader.
        world: This worker's rank and the number of workers.
        seed: Seed for the loader's worker processes; None for PyTorch's default.
        exact: True to repeat no samples, even if the shards then differ in size.

    Raises:
        ValueError: The batches come from a batch sampler that cannot be sharded, or the sampler has no length.
    """
    if not is_divisible(loader):
        return loader
    if world.size == 1:
        _accept_epochs(loader.sampler)
        return loader
    _check_batches(loader)
    sampler, batches = _divided_sampler(_sampler_of(loader), world, exact), loader.batch_sampler
    if isinstance(batches, BatchSampler):
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    return _over(loader, sampler, batches, seed, world.rank)


def is_divisible(loader: DataLoader[Any]) -> bool:
    """Return True if the samples of a loader can be sharded across the workers and are not sharded yet."""
    return not divides_data(_sampler_of(loader)) and not isinstance(loader.dataset, IterableDataset)


def over_global_batches(loader: DataLoader[Any], world: World, seed: int | None) -> DataLoader[Any]:
    """Return a loader over this rank's part of each global batch.

    The size of a global batch does not change when workers are lost or added.

    Args:
        loader: The user's loader.
        world: This worker's rank, and the number of workers that determines the size of a global batch.
        seed: See `divided`.

    Raises:
        ValueError: The loader has no `batch_size`, or a batch sampler or sampler that cannot be sharded.
    """
    _check_batches(loader)
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler):
        raise ValueError("`elastic=True` needs a loader with batches: pass `batch_size` to the loader.")
    whole = _divided_sampler(_sampler_of(loader), World(0, 1), exact=True)
    assert isinstance(whole, DrawnSampler), "parts are exact"
    joint = GlobalBatches(whole, batches.batch_size * world.size, batches.drop_last)
    return _over(loader, whole, joint, seed, world.rank)


def _over(
    loader: DataLoader[Any], sampler: DistributedSampler[Any], batches: Any, seed: int | None, rank: int
) -> DataLoader[Any]:
    """Return a copy of the loader with different samplers, and different seeds for its processes on each rank.

    With equal seeds, all ranks would draw the same random augmentations. If `seed` is None, use the seed of the
    loader's generator. Without a generator, the seeds do not change.
    """
    made = copy.copy(loader)
    # Set through `vars`, because `DataLoader` forbids assigning these attributes.
    vars(made).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    if seed is not None:
        made.worker_init_fn = partial(_seed_process, made.worker_init_fn)
    elif made.generator is not None:
        seed = made.generator.initial_seed()
    if seed is not None:
        made.generator = torch.Generator().manual_seed(seed_of(seed, rank))
    return made


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that chooses a loader's samples: the batch sampler's sampler, or else the loader's own.

    `loader.sampler` may be a default that the loader does not use.
    """
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _check_batches(loader: DataLoader[Any]) -> None:
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        raise ValueError(
            f"`batch_sampler={type(batches).__name__}(...)` cannot be sharded across the workers. Shard it yourself, "
            "for instance by yielding every `train.world_size()`-th batch from `train.world_rank()` on, and pass "
            "`add_dist_sampler=False`; or pass `batch_size` or a `torch.utils.data.BatchSampler` to the loader."
        )


def _divided_sampler(sampler: Any, world: World, exact: bool) -> DistributedSampler[Any]:
    if length_of(sampler) is None:
        raise ValueError(
            f"`sampler={type(sampler).__name__}(...)` cannot be sharded across the workers: it has no `__len__`. "
            "Define it, or shard its samples yourself, and pass `add_dist_sampler=False`."
        )
    order = order_of(sampler)
    draws = isinstance(order, SamplerOrder)
    if draws and world.rank == 0:
        logger.warning(
            "the sampler %s was replaced by one that shards its samples. All workers draw the same order from "
            "`loader.sampler.seed` and the epoch, so call `loader.sampler.set_epoch(epoch)` before each pass. Pass "
            "`add_dist_sampler=False` to keep your sampler",
            type(sampler).__name__,
        )
    if draws or exact:
        return DrawnSampler(sampler, world, exact)
    return DistributedSampler(
        sampler.data_source, num_replicas=world.size, rank=world.rank, shuffle=isinstance(order, ShuffledOrder)
    )


def _accept_epochs(sampler: Any) -> None:
    """Add a `set_epoch` method that does nothing to a sampler without such a method.

    Training functions call `loader.sampler.set_epoch`, but with a single worker, the loader keeps the user's sampler.
    """
    if not hasattr(sampler, "set_epoch"):
        with suppress(AttributeError):  # some samplers, such as a list, accept no new attributes
            sampler.set_epoch = _ignore_epoch


def _ignore_epoch(epoch: int) -> None:
    """Do nothing. `_accept_epochs` installs this function as the `set_epoch` of a sampler."""


def _seed_process(then: Callable[[int], None] | None, worker_id: int) -> None:
    """Seed NumPy and `random` in a process of a loader, then call the user's `worker_init_fn`.

    Args:
        then: The user's `worker_init_fn`, or None.
        worker_id: The number of the process, which PyTorch passes.
    """
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)
    if then is not None:
        then(worker_id)


class DrawnSampler(DistributedSampler[Any]):
    """Gives each rank its shard of the indices that the user's sampler draws.

    Args:
        sampler: The user's sampler. With the same seed, it must draw the same indices on all ranks.
        world: This worker's rank and the number of workers.
        exact: True to repeat no samples. The first ranks may then have one more sample than the other ranks.
    """

    def __init__(self, sampler: Any, world: World, exact: bool) -> None:
        super().__init__(sampler, num_replicas=world.size, rank=world.rank)
        self._order = SamplerOrder(sampler)
        self._multiple = 1 if exact else world.size
        self.total_size = self._with_repeats(len(sampler))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def drawn(self) -> Indices:
        """Return all indices that the user's sampler draws in this epoch."""
        return self._order.indices(self.seed, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        drawn = self.drawn()
        return islice(cycle(drawn), self.rank, self._with_repeats(len(drawn)), self.num_replicas)

    def _with_repeats(self, num_samples: int) -> int:
        return num_samples + -num_samples % self._multiple


class GlobalBatches(Sampler[list[Any]]):
    """A batch sampler that yields one rank's part of each global batch.

    Args:
        sampler: Sampler that determines the order of the samples.
        size: Number of samples in a global batch.
        drop_last: True to omit a smaller last global batch.

    Attributes:
        size: Number of samples in a global batch.
        consumed: Number of samples that were used before a pass. Always 0, because a pass over a dataset starts at its
            beginning. In a `GlobalStream`, a pass may start later.
    """

    consumed = 0

    def __init__(self, sampler: DrawnSampler, size: int, drop_last: bool) -> None:
        self._sampler, self.size, self._drop_last = sampler, size, drop_last
        self._order: Indices = ()
        self._rank = 0

    def __len__(self) -> int:
        return self._plan_of(len(self._sampler), 0, 1).num_steps

    def _plan_of(self, num_samples: int, consumed: int, world_size: int) -> PassPlan:
        # With this cap, single samples are only avoided if no rank then has more samples than in a full global batch.
        division = Division(self.size, world_size, cap=-(-self.size // world_size))
        return PassPlan(num_samples, consumed, division, self._drop_last, pad=True)

    def draw(self) -> None:
        """Choose the samples of the next pass and their order."""
        self._order = self._sampler.drawn()

    def open(self, consumed: int, world: World) -> PassPlan:
        """Return the plan for the rest of the pass. The next iteration yields the batches of the rank in `world`.

        Args:
            consumed: Number of samples of the pass that all ranks together have used.
            world: The rank, and the number of ranks.
        """
        self._rank, self._plan = world.rank, self._plan_of(len(self._order), consumed, world.size)
        return self._plan

    def note_used(self, consumed: int) -> None:
        """Do nothing, because the position in a dataset is not saved."""

    def end_pass(self) -> None:
        """Do nothing, because the training function sets the next epoch itself, with `loader.sampler.set_epoch`."""

    def __iter__(self) -> Iterator[list[Any]]:
        return batches_of_rank(self._order, self._plan, self._rank)


class GlobalStream:
    """This rank's batches of a stream whose rows are counted in advance. It has the methods of `GlobalBatches`.

    It also serves as the loader's sampler, so `loader.sampler.set_epoch` sets the stream's epoch. At its end, a pass
    advances to the next epoch. Other attributes, such as `epoch` and `consumed`, come from the worker's shard.

    Args:
        part: The worker's shard of the stream.

    Attributes:
        size: Number of rows in a global batch.
    """

    def __init__(self, part: StreamPart) -> None:
        self._part = part
        self._num_rows, self.size = part.sizes
        self.sampler = self.batch_sampler = self

    def __len__(self) -> int:
        return len(self._part)

    def draw(self) -> None:
        """Do nothing, because the epoch determines the order of the rows."""

    def open(self, consumed: int, world: World) -> PassPlan:
        """Return the plan for the rest of the epoch. The next iteration yields the batches of the rank in `world`."""
        self._batches = self._part.batches_of(world, consumed)
        return PassPlan(self._num_rows, consumed, Division(self.size, world.size), drop_last=False, pad=True)

    def note_used(self, consumed: int) -> None:
        """Set the stream's position."""
        self._part.consumed = consumed

    def end_pass(self) -> None:
        """Advance the stream to its next epoch."""
        self._part.set_epoch(self._part.epoch + 1)

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_part"], name)


class WrappedLoader(DataLoader[Any]):
    """Wraps a loader. All attributes that this class lacks come from the wrapped loader.

    Args:
        loader: The loader to wrap.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not `DataLoader.__setattr__`, which rejects some names


class RepeatingLoader(WrappedLoader):
    """Wraps a loader over global batches, and repeats a batch if a worker was lost while the batch was processed.

    After a worker was lost, the loader waits before the next batch until the remaining workers have formed a new group.
    New workers also join between two batches.

    Args:
        loader: The loader to wrap.
        steps: Object that decides whether an optimizer step on one of the loader's batches counts.

    Attributes:
        is_open: True while the function is in the middle of a training pass.
    """

    def __init__(self, loader: DataLoader[Any], steps: GlobalSteps) -> None:
        super().__init__(loader)
        self._steps = steps
        self._has_trained = self.is_open = False
        self._epoch = self._consumed = 0
        steps.number(self)

    @property
    def _global(self) -> GlobalBatches | GlobalStream:
        return self._loader.batch_sampler  # type: ignore[return-value]

    @property
    def _sampler(self) -> DistributedSampler[Any] | GlobalStream:
        return self._loader.sampler  # type: ignore[return-value]

    @property
    def epoch(self) -> int:
        """Number of passes in which the function has trained. It is equal on all workers.

        A pass counts when it ends, even if the function leaves it early. But if the function leaves a pass over a
        stream before the last batch, the pass does not count, because the next pass continues there.

        New workers can join a running function only if the function counts its epochs by this attribute. You may set
        the attribute, for example to a value from a checkpoint.
        """
        self._steps.admit()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self) -> dict[str, Any]:
        """Return the loader's position, which is sent to new workers."""
        return {
            "epoch": self._epoch,
            "order": self._sampler.epoch,
            "size": self._global.size,
            "consumed": self._consumed,
            "is_open": self.is_open,
        }

    def take_over(self, position: dict[str, Any]) -> None:
        """Continue at the other workers' position. Called in a new worker.

        Args:
            position: The result of `position` in another worker.
        """
        self._epoch, self._consumed, self._global.size = position["epoch"], position["consumed"], position["size"]
        self._sampler.set_epoch(position["order"])
        self._global.note_used(self._consumed)
        self._has_trained = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        joint = self._global
        self._consumed, self.is_open = joint.consumed, torch.is_grad_enabled()
        place, outcomes = self._steps.enter(self.is_open), set[str]()
        joint.draw()
        while (plan := joint.open(self._consumed, place.world)).num_steps:
            batches = zip(self._loader, plan.shares(place.world.rank), strict=True)
            for number, (batch, (_, share)) in enumerate(batches, 1):
                consumed = plan.consumed_after(number)
                joint.note_used(consumed)
                # Under `torch.no_grad()`, the function evaluates: no steps follow, and ranks need not stay together.
                if not torch.is_grad_enabled():
                    if share.plan.num_samples:
                        yield batch
                    self._consumed = consumed
                    continue
                mark = self._steps.open_batch(place, share.plan.weight, self._has_trained, self._consumed)
                try:
                    yield batch
                except GeneratorExit:
                    has_trained = self._steps.leave_batch(mark) or "done" in outcomes
                    self._leave(has_trained, is_last=number == plan.num_steps)
                    raise
                outcome = self._steps.close_batch(mark)
                self._consumed = self._consumed if outcome == "failed" else consumed
                outcomes.add(outcome)
                self._has_trained = self._has_trained or outcome != "seen"
                if {"seen", "done"} <= outcomes:
                    self._steps.note_unstepped()
                before = place
                if outcome != "seen":
                    place = self._steps.enter()
                if outcome == "failed" or place is not before:
                    break
        joint.end_pass()
        self._epoch += "done" in outcomes
        self.is_open = False

    def _leave(self, has_trained: bool, is_last: bool) -> None:
        """When the function leaves a pass early, count the pass as an epoch if the function has taken a step in it.

        A pass over a stream counts only if the function leaves it during the last batch. Otherwise, the next pass
        continues where this pass stopped.

        Args:
            has_trained: True if the function has taken a step in the pass.
            is_last: True if the function leaves the pass during its last batch.
        """
        self.is_open, self._has_trained = False, self._has_trained or has_trained
        if has_trained and (is_last or isinstance(self._global, GlobalBatches)):
            self._global.end_pass()
            self._epoch += 1


class DeviceLoader(WrappedLoader):
    """Wraps a loader and moves its batches to a device.

    Args:
        loader: The loader to wrap.
        device: Device for the batches.
        ahead: True to copy the next batch while the current batch is processed; GPUs only. Ignored if the loader has a
            `state_dict`, because its position would count the batch that was copied ahead, and a resumed run would
            skip that batch.

    Attributes:
        epoch: Number of finished passes over the loader, not counting passes under `torch.no_grad()`.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, ahead: bool) -> None:
        super().__init__(loader)
        self._device = device
        self.epoch = 0
        runs_ahead = ahead and device.type == "cuda" and not hasattr(loader, "state_dict")
        self._stream = torch.cuda.Stream(device) if runs_ahead else None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the wrapped loader's batches, moved to the device."""
        batches = iter(self._loader)
        if self._stream is None:
            on_device: Iterator[Any] = (moved(batch, self._device) for batch in batches)
        else:
            on_device = self._ahead(batches, self._stream)
        return self._counted(on_device, torch.is_grad_enabled())

    def _counted(self, batches: Iterator[Any], counts: bool) -> Iterator[Any]:
        yield from batches
        self.epoch += counts

    def _ahead(self, batches: Iterator[Any], stream: torch.cuda.Stream) -> Iterator[Any]:
        """Yield each batch after starting to copy the next batch to the device."""
        coming = self._sent(batches, stream)
        while coming is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)
            [batch] = coming
            _map_tensors(batch, lambda tensor: tensor.record_stream(torch.cuda.current_stream(self._device)))
            coming = self._sent(batches, stream)
            yield batch

    def _sent(self, batches: Iterator[Any], stream: torch.cuda.Stream) -> list[Any] | None:
        for batch in batches:
            with torch.cuda.stream(stream):
                return [moved(batch, self._device)]
        return None


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors moved to `device`, including those inside mappings, lists and tuples.

    Lists and tuples keep their types. Mappings become plain dicts.
    """
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    return trees.mapped(batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, in_lists=True)
