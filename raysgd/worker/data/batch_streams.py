"""Batches that come one after the other, across calls: the position in the data of one replica.

A stream keeps a live iterator over its source between calls, so that `num_steps` continues where the last call stopped.
The position is the number of samples that all ranks have used, so it means the same for any number of workers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

NO_BATCH = object()
"""Instead of a batch: this rank has no sample in a global step, which still counts."""
_REDRAW_EVERY_S = 0.1


class BatchInStep(Protocol):
    """What a batch is in a step of all replicas."""

    @property
    def num_samples(self) -> int | None:
        """The number of its samples that count; None if that is not known."""

    @property
    def is_padding(self) -> bool:
        """True if it is only there to take part."""

    @property
    def is_boundary(self) -> bool:
        """True if the step of the optimizer ends with it."""


class PlaceInStep(Protocol):
    """The place of a replica in a step of all replicas.

    Attributes:
        began_at: When drawing its batch began.
    """

    began_at: float

    @property
    def batch(self) -> BatchInStep:
        """The batch that was handed out last."""

    def skip(self) -> None:
        """Called when the batch that was drawn last is left out."""

    def confirm(self) -> None:
        """Called when a step is done."""

    def end_stream(self) -> None:
        """Called when no batch follows in this call."""


ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT", bound=PlaceInStep)


class _OpenPass(Generic[ItemT]):
    """What is left of a pass.

    Args:
        items: The items that it has.

    Attributes:
        items: The same, but for those that were drawn.
        ahead: What was drawn and not handed out; None is the end of the pass.
    """

    def __init__(self, items: Iterator[ItemT]) -> None:
        self.items = items
        self.ahead: list[ItemT | None] = []


class BatchStream(ABC, Generic[ItemT, PlaceT]):
    """Hands out the batches of a source, pass after pass, and remembers where it is.

    A subclass says what an item of its source is, and how samples are counted.

    Args:
        source: Where the batches come from.
        place_of: Returns the place of the replica, which is told about each step before its batch is handed out.
        next_pass: Called whenever a new pass is opened; returns its index.
        undo: Called ahead of a batch of padding; what it returns is called when that batch is done with.

    Attributes:
        at_boundary: Called between two steps, if it is set. What it raises ends the iteration.
        prepare: Called before the first batch of a call and of a pass.
        has_one_pass: Whether there is but one, which all ranks begin together: none may begin another one by itself.
        pass_index: Index of the pass begun last.
        num_steps_taken: Steps whose first batch was handed out.
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
        self._num_open = 0  # steps begun since the last optimizer step
        self._is_last_of_step = True  # the batch drawn last
        self.at_boundary: Callable[[], None] | None = None
        self.prepare: Callable[[], None] = lambda: None
        self.has_one_pass = self._has_begun = False
        self.pass_index = 0
        self.num_steps_taken = 0

    @property
    def place(self) -> PlaceT:
        """The place of the batch that was handed out last."""
        return self._place_of()

    @property
    @abstractmethod
    def completed(self) -> int:
        """Samples of the pass begun last that all ranks have used in steps that are done; 0 where that is not known."""

    @abstractmethod
    def _begin_pass(self, consumed: int) -> Iterator[ItemT]:
        """Open the source at the pass `pass_index`, after `consumed` samples."""

    @abstractmethod
    def _begin_step(self, place: PlaceT, item: ItemT, is_last: bool) -> Any:
        """Tell the step about a batch, counts its samples, and return it; `is_last` of the pass or of the call."""

    @property
    def num_steps_completed(self) -> int:
        """Batches of optimizer steps that are done: their last batch was asked to be followed by something."""
        return self.num_steps_taken - self._num_open

    @property
    def is_mid_pass(self) -> bool:
        """True if the next batch belongs to the pass that was begun last."""
        return self._pass is not None or self._to_resume is not None or self._num_open > 0

    def settle(self) -> None:
        """Say that the loop around the steps came to its end: what was handed out is done.

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
        """Forget the step that broke off, if there is one: its batches will be handed out again, perhaps elsewhere."""
        self._leave_padding()
        if self.is_mid_pass:
            self.resume(self.pass_index, self.completed)
        self.num_steps_taken = self.num_steps_completed
        self._pass, self._num_open, self._is_last_of_step = None, 0, True

    def resume(self, pass_index: int, consumed: int) -> None:
        """Continue a pass that was begun elsewhere; the next batch is the one after `consumed` samples."""
        self._pass, self._is_last_of_step = None, True
        self.pass_index, self._to_resume = pass_index, (pass_index, consumed)

    def take(self, num_steps: int | None) -> Iterator[Any]:
        """Yield `num_steps` batches, over as many passes as it takes; with None the rest of this pass, or a whole one.

        An empty source ends the iteration.
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
            item = self._pass.ahead[0]  # stays there until it is handed out: a look ahead that fails does not lose it
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
        )  # a loss may be noticed here: it has not begun then
        self.num_steps_taken += is_first_of_step
        if is_last:
            self._pass = None  # the next call begins with a fresh one
        return batch

    def _place_in_step(self, item: ItemT) -> tuple[bool, bool]:
        """Tell whether a step of all ranks begins with a batch, where it is counted, and whether it ends with it."""
        return True, True

    def _is_last_of_pass(self, open_pass: _OpenPass[ItemT], item: ItemT) -> bool:
        """Let go of what was drawn ahead; tell whether the pass ends with it. Here that draws one more."""
        open_pass.ahead = [next(open_pass.items, None)]
        return open_pass.ahead[0] is None

    def _undoing_padding(self, batch: Any) -> Iterator[Any]:
        undo = self._undo_padding = None if self._undo is None else self._undo()
        try:
            yield batch
        finally:  # also where user code raises, unless another call has begun by then
            if undo is not None and undo is self._undo_padding:
                self._leave_padding()

    def _leave_padding(self) -> None:
        if self._undo_padding is not None:
            undo, self._undo_padding = self._undo_padding, None
            undo()


class WatchedBatches:
    """The iterator that a `train_epoch` is given; it knows whether it was used."""

    def __init__(self, batches: Iterator[Any], stream: BatchStream[Any, Any]) -> None:
        self._batches = batches
        self._stream = stream
        self.was_touched = False

    @property
    def is_padding(self) -> bool:
        """True if the batch drawn last repeats samples: other workers have some left, and this one has none."""
        is_padding: bool = self._stream.place.batch.is_padding
        return is_padding

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self._batches

    def __next__(self) -> Any:
        self.was_touched = True
        return next(self._batches)


def redrawing(batches: Iterator[Any], redraw: Callable[[], None]) -> Iterator[Any]:
    """The batches; calls `redraw` between them, some ten times a second."""
    due = time.monotonic()
    for batch in batches:
        if time.monotonic() >= due:
            redraw()
            due = time.monotonic() + _REDRAW_EVERY_S
        yield batch
