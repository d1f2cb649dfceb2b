"""Data that the driver divides: Ray Data that operators registered, and what single calls bring along."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd._ray_data import are_cpus_free
from raysgd.engine.types import World
from raysgd.replicas.batching import config_for_worker
from raysgd.replicas.ray_batches import RayBatches, RayShare, ray_batches

Requests = list[tuple[Any, ...]]
"""For each rank a request, and its share behind it if it is given one: Ray hands that over by itself."""


@dataclass(frozen=True)
class _Division:
    data: Any
    worlds: Sequence[World]
    key: str


class Sharing:
    """Adds to requests what each worker needs of such data: once for each group, as long as calls succeed.

    What workers have been given they keep, and with it their place in it. A call that fails may leave them at different
    places, so they are given new shares after it.

    Args:
        config: That of all workers together.
        place: Puts the share of a rank where the rank can take it from.
    """

    def __init__(self, config: Mapping[str, Any], place: Callable[[int, Any], Any]) -> None:
        self._config = config
        self._place = place
        self._divisions: dict[str, _Division] = {}
        self._has_warned = False

    def with_registered(
        self, requests: Requests, name: str, batches: RayBatches | None, worlds: Sequence[World]
    ) -> Requests:
        """Requests with shares of Ray Data that operators registered.

        Args:
            requests: By rank.
            name: "train" or "validation".
            batches: What is registered; None if it is not of Ray Data.
            worlds: The group; the same object as long as the group is the same.
        """
        if batches is None:
            return requests
        _, shares = self._shares(name, batches, worlds, lambda: self._dealt(batches, worlds))
        return self._with_shares(requests, shares)

    def with_data_of_call(self, requests: Requests, name: str, dataset: Any, worlds: Sequence[World]) -> Requests:
        """Requests with shares of a dataset that takes the place of what is registered, for one call.

        Args:
            requests: By rank.
            name: "train" or "validation".
            dataset: Of Ray Data, or with `set_num_shards(n)` and `get_shard(i)`.
            worlds: The group.
        """
        if ray_batches(dataset) is None and not getattr(dataset, "keeps_position", False):
            self._divisions.pop(_of_call(name), None)  # what it gives may be something else each time
        key, shares = self._shares(_of_call(name), dataset, worlds, lambda: self._divided(dataset, worlds))
        return self._with_shares([(replace(each, shard_key=key),) for (each,) in requests], shares)

    def forget(self) -> None:
        """Makes new shares in the next call."""
        self._divisions.clear()

    def _with_shares(self, requests: Requests, shares: Sequence[Any]) -> Requests:
        if not shares:
            return requests
        return [(*each, self._place(rank, shares[rank])) for rank, each in enumerate(requests)]

    def _shares(
        self, name: str, data: Any, worlds: Sequence[World], divide: Callable[[], Sequence[Any]]
    ) -> tuple[str, Sequence[Any]]:
        """A name for what workers have, and what each is given; nothing if they have it."""
        known = self._divisions.get(name)
        if known is not None and known.data is data and known.worlds is worlds:
            return known.key, ()
        shares = divide()
        self._divisions[name] = _Division(data, worlds, uuid.uuid4().hex)
        return self._divisions[name].key, shares

    def _divided(self, dataset: Any, worlds: Sequence[World]) -> Sequence[Any]:
        batches = ray_batches(dataset)
        if batches is not None:
            return self._dealt(batches.sized(config_for_worker(self._config, len(worlds))), worlds)
        dataset.set_num_shards(len(worlds))
        return [dataset.get_shard(world.rank) for world in worlds]

    def _dealt(self, batches: RayBatches, worlds: Sequence[World]) -> Sequence[RayShare]:
        self._has_warned = self._has_warned or not are_cpus_free()
        return batches.shares(len(worlds))


def _of_call(name: str) -> str:
    return f"{name} of a call"
