"""Data of a call that every worker is given whole, and divides as it divides what is registered.

Why the driver does not cut them into parts: ADR 79.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from raysgd._arguments import check_count
from raysgd.arrays.ray_batches import PLAIN_BATCH_SIZE
from raysgd.engine.shared.types import World
from raysgd.utils import BATCH_SIZE


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
class WholeShare:
    """The share of every worker: all of the data, and where to begin.

    Attributes:
        data: Has a method `make()` that returns a loader or a dataset of the framework.
        place: Where the last call with the same data stopped; None for the beginning.
    """

    data: Any
    place: DataPosition | None = None


@dataclass(frozen=True)
class OwnData:
    """A loader, a dataset or a stream of the user's, as it is.

    Attributes:
        data: The same.
    """

    data: Any

    def make(self) -> Any:
        """Return it."""
        return self.data


@dataclass(frozen=True)
class Creator:
    """A function of the user's, which makes the data in each worker.

    Attributes:
        function: `(config, batch_size)` -> the data.
        config: That of one worker.
        batch_size: That of one worker; None if the config has none.
    """

    function: Callable[[Mapping[str, Any], int | None], Any]
    config: Mapping[str, Any]
    batch_size: int | None

    def make(self) -> Any:
        """Return what the function returns."""
        return self.function(self.config, self.batch_size)


def creator_of(dataset: Any, config: Mapping[str, Any]) -> Creator | None:
    """`dataset` as a creator; None if it is not one."""
    return Creator(dataset, config, size_in(config)) if is_creator(dataset) else None


def is_creator(dataset: Any) -> bool:
    """Return whether a dataset is a function that makes one."""
    return callable(dataset) and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__")


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


class DealtBatches:
    """Every n-th batch of something that cannot be divided by samples: each is used once.

    Args:
        batches: Yields the same batches on all workers.
        world: The place among them.
    """

    def __init__(self, batches: Any, world: World) -> None:
        self._batches, self._world = batches, world

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._batches), self._world.rank, None, self._world.size)
