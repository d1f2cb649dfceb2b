"""Shards the data of a run across its workers.

If the function restarts on the same number of workers, each rank gets the same shard as before. A worker's shard of a
stream is a `StreamPart`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raysgd.core.arrays.division import Division
from raysgd.core.engine.shared.types import World
from raysgd.core.sending import packed_bytes
from raysgd.streams.global_reader import StartSum
from raysgd.streams.loaders import ArrayCollate, Collate
from raysgd.streams.source import StreamGroup, StreamSource, check_batched, stream_data
from raysgd.streams.stream import Stream


class DividedData:
    """Shards a dataset, or a dict of datasets, when workers start. It keeps the shards for a restart.

    Args:
        dataset: A stream; or an object with `split(n, equal=True)`, which returns n shards; or a dict of such datasets.
            If `split` accepts `locality_hints`, it receives Ray's handles of the workers, to give each worker nearby
            data.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._parts: Sequence[Any] = ()

    @property
    def goes_to_all(self) -> bool:
        """True if every worker gets the same object, such as a stream, and selects its own shard by rank."""
        each = self._dataset.values() if isinstance(self._dataset, Mapping) else (self._dataset,)
        return all(isinstance(dataset, Stream) for dataset in each)

    def __call__(self, num_workers: int, workers: Sequence[Any] = ()) -> Sequence[Any]:
        """Return a list with each worker's shard of the data, by rank.

        If the data is a dict of datasets, each element is a dict of shards.
        """
        if num_workers != len(self._parts):
            self._parts = self._divided(num_workers, [worker.actor.ray_actor for worker in workers])
        return self._parts

    def _divided(self, num_workers: int, actors: Sequence[Any]) -> list[Any]:
        if not isinstance(self._dataset, Mapping):
            return divided(self._dataset, num_workers, actors)
        by_name = {name: divided(dataset, num_workers, actors) for name, dataset in self._dataset.items()}
        return [{name: parts[rank] for name, parts in by_name.items()} for rank in range(num_workers)]


def divided(dataset: Any, num_workers: int, actors: Sequence[Any] = ()) -> list[Any]:
    """Return one shard of a dataset for each worker.

    The shards are near their workers if the dataset's `split` supports that. For a stream, all workers get the same
    `StreamPart`, which reads the part that belongs to the worker's rank.
    """
    if isinstance(dataset, Stream):
        return [StreamPart(dataset, num_workers)] * num_workers
    if not actors or "locality_hints" not in inspect.signature(dataset.split).parameters:
        return list(dataset.split(num_workers, equal=True))
    return list(dataset.split(num_workers, equal=True, locality_hints=list(actors)))


def with_to_torch(shard: Any) -> Any:
    """Add a method `to_torch` to a Ray Data shard, or to each Ray Data shard in a dict, and return `shard`.

    Datasets of older Ray versions had this method. Other shards stay unchanged.
    """
    for each in shard.values() if isinstance(shard, dict) else (shard,):
        if hasattr(each, "iterator") and not hasattr(each, "to_torch"):
            each.to_torch = partial(_to_torch, each)
    return shard


def _to_torch(dataset: Any, **options: Any) -> Any:
    return dataset.iterator().to_torch(**options)


