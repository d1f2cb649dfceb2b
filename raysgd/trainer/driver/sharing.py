"""Data that the driver divides among the workers: registered Ray Data, and the data of single calls."""

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
"""For each rank a request, followed by its share of the data if it gets one. Ray delivers the share."""


def place_share(use_local: bool, rank: int, share: Any) -> Any:
    """Store the share of a rank, and return what to send. If it is an argument of its own, Ray tracks who holds it.

    Args:
        use_local: Whether rank 0 is in the driver. Its share then stays there.
        rank: The rank.
        share: Its share of the data.
    """
    if use_local and rank == 0:
        return share
    import ray

    try:
        return ray.put(share)
    except TypeError:
        packed_bytes("What the call is given", share)  # raises an error that says what cannot be pickled
        raise


@dataclass(frozen=True)
class _Division:
    data: Any
    worlds: Sequence[World]
    kind: Kind
    key: str


class DataSharing:
    """Adds to each request the worker's share of the data: once per group, as long as calls succeed.

    Workers keep their shares and their places in them. A failed call may leave workers at different places, so they
    get new shares after it.

    Args:
        config: The config for all workers together.
        place: Stores the share of a rank, and returns what to send.
        call_data_of: Takes the data of a call and the config of one worker, and says who divides the data.
        config_for: Makes the config of one worker from the common config and the number of workers.
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
        """Return the requests with shares of the Ray Data that operators registered.

        Args:
            requests: The requests by rank.
            name: "train" or "validation".
            batches: The registered data.
            worlds: The places in the group. The same object means the same group.
        """
        _, shares = self._shares(name, batches, CallData("ray", batches), worlds)
        return self._with_shares(requests, shares)

    def with_data_of_call(self, requests: Requests, name: str, dataset: Any, worlds: Sequence[World]) -> Requests:
        """Return the requests with shares of a dataset that replaces the registered data for one call.

        Args:
            requests: The requests by rank.
            name: "train" or "validation".
            dataset: The dataset of the call, of a kind that `call_data_of` knows.
            worlds: The places in the group, as in `with_registered`.
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
        """Keep the place where a call stopped, for the next call with the same object."""
        self._places[name] = identity(dataset), place

    def places_to_keep(self) -> dict[str, tuple[str, DataPosition | None]]:
        """Return the places where calls stopped, for another process. Data that is not sent again has none."""
        return {name: (token, place) for name, (token, place) in self._places.items() if isinstance(token, str)}

    def take_over(self, kept: Mapping[str, tuple[str, DataPosition | None]]) -> None:
        """Continue at the places that another process has kept."""
        self._places = {name: (sys.intern(token), place) for name, (token, place) in kept.items()}

    def follow(self, config: Mapping[str, Any]) -> None:
        """Use a changed config. Data that functions make from the config gets new shares."""
        self._config = config
        self._divisions = {name: each for name, each in self._divisions.items() if each.kind != "creator"}

    def forget(self) -> None:
        """Give workers new shares in the next call."""
        self._divisions.clear()

    def _with_shares(self, requests: Requests, shares: Sequence[CallData]) -> Requests:
        if not shares:
            return requests
        if all(share is shares[0] for share in shares):
            return [(*each, share) for each, share in zip(requests, placed_once(self._place, shares), strict=True)]
        return [(*each, self._place(rank, shares[rank])) for rank, each in enumerate(requests)]

    def _shares(self, name: str, given: Any, data: CallData, worlds: Sequence[World]) -> tuple[str, Sequence[CallData]]:
        """Return a key for the shares, and the shares by rank. No shares if the workers have them already."""
        known = self._divisions.get(name)
        if known is not None and known.data is identity(given) and known.worlds is worlds:
            return known.key, ()
        if data.kind == "ray":
            self._has_warned = self._has_warned or not are_cpus_free()
        shares = data.shares(len(worlds))
        self._divisions[name] = _Division(identity(given), worlds, data.kind, uuid.uuid4().hex)
        return self._divisions[name].key, shares


def placed_once(place: Callable[[int, Any], Any], shares: Sequence[Any]) -> list[Any]:
    """Return one share for all ranks. It is stored once for all ranks outside the driver."""
    share, num_others = shares[0], len(shares) - 1
    first = place(0, share)
    is_local = first is share  # other ranks need a stored copy
    return [first, *[place(1, share) if is_local and num_others else first] * num_others]
