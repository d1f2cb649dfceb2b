"""Streams of batches that remember one worker's position in its data between calls.

A stream keeps an iterator over its data open between calls, so a call with `num_steps` continues where the previous
call stopped. The position is the number of samples that all ranks together have used. It is therefore valid for any
number of workers. A pass is one iteration through the whole data, and may span several calls.

A step counts as done only when the training loop requests the next batch, or ends. The stream then confirms the step
(`confirm_step`). Until then, the operator's metrics and its `global_step` may already include a step that the position
does not include.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from raysgd.trainer.worker.step_loop import BatchPlan, PlannedItem, planned

NO_BATCH = object()
"""Placeholder for the batch of a step in which this rank has no samples. The call still counts the step."""
_REDRAW_EVERY_S = 0.1


class CurrentLeg(Protocol):
    """Tracks the current batch in a leg, the part of a call that one group of workers runs.

    With PyTorch, this is a `Leg`. With TensorFlow, it is a `TFStep`, which serves all legs.

    Attributes:
        began_at: Value of `time.perf_counter()` when the worker started to draw the current batch.
    """

    began_at: float

    @property
    def plan(self) -> BatchPlan:
        """How the current batch counts."""

    @property
    def accumulate(self) -> int:
        """Number of global batches whose gradients are accumulated for a step of the optimizer."""

    def skip(self) -> None:
        """Leave the most recent batch out of training."""

    def confirm(self) -> None:
        """Raise an error if the group of workers broke during the current step.

        Called before the step counts as done.
        """

    def end_stream(self) -> None:
        """Called when the stream has yielded all batches of a training or validation call."""


ItemT = TypeVar("ItemT", bound=PlannedItem)
LegT = TypeVar("LegT", bound=CurrentLeg)


class BatchStream(ABC, Generic[ItemT, LegT]):
    """Yields the batches of a source, pass after pass over the data, and remembers the position in the data.

    A subclass defines what an item of its source is, and how samples are counted.

    Args:
        source: Object that supplies the batches, such as a wrapped data loader.
        leg: Tracks the current batch. The stream records each batch there before yielding the batch.
        next_pass: Function that is called when a new pass starts, and returns the index of the pass.
        undo: Function that is called before a padding batch, and returns a function that reverts the effects of
            training on that batch. None if padding batches have no effects.

    Attributes:
        leg: Tracks the current batch. With PyTorch, each training call sets it.
        at_boundary: Function that is called after each completed step, or None. If it raises an exception, the
            iteration ends.
        prepare: Function that is called before the first batch of every call and every pass.
        has_one_pass: True if the source can be iterated through only once, by all ranks together. No second pass is
            then started.
        pass_index: Index of the most recently started pass.
        num_steps_taken: Number of steps that were started, including steps in which this rank has no batch.
        looks_ahead: True if the next item is drawn early to learn whether a pass ends, where an item does not say so.
    """

    looks_ahead = True

    def __init__(
        self,
        source: Any,
        leg: LegT,
        next_pass: Callable[[], int],
        undo: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.source = source
        self.leg = leg
        self._next_pass = next_pass
        self._undo = undo
        self._undo_padding: Callable[[], None] | None = None
        self._items: Iterator[ItemT] | None = None  # items of the open pass that were not drawn yet
        self._ahead: list[ItemT | None] = []  # items that were drawn but not yielded yet; None ends the pass
        self._to_resume: tuple[int, int] | None = None
        self._num_open = 0  # number of global batches that were started since the last confirmed optimizer step
        self._ends_pass = False  # True if the pass ends with the item that was drawn last
        self.at_boundary: Callable[[], None] | None = None
        self.prepare: Callable[[], None] = lambda: None
        self.has_one_pass = self._has_begun = False
        self.pass_index = 0
        self.num_steps_taken = 0

    @property
    @abstractmethod
    def completed(self) -> int:
        """Number of samples of the current pass that all ranks together have used in completed steps. 0 if unknown."""

    @abstractmethod
    def _begin_pass(self, consumed: int) -> Iterator[ItemT]:
        """Return an iterator over the items of pass number `pass_index`.

        Args:
            consumed: Number of samples at the start of the pass to leave out, because they were used already.
        """

    @abstractmethod
    def _begin_batch(self, leg: LegT, item: ItemT, plan: BatchPlan) -> Any:
        """Make a batch of an item, count its samples, record the batch in `leg`, and return it.

        Args:
            leg: Tracks the current batch.
            item: The item that was drawn from the source.
            plan: How the batch counts.
        """

    @property
    def num_steps_completed(self) -> int:
        """Number of completed steps.

        A step is completed when the training loop requests the batch after the step, or ends.
        """
        return self.num_steps_taken - self._num_open

    @property
    def is_mid_pass(self) -> bool:
        """True if the most recently started pass has batches left, or its last step is not completed yet."""
        return self._items is not None or self._to_resume is not None or self._num_open > 0

    def confirm_step(self) -> None:
        """Confirm the last step, because the training loop requests the next batch or has finished.

        Raises:
            RuntimeError: The group of workers broke during the last step.
        """
        if self._undo_padding is not None:
            self._leave_padding()
        if self._num_open:
            self.leg.confirm()
        self._num_open = 0

    def break_off(self) -> None:
        """Discard an interrupted step. The batches of the step will be yielded again, possibly on another rank."""
        self._leave_padding()
        if self.is_mid_pass:
            self.resume(self.pass_index, self.completed)
        self.num_steps_taken = self.num_steps_completed
        self._items, self._num_open = None, 0

    def resume(self, pass_index: int, consumed: int) -> None:
        """Let the next batch come from the given position in a pass.

        Args:
            pass_index: Index of the pass.
            consumed: Number of samples at the start of the pass that were used already.
        """
        self._items, self.pass_index, self._to_resume = None, pass_index, (pass_index, consumed)

    def take(self, num_steps: int | None) -> Iterator[Any]:
        """Yield the batches of `num_steps` steps, spanning as many passes as needed.

        A step counts as done when the caller requests the batch after it. The stream then calls `leg.confirm` and
        `at_boundary`. An empty source ends the iteration.

        Args:
            num_steps: Number of steps. None for the rest of the current pass, or for a whole new pass if the last one
                is complete.
        """
        leg, self._undo_padding = self.leg, None
        drawn = self._drawn(is_one_pass=num_steps is None) if num_steps != 0 else iter(())
        for item, plan in planned(drawn, leg.accumulate, num_steps):
            # If a rank was lost, this raises an error before the step counts as started.
            batch = self._begin_batch(leg, item, plan)
            self.num_steps_taken += plan.starts_global_batch
            if self._ends_pass:
                self._items = None  # the next call starts a new pass
            if batch is not NO_BATCH:
                self._num_open += plan.starts_global_batch
                if plan.is_padding:
                    yield from self._undoing_padding(batch)
                else:
                    yield batch
                if plan.sync_gradients:
                    self.confirm_step()
                    if self.at_boundary is not None:
                        self.at_boundary()
        leg.end_stream()

    def _drawn(self, is_one_pass: bool) -> Iterator[tuple[ItemT, bool]]:
        """Yield items, pass after pass, and whether the pass ends with the item: False where that is unknown."""
        num_begun, just_opened = 0, False
        if self._items is not None:
            self.prepare()
        while True:
            if self._items is None:
                if is_one_pass and num_begun:
                    return
                self._items, self._ahead, just_opened = self._open(), [], True
            self.leg.began_at = time.perf_counter()
            if not self._ahead:
                self._ahead.append(next(self._items, None))
            item = self._ahead[0]  # keep the item in `_ahead` until it is yielded: drawing the next one may fail
            if item is None:
                self._items = None
                if just_opened:
                    return
                continue
            just_opened, is_last = False, item.is_last_of_pass
            is_unknown = is_last is None and self.looks_ahead
            self._ahead = [next(self._items, None)] if is_unknown else []
            self._ends_pass = self._ahead[0] is None if is_unknown else bool(is_last)
            num_begun += item.is_first
            yield item, self._ends_pass

    def _open(self) -> Iterator[ItemT]:
        if self.has_one_pass and self._has_begun:
            return iter(())
        self._has_begun = True
        self.prepare()
        if self._to_resume is not None:
            (self.pass_index, consumed), self._to_resume = self._to_resume, None
        else:
            self.pass_index, consumed = self._next_pass(), 0
        return self._begin_pass(consumed)

    def _undoing_padding(self, batch: Any) -> Iterator[Any]:
        undo = self._undo_padding = None if self._undo is None else self._undo()
        try:
            yield batch
        finally:  # undo training on the padding batch even after an error, unless another call has started since
            if undo is not None and undo is self._undo_padding:
                self._leave_padding()

    def _leave_padding(self) -> None:
        if self._undo_padding is not None:
            undo, self._undo_padding = self._undo_padding, None
            undo()


class WatchedBatches:
    """The iterator over batches that is passed to the operator's `train_epoch`.

    Attributes:
        was_touched: True after the first use. If it stays False, the user's `train_epoch` has used other data.
    """

    def __init__(self, batches: Iterator[Any], stream: BatchStream[Any, Any]) -> None:
        self._batches = batches
        self._stream = stream
        self.was_touched = False

    @property
    def is_padding(self) -> bool:
        """True if the most recent batch is padding.

        A padding batch repeats samples, because this worker has no samples left while other workers have some.
        """
        plan: BatchPlan = self._stream.leg.plan
        return plan.is_padding

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self._batches

    def __next__(self) -> Any:
        self.was_touched = True
        return next(self._batches)


def redrawing(batches: Iterator[Any], redraw: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches, and call `redraw` between them, at most ten times a second, to update a progress display."""
    due = time.monotonic()
    for batch in batches:
        if time.monotonic() >= due:
            redraw()
            due = time.monotonic() + _REDRAW_EVERY_S
        yield batch
