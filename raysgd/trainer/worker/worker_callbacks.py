"""The worker callbacks in one worker: calls them, and saves and loads their states."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback, call_event, has_state, key_of
from raysgd.core.numbers.meters import BATCH_WEIGHT, NUM_SAMPLES, AverageMeterCollection, is_metric_object, weight_of
from raysgd.trainer.worker.data.batch_streams import PlaceInStep

CALLBACKS = "callbacks"
"""Key of the callbacks' states in a replica's state. A replica without callback states omits it."""


logger = logging.getLogger(__name__)


class InstalledCallbacks:
    """The worker callbacks of one operator.

    If a loaded state belongs to a callback that is not installed, the state is retained until a callback with the same
    `state_key` is installed.

    Attributes:
        are_there: True if at least one callback is installed.
        noting_batches: The callbacks that override `_on_batch`.
        wants_gradients: True if a callback is to be called before an optimizer steps.
        wants_steps: True if a callback is to be called after an optimizer has stepped.
    """

    def __init__(self) -> None:
        self._callbacks: list[WorkerCallback] = []
        self.noting_batches: list[WorkerCallback] = []
        self.are_there = False
        self._unclaimed: dict[str, Any] = {}
        self._epoch: Any = None
        self._operator: Any = None
        self._listen([], [])

    def _listen(self, on_gradients: list[WorkerCallback], on_steps: list[WorkerCallback]) -> None:
        self._on_gradients, self._on_steps = on_gradients, on_steps
        self.wants_gradients, self.wants_steps = bool(on_gradients), bool(on_steps)

    def install(self, callbacks: Sequence[WorkerCallback], operator: Any) -> None:
        """Replace the installed callbacks with copies of `callbacks`."""
        states = self.states()
        self._callbacks = [copy.deepcopy(each) for each in callbacks]
        self.are_there = bool(self._callbacks)
        self.noting_batches = self._with("_on_batch")
        for each in self._callbacks:
            call_event(each, "on_begin", operator)
        self._claim(states)

    # ---------------------------------------------------------------------------------------------- around a step

    def begin_epoch(self, epoch: Any, operator: Any) -> None:
        """Call `on_epoch_begin`, unless this worker has already called it for the same epoch before a failure."""
        if epoch is not self._epoch:
            self._epoch = epoch
            for each in self._callbacks:
                call_event(each, "on_epoch_begin", operator)

    def begin_leg(self, operator: Any, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Call `_on_leg`, because an epoch begins or a new group continues the epoch.

        Args:
            operator: The operator.
            describe: Returns a description of the leg, the part of the epoch that this worker group runs.
        """
        for each in self._with("_on_leg"):
            call_event(each, "_on_leg", operator, describe())

    def after_batch(self, operator: Any, step: PlaceInStep) -> Callable[[Any], Any] | None:
        """Return a function that must be called with each batch's metrics, or None if no callback needs them."""
        watching, window = self._with("on_step_end"), list[AverageMeterCollection]()

        def after(metrics: Any) -> Any:
            of_step = metrics
            if window or not step.batch.is_boundary:
                meters = window.pop() if window else operator._raysgd.new_meters()
                of_step = _over_batches(meters, metrics, step.batch.is_boundary)
                window.extend([] if step.batch.is_boundary else [meters])
            return _after_step(watching, operator, metrics, of_step) if step.batch.is_boundary else metrics

        return after if watching else None

    def note_batch(self, operator: Any, metrics: Any, is_boundary: bool) -> None:
        """Call `_on_batch` with the metrics of a batch; None for padding."""
        for each in self.noting_batches:
            call_event(each, "_on_batch", operator, metrics, is_boundary)

    @contextmanager
    def listening(self, operator: Any) -> Iterator[None]:
        """Inside the block, call the installed callbacks around optimizer steps."""
        self._listen(self._with("on_gradients"), self._with("on_optimizer_step"))
        self._operator = operator
        try:
            yield
        finally:
            self._operator = None
            self._listen([], [])

    def gradients(self, optimizer: Any) -> None:
        """Call `on_gradients` before an optimizer steps, once its gradients are complete."""
        for each in self._on_gradients:
            call_event(each, "on_gradients", self._operator, optimizer)

    def note_norm(self, norm: Any) -> None:
        """Call `_on_norm` with an optimizer's gradient norm, which clipping or a callback has computed."""
        for each in self._with("_on_norm"):
            call_event(each, "_on_norm", norm)

    def stepped(self, optimizer: Any) -> None:
        """Call `on_optimizer_step` after an optimizer has stepped."""
        for each in self._on_steps:
            call_event(each, "on_optimizer_step", self._operator, optimizer)

    @property
    def changed_by_steps(self) -> list[WorkerCallback]:
        """The callbacks that are called around optimizer steps, which may change the callbacks' states."""
        return [*self._on_gradients, *self._on_steps]

    def end_epoch(self, operator: Any, returned: Any) -> Any:
        """Call `on_epoch_end`. Return the metrics of `train_epoch` with the entries that callbacks added."""
        self._epoch = None
        watching = self._with("on_epoch_end")
        if not watching or not isinstance(returned, Mapping):
            return returned
        metrics = returned if isinstance(returned, dict) else dict(returned)
        for each in watching:
            call_event(each, "on_epoch_end", operator, metrics)
        return metrics

    def _with(self, method: str) -> list[WorkerCallback]:
        return [each for each in self._callbacks if getattr(type(each), method) is not getattr(WorkerCallback, method)]

    def of_kind(self, kind: type) -> Any:
        """Return the callback of exactly this class, or None if no such callback is installed."""
        return next((each for each in self._callbacks if type(each) is kind), None)

    # ---------------------------------------------------------------------------------------------- their state

    def states(self) -> dict[str, Any]:
        """Return the callbacks' states by `state_key`, including loaded states whose callback is not installed."""
        return {**self._unclaimed, **{key_of(each): call_event(each, "state_dict") for each in self._callbacks}}

    def state_of(self, key: str) -> Any:
        """Return the state stored under a `state_key`, or None if no state has this key."""
        found = next((each for each in self._callbacks if key_of(each) == key), None)
        return self._unclaimed.get(key) if found is None else call_event(found, "state_dict")

    def part_of_state(self) -> dict[str, Any]:
        """Return the entry of the replica's state that holds the callbacks' states; empty if they have no states."""
        states = self.states()
        return {CALLBACKS: states} if states else {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Check the type of the callbacks' states in a replica's state.

        Raises:
            ValueError: The callbacks' states are not a mapping.
        """
        if not isinstance(state.get(CALLBACKS, {}), Mapping):
            raise ValueError(f"The state's {CALLBACKS!r} does not have the states of callbacks. Nothing was loaded.")

    def apply(self, state: Mapping[str, Any], operator: Any) -> None:
        """Load the callbacks' states from a replica's state. A callback without a state is reset with `on_begin`."""
        without = self._claim(copy.deepcopy(dict(state.get(CALLBACKS, {}))))
        for each in without:
            call_event(each, "on_begin", operator)
        missing = [key_of(each) for each in without if has_state(each)]
        if missing and self._unclaimed and operator._raysgd.world.rank == 0:
            logger.warning(
                "the state that was loaded has no part for the callback `%s`, which begins again; it has one for `%s`",
                "`, `".join(missing),
                "`, `".join(self._unclaimed),
            )

    def _claim(self, states: Mapping[str, Any]) -> list[WorkerCallback]:
        """Load each callback's state from `states`. Return the callbacks whose key is missing."""
        self._unclaimed = {key: state for key, state in states.items() if state is not None}
        for each in self._callbacks:
            state = self._unclaimed.pop(key_of(each), None)
            if state is not None:
                call_event(each, "load_state_dict", state)
        return [each for each in self._callbacks if key_of(each) not in states]


def _after_step(callbacks: Sequence[WorkerCallback], operator: Any, metrics: Any, of_step: Any) -> Any:
    step = operator.global_step + 1
    for each in callbacks:
        more = call_event(each, "on_step_end", operator, step, of_step)
        if more and isinstance(metrics, Mapping):
            metrics, of_step = {**metrics, **more}, {**of_step, **more}
    return metrics


def _over_batches(meters: AverageMeterCollection, metrics: Any, is_last: bool) -> Any:
    """Add a batch's metrics to its step's meters. After the step's last batch, return the means and their weights.

    Metrics that cannot be averaged keep this batch's value.
    """
    if not isinstance(metrics, Mapping):
        return metrics
    values = {name: value for name, value in metrics.items() if not is_metric_object(type(value))}
    of_step = {name: value for name, value in metrics.items() if name != BATCH_WEIGHT}
    with suppress(TypeError, ValueError):
        meters.hold(values, values.pop(NUM_SAMPLES, 1), is_strict=False)
        if is_last:
            meters.count_held()
            summary = meters.summary()
            of_step[NUM_SAMPLES] = meters.n
            for name, (_, weight) in summary.totals.items():
                of_step.update({name: summary[name], weight_of(name): weight})
    return of_step
