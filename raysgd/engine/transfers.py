"""Values on their way between the driver and the workers.

Why sending has its own thread: ADR 131.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from raysgd.engine.placement import session
from raysgd.engine.worker import LocalCall, node_here
from raysgd.exceptions import WorkersLostError


class Transfer(Protocol):
    """A value on its way from a worker to the driver."""

    def result(self, timeout_s: float | None, /) -> Any:
        """The value; raises `TimeoutError` while it is on its way, anything else when it is lost."""


@dataclass(frozen=True)
class SharedValue:
    """A value for all ranks.

    Attributes:
        value: The value; where there are remote ranks, as it lies in the object store of the driver's node.
        reference: Ray's reference to it.
    """

    value: Any
    reference: Any


def store(value: Any) -> SharedValue:
    """Puts a value into Ray's object store, once for all ranks, whatever the group will look like then."""
    import ray

    reference = ray.put(value)
    return SharedValue(ray.get(reference), reference)


def transfer(call: Any) -> Transfer:
    """Return what a call will return, on its way."""
    if not isinstance(call, LocalCall):
        return _StoreTransfer(call)
    arrived: Future[Any] = Future()
    arrived.set_result(call.function())
    return arrived


T = TypeVar("T")


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run something in a thread that has no caller: the future raises what it raises."""
    try:
        result = work()
    except BaseException as error:  # whatever it comes to, Ctrl-C and the end of the trainer included
        future.set_exception(error)
    else:
        future.set_result(result)


class StoringTransfer:
    """A value that a thread of the driver puts into the store, beside whatever comes next; a `Transfer`.

    Args:
        store: Puts a value into the store; `WorkerGroup.store`.
        make: Makes the value, in that thread.
    """

    def __init__(self, store: Callable[[Any], SharedValue], make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._put, self._make = store, make
        self._stored: Future[Any] = Future()
        threading.Thread(target=run_into, args=(self._stored, self._store), name="raysgd-storing", daemon=True).start()

    def result(self, timeout_s: float | None) -> Any:
        """The value as it lies in the store.

        Raises:
            TimeoutError: It is not there yet.
        """
        try:
            return self._stored.result(timeout_s)
        except FutureTimeoutError:  # in Python 3.10 not the class that everyone else means
            raise TimeoutError from None

    def _store(self) -> Any:
        with self._make() as value:
            return self._put(value).value


@dataclass(frozen=True)
class StoredPart:
    """A part in the object store of a node.

    Attributes:
        node_id: The node.
        reference: Ray's reference to it.
    """

    node_id: str
    reference: Any


@dataclass(frozen=True)
class DividedValue:
    """A value that the ranks divide: the part of each, as it lies in the object store.

    The driver holds on to the parts and does not read them. To another process they travel as references, so that it
    reads those that it needs.

    Attributes:
        values: The parts that are in this process; None for others.
        places: Where those are that came through the object store, each once or twice, in the order in which to try.
    """

    values: tuple[Any, ...]
    places: tuple[tuple[StoredPart, ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        own = [None if places else value for value, places in zip(self.values, self.places, strict=True)]
        return DividedValue, (tuple(own), self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        """The part of a rank.

        Raises:
            LostPartError: It was lost.
        """
        import ray

        if self.values[index] is not None or not self.places[index]:
            return self.values[index]
        for place in self.places[index]:
            try:
                return ray.get(place.reference)
            except ray.exceptions.ObjectLostError:
                continue
        raise LostPartError(f"The last snapshot is lost: no node is left that has what rank {index} had of it.")

    def best_on(self, nodes: Collection[str]) -> DividedValue:
        """The same parts, to be read from these nodes where that is possible: others may be lost."""
        home, values, places = node_here()[0], list[Any](), list[tuple[StoredPart, ...]]()
        for value, places_of_part in zip(self.values, self.places, strict=True):
            best = tuple(sorted(places_of_part, key=lambda place: place.node_id not in nodes))
            if value is not None and best and not any(place.node_id in (*nodes, home) for place in best):
                stored = store(value)  # a reader would ask the lost node first, and wait until Ray misses it: ADR 92
                value, best = stored.value, (StoredPart(home, stored.reference),)
            values.append(value)
            places.append(best)
        return DividedValue(tuple(values), tuple(places))


class LostPartError(WorkersLostError):
    """A part of a snapshot was lost, and its copy too."""


class FetchedParts:
    """The parts of all ranks, on their way to the driver's node or to partners.

    Args:
        transfers: The part of each rank.
        nodes: The node of each rank.
        relays: By rank: of those that partners keep, what has a result when the copy is there, and its place. They do
            not come to the driver's node.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        nodes: Sequence[str],
        relays: Mapping[int, tuple[Transfer, StoredPart]] | None = None,
    ) -> None:
        self._transfers, self._nodes, self._relays = transfers, nodes, relays or {}

    def result(self, timeout_s: float | None) -> DividedValue:
        """All parts.

        Raises:
            TimeoutError: One is not there yet.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        values = []
        for rank, each in enumerate(self._transfers):
            awaited = self._relays[rank][0] if rank in self._relays else each
            value = awaited.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            values.append(None if rank in self._relays else value)
        return DividedValue(tuple(values), tuple(map(self._places, range(len(values)))))

    def _places(self, rank: int) -> tuple[StoredPart, ...]:
        reference = getattr(self._transfers[rank], "reference", None)
        if reference is None:
            return ()
        copies = (self._relays[rank][1],) if rank in self._relays else ()
        return StoredPart(self._nodes[rank], reference), *copies


@dataclass(frozen=True)
class _StoreTransfer:
    """A transfer through Ray's object store. Holding on to the value keeps it in the store of the driver's node."""

    reference: Any
    session: Any = field(default_factory=session)

    def result(self, timeout_s: float | None) -> Any:
        import ray

        if session() != self.session:
            raise WorkersLostError("The Ray session in which it was sent has ended.")
        try:
            return ray.get(self.reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("still on its way") from error