def check_dataset(dataset: Any) -> None:
    """Check that a run's data can be sharded.

    Raises:
        TypeError: The data cannot be sharded, or is a stream that cannot be pickled.
        ValueError: The data is a stream that is not batched.
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
    """One worker's batches of a stream. Iterate over this object once per epoch.

    All workers get the same number of batches if the stream's rows are counted before they are read. The rows cannot be
    counted if, for example, a filter drops rows or the lengths of the stream's shards are unknown. Each worker then
    gets as many batches as its own rows yield. `prepare_data_loader` connects the workers, so that their numbers of
    batches are equal in this case, too, unless you pass `exact=True`.

    Store `state_dict()` in your checkpoints. It is a position in the stream at which any number of workers can
    continue.

    Args:
        stream: The stream of global batches.
        world_size: Number of workers.

    Attributes:
        epoch: The current epoch.
        consumed: Number of the epoch's rows that all workers together have used, up to the most recent batch.
        is_known: True if an epoch's rows are counted before they are read.

    Raises:
        ValueError: The stream is not batched, or it has fewer lanes than workers. A lane is a fixed part of the
            stream's rows. Each worker watches at least one lane.
    """

    def __init__(self, stream: Stream, world_size: int) -> None:
        data = stream_data(stream, "train", Division, world_size)
        self._has_own_rows = not data.open_pass(0, 0).is_known
        data = replace(data, is_training=not self._has_own_rows)
        self._seed = data.loader.seed or 0
        self._place = _StreamGroup(partial(World, 0, world_size))
        self._source = StreamSource(data, self._place, self._seed, ArrayCollate())
        self.epoch, self.consumed = 0, 0
        self.is_known = not self._has_own_rows

    def of_worker(self, world: Callable[[], World]) -> StreamPart:
        """Set the function that returns this worker's rank, and return this object.

        The function is called when a batch is read, because the rank may not be known before.
        """
        self._place.world = world
        return self

    def joined(self, ranks: StreamGroup, collate: Collate, *, exact: bool) -> StreamPart:
        """Connect this worker to the other workers, and return this object.

        If the stream's rows cannot be counted in advance, the workers then send each other the numbers of rows that
        they find. With `exact`, each worker instead reads its own rows to their end.

        Args:
            ranks: The group through which the workers communicate.
            collate: Function that forms a batch from rows.
            exact: True to use each row exactly once. Workers may then have different numbers of batches.
        """
        data = replace(self._source.data, is_training=not exact)
        self._source = StreamSource(data, ranks, self._seed, collate)
        self._has_own_rows = exact and not self.is_known
        if not self._has_own_rows:
            self._source.join(ranks)
        return self

    @property
    def sampler(self) -> StreamPart:
        """This object, so that `loader.sampler.set_epoch` works as with other loaders."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and move to its beginning. If this epoch is already set, keep the position in it."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: The number is unknown.
        """
        return len(self._source.data.loader)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of the rest of the epoch, then advance to the next epoch."""
        for batch, plan, _, used_after in self._source.open(self.epoch, self.consumed):
            if not self._has_own_rows:
                self.consumed = used_after
            if plan.num_samples or self._source.data.is_training:
                yield batch
        self.epoch, self.consumed = self.epoch + 1, 0

    @property
    def sizes(self) -> tuple[int, int]:
        """A pair: the number of rows in all global batches of an epoch, and in one full global batch.

        Only for streams whose rows are counted in advance.
        """
        data = self._source.data
        assert data.num_rows is not None, "asked for only where it is known"
        return data.num_rows, data.batch_size

    def batches_of(self, world: World, consumed: int) -> Iterator[Any]:
        """Iterate over the batches of the rank in `world`, skipping the first `consumed` rows of the epoch."""
        self._source.join(_StreamGroup(lambda: world))
        return (batch for batch, *_ in self._source.open(self.epoch, consumed))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream after the most recent batch, as plain data that is equal on all workers.

        Raises:
            ValueError: Each worker has a different position in the epoch.
        """
        if self._has_own_rows:
            raise ValueError(
                "a stream with a filter, or with shards of unknown lengths, has a position of its own on each worker. "
                "Pass it through `train.torch.prepare_data_loader`, which lets the workers share their positions."
            )
        place = {"epoch": self.epoch, "consumed": self.consumed, "is_mid_pass": self.consumed > 0}
        return {**place, **self._source.state(self.consumed, self.consumed > 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position in the stream that `state_dict` returned, with any number of workers.

        Raises:
            ValueError: The position is inside an epoch of another stream, such as one with other shards or another
                shuffle seed. Or the position is damaged.
        """
        self._source.load_state(state)
        self.epoch, self.consumed = state["epoch"], state["consumed"]
