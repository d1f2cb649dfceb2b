"""Transfers of values between the driver and the workers.

ADR 131 explains why sending has its own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.engine.placement import session
from raysgd.core.engine.worker import LocalCall, node_here
from raysgd.exceptions import WorkersLostError


@dataclass(frozen=True)
class Transfer:
    """A value on its way from a worker to the driver.

    Attributes:
        result: Returns the value. Its argument is the number of seconds to wait, or None for no limit. Raises
            `TimeoutError` if the value is still on its way, any other error if it is lost.
        reference: Ray's reference to the value, if it comes through the object store. Keep it to keep the value in the
            store of the driver's node.
    """

    result: Callable[[float | None], Any]
    reference: Any = None


@dataclass(frozen=True)
class SharedValue:
    """A value for all ranks.

    Attributes:
        value: The value. If there are remote ranks, it is the one in the object store of the driver's node.
        reference: Ray's reference to it.
    """

    value: Any
    reference: Any


def store(value: Any) -> SharedValue:
    """Put a value into Ray's object store, once for all ranks of any group."""
    import ray

    reference = ray.put(value)
    return SharedValue(ray.get(reference), reference)


def transfer(call: Any) -> Transfer:
    """Return the transfer of a call's result."""
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
    """A part of a divided value, in the object store of a node.

    Attributes:
        node_id: The node.
        reference: Ray's reference to the part.
    """

    node_id: str
    reference: Any


@dataclass(frozen=True)
class DividedValue:
    """A value that is divided over the ranks: one part for each rank.

    The driver keeps the parts without reading them. Other processes get references, and read the parts that they need.

    Attributes:
        values: The parts that are in this process; None for the others.
        places: For each part in the object store, its one or two places, in the order in which to try them.
    """

    values: tuple[Any, ...]
    places: tuple[tuple[StoredPart, ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        own = [None if places else value for value, places in zip(self.values, self.places, strict=True)]
        return DividedValue, (tuple(own), self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        """Return the part of a rank.

        Raises:
            LostPartError: The part was lost.
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
        """Return the same parts, read from these nodes if possible, because other nodes may be lost."""
        home, values, places = node_here()[0], list[Any](), list[tuple[StoredPart, ...]]()
        for value, places_of_part in zip(self.values, self.places, strict=True):
            best = tuple(sorted(places_of_part, key=lambda place: place.node_id not in nodes))
            if value is not None and best and not any(place.node_id in (*nodes, home) for place in best):
                stored = store(value)  # otherwise readers ask the lost node first, and wait until Ray notices: ADR 92
                value, best = stored.value, (StoredPart(home, stored.reference),)
            values.append(value)
            places.append(best)
        return DividedValue(tuple(values), tuple(places))


class LostPartError(WorkersLostError):
    """A part of a snapshot was lost together with its copy."""


def together(
    transfers: Sequence[Transfer], nodes: Sequence[str], relays: Mapping[int, tuple[Transfer, StoredPart]]
) -> Transfer:
    """Return one transfer of all parts as a `DividedValue`. Parts go to the driver's node or to partner ranks.

    Args:
        transfers: The part of each rank.
        nodes: The node of each rank.
        relays: By rank, for parts that a partner keeps: a transfer that is done once the copy exists, and the copy's
            place. These parts do not come to the driver's node.
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
