"""Streams of batches that last across calls and track one replica's position in its data.

A stream keeps an iterator over its source open between calls, so a call with `num_steps` continues where the previous
call stopped. The position is the number of samples that all ranks together have used, so it is valid for any number of
workers. A pass is one iteration through the whole data; it may span several calls.

A step counts as done only once the loop requests the next batch or finishes. `BatchStream.take` then confirms the
step. Until then, the operator's meters and `global_step` may be ahead of the position.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

NO_BATCH = object()
"""Placeholder batch for a global step in which this rank has no samples. The step still counts."""
_REDRAW_EVERY_S = 0.1


class BatchInStep(Protocol):
    """One rank's batch in a step that all replicas take together."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the batch, without padding; None if unknown."""

    @property
    def is_padding(self) -> bool:
        """True if no sample in this batch counts.

        The rank trains on the batch only to take part in other ranks' collectives.
        """

    @property
    def is_boundary(self) -> bool:
        """True if this batch completes an optimizer step."""


class PlaceInStep(Protocol):
    """A replica's position in a step that all replicas take together.

    The PyTorch front end uses the current `Leg`, the part of a call that one worker group runs.

    Attributes:
        began_at: Time at which the replica started to draw its batch.
    """

    began_at: float

    @property
    def batch(self) -> BatchInStep:
        """The most recent batch that the stream yielded."""

    def skip(self) -> None:
        """Skip the most recent batch, so that it does not take part in training."""

    def confirm(self) -> None:
        """Check the worker group before a step counts as done. Raises if the group broke during the step."""

    def end_stream(self) -> None:
        """Called when the call has no more batches."""


ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT", bound=PlaceInStep)


class _OpenPass(Generic[ItemT]):
    """The rest of a pass over the data: items that the stream has not yielded yet.

    Args:
        items: Iterator over the source's items.

    Attributes:
        items: Iterator over the items that have not been drawn.
        ahead: Items that were drawn from `items` but not yielded yet. None marks the end of the pass.
    """

    def __init__(self, items: Iterator[ItemT]) -> None:
        self.items = items
        self.ahead: list[ItemT | None] = []


