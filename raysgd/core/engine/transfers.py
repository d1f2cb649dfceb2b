"""Transfers of large values, such as snapshots, between the driver and the workers.

ADR 131 explains why workers send such values from a separate thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.cluster.ray_cluster import delaying_shutdown, in_session, is_ray_thread, session
from raysgd.core.engine.worker import LocalCall, node_here
from raysgd.exceptions import WorkersLostError

# Seconds to wait for the workers' reports about their steps. While a call runs, a later request brings missing reports.
_REPORTS_S = 1.0
# Seconds to wait for these reports after the call, when no later request follows. The workers are idle then, but their
# machine may be busy.
_LAST_REPORTS_S = 10.0


@dataclass(frozen=True)
class Transfer:
    """A value in transit, usually from a worker to the driver.

    Attributes:
        result: Waits for the value and returns it. The argument is the number of seconds to wait, or None for no limit.
            Raises `TimeoutError` if the value is still in transit, and any other error if the value is lost.
        reference: Ray's reference to the value, if it is sent through the object store. While the reference exists, Ray
            does not delete the value.
    """

    result: Callable[[float | None], Any]
    reference: Any = None


@dataclass(frozen=True)
class SharedValue:
    """A value that the driver passes to all ranks.

    Attributes:
        value: The value. If it is stored in Ray's object store, this is the copy on the driver's node.
        reference: Ray's reference to the value. None if it is not stored.
    """

    value: Any
    reference: Any


def store(value: Any) -> SharedValue:
    """Put a value into Ray's object store, where the ranks of any group can read it."""
    import ray

    with delaying_shutdown():
        reference = ray.put(value)
        return SharedValue(ray.get(reference), reference)


def transfer(call: Any) -> Transfer:
    """Return a `Transfer` that receives the result of a call.

    Args:
        call: Ray's reference to a remote call, or a call to the local worker. A local call runs at once.
    """
    if isinstance(call, LocalCall):
        value = call.function()
        return Transfer(lambda timeout_s: value)
    import ray

    sent_in = session()

    def result(timeout_s: float | None) -> Any:
        with in_session(sent_in):
            try:
                if not is_ray_thread():
                    return ray.get(call, timeout=timeout_s)
                # If Ray is shut down while a thread reads from the object store, Ray aborts the process or spins.
                if not ray.wait([call], timeout=timeout_s, fetch_local=False)[0]:
                    raise TimeoutError("the result is still in transit")
                with delaying_shutdown(), in_session(sent_in):
                    return ray.get(call, timeout=timeout_s)
            except ray.exceptions.GetTimeoutError as error:
                raise TimeoutError("the result is still in transit") from error

    return Transfer(result, call)


def ask_all(group: Any, function: Any, *args: Any, are_last: bool) -> tuple[list[Any], Exception | None]:
    """Ask all ranks for reports about their steps. Return the reports that arrive in time, and the first error.

    Args:
        group: The worker group.
        function: Called on the replicas, beside their work. See `WorkerGroup.fetch`.
        args: Arguments of the function, after the replica.
        are_last: True if the reports are not requested again, for example because the call has ended. The wait may then
            take longer.
    """
    transfers = [group.fetch(rank, function, *args) for rank in range(len(group))]
    reports, failure = list[Any](), None
    until = time.monotonic() + (_LAST_REPORTS_S if are_last else _REPORTS_S)
    for each in transfers:
        try:
            reports.append(each.result(max(0.0, until - time.monotonic())))
        except Exception as error:  # the report is late, or its worker was lost
            failure = failure or error
    return reports, failure


@dataclass(frozen=True)
class StoredPart:
    """A copy of one shard, in the object store of a node.

    Attributes:
        node_id: ID of the node.
        reference: Ray's reference to the copy.
    """

    node_id: str
    reference: Any


@dataclass(frozen=True)
class DividedValue:
    """A value that is sharded over the ranks, one shard per rank.

    A pickled `DividedValue` contains references instead of the stored shards. Each process that receives it reads only
    the shards that it needs.

    Attributes:
        values: The shards that are in this process, by rank. None for the other shards.
        places: The stored copies of each shard, by rank: up to two copies, in the order in which to try them. Empty for
            a shard that is only in this process.
    """

    values: tuple[Any, ...]
    places: tuple[tuple[StoredPart, ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        own = [None if places else value for value, places in zip(self.values, self.places, strict=True)]
        return DividedValue, (tuple(own), self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        """Return the shard of a rank.

        Raises:
            LostPartError: All copies of the shard were lost.
        """
        import ray

        if self.values[index] is not None or not self.places[index]:
            return self.values[index]
        for place in self.places[index]:
            try:
                return ray.get(place.reference)
            except ray.exceptions.ObjectLostError:
                continue
        raise LostPartError(f"The last snapshot is lost, because no remaining node has the shard of rank {index}.")

    def best_on(self, nodes: Collection[str]) -> DividedValue:
        """Return the same value, with its copies reordered: readers try copies on `nodes` first.

        If this process holds a shard, but no copy of it is on `nodes` or on this node, store a copy on this node.

        Args:
            nodes: IDs of nodes that are alive. Other nodes may be lost.
        """
        home, values, places = node_here()[0], list[Any](), list[tuple[StoredPart, ...]]()
        for value, places_of_part in zip(self.values, self.places, strict=True):
            best = tuple(sorted(places_of_part, key=lambda place: place.node_id not in nodes))
            if value is not None and best and not any(place.node_id in (*nodes, home) for place in best):
                # Without this copy, readers would wait until Ray notices that the node is lost: see ADR 92.
                stored = store(value)
                value, best = stored.value, (StoredPart(home, stored.reference),)
            values.append(value)
            places.append(best)
        return DividedValue(tuple(values), tuple(places))


class LostPartError(WorkersLostError):
    """A shard of a snapshot cannot be read, because all copies of the shard were lost."""


def together(
    transfers: Sequence[Transfer], nodes: Sequence[str], relays: Mapping[int, tuple[Transfer, StoredPart]]
) -> Transfer:
    """Combine the transfers of all ranks' shards into one transfer, which receives a `DividedValue`.

    Args:
        transfers: The transfer of each rank's shard, by rank.
        nodes: ID of each rank's node, by rank.
        relays: The shards that are copied to a partner rank instead of the driver, by the rank that sends the shard.
            Each item is a pair: a transfer that finishes once the copy exists, and the copy.
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
