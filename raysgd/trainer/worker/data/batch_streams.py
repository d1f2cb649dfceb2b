"""Streams of batches across calls, which know the position of one replica in its data.

A stream keeps a live iterator over its source between calls, so a call with `num_steps` continues where the last one
stopped. The position is the number of samples that all ranks have used, so it is valid for any number of workers.

A step counts as done only when the loop asks for the next batch, or ends: then `BatchStream.take` confirms it. Until
then, the meters and `global_step` of the operator may be ahead of the position.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

NO_BATCH = object()
"""Stands for a batch if this rank has no samples in a global step. The step still counts."""
_REDRAW_EVERY_S = 0.1


class BatchInStep(Protocol):
    """One rank's batch in a step of all replicas."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples that count; None if it is not known."""

    @property
    def is_padding(self) -> bool:
        """True if the batch counts no samples, and is only trained on because the other ranks wait for this one."""

    @property
    def is_boundary(self) -> bool:
        """True if the optimizer step ends with this batch."""


class PlaceInStep(Protocol):
    """The place of a replica in a step of all replicas. With PyTorch, this is the `Leg` of the running call.

    Attributes:
        began_at: Time at which the replica began to draw its batch.
    """

    began_at: float

    @property
    def batch(self) -> BatchInStep:
        """The last batch that was handed out."""

    def skip(self) -> None:
        """Called when the last batch is left out."""

    def confirm(self) -> None:
        """Called before a step counts as done. Raises if the group broke in the step."""

    def end_stream(self) -> None:
        """Called when no batch follows in this call."""


ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT", bound=PlaceInStep)


class _OpenPass(Generic[ItemT]):
    """The rest of a pass.

    Args:
        items: Iterator over the items.

    Attributes:
        items: Iterator over the items that were not drawn.
        ahead: Items that were drawn and not handed out. None stands for the end of the pass.
    """

    def __init__(self, items: Iterator[ItemT]) -> None:
        self.items = items
        self.ahead: list[ItemT | None] = []


