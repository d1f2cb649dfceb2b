"""Calls the worker callbacks in one worker, and saves and loads their states.

Worker callbacks are instances of `raysgd.callbacks.WorkerCallback`, which run in the workers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback, call_event, has_state, key_of
from raysgd.core.numbers.meters import (
    BATCH_WEIGHT,
    NUM_SAMPLES,
    AverageMeterCollection,
    PendingMetric,
    is_metric_object,
    weight_of,
)

CALLBACKS = "callbacks"
"""Key of the callbacks' states in the training state of a worker. Missing if `InstalledCallbacks.states` is empty."""


logger = logging.getLogger(__name__)


class InstalledCallbacks:
    """The worker callbacks that one training operator calls (the installed callbacks).

    The state of a callback that is not installed, from a checkpoint or from a callback that `install` has replaced, is
    kept until a callback with the same `state_key` is installed.

    Attributes:
        are_there: True if at least one callback is installed.
        noting_batches: The callbacks that override `_on_batch`.
        may_leave_out: The callbacks that may leave steps out. Empty outside `listening`.
        wants_gradients: True if a callback must be called before an optimizer steps. False outside `listening`.
        wants_steps: The callbacks to call after an optimizer has stepped. Empty outside `listening`.
    """

    def __init__(self) -> None:
        self._callbacks: list[WorkerCallback] = []
        self.noting_batches: list[WorkerCallback] = []
        self._noting_norms: list[WorkerCallback] = []
        self.are_there = False
        self._unclaimed: dict[str, Any] = {}
        self._epoch: Any = None
        self._operator: Any = None
        self._listen()

    def _listen(self, *methods: str) -> None:
        """Call the callbacks that override these methods in steps, or no callback without arguments."""
        found = [self._with(method) for method in methods] or [[], [], []]
        self.may_leave_out, self._on_gradients, self.wants_steps = found
        self.wants_gradients = bool(self.may_leave_out or self._on_gradients)

    def install(self, callbacks: Sequence[WorkerCallback], operator: Any) -> None:
        """Replace the installed callbacks with copies of these callbacks, and call `on_begin` of each copy.

        A copy then loads the state that is stored under its `state_key`, if there is one. The state is from an earlier
        callback or from a checkpoint.

        If a copy fails in `on_begin` or rejects its state, the installed callbacks stay.
        """
        states = self.states()
        copies = [copy.deepcopy(each) for each in callbacks]
        for each in copies:
            call_event(each, "on_begin", operator)
        _check_states(copies, states, operator)
        self._callbacks, self.are_there = copies, bool(copies)
        self.noting_batches, self._noting_norms = self._with("_on_batch"), self._with("_on_norm")
        self._claim(states)

    # ---------------------------------------------------------------------------------------------- around a step

    def begin_epoch(self, epoch: Any, operator: Any) -> None:
        """Call `on_epoch_begin` of the callbacks, unless it was called for the same epoch before a failure.

        Args:
            epoch: Object that identifies the epoch.
            operator: The training operator.
        """
        if epoch is not self._epoch:
            self._epoch = epoch
            for each in self._callbacks:
                call_event(each, "on_epoch_begin", operator)

    def note_leg(self, operator: Any, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Call `_on_leg` of the callbacks when an epoch begins, and when a new group of workers continues the epoch.

        Args:
            operator: The training operator.
            describe: Function that returns a description of the leg, the part of the epoch that the current group of
                workers runs.
        """
        for each in self._with("_on_leg"):
            call_event(each, "_on_leg", operator, describe())

    def after_batch(self, operator: Any) -> Callable[[Any], Any] | None:
        """Return a function to call with each batch's metrics, or None if no callback overrides `on_step_end`.

        If the batch is the last of a step, the function calls `on_step_end` of the callbacks. It returns the batch's
        metrics. If they are a mapping, they include the entries that callbacks added.

        Args:
            operator: The training operator.
        """
        watching, window = self._with("on_step_end"), list[AverageMeterCollection]()

        def after(metrics: Any) -> Any:
            of_step = metrics
            is_last = operator._raysgd.leg.plan.ends_step
            if window or not is_last:
                meters = window.pop() if window else operator._raysgd.new_meters()
                of_step = _over_batches(meters, metrics, is_last)
                window.extend([] if is_last else [meters])
            if self._epoch.meters.is_left_out:
                return metrics
            return _after_step(watching, operator, metrics, of_step) if is_last else metrics

        return after if watching else None

    def note_batch(self, operator: Any, metrics: Sequence[PendingMetric] | None, is_boundary: bool) -> None:
        """Call `_on_batch` of the callbacks after a batch.

        Args:
            operator: The training operator.
            metrics: Metrics of the batch as the meters have read them, or None if the batch is padding, whose samples
                do not count.
            is_boundary: True if the batch ends a step.
        """
        for each in self.noting_batches:
            each._on_batch(operator, metrics, is_boundary)

    @contextmanager
    def listening(self, operator: Any) -> Iterator[None]:
        """Inside the block, call the installed callbacks before and after each optimizer step."""
        self._listen("_leaves_out", "on_gradients", "on_optimizer_step")
        self._operator = operator
        try:
            yield
        finally:
            self._operator = None
            self._listen()

    def see_loss(self, loss: Any) -> Any:
        """Call `_see_loss` of the callbacks that may leave steps out. Return the loss whose gradients are computed."""
        for each in self.may_leave_out:
            loss = call_event(each, "_see_loss", self._operator, loss)
        return loss

    def gradients(self, optimizer: Any) -> bool:
        """Call `on_gradients` of the callbacks, when gradients are complete and before an optimizer steps.

        Return False, without these calls, if a callback leaves the step out. The step's metrics then do not count.
        """
        if any(call_event(each, "_leaves_out", self._operator, optimizer) for each in self.may_leave_out):
            self._epoch.leave_out_step()
            return False
        for each in self._on_gradients:
            call_event(each, "on_gradients", self._operator, optimizer)
        return True

    def note_left_out(self, entry: Mapping[str, Any]) -> None:
        """Call `_on_left_out` of the callbacks with a description of a step that was left out."""
        for each in self._with("_on_left_out"):
            each._on_left_out(entry)

    def note_norm(self, norm: Any) -> None:
        """Call `_on_norm` of the callbacks with a gradient norm that clipping or a callback has computed."""
        for each in self._noting_norms:
            each._on_norm(norm)

    def stepped(self, optimizer: Any) -> None:
        """Call `on_optimizer_step` of the callbacks after an optimizer has stepped."""
        for each in self.wants_steps:
            call_event(each, "on_optimizer_step", self._operator, optimizer)

    @property
    def changed_by_steps(self) -> list[WorkerCallback]:
        """The callbacks that are called before or after optimizer steps. Their states may change in each step.

        Outside a `listening` block, the list is empty.
        """
        return [*self.may_leave_out, *self.followers]

    @property
    def followers(self) -> list[WorkerCallback]:
        """The callbacks that follow what optimizer steps do, such as averages of weights."""
        return [*self._on_gradients, *self.wants_steps]

    def end_epoch(self, operator: Any, returned: Any) -> Any:
        """Call `on_epoch_end` of the callbacks, and return the epoch's metrics with the entries that callbacks added.

        If `returned` is not a mapping, return it unchanged without calling the callbacks.

        Args:
            operator: The training operator.
            returned: What the operator's `train_epoch` returned. If this is not a mapping, it is returned unchanged.
        """
        self._epoch = None
        watching = self._with("on_epoch_end")
        is_metrics = isinstance(returned, Mapping)
        metrics = returned if isinstance(returned, dict) else dict(returned if is_metrics else {})
        for each in watching:
            call_event(each, "on_epoch_end", operator, metrics)
        return metrics if watching and is_metrics else returned

    def _with(self, method: str) -> list[WorkerCallback]:
        return [each for each in self._callbacks if getattr(type(each), method) is not getattr(WorkerCallback, method)]

    def of_kind(self, kind: type) -> Any:
        """Return the installed callback of exactly this class, or None if there is none."""
        return next((each for each in self._callbacks if type(each) is kind), None)

    # ---------------------------------------------------------------------------------------------- their state

    def states(self) -> dict[str, Any]:
        """Return the states of the callbacks by `state_key`.

        This includes the kept states of callbacks that are not installed. The value is None for an installed callback
        whose `state_dict` returns None.
        """
        return {**self._unclaimed, **{key_of(each): call_event(each, "state_dict") for each in self._callbacks}}

    def state_of(self, key: str) -> Any:
        """Return the state of the callback with this `state_key`, or None if there is no such state."""
        found = next((each for each in self._callbacks if key_of(each) == key), None)
        return self._unclaimed.get(key) if found is None else call_event(found, "state_dict")

    def part_of_state(self) -> dict[str, Any]:
        """Return the entry for the callbacks' states in the worker's state dict, as a dict with one key.

        Return an empty dict if no callback is installed and no state is kept.
        """
        states = self.states()
        return {CALLBACKS: states} if states else {}

    def check(self, state: Mapping[str, Any], operator: Any) -> None:
        """Check the callbacks' states in a state dict that is about to be loaded.

        Raises:
            ValueError: The callbacks' states are not a mapping, or an installed callback of the library rejects its
                state.
        """
        states = state.get(CALLBACKS, {})
        if not isinstance(states, Mapping) or not all(isinstance(key, str) for key in states):
            raise ValueError(f"The state's {CALLBACKS!r} does not have the states of callbacks. Nothing was loaded.")
        _check_states(self._callbacks, states, operator)

    def apply(self, state: Mapping[str, Any], operator: Any) -> None:
        """Load the callbacks' states from a state dict.

        If the state dict has no entry for a callback, call `on_begin` of this callback, so that it starts over.
        """
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
        """Load the state of each callback, and return the callbacks that `states` has no entry for.

        Keep the remaining states for callbacks that are installed later.

        Args:
            states: The states by `state_key`.
        """
        self._unclaimed = {key: state for key, state in states.items() if state is not None}
        for each in self._callbacks:
            state = self._unclaimed.pop(key_of(each), None)
            if state is not None:
                call_event(each, "load_state_dict", state)
        return [each for each in self._callbacks if key_of(each) not in states]


def _check_states(callbacks: Sequence[WorkerCallback], states: Mapping[str, Any], operator: Any) -> None:
    for each in callbacks:
        state = states.get(key_of(each))
        if state is not None:
            each._check_state(operator, state)


def _after_step(callbacks: Sequence[WorkerCallback], operator: Any, metrics: Any, of_step: Any) -> Any:
    step = operator.global_step + 1
    for each in callbacks:
        more = call_event(each, "on_step_end", operator, step, of_step)
        if more and isinstance(metrics, Mapping):
            metrics, of_step = {**metrics, **more}, {**of_step, **more}
    return metrics


def _over_batches(meters: AverageMeterCollection, metrics: Any, is_last: bool) -> Any:
    """Average metrics over all batches whose gradients are added up for one step.

    After the last batch, return the averages with their weights, and the step's number of samples. Before that, return
    the metrics of the batch. A metric that cannot be averaged has the value of the last batch. Metrics that are not a
    mapping are returned unchanged.

    Args:
        meters: Collection in which the step's metrics are accumulated.
        metrics: Metrics of one batch.
        is_last: True if the batch is the last of the step.
    """
    if not isinstance(metrics, Mapping):
        return metrics
    values = {name: value for name, value in metrics.items() if not is_metric_object(type(value))}
    of_step = {name: value for name, value in metrics.items() if name != BATCH_WEIGHT}
    with suppress(TypeError, ValueError):
        meters.add_pending(values, values.pop(NUM_SAMPLES, 1), is_strict=False)
        if is_last:
            meters.count_pending()
            summary = meters.summary()
            of_step[NUM_SAMPLES] = meters.n
            for name, (_, weight) in summary.totals.items():
                of_step.update({name: summary[name], weight_of(name): weight})
    return of_step
