"""The data of a run, divided over its workers: once for each number of workers, and the same parts after a restart.

The part of a stream, `StreamPart`, is made in its worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raysgd.arrays.division import Division
from raysgd.engine.shared.types import World
from raysgd.engine.worker import packed_bytes
from raysgd.streams.global_reader import StartSum
from raysgd.streams.loaders import ArrayCollate, Collate
from raysgd.streams.source import StreamGroup, StreamSource, check_batched, stream_data
from raysgd.streams.stream import Stream


class DividedData:
    """Divides a dataset, or a dict of them, whenever workers start: the same parts again for as many as before.

    Args:
        dataset: Has `split(n, equal=True)`, which returns n parts; or a dict of such. One that takes `locality_hints`
            gets Ray's handles on the workers, and gives each worker what is near it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._parts: Sequence[Any] = ()

    @property
    def is_whole(self) -> bool:
        """True if every worker gets the same, and takes its part by its place."""
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
    """Check that the data of a run can be divided.

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


@dataclass
class _StreamGroup:
    world: Callable[[], World]

    @property
    def rank(self) -> int:
        return self.world().rank

    @property
    def world_size(self) -> int:
        return self.world().size

    def adding(self) -> StartSum:
        raise AssertionError("each takes its own rows")


class StreamPart:
    """The batches of one worker: iterate over it once for each epoch.

    All workers get the same number of batches. Where lengths of shards are not known, or a filter leaves rows out, each
    worker gets as many as its own rows make, unless `prepare_data_loader` lets the workers tell each other.

    The position does not depend on the number of workers: put `state_dict()` into your checkpoints.

    Args:
        stream: The stream, in batches: the global batches of all workers.
        world_size: How many workers there are.

    Attributes:
        epoch: The epoch that it is in.
        consumed: The rows of all workers in it, up to the batch that was handed out last.
        is_known: Whether the rows of an epoch are counted before they are read.

    Raises:
        ValueError: It is not in batches; there are more workers than lanes.
    """

    def __init__(self, stream: Stream, world_size: int) -> None:
        data = stream_data(stream, "train", Division, world_size)
        self._has_own_rows = not data.open_pass(0, 0).is_known
        data = replace(data, is_training=not self._has_own_rows)
        self._seed = data.loader.seed or 0
        self._place = _StreamGroup(partial(World, 0, world_size))
        self._source = StreamSource(data, self._place, self._seed, ArrayCollate(), _as_pair)
        self.epoch, self.consumed = 0, 0
        self.is_known = not self._has_own_rows

    def of_worker(self, world: Callable[[], World]) -> StreamPart:
        """Return this object, for a worker that has the place that `world` returns at the time."""
        self._place.world = world
        return self

    def joined(self, ranks: StreamGroup, collate: Collate, *, exact: bool) -> StreamPart:
        """Return the part for workers that tell each other what they see of the stream.

        Args:
            ranks: The workers.
            collate: Makes batches of rows.
            exact: Whether each row comes once, and workers may have different numbers of batches.
        """
        data = replace(self._source.data, is_training=not exact)
        self._source = StreamSource(data, ranks, self._seed, collate, _as_pair)
        self._has_own_rows = exact and not self.is_known
        if not self._has_own_rows:
            self._source.join(ranks)
        return self

    @property
    def sampler(self) -> StreamPart:
        """This object, so that `loader.sampler.set_epoch` works as it does for loaders."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning, unless it is the one that a loaded state is in."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: It is not known.
        """
        return len(self._source.data.loader)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, and begin with the next one after it."""
        for num_steps, (batch, num_rows) in enumerate(self._source.open(self.epoch, self.consumed), 1):
            if not self._has_own_rows:
                self.consumed = self._source.consumed_after(num_steps)
            if num_rows or self._source.data.is_training:
                yield batch
        self.epoch, self.consumed = self.epoch + 1, 0

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows of an epoch, which are known, and those of a global batch."""
        data = self._source.data
        assert data.num_rows is not None, "asked for only where it is known"
        return data.num_rows, data.batch_size

    def batches_of(self, world: World, consumed: int) -> Iterator[Any]:
        """Iterate over the batches of any place in a group of any size, after so many rows of the epoch."""
        self._source.join(_StreamGroup(lambda: world))
        return (batch for batch, _ in self._source.open(self.epoch, consumed))

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch that was handed out last, as plain data; the same on all workers.

        Raises:
            ValueError: In the middle of an epoch each worker is somewhere else.
        """
        if self._has_own_rows:
            raise ValueError(
                "a stream with a filter, or with shards of unknown lengths, has no position here: pass it through "
                "`train.torch.prepare_data_loader`, which lets the workers tell each other."
            )
        place = {"epoch": self.epoch, "consumed": self.consumed, "is_mid_pass": self.consumed > 0}
        return {**place, **self._source.state(self.consumed, self.consumed > 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position, of any number of workers.

        Raises:
            ValueError: It is one in other shards.
        """
        self._source.load_state(state)
        self.epoch, self.consumed = state["epoch"], state["consumed"]


def _as_pair(batch: Any, weight: float, num_rows: int, *place: Any) -> tuple[Any, int]:
    return batch, num_rows