class BatchStream(ABC, Generic[ItemT, PlaceT]):
    """Hands out the batches of a source, pass after pass, and remembers the position.

    A subclass defines what an item of its source is, and how samples are counted.

    Args:
        source: Source of the batches.
        place_of: Returns the place of the replica, which is told about each batch before it is handed out.
        next_pass: Called when a new pass begins. Returns its index.
        undo: Called before a padding batch. Returns a function that undoes what training on that batch changed.

    Attributes:
        at_boundary: Called between two steps, if it is set. An exception from it ends the iteration.
        prepare: Called before the first batch of a call and of a pass.
        has_one_pass: True if the source has a single pass, which all ranks begin together, so no rank may begin
            another.
        pass_index: Index of the last pass that began.
        num_steps_taken: Number of steps whose first batch was handed out.
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
        self._num_open = 0  # global batches begun since the last confirmed optimizer step
        self._is_last_of_step = True  # about the last batch drawn
        self.at_boundary: Callable[[], None] | None = None
        self.prepare: Callable[[], None] = lambda: None
        self.has_one_pass = self._has_begun = False
        self.pass_index = 0
        self.num_steps_taken = 0

    @property
    def place(self) -> PlaceT:
        """The place of the replica in its step. With PyTorch, this is the `Leg` of the running call."""
        return self._place_of()

    @property
    @abstractmethod
    def completed(self) -> int:
        """Number of samples of the current pass that all ranks have used in completed steps; 0 if it is not known."""

    @abstractmethod
    def _begin_pass(self, consumed: int) -> Iterator[ItemT]:
        """Open the source in the pass `pass_index`, after `consumed` samples."""

    @abstractmethod
    def _begin_step(self, place: PlaceT, item: ItemT, is_last: bool) -> Any:
        """Tell `place` about a batch, count its samples, and return it.

        Args:
            place: The place of the replica.
            item: The item of the source.
            is_last: True if the pass or the call ends with this batch.
        """

    @property
    def num_steps_completed(self) -> int:
        """Number of steps that count as done. After the last batch of an optimizer step, the loop asked for another."""
        return self.num_steps_taken - self._num_open

    @property
    def is_mid_pass(self) -> bool:
        """True if the next batch belongs to the last pass that began."""
        return self._pass is not None or self._to_resume is not None or self._num_open > 0

    def settle(self) -> None:
        """Confirm the last step, because the loop over the batches has ended.

        Raises:
            RuntimeError: The group broke in the last step.
        """
        self._settle(self.place)

    def _settle(self, place: PlaceT) -> None:
        if self._undo_padding is not None:
            self._leave_padding()
        if self._num_open:
            place.confirm()
        self._num_open = 0

    def break_off(self) -> None:
        """Forget an interrupted step. Its batches will be handed out again, perhaps by another rank."""
        self._leave_padding()
        if self.is_mid_pass:
            self.resume(self.pass_index, self.completed)
        self.num_steps_taken = self.num_steps_completed
        self._pass, self._num_open, self._is_last_of_step = None, 0, True

    def resume(self, pass_index: int, consumed: int) -> None:
        """Continue a pass from elsewhere. The next batch is the one after `consumed` samples."""
        self._pass, self._is_last_of_step = None, True
        self.pass_index, self._to_resume = pass_index, (pass_index, consumed)

    def take(self, num_steps: int | None) -> Iterator[Any]:
        """Yield the batches of `num_steps` steps, over as many passes as needed.

        A step counts as done when the caller asks for the batch after it: then `place.confirm` is called, and
        `at_boundary`. An empty source ends the iteration.

        Args:
            num_steps: Number of steps; None for the rest of the current pass, or a whole one if none has begun.
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
            item = self._pass.ahead[0]  # stays there until it is handed out, in case looking ahead fails
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
        )  # may notice a lost rank; then the step has not begun
        self.num_steps_taken += is_first_of_step
        if is_last:
            self._pass = None  # the next call begins a new pass
        return batch

    def _place_in_step(self, item: ItemT) -> tuple[bool, bool]:
        """Return two flags: True if a step of all ranks begins with this item, and True if one ends with it."""
        return True, True

    def _is_last_of_pass(self, open_pass: _OpenPass[ItemT], item: ItemT) -> bool:
        """Drop the item from those drawn ahead, and draw the next. Return True if the pass ends with the item."""
        open_pass.ahead = [next(open_pass.items, None)]
        return open_pass.ahead[0] is None

    def _undoing_padding(self, batch: Any) -> Iterator[Any]:
        undo = self._undo_padding = None if self._undo is None else self._undo()
        try:
            yield batch
        finally:  # also if user code raises, unless another call has begun by then
            if undo is not None and undo is self._undo_padding:
                self._leave_padding()

    def _leave_padding(self) -> None:
        if self._undo_padding is not None:
            undo, self._undo_padding = self._undo_padding, None
            undo()


class WatchedBatches:
    """The iterator that `train_epoch` gets. `was_touched` is True once it was used."""

    def __init__(self, batches: Iterator[Any], stream: BatchStream[Any, Any]) -> None:
        self._batches = batches
        self._stream = stream
        self.was_touched = False

    @property
    def is_padding(self) -> bool:
        """True if the last batch repeats samples, because this worker has none left while others still have some."""
        is_padding: bool = self._stream.place.batch.is_padding
        return is_padding

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self._batches

    def __next__(self) -> Any:
        self.was_touched = True
        return next(self._batches)


def redrawing(batches: Iterator[Any], redraw: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches, and call `redraw` between them about ten times a second."""
    due = time.monotonic()
    for batch in batches:
        if time.monotonic() >= due:
            redraw()
            due = time.monotonic() + _REDRAW_EVERY_S
        yield batch
