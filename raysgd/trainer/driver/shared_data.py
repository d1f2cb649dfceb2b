"""Data that the driver shards among the workers: registered Ray Data, and data passed to single calls."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.arrays.data_kinds import CallData, DataPosition, Kind, call_data_of
from raysgd.core.arrays.ray_batches import RayBatches
from raysgd.core.arrays.ray_data import are_cpus_free
from raysgd.core.engine.shared.types import World
from raysgd.core.engine.worker import identity, packed_bytes
from raysgd.trainer.configuration.batching import config_for_worker

Requests = list[tuple[Any, ...]]
"""For each rank, the arguments to send: the request, and the rank's shard of the data unless the rank has it."""


def place_share(use_local: bool, rank: int, share: Any) -> Any:
    """Put a rank's shard into Ray's object store and return the reference to send.

    The reference must be passed as an argument of its own, not inside another object. Otherwise Ray cannot track which
    processes use the shard.

    Args:
        use_local: Whether rank 0 runs in the driver. Its shard is then returned unchanged.
        rank: Rank of the worker that receives the shard.
        share: The rank's shard of the data.
    """
    if use_local and rank == 0:
        return share
    import ray

    try:
        return ray.put(share)
    except TypeError:
        packed_bytes("What the call is given", share)  # raises an error that names the object that cannot be pickled
        raise


@dataclass(frozen=True)
class _Division:
    data: Any
    worlds: Sequence[World]
    kind: Kind
    key: str


class DataSharing:
    """Adds each worker's shard of the data to its request. A group receives its shards only once, until a call fails.

    Workers keep their shards and their positions in them. A failed call may leave workers at different positions, so
    the workers receive new shards after it.

    Args:
        config: The config for all workers together.
        place: Stores a rank's shard and returns the argument to send, as `place_share` does.
        call_data_of: Takes a call's data and one worker's config. Returns a `CallData`, which says how the data is
            sharded.
        config_for: Builds one worker's config from the common config and the number of workers.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        place: Callable[[int, Any], Any],
        call_data_of: Callable[[Any, Mapping[str, Any]], CallData | None] = call_data_of,
        config_for: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = config_for_worker,
    ) -> None:
        self._config = config
        self._place = place
        self._call_data_of = call_data_of
        self._config_for = config_for
        self._places: dict[str, tuple[Any, DataPosition | None]] = {}
        self._divisions: dict[str, _Division] = {}
        self._has_warned = False

    def with_registered(self, requests: Requests, name: str, batches: RayBatches, worlds: Sequence[World]) -> Requests:
        """Return the requests with shards of the Ray Data that operators registered.

        Args:
            requests: The requests by rank.
            name: "train" or "validation".
            batches: The registered data.
            worlds: Each worker's rank and group size. Passing the identical list object means that the group has not
                changed.
        """
        _, shares = self._shares(name, batches, CallData("ray", batches), worlds)
        return self._with_shares(requests, shares)

    def with_data_of_call(self, requests: Requests, name: str, dataset: Any, worlds: Sequence[World]) -> Requests:
        """Return the requests with shards of a dataset that replaces the registered data for one call.

        Args:
            requests: The requests by rank.
            name: "train" or "validation".
            dataset: The call's dataset, of a type that `call_data_of` supports.
            worlds: Each worker's rank and group size, as for `with_registered`.
        """
        data, of_call = self._call_data_of(dataset, self._config_for(self._config, len(worlds))), f"{name} of a call"
        assert data is not None, "the call has checked it"
        if not data.keeps_position:
            self._divisions.pop(of_call, None)
        known, place = self._places.get(name, (None, None))
        begun = replace(data, place=place) if known is identity(dataset) else data
        key, shares = self._shares(of_call, dataset, begun, worlds)
        return self._with_shares([(replace(each, shard_key=key),) for (each,) in requests], shares)

    def note_place(self, name: str, dataset: Any, place: DataPosition | None) -> None:
        """Record the position at which a call stopped in its dataset, for the next call with the same dataset."""
        self._places[name] = identity(dataset), place

    def places_to_keep(self) -> dict[str, tuple[str, DataPosition | None]]:
        """Return the positions at which calls stopped in their datasets, for a process that continues this trainer.

        Only data that a driver sent to this process is included, because only such data has a token by which the later
        process can recognize it.
        """
        return {name: (token, place) for name, (token, place) in self._places.items() if isinstance(token, str)}

    def take_over(self, kept: Mapping[str, tuple[str, DataPosition | None]]) -> None:
        """Continue datasets from the positions that another process has stored."""
        self._places = {name: (sys.intern(token), place) for name, (token, place) in kept.items()}

    def follow(self, config: Mapping[str, Any]) -> None:
        """Use a changed config. The next call shards data again if a creator function builds it from the config."""
        self._config = config
        self._divisions = {name: each for name, each in self._divisions.items() if each.kind != "creator"}

    def forget(self) -> None:
        """Discard the cached shards, so that the next call recomputes them."""
        self._divisions.clear()

    def _with_shares(self, requests: Requests, shares: Sequence[CallData]) -> Requests:
        if not shares:
            return requests
        if all(share is shares[0] for share in shares):
            return [(*each, share) for each, share in zip(requests, placed_once(self._place, shares), strict=True)]
        return [(*each, self._place(rank, shares[rank])) for rank, each in enumerate(requests)]

    def _shares(self, name: str, given: Any, data: CallData, worlds: Sequence[World]) -> tuple[str, Sequence[CallData]]:
        """Return the shards' key, and the shards by rank.

        If the workers already have the shards, the shards returned are empty.
        """
        known = self._divisions.get(name)
        if known is not None and known.data is identity(given) and known.worlds is worlds:
            return known.key, ()
        if data.kind == "ray":
            self._has_warned = self._has_warned or not are_cpus_free()
        shares = data.shares(len(worlds))
        self._divisions[name] = _Division(identity(given), worlds, data.kind, uuid.uuid4().hex)
        return self._divisions[name].key, shares


def placed_once(place: Callable[[int, Any], Any], shares: Sequence[Any]) -> list[Any]:
    """Return the argument for each rank that sends the same value to all. Ranks outside the driver share one copy."""
    share, num_others = shares[0], len(shares) - 1
    first = place(0, share)
    # If rank 0 runs in the driver, its value was not put into Ray's object store, so the other ranks need a copy.
    is_local = first is share
    return [first, *[place(1, share) if is_local and num_others else first] * num_others]
