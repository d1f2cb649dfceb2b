"""Loaders for several workers: each gets its part of the samples, and batches arrive on the device."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from raysgd.engine.types import World

logger = logging.getLogger(__name__)


def divided(loader: DataLoader[Any], world: World, seed: int | None) -> DataLoader[Any]:
    """A loader over this rank's part of the same data; the loader itself where that makes no sense.

    Args:
        loader: Any loader.
        world: The place of this worker.
        seed: For random numbers in the processes of the loader; None for PyTorch's own.
    """
    is_divided = isinstance(loader.sampler, DistributedSampler)
    if world.size == 1 or is_divided or isinstance(loader.dataset, IterableDataset):
        return loader
    shuffles = not isinstance(loader.sampler, SequentialSampler)
    if shuffles and not isinstance(loader.sampler, RandomSampler) and world.rank == 0:
        logger.warning(
            "the sampler %s is replaced by one that divides the data and shuffles it: pass `add_dist_sampler=False` to "
            "keep it",
            type(loader.sampler).__name__,
        )
    generator, init = loader.generator, loader.worker_init_fn
    if seed is not None:
        generator, init = torch.Generator(), _seeding(loader.worker_init_fn)
        generator.manual_seed(seed)
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        shuffle=False,
        sampler=DistributedSampler(loader.dataset, num_replicas=world.size, rank=world.rank, shuffle=shuffles),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=init,
        generator=generator,
    )


class _seeding:
    """Seeds numpy and `random` in a process of a loader, then does what was to be done there.

    Args:
        then: What the user wanted to be done.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        seed = torch.initial_seed() % 2**32
        np.random.seed(seed)
        random.seed(seed)
        if self._then is not None:
            self._then(worker_id)


class DeviceLoader(DataLoader[Any]):
    """Another loader whose batches come on a device. Everything else is read from that one.

    Args:
        loader: The other one.
        device: Where the batches go.
        ahead: Whether to copy the next batch while the last one is worked on; GPUs only.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, ahead: bool) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches, on the device."""
        batches = iter(self._loader)
        if self._stream is None:
            return (moved(batch, self._device) for batch in batches)
        return self._ahead(batches, self._stream)

    def _ahead(self, batches: Iterator[Any], stream: torch.cuda.Stream) -> Iterator[Any]:
        """Each batch while the one after it is on its way."""
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; dicts, lists and tuples keep their form."""
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_tensors(value, function) for value in batch)
    return batch
