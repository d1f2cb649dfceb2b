"""The start of a run's function on a group of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from raysgd._state.state_codec import lend
from raysgd.engine.shared.types import World
from raysgd.train._rules.arrivals import CheckpointTaker
from raysgd.train._run.plugin_hooks import PluginHooks
from raysgd.train._worker.messages import FunctionSpec


class DataShards(Protocol):
    """Divides data over workers, whenever they start."""

    def of(self, num_workers: int) -> Sequence[Any]:
        """Return what each worker gets, by rank."""


class Launch:
    """The arguments of every call of a run: nothing where the function runs, else what it takes to start it there.

    The controller asks for them at each attempt. There is no way back from here to the controller: the group is the one
    that the hooks saw start.

    Attributes:
        is_muted: Whether a function that is started does not wait for its reports to be read.
        started_on: The places of the workers on which it was started last; None before.
    """

    def __init__(
        self, spec: FunctionSpec, checkpoints: CheckpointTaker, data: DataShards | None, hooks: PluginHooks
    ) -> None:
        self._spec = spec
        self._checkpoints = checkpoints
        self._data = data
        self._hooks = hooks
        self.is_muted = False
        self.started_on: Sequence[World] | None = None

    def __call__(self, worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """The arguments of each rank."""
        if worlds is self.started_on:  # a group that is started again has other ones
            return [()] * len(worlds)
        start = self._start(len(worlds))
        self.started_on = worlds
        return start

    def _start(self, num_workers: int) -> list[tuple[Any, ...]]:
        self._hooks.on_training_start()
        self._checkpoints.begin_attempt()
        spec = replace(self._spec, is_muted=self.is_muted)
        checkpoint = self._checkpoints.restart_point
        shared: Any = None
        if checkpoint is not None:
            [shared, *_] = self._hooks.group.share(lend(checkpoint))
        if self._data is None:
            return [(spec, shared, None)] * num_workers  # one object: the engine then packs it once
        return [(spec, shared, shard) for shard in self._data.of(num_workers)]
