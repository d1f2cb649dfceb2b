"""Data that the driver divides: Ray Data that operators registered, and what single calls bring along."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.arrays.data_kinds import CallData, DataPosition, Kind, call_data_of
from raysgd.arrays.ray_batches import RayBatches
from raysgd.arrays.ray_data import are_cpus_free
from raysgd.engine.shared.types import World
from raysgd.engine.worker import identity, packed_bytes
from raysgd.messages.batching import config_for_worker

Requests = list[tuple[Any, ...]]
"""For each rank a request, and its share behind it if it is given one: Ray hands that over by itself."""


def place_share(use_local: bool, rank: int, share: Any) -> Any:
    """Put a share where its rank can take it from; return what to send. Ray knows who holds one that travels alone.

    Args:
        use_local: Whether rank 0 is in the driver, where its share stays.
        rank: The rank.
        share: Its share.
    """
    if use_local and rank == 0:
        return share
    import ray

    try:
        return ray.put(share)
    except TypeError:
        packed_bytes("What the call is given", share)  # says what cannot be pickled, and what to do
        raise


@dataclass(frozen=True)
class _Division:
    data: Any
    worlds: Sequence[World]
    kind: Kind
    key: str


class DataSharing:
    """Adds to requests what each worker needs of such data: once for each group, as long as calls succeed.

    What workers have been given they keep, and with it their place in it. A call that fails may leave them at different
    places, so they are given new shares after it.

    Args:
        config: That of all workers together.
        place: Puts the share of a rank where the rank can take it from.
        call_data_of: Says of data of a call, with the config of one worker, who divides them.
        config_for: Makes of the config of all workers the one of a worker, one of so many.
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
        """Requests with shares of Ray Data that operators registered.

        Args:
            requests: By rank.
            name: "train" or "validation".
            batches: What is registered.
            worlds: The group; the same object as long as the group is the same.
        """
        _, shares = self._shares(name, batches, CallData("ray", batches), worlds)
        return self._with_shares(requests, shares)

    def with_data_of_call(self, requests: Requests, name: str, dataset: Any, worlds: Sequence[World]) -> Requests:
        """Requests with shares of a dataset that takes the place of what is registered, for one call.

        Args:
            requests: By rank.
            name: "train" or "validation".
            dataset: What the call was given, of a kind that `call_data_of` knows.
            worlds: The group.
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
        """Note where a call stopped, for the next one with the same object."""
        self._places[name] = identity(dataset), place

    def places_to_keep(self) -> dict[str, tuple[str, DataPosition | None]]:
        """Return where calls stopped in data that a program sends again, for another process."""
        return {name: (token, place) for name, (token, place) in self._places.items() if isinstance(token, str)}

    def take_over(self, kept: Mapping[str, tuple[str, DataPosition | None]]) -> None:
        """Go on at places that another process has kept."""
        self._places = {name: (sys.intern(token), place) for name, (token, place) in kept.items()}

    def follow(self, config: Mapping[str, Any]) -> None:
        """Make new shares of what functions make of the config, which is another one from now on."""
        self._config = config
        self._divisions = {name: each for name, each in self._divisions.items() if each.kind != "creator"}

    def forget(self) -> None:
        """Make new shares in the next call."""
        self._divisions.clear()

    def _with_shares(self, requests: Requests, shares: Sequence[CallData]) -> Requests:
        if not shares:
            return requests
        if all(share is shares[0] for share in shares):
            return [(*each, share) for each, share in zip(requests, placed_once(self._place, shares), strict=True)]
        return [(*each, self._place(rank, shares[rank])) for rank, each in enumerate(requests)]

    def _shares(self, name: str, given: Any, data: CallData, worlds: Sequence[World]) -> tuple[str, Sequence[CallData]]:
        """A name for what workers have, and what each is given; nothing if they have it."""
        known = self._divisions.get(name)
        if known is not None and known.data is identity(given) and known.worlds is worlds:
            return known.key, ()
        if data.kind == "ray":
            self._has_warned = self._has_warned or not are_cpus_free()
        shares = data.shares(len(worlds))
        self._divisions[name] = _Division(identity(given), worlds, data.kind, uuid.uuid4().hex)
        return self._divisions[name].key, shares


def placed_once(place: Callable[[int, Any], Any], shares: Sequence[Any]) -> list[Any]:
    """One share for all ranks, put once for all of those that it has to travel to."""
    share, num_others = shares[0], len(shares) - 1
    first = place(0, share)
    is_local = first is share  # and the others are elsewhere
    return [first, *[place(1, share) if is_local and num_others else first] * num_others]