class BatchStream(ABC, Generic[ItemT, PlaceT]):
    """Yields the batches of a source, for pass after pass over the data, and tracks the position.

    A subclass defines what an item of its source is and how samples are counted.

    Args:
        source: Source of the batches.
        place_of: Returns the replica's position in its step. The stream reports each batch there before yielding it.
        next_pass: Called when a new pass starts. Returns the index of the pass.
        undo: Called before a padding batch. Returns a function that reverts the effects of training on that batch.

    Attributes:
        at_boundary: If set, called between two steps. An exception that it raises ends the iteration.
        prepare: Called before the first batch of every call and every pass.
        has_one_pass: True if the source has only one pass, which all ranks start together. No rank may then start
            a second pass.
        pass_index: Index of the most recently started pass.
        num_steps_taken: Number of steps whose first batch was yielded.
    """

    def __init__(
        self,
        source: Any,
        place_of: Callable[[], PlaceT],
        next_pass: Callable[[], int],
        undo: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.source = source
        self._place_of = place_of
        self._next_pass = next_pass
        self._undo = undo
        self._undo_padding: Callable[[], None] | None = None
        self._pass: _OpenPass[ItemT] | None = None
        self._to_resume: tuple[int, int] | None = None
        self._num_open = 0  # global batches started since the last confirmed optimizer step
        self._is_last_of_step = True  # refers to the most recently drawn batch
        self.at_boundary: Callable[[], None] | None = None
        self.prepare: Callable[[], None] = lambda: None
        self.has_one_pass = self._has_begun = False
        self.pass_index = 0
        self.num_steps_taken = 0

    @property
    def place(self) -> PlaceT:
        """The replica's position in its step."""
        return self._place_of()

    @property
    @abstractmethod
    def completed(self) -> int:
        """Number of samples of the current pass that all ranks used in completed steps; 0 if unknown."""

    @abstractmethod
    def _begin_pass(self, consumed: int) -> Iterator[ItemT]:
        """Open the source for pass number `pass_index`, skipping the pass's first `consumed` samples."""

    @abstractmethod
    def _begin_step(self, place: PlaceT, item: ItemT, is_last: bool) -> Any:
        """Count a batch's samples, set the batch as the current one in `place`, and return it.

        Args:
            place: The replica's position in its step.
            item: The source's item.
            is_last: True if this batch is the last of the pass or of the call.
        """

    @property
    def num_steps_completed(self) -> int:
        """Number of steps that are done. A step is done once the loop has requested the batch after it."""
        return self.num_steps_taken - self._num_open

    @property
    def is_mid_pass(self) -> bool:
        """True if the next batch belongs to the most recently started pass."""
        return self._pass is not None or self._to_resume is not None or self._num_open > 0

    def settle(self) -> None:
        """Confirm the last step after the loop over the batches has finished.

        Raises:
            RuntimeError: The group broke during the last step.
        """
        self._settle(self.place)

    def _settle(self, place: PlaceT) -> None:
        if self._undo_padding is not None:
            self._leave_padding()
        if self._num_open:
            place.confirm()
        self._num_open = 0

    def break_off(self) -> None:
        """Discard an interrupted step. Its batches will be yielded again, possibly on another rank."""
        self._leave_padding()
        if self.is_mid_pass:
            self.resume(self.pass_index, self.completed)
        self.num_steps_taken = self.num_steps_completed
        self._pass, self._num_open, self._is_last_of_step = None, 0, True

    def resume(self, pass_index: int, consumed: int) -> None:
        """Continue a pass from a given position. The next batch starts after the first `consumed` samples."""
        self._pass, self._is_last_of_step = None, True
        self.pass_index, self._to_resume = pass_index, (pass_index, consumed)

    def take(self, num_steps: int | None) -> Iterator[Any]:
        """Yield the batches of `num_steps` steps, spanning as many passes as needed.

        A step counts as done when the caller requests the batch after it. The stream then calls `place.confirm` and
        `at_boundary`. An empty source ends the iteration.

        Args:
            num_steps: Number of steps; None for the rest of the current pass, or for a whole pass if none is open.
        """
        num_drawn, just_opened, place = 0, False, self.place
        self._undo_padding = None
        if self._pass is not None and num_steps != 0:
            self.prepare()
        while num_steps is None or num_drawn < num_steps or not self._is_last_of_step:
            if self._pass is None:
                if num_steps is None and num_drawn:
                    break
                self._pass, just_opened = _OpenPass(self._open()), True
            place.began_at = time.perf_counter()
            if not self._pass.ahead:
                self._pass.ahead.append(next(self._pass.items, None))
            item = self._pass.ahead[0]  # stays in `ahead` until it is yielded, in case drawing the next item fails
            if item is None:
                self._pass = None
                if just_opened:
                    break
                continue
            just_opened = False
            is_first_of_step, self._is_last_of_step = self._place_in_step(item)
            num_drawn += is_first_of_step
            is_last_of_call = num_drawn == num_steps and self._is_last_of_step
            batch = self._hand_out(place, item, is_first_of_step, is_last_of_call)
            if batch is not NO_BATCH:
                self._num_open += is_first_of_step
                if place.batch.is_padding:
                    yield from self._undoing_padding(batch)
                else:
                    yield batch
                if place.batch.is_boundary:
                    self._settle(place)
                    if self.at_boundary is not None:
                        self.at_boundary()
        place.end_stream()

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

    def _hand_out(self, place: PlaceT, item: ItemT, is_first_of_step: bool, is_last_of_call: bool) -> Any:
        assert self._pass is not None
        is_last = self._is_last_of_pass(self._pass, item)
        batch = self._begin_step(
            place, item, is_last or is_last_of_call
        )  # if a rank is lost, this raises before the step counts as started
        self.num_steps_taken += is_first_of_step
        if is_last:
            self._pass = None  # the next call starts a new pass
        return batch

    def _place_in_step(self, item: ItemT) -> tuple[bool, bool]:
        """Return two flags: True if a global step starts with this item, and True if a global step ends with it."""
        return True, True

    def _is_last_of_pass(self, open_pass: _OpenPass[ItemT], item: ItemT) -> bool:
        """Remove the item from `ahead` and draw the next item. Return True if the item is the last of the pass."""
        open_pass.ahead = [next(open_pass.items, None)]
        return open_pass.ahead[0] is None

    def _undoing_padding(self, batch: Any) -> Iterator[Any]:
        undo = self._undo_padding = None if self._undo is None else self._undo()
        try:
            yield batch
        finally:  # undo the padding batch even if user code raises, unless another call has started since
            if undo is not None and undo is self._undo_padding:
                self._leave_padding()

    def _leave_padding(self) -> None:
        if self._undo_padding is not None:
            undo, self._undo_padding = self._undo_padding, None
            undo()


class WatchedBatches:
    """The iterator of batches passed to the user's `train_epoch`. `was_touched` becomes True on first use."""

    def __init__(self, batches: Iterator[Any], stream: BatchStream[Any, Any]) -> None:
        self._batches = batches
        self._stream = stream
        self.was_touched = False

    @property
    def is_padding(self) -> bool:
        """True if the last batch is padding, which repeats samples because only other workers have samples left."""
        is_padding: bool = self._stream.place.batch.is_padding
        return is_padding

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self._batches

    def __next__(self) -> Any:
        self.was_touched = True
        return next(self._batches)


def redrawing(batches: Iterator[Any], redraw: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches. Between batches, call `redraw` about ten times a second to update a progress display."""
    due = time.monotonic()
    for batch in batches:
        if time.monotonic() >= due:
            redraw()
            due = time.monotonic() + _REDRAW_EVERY_S
        yield batch
