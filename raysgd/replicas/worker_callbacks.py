"""The callbacks that run in one worker: when each of them is called, and their part of the worker's state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.exceptions import CallbackError
from raysgd.replicas.streams import PlaceInStep

CALLBACKS = "callbacks"
"""Key of their part of a state; a state without callbacks has none."""

_LIBRARIES = ("torch", "horovod", "raysgd")


class InstalledCallbacks:
    """The worker callbacks of one operator.

    A state that no callback has claimed is kept: the next callback of its class gets it.
    """

    def __init__(self) -> None:
        self._callbacks: list[WorkerCallback] = []
        self._unclaimed: list[dict[str, Any]] = []
        self._epoch: Any = None
        self._operator: Any = None
        self._on_gradients: list[WorkerCallback] = []

    def install(self, callbacks: Sequence[WorkerCallback], operator: Any) -> None:
        """Puts copies of `callbacks` in the place of those that there are."""
        states = self.states()
        self._callbacks = [copy.deepcopy(each) for each in callbacks]
        for each in self._callbacks:
            _call(each, "on_begin", operator)
        self._claim(states)

    # ---------------------------------------------------------------------------------------------- around a step

    def begin_epoch(self, epoch: Any, operator: Any) -> None:
        """Called before steps; an epoch that continues after a loss has begun already, unless this worker is new."""
        if epoch is not self._epoch:
            self._epoch = epoch
            for each in self._callbacks:
                _call(each, "on_epoch_begin", operator)

    def around_steps(self, operator: Any, step: PlaceInStep) -> AbstractContextManager[None]:
        """Inside, callbacks are called around each step. Without callbacks it costs nothing."""
        return self._around_steps(operator, step) if self._callbacks else nullcontext()

    @contextmanager
    def _around_steps(self, operator: Any, step: PlaceInStep) -> Iterator[None]:
        before, train_batch = vars(operator).get("train_batch"), operator.train_batch
        watching = self._with("on_step_end")

        @wraps(train_batch)
        def watched(*args: Any, **kwargs: Any) -> Any:
            metrics = train_batch(*args, **kwargs)
            return _after_step(watching, operator, metrics) if step.is_boundary else metrics

        if watching:
            operator.train_batch = watched
        self._on_gradients, self._operator = self._with("on_gradients"), operator
        try:
            yield
        finally:
            self._on_gradients, self._operator = [], None
            if watching:
                del operator.train_batch
                if before is not None:
                    operator.train_batch = before

    @property
    def wants_gradients(self) -> bool:
        """Whether a callback is to be called before an optimizer steps."""
        return bool(self._on_gradients)

    def gradients(self, optimizer: Any) -> None:
        """Called before an optimizer steps, with gradients that are complete."""
        for each in self._on_gradients:
            _call(each, "on_gradients", self._operator, optimizer)

    def end_epoch(self, operator: Any, returned: Any) -> Any:
        """Called with what `train_epoch` returned; returns that with what callbacks have added."""
        self._epoch = None
        watching = self._with("on_epoch_end")
        if not watching or not isinstance(returned, Mapping):
            return returned
        metrics = returned if isinstance(returned, dict) else dict(returned)
        for each in watching:
            _call(each, "on_epoch_end", operator, metrics)
        return metrics

    def _with(self, method: str) -> list[WorkerCallback]:
        return [each for each in self._callbacks if getattr(type(each), method) is not getattr(WorkerCallback, method)]

    # ---------------------------------------------------------------------------------------------- their state

    def states(self) -> list[dict[str, Any]]:
        """The class and the state of each callback, and what no callback has claimed yet."""
        own = [{"name": type(each).__name__, "state": _call(each, "state_dict")} for each in self._callbacks]
        return [*own, *self._unclaimed]

    def part_of_state(self) -> dict[str, Any]:
        """Their part of the state of a replica; empty if there is none."""
        states = self.states()
        return {CALLBACKS: states} if states else {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a state whose part for callbacks is of another form.

        Raises:
            ValueError: It is.
        """
        entries = state.get(CALLBACKS, [])
        if not isinstance(entries, list) or not all(isinstance(each, Mapping) and "name" in each for each in entries):
            raise ValueError(f"The state's {CALLBACKS!r} is no list of the states of callbacks. Nothing was loaded.")

    def apply(self, state: Mapping[str, Any], operator: Any) -> None:
        """Takes over their part of a state. A callback that has none in it begins again: the model is another one."""
        for each in self._claim(copy.deepcopy(list(state.get(CALLBACKS, ())))):
            _call(each, "on_begin", operator)

    def _claim(self, states: Iterable[Mapping[str, Any]]) -> list[WorkerCallback]:
        """Gives each callback the first state of its class that is left; returns callbacks that got none."""
        left, without = [dict(each) for each in states], []
        for each in self._callbacks:
            index = next((i for i, entry in enumerate(left) if entry["name"] == type(each).__name__), None)
            if index is None:
                without.append(each)
                continue
            found = left.pop(index).get("state")
            if found is not None:
                _call(each, "load_state_dict", found)
        self._unclaimed = left
        return without


def _after_step(callbacks: Sequence[WorkerCallback], operator: Any, metrics: Any) -> Any:
    step = operator.global_step + 1
    for each in callbacks:
        more = _call(each, "on_step_end", operator, step, metrics)
        if more and isinstance(metrics, Mapping):
            metrics = {**metrics, **more}
    return metrics


def _call(callback: WorkerCallback, method: str, *args: Any) -> Any:
    try:
        return getattr(callback, method)(*args)
    except Exception as error:
        if type(error).__module__.partition(".")[0] in _LIBRARIES:  # a lost connection has to be recognized
            raise
        raise CallbackError(
            f"The callback `{type(callback).__name__}` failed in `{method}`: {type(error).__name__}: {error}"
        ).with_traceback(error.__traceback__) from error
