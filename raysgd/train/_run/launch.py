"""The start of a run's function on a group of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raysgd._state.state_codec import lend
from raysgd.engine.shared.types import World
from raysgd.train._rules.arrivals import CheckpointTaker
from raysgd.train._rules.worker_handles import Worker
from raysgd.train._run.plugin_hooks import PluginHooks
from raysgd.train._worker.messages import FunctionSpec


class DivideData(Protocol):
    """Divides data over workers, whenever they start."""

    @property
    def is_whole(self) -> bool:
        """True if every worker gets the same, and takes its part by its place."""

    def __call__(self, num_workers: int, workers: Sequence[Worker]) -> Sequence[Any]:
        """Return, for a number of workers that start, and for these, what each gets, by rank."""


class Launch:
    """The arguments of every call of a run: nothing where the function runs, else what it takes to start it there.

    The controller asks for them at each attempt. There is no way back from here to the controller: the group is the one
    that the hooks saw start.

    Attributes:
        is_muted: Whether a function that is started does not wait for its reports to be read.
        attempt: Which group of workers it was started on last; None before.
        is_elastic: Whether it goes on where it is when some of these are lost.
    """

    def __init__(
        self, spec: FunctionSpec, checkpoints: CheckpointTaker, data: DivideData | None, hooks: PluginHooks
    ) -> None:
        self._spec = spec
        self._checkpoints = checkpoints
        self._data = data
        self._hooks = hooks
        self.is_muted = False
        self.is_elastic = spec.is_elastic
        self.attempt: int | None = None
        self._num_changes = 0

    def __call__(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """The arguments of each rank."""
        if self.has_started:
            return [()] * len(worlds)
        start = self._start(len(worlds))
        self.attempt = self._hooks.num_started
        return start

    @property
    def has_started(self) -> bool:
        """True if the function runs on the workers that there are, or on those that are left of them."""
        return self.attempt == self._hooks.num_started

    @property
    def members(self) -> Mapping[Any, int]:
        """The name of each worker on which it runs, by rank, whatever its rank was before.

        With it comes the number of the group, since the function began, in which it stepped in; 0 where it did not.
        """
        infos = self._hooks.group.infos if self.has_started else ()
        return {info: max(0, self._hooks.joined.get(info, 0) - self._num_changes) for info in infos}

    @property
    def can_be_joined(self) -> bool:
        """True if others can step in where the function is."""
        return self.is_elastic and bool(self._hooks.replicas.start)

    def end(self) -> None:
        """The function has ended; those that ran it in advance end with it."""
        self._hooks.replicas.start = ()
        self._hooks.group.standby.kill_all()

    def _start(self, num_workers: int) -> list[tuple[Any, ...]]:
        self._hooks.on_training_start()
        self._checkpoints.begin_attempt()
        self._num_changes = self._hooks.num_changes
        is_whole = self._data is None or self._data.is_whole
        spec = replace(self._spec, is_muted=self.is_muted, has_parts=not is_whole)
        checkpoint = self._checkpoints.restart_point
        shared: Any = None
        if checkpoint is not None:
            [shared, *_] = self._hooks.group.share(lend(checkpoint))
        parts = [None] if self._data is None else self._data(num_workers, self._hooks.workers.workers)
        if not is_whole:
            return [(spec, shared, self._hooks.store(part)) for part in parts]
        start = spec, shared, parts[0]
        self._hooks.replicas.start = start  # of data that are divided there is no part for who comes later
        return [start] * num_workers  # one object: the engine then packs it once
