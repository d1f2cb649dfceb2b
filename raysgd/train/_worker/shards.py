"""The data of a run, divided over its workers: once for each number of workers, and the same parts after a restart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from raysgd.engine.worker import packed_bytes
from raysgd.streams.source import check_batched
from raysgd.streams.stream import Stream
from raysgd.train._worker.stream_part import StreamPart


class DividedData:
    """Divides a dataset, or a dict of them.

    Args:
        dataset: Has `split(n, equal=True)`, which returns n parts; or a dict of such. One that takes `locality_hints`
            gets Ray's handles on the workers, and gives each worker what is near it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._parts: Sequence[Any] = ()

    @property
    def is_whole(self) -> bool:
        """See `raysgd.train._run.launch.DivideData`."""
        each = self._dataset.values() if isinstance(self._dataset, Mapping) else (self._dataset,)
        return all(isinstance(dataset, Stream) for dataset in each)

    def __call__(self, num_workers: int, workers: Sequence[Any] = ()) -> Sequence[Any]:
        """Return what each worker gets: its part, or a dict of its parts."""
        if num_workers != len(self._parts):
            self._parts = self._divided(num_workers, [worker.actor.ray_actor for worker in workers])
        return self._parts

    def _divided(self, num_workers: int, actors: Sequence[Any]) -> list[Any]:
        if not isinstance(self._dataset, Mapping):
            return divided(self._dataset, num_workers, actors)
        by_name = {name: divided(dataset, num_workers, actors) for name, dataset in self._dataset.items()}
        return [{name: parts[rank] for name, parts in by_name.items()} for rank in range(num_workers)]


def divided(dataset: Any, num_workers: int, actors: Sequence[Any] = ()) -> list[Any]:
    """The parts of a dataset that can divide itself, near its worker where that can see to it; or a stream for each.

    The part of a stream follows from the place that its worker has.
    """
    if isinstance(dataset, Stream):
        return [StreamPart(dataset, num_workers)] * num_workers
    if not actors or "locality_hints" not in inspect.signature(dataset.split).parameters:
        return list(dataset.split(num_workers, equal=True))
    return list(dataset.split(num_workers, equal=True, locality_hints=list(actors)))


def with_to_torch(shard: Any) -> Any:
    """A shard, or a dict of them, with the `to_torch` that datasets of Ray Data had; today their iterators have it."""
    for each in shard.values() if isinstance(shard, dict) else (shard,):
        if hasattr(each, "iterator") and not hasattr(each, "to_torch"):
            each.to_torch = partial(_to_torch, each)
    return shard


def _to_torch(dataset: Any, **options: Any) -> Any:
    return dataset.iterator().to_torch(**options)


def check_dataset(dataset: Any) -> None:
    """Checks that the data of a run can be divided.

    Raises:
        TypeError: It cannot, or it is a stream that cannot be sent.
        ValueError: It is a stream without batches.
    """
    for each in dataset.values() if isinstance(dataset, Mapping) else (dataset,):
        if isinstance(each, Stream):
            packed_bytes("the stream in `dataset`", check_batched(each, "the stream in `dataset`"))
        elif each is not None and (isinstance(each, str | bytes) or not hasattr(each, "split")):
            raise TypeError(
                f"`dataset` is, or holds, a {type(each).__name__}: need a Ray Data dataset, a stream, something with "
                "`split(n, equal=True)`, or a dict of such."
            )
