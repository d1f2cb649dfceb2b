"""Data that one call brings along: who divides them over the workers, and what each worker is given.

Why the driver does not cut them into parts: ADR 79.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from raysgd._arguments import check_count
from raysgd.arrays.arrays import Arrays, is_frame, is_of_arrays
from raysgd.arrays.ray_batches import PLAIN_BATCH_SIZE, ray_batches
from raysgd.utils import BATCH_SIZE

Kind = Literal["ray", "shards", "rows", "batches", "creator"]


@dataclass(frozen=True)
class DataPosition:
    """The place in the data where a call stopped, for any number of workers.

    Attributes:
        pass_index: Index of the pass.
        consumed: Samples of the pass that all workers have used.
        state: What the source of the data says as well.
    """

    pass_index: int
    consumed: int
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def saved(self) -> dict[str, Any]:
        """The same as a position that a source takes over."""
        return {"consumed": self.consumed, "pass_index": self.pass_index, "is_mid_pass": True, **self.state}


@dataclass(frozen=True)
class CallData:
    """Data of one call; in a worker, its share of them.

    Attributes:
        kind: Who divides them, and what `data` is.
            "ray": Ray Data does. A `RayBatches`; in a worker a `RayShare`.
            "shards": their owner does. An object with `set_num_shards(n)` and `get_shard(i)`; in a worker a shard.
            All other kinds are whole: every worker is given all of them, and the library divides them there.
            "rows": a function that makes a loader or a dataset over rows.
            "batches": a loader, a dataset of batches or a stream.
            "creator": the user's function, with its arguments.
        data: What `kind` says.
        place: Where the last call with the same data stopped; None for the beginning.
    """

    kind: Kind
    data: Any
    place: DataPosition | None = None

    @property
    def is_whole(self) -> bool:
        """True if every worker is given all of the data."""
        return is_whole(self.kind)

    @property
    def keeps_position(self) -> bool:
        """True if workers go on with the share they have; what other data give may be something else each time."""
        return self.kind in ("ray", "creator") or getattr(self.data, "keeps_position", False)

    def shares(self, num_workers: int) -> list[CallData]:
        """Return what each worker is given, by rank; one and the same object if the data are whole."""
        if self.kind == "ray":
            return [replace(self, data=share) for share in self.data.shares(num_workers)]
        if self.kind == "shards":
            self.data.set_num_shards(num_workers)
            return [replace(self, data=self.data.get_shard(rank)) for rank in range(num_workers)]
        return [self] * num_workers


def kind_of(dataset: Any) -> Kind | None:
    """Return the kind of data that need no framework; None for any other."""
    if ray_batches(dataset) is not None:
        return "ray"
    if hasattr(dataset, "set_num_shards") and hasattr(dataset, "get_shard"):
        return "shards"
    if isinstance(dataset, Arrays) or is_frame(dataset) or is_of_arrays(dataset):
        return "rows"
    if callable(dataset) and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        return "creator"
    return None


def is_whole(kind: Kind | None) -> bool:
    """Return whether every worker is given all data of this kind."""
    return kind in ("rows", "batches", "creator")


def call_data_of(dataset: Any, config: Mapping[str, Any]) -> CallData | None:
    """Return data whose kind is the same in every framework, ready for workers; None for any other.

    Args:
        dataset: What the call was given.
        config: That of one worker.

    Raises:
        ValueError: There is no batch size, or a wrong one.
    """
    kind = kind_of(dataset)
    if kind == "ray":
        batches = ray_batches(dataset)
        assert batches is not None, "it is of Ray Data"
        return CallData(kind, batches.sized(config))
    if kind == "creator":
        return CallData(kind, partial(dataset, config, size_in(config)))
    return CallData(kind, dataset) if kind == "shards" else None


def size_in(config: Mapping[str, Any]) -> int | None:
    """The batch size of one worker in its config, if there is one."""
    size = config.get(BATCH_SIZE, config.get(PLAIN_BATCH_SIZE))
    return None if size is None else check_count("config['batch_size']", size, "It is the number of rows in a batch.")


def size_of(what: str, own: int | None, config: Mapping[str, Any]) -> int:
    """The batch size of one worker: that of the data, or that of its config.

    Raises:
        ValueError: There is none.
    """
    size = size_in(config) if own is None else own
    if size is None:
        raise ValueError(
            f"`dataset=` got {what}, which has no batch size: pass `raysgd.data.Arrays(data, batch_size=...)` or a "
            "`DataLoader`, or put the size of one worker's batch into the trainer's config, "
            '`config={"batch_size": 32}`.'
        )
    return size


class RepeatedBatches:
    """Batches that a function hands out again for each pass.

    Args:
        open_pass: Called whenever a pass begins.
    """

    def __init__(self, open_pass: Callable[[], Iterator[Any]]) -> None:
        self._open_pass = open_pass

    def __iter__(self) -> Iterator[Any]:
        return self._open_pass()


def every_nth(batches: Any, rank: int, size: int) -> RepeatedBatches:
    """Return this rank's batches of something that cannot be divided by samples: each is used once.

    Args:
        batches: Yields the same batches on all workers.
        rank: The place among them.
        size: How many workers there are.
    """
    return RepeatedBatches(lambda: islice(iter(batches), rank, None, size))
