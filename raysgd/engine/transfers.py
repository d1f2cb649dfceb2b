"""Values on their way between the driver and the workers.

Why sending has its own thread: ADR 131.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.engine.placement import session
from raysgd.engine.worker import LocalCall, node_here
from raysgd.exceptions import WorkersLostError


@dataclass(frozen=True)
class Transfer:
    """A value on its way from a worker to the driver.

    Attributes:
        result: Returns the value. Takes how many seconds to wait, or None to wait for it. Raises `TimeoutError` while
            it is on its way, anything else when it is lost.
        reference: Ray's reference to it, where it comes through the object store. Holding on to it keeps the value in
            the store of the driver's node.
    """

    result: Callable[[float | None], Any]
    reference: Any = None


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
    """Put a value into Ray's object store, once for all ranks, whatever the group will look like then."""
    import ray

    reference = ray.put(value)
    return SharedValue(ray.get(reference), reference)


def transfer(call: Any) -> Transfer:
    """Return what a call will return, on its way."""
    if isinstance(call, LocalCall):
        value = call.function()
        return Transfer(lambda timeout_s: value)
    import ray

    sent_in = session()

    def result(timeout_s: float | None) -> Any:
        if session() != sent_in:
            raise WorkersLostError("The Ray session in which it was sent has ended.")
        try:
            return ray.get(call, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("still on its way") from error

    return Transfer(result, call)


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


def together(
    transfers: Sequence[Transfer], nodes: Sequence[str], relays: Mapping[int, tuple[Transfer, StoredPart]]
) -> Transfer:
    """Return the parts of all ranks, on their way to the driver's node or to partners, as one `DividedValue`.

    Args:
        transfers: The part of each rank.
        nodes: The node of each rank.
        relays: By rank: of those that partners keep, what has a result when the copy is there, and its place. They do
            not come to the driver's node.
    """

    def places(rank: int) -> tuple[StoredPart, ...]:
        reference = transfers[rank].reference
        copies = (relays[rank][1],) if rank in relays else ()
        return () if reference is None else (StoredPart(nodes[rank], reference), *copies)

    def result(timeout_s: float | None) -> DividedValue:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        values = []
        for rank, each in enumerate(transfers):
            awaited = relays[rank][0] if rank in relays else each
            value = awaited.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            values.append(None if rank in relays else value)
        return DividedValue(tuple(values), tuple(map(places, range(len(values)))))

    return Transfer(result)
