"""The data that users pass to a call such as `train`: how it is sharded across workers, and what each worker gets.

ADR 79 explains why the driver does not split arrays and loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from raysgd.core.arguments import check_count
from raysgd.core.arrays.arrays import Arrays, is_frame, is_of_arrays
from raysgd.core.arrays.ray_batches import ray_batches
from raysgd.core.config_keys import BATCH_SIZE, PLAIN_BATCH_SIZE

Kind = Literal["ray", "shards", "rows", "batches", "creator"]


@dataclass(frozen=True)
class DataPosition:
    """The position in the data where a call stopped. It remains valid if the number of workers changes.

    Attributes:
        pass_index: Index of the pass through the data.
        consumed: Number of samples that all workers together have consumed in that pass.
        state: Additional state that the data source needs to continue.
    """

    pass_index: int
    consumed: int
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def saved(self) -> dict[str, Any]:
        """The position as a dict, in the format that data sources load."""
        return {"consumed": self.consumed, "pass_index": self.pass_index, "is_mid_pass": True, **self.state}


@dataclass(frozen=True)
class CallData:
    """The data passed to one call, such as `train`. `kind` determines whether a worker gets all of the data or a shard.

    Attributes:
        kind: How the data is sharded, and what `data` contains.

            * "ray": Ray Data shards the dataset. `data` is a `RayBatches` in the driver, and a `RayShare` in a worker.
            * "shards": The dataset shards itself. In the driver, `data` has the methods `set_num_shards(n)` and
              `get_shard(i)`. In a worker, `data` is a shard.

            For all other kinds, every worker gets all of the data, and selects its own shard:

            * "rows": `data` is a function that creates a loader or a dataset of rows.
            * "batches": `data` is a loader, a dataset of batches or a stream.
            * "creator": `data` is the user's creator function, with its arguments.
        data: The data. Its type depends on `kind`.
        place: Position at which the last call with the same data stopped. None to start from the beginning.
    """

    kind: Kind
    data: Any
    place: DataPosition | None = None

    @property
    def goes_to_all(self) -> bool:
        """True if every worker gets all of the data."""
        return goes_to_all(self.kind)

    @property
    def keeps_position(self) -> bool:
        """True if workers can reuse their data in the next call. False if the driver must send the data again."""
        return self.kind in ("ray", "creator") or getattr(self.data, "keeps_position", False)

    def shares(self, num_workers: int) -> list[CallData]:
        """Return the `CallData` to send to each worker, by rank.

        It contains the worker's shard. If every worker gets all of the data, all workers get this object itself.
        """
        if self.kind == "ray":
            return [replace(self, data=share) for share in self.data.shares(num_workers)]
        if self.kind == "shards":
            self.data.set_num_shards(num_workers)
            return [replace(self, data=self.data.get_shard(rank)) for rank in range(num_workers)]
        return [self] * num_workers


def kind_of(dataset: Any) -> Kind | None:
    """Return the `CallData.kind` of a dataset that is specific to neither PyTorch nor TensorFlow.

    Return None for other datasets.
    """
    if ray_batches(dataset) is not None:
        return "ray"
    if hasattr(dataset, "set_num_shards") and hasattr(dataset, "get_shard"):
        return "shards"
    if isinstance(dataset, Arrays) or is_frame(dataset) or is_of_arrays(dataset):
        return "rows"
    if callable(dataset) and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        return "creator"
    return None


def goes_to_all(kind: Kind | None) -> bool:
    """Return True for a kind of data that every worker gets as a whole, rather than a shard of it."""
    return kind in ("rows", "batches", "creator")


def call_data_of(dataset: Any, config: Mapping[str, Any]) -> CallData | None:
    """Prepare a dataset for the workers. Return None for a dataset that only a trainer of its framework can prepare.

    Args:
        dataset: The `dataset` argument of the user's call.
        config: The worker config, which may contain the batch size.

    Raises:
        ValueError: The batch size is missing or invalid.
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
    """Return the batch size in a worker's config, or None if there is none.

    This is the batch size of one worker. With `split_batches=True`, it is the global batch size.

    Args:
        config: The worker config, in which `BATCH_SIZE` is already divided by the number of workers.
    """
    size = config.get(BATCH_SIZE, config.get(PLAIN_BATCH_SIZE))
    return None if size is None else check_count("config['batch_size']", size, "It is the number of rows in a batch.")


def size_of(what: str, own: int | None, config: Mapping[str, Any]) -> int:
    """Return the batch size of a dataset: `own` if the data specifies one, otherwise the result of `size_in(config)`.

    Args:
        what: Description of the data, for the error.
        own: Batch size that the data specifies. None if the data specifies no batch size.
        config: The worker config.

    Raises:
        ValueError: Neither the data nor the config specifies a batch size.
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
    """An iterable over batches that can be iterated several times.

    Each iteration is one pass and recreates the batches.

    Args:
        open_pass: Called at the start of each pass. Returns an iterator over the batches of that pass.
    """

    def __init__(self, open_pass: Callable[[], Iterator[Any]]) -> None:
        self._open_pass = open_pass

    def __iter__(self) -> Iterator[Any]:
        return self._open_pass()


def every_nth(batches: Any, rank: int, size: int) -> RepeatedBatches:
    """Return every `size`-th of the batches, starting with batch number `rank`, as this rank's shard of the data.

    This function is for data that cannot be sharded by sample.

    Args:
        batches: An iterable that yields the same batches on all workers.
        rank: Rank of this worker.
        size: Number of workers.
    """
    return RepeatedBatches(lambda: islice(iter(batches), rank, None, size))
