"""Divides datasets over the workers: Ray Data that operators registered, and data that users pass to single calls.

Other registered data is divided by the workers themselves.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.arrays.user_data import CallData, Kind, RayBatches, are_cpus_free, call_data_of
from raysgd.core.engine.shared.types import World
from raysgd.core.sending import identity, packed_bytes
from raysgd.trainer.configuration import ReplicaSettings

Requests = list[tuple[Any, ...]]
"""For each rank, the arguments to send: the request, and also the rank's shard of the data if the rank lacks it."""


def store_share(use_local: bool, rank: int, share: Any) -> Any:
    """Put a rank's shard of the data into Ray's object store, and return the reference to send to the rank.

    The reference must be passed to a Ray call as a separate argument. Inside another object, Ray could not track
    which processes use the shard.

    Args:
        use_local: Whether rank 0 runs in the driver. The shard of rank 0 is then returned unchanged.
        rank: Rank of the worker that receives the shard.
        share: The rank's shard of the data.
    """
    if use_local and rank == 0:
        return share
    import ray

    try:
        return ray.put(share)
    except TypeError:
        packed_bytes("What the call is given", share)  # raises a clearer error, which names what cannot be pickled
        raise


@dataclass(frozen=True)
class _Division:
    data: Any
    worlds: Sequence[World]
    kind: Kind
    key: str


class DataSharing:
    """Divides datasets over the workers, and adds each worker's shard to the request that the worker receives.

    For some kinds of data, such as Ray Data, workers keep their shards, and their positions in the shards, for later
    calls. The driver then sends new shards only if the group of workers or the data has changed, or after a failed
    call. A failed call may have left workers at different positions. Other data is sent in each call. See
    `CallData.keeps_position`.

    Args:
        settings: The trainer's settings. The batch size in their config is that of all workers together.
        store: Function that stores the shard of a rank and returns the argument to send, as `store_share` does.
        call_data_of: Function that returns how to divide data over the workers, as a `CallData`. Its arguments are the
            data that the user passed to a call, and the config of one worker.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        store: Callable[[int, Any], Any],
        call_data_of: Callable[[Any, Mapping[str, Any]], CallData | None] = call_data_of,
    ) -> None:
        self._settings = settings
        self._store = store
        self._call_data_of = call_data_of
        self._positions: dict[str, tuple[Any, Mapping[str, Any] | None]] = {}
        self._divisions: dict[str, _Division] = {}
        self._has_warned = False

    def with_registered(self, requests: Requests, name: str, batches: RayBatches, worlds: Sequence[World]) -> Requests:
        """Return the requests with each rank's shard of the Ray Data that operators registered in `setup`.

        If the workers already have these shards, no shards are added.

        Args:
            requests: The requests by rank.
            name: "train" or "validation".
            batches: The registered data.
            worlds: Each worker's rank and group size. The same list object as in the last call means that the group of
                workers has not changed.
        """
        _, shares = self._shares(name, batches, CallData("ray", batches), worlds)
        return self._with_shares(requests, shares)

    def with_data_of_call(self, requests: Requests, name: str, dataset: Any, worlds: Sequence[World]) -> Requests:
        """Return the requests with each rank's shard of a dataset that the user passed to one call.

        If the workers still have their shards from an earlier call and can reuse them, no shards are added.

        Args:
            requests: The requests by rank.
            name: "train" or "validation".
            dataset: The dataset that the user passed to the call, of a type that `call_data_of` supports.
            worlds: Each worker's rank and group size, as for `with_registered`.
        """
        data, of_call = self._call_data_of(dataset, self._settings.config_for(len(worlds))), f"{name} of a call"
        assert data is not None, "the call has checked it"
        if not data.keeps_position:
            self._divisions.pop(of_call, None)
        known, position = self._positions.get(name, (None, None))
        begun = replace(data, place=position) if known is identity(dataset) else data
        key, shares = self._shares(of_call, dataset, begun, worlds)
        return self._with_shares([(replace(each, shard_key=key),) for (each,) in requests], shares)

    def note_position(self, name: str, dataset: Any, position: Mapping[str, Any] | None) -> None:
        """Remember the position at which a call stopped in the dataset that the user passed to it.

        The next call with the same dataset continues from there.

        Args:
            name: "train" or "validation".
            dataset: The dataset.
            position: The position, or None if the next call starts from the beginning.
        """
        self._positions[name] = identity(dataset), position

    def positions_to_keep(self) -> dict[str, tuple[str, Mapping[str, Any] | None]]:
        """Return the positions at which calls stopped in datasets, for a later process that continues this trainer.

        Only datasets that another process sent to this one are included. Such a dataset has a token, by which the later
        process can recognize it.
        """
        return {
            name: (token, position) for name, (token, position) in self._positions.items() if isinstance(token, str)
        }

    def take_over(self, kept: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Let later calls continue in their datasets from positions that another process stored.

        Args:
            kept: The positions, as `positions_to_keep` returned them.
        """
        self._positions = {name: (sys.intern(token), position) for name, (token, position) in kept.items()}

    def follow(self, settings: ReplicaSettings) -> None:
        """Use settings with a changed config.

        If a creator function builds a dataset from the config, the next call builds and divides the dataset again.
        """
        self._settings = settings
        self._divisions = {name: each for name, each in self._divisions.items() if each.kind != "creator"}

    def forget(self) -> None:
        """Forget which shards the workers have. The next call then sends a shard to each worker again."""
        self._divisions.clear()

    def _with_shares(self, requests: Requests, shares: Sequence[CallData]) -> Requests:
        if not shares:
            return requests
        if all(share is shares[0] for share in shares):
            return [(*each, share) for each, share in zip(requests, stored_once(self._store, shares), strict=True)]
        return [(*each, self._store(rank, shares[rank])) for rank, each in enumerate(requests)]

    def _shares(
        self, name: str, dataset: Any, data: CallData, worlds: Sequence[World]
    ) -> tuple[str, Sequence[CallData]]:
        """Split the data into one shard per rank. Return a key that identifies this split, and the shards by rank.

        If the workers already have these shards, return an empty sequence instead of the shards.
        """
        known = self._divisions.get(name)
        if known is not None and known.data is identity(dataset) and known.worlds is worlds:
            return known.key, ()
        if data.kind == "ray":
            self._has_warned = self._has_warned or not are_cpus_free()
        shares = data.shares(len(worlds))
        self._divisions[name] = _Division(identity(dataset), worlds, data.kind, uuid.uuid4().hex)
        return self._divisions[name].key, shares


def stored_once(store: Callable[[int, Any], Any], shares: Sequence[Any]) -> list[Any]:
    """Store a value that is sent to all ranks, and return the argument to send to each rank.

    Ranks outside the driver share one copy in Ray's object store.

    Args:
        store: Function that stores the value for a rank and returns the argument to send, as `store_share` does.
        shares: The value, repeated for each rank.
    """
    share, num_others = shares[0], len(shares) - 1
    first = store(0, share)
    # If rank 0 runs in the driver, `store` has not put its value into Ray's object store. Store it for the other ranks.
    is_local = first is share
    return [first, *[store(1, share) if is_local and num_others else first] * num_others]
