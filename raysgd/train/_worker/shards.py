"""The data of a run, divided over its workers: once for each number of workers, and the same parts after a restart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any


class DividedData:
    """Divides a dataset, or a dict of them.

    Args:
        dataset: Has `split(n, equal=True)`, which returns n parts; or a dict of such.
        place: Puts a part where one worker can take it from.
        actors: Ray's handles on the workers, by rank. A dataset that takes them as `locality_hints` gives each worker
            what is near it.
    """

    def __init__(
        self,
        dataset: Any,
        place: Callable[[Any], Any] = lambda part: part,
        actors: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._dataset = dataset
        self._place = place
        self._actors = actors
        self._num_workers = 0
        self._parts: Sequence[Any] = ()

    def of(self, num_workers: int) -> Sequence[Any]:
        """Return what each worker gets: its part, or a dict of its parts."""
        if num_workers != self._num_workers:
            self._parts = [self._place(part) for part in self._divided(num_workers)]
            self._num_workers = num_workers
        return self._parts

    def _divided(self, num_workers: int) -> list[Any]:
        if not isinstance(self._dataset, Mapping):
            return self._split(self._dataset, num_workers)
        by_name = {name: self._split(dataset, num_workers) for name, dataset in self._dataset.items()}
        return [{name: parts[rank] for name, parts in by_name.items()} for rank in range(num_workers)]

    def _split(self, dataset: Any, num_workers: int) -> list[Any]:
        return divided(dataset, num_workers, self._actors)


def divided(dataset: Any, num_workers: int, actors: Callable[[], Sequence[Any]] | None = None) -> list[Any]:
    """The parts of a dataset that can divide itself; each near its worker where the dataset can see to that."""
    if actors is None or "locality_hints" not in inspect.signature(dataset.split).parameters:
        return list(dataset.split(num_workers, equal=True))
    return list(dataset.split(num_workers, equal=True, locality_hints=list(actors())))


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
        TypeError: It cannot.
    """
    for each in dataset.values() if isinstance(dataset, Mapping) else (dataset,):
        if each is not None and (isinstance(each, str | bytes) or not hasattr(each, "split")):
            raise TypeError(
                f"`dataset` is, or holds, a {type(each).__name__}: need a Ray Data dataset, something with "
                "`split(n, equal=True)`, or a dict of such."
            )
