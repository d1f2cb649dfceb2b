"""Shards a user's `DataLoader` over the workers by rebuilding it with an `ElasticBatchSampler`.

A loader that cannot be rebuilt is used unchanged, and the reason is recorded. The processes of a rebuilt loader exit
immediately when the worker that started them dies. Without this, PyTorch's loader processes would exit up to 5 s later.

ADR 2 explains why the user's order is kept.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
)

from raysgd.streams.loaders import end_with_parent
from raysgd.torch.data.batch_sampler import ElasticBatchSampler, GlobalBatchRule, SeededIndices
from raysgd.torch.data.sample_order import BatchesOrder, divides_data, length_of, order_of
from raysgd.torch.objects import rng

logger = logging.getLogger(__name__)


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
        >>> plan = sharded.sampler.begin_pass(0, seed=0)
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
