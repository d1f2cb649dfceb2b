"""`DataCursor`: draws one worker's batches pass after pass, and remembers the position in its data between calls.

A cursor keeps an iterator over its data open between calls, so a call with `num_steps` continues where the previous
call stopped. The position is the number of samples that all ranks together have used. It is therefore valid for any
number of workers. A pass is one iteration through the whole data, and may span several calls.

A step counts only once it is committed (`commit`), when the training loop requests the next batch, or ends. Until then,
the operator's metrics and its `global_step` may already include a step that the position does not include.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

NO_BATCH = object()
"""Placeholder for the batch of a step in which this rank has no samples. The call still counts the step."""


class Item(Protocol):
    """A batch of a source, and its place in the pass."""

    @property
    def batch(self) -> Any:
        """The batch, or `NO_BATCH`."""

    @property
    def is_first(self) -> bool:
        """True if a global batch starts with this item."""

    @property
    def is_last_of_pass(self) -> bool | None:
        """True if the pass ends with this item. None if that is unknown before the next item is drawn."""


ItemT = TypeVar("ItemT", bound=Item)


class DataCursor(ABC, Generic[ItemT]):
    """Draws the items of a source, pass after pass over the data, and remembers the position in the data.

    A subclass defines what an item of its source is, and how samples are counted.

    Args:
        source: Object that supplies the batches, such as a wrapped data loader.
        next_pass: Function that is called when a new pass starts, and returns the index of the pass.
        has_one_pass: True if the source can be iterated through only once, by all ranks together. No second pass is
            then started.

    Attributes:
        pass_index: Index of the most recently started pass.
        num_steps_taken: Number of steps that were started, including steps in which this rank has no batch.
        num_open: Number of global batches that were started since the last committed step.
        looks_ahead: True to always draw the next item early, to learn whether a pass ends, where an item does not say
            so.
    """

    looks_ahead = False

    def __init__(self, source: Any, next_pass: Callable[[], int], has_one_pass: bool = False) -> None:
        self.source = source
        self._next_pass, self._has_one_pass, self._has_begun = next_pass, has_one_pass, False
        self._items: Iterator[ItemT] | None = None  # items of the open pass that were not drawn yet
        self._ahead: list[ItemT | None] = []  # items that were drawn but not yielded yet; None ends the pass
        self._to_resume: tuple[int, int] | None = None
        self._ends_pass = False  # True if the pass ends with the item that was drawn last
        self.pass_index = self.num_steps_taken = self.num_open = self._num_steps_in_pass = 0

    @property
    @abstractmethod
    def completed(self) -> int:
        """Number of samples of the current pass that all ranks together have used in committed steps. 0 if unknown."""

    @abstractmethod
    def _begin_pass(self, consumed: int) -> Iterator[ItemT]:
        """Return an iterator over the items of pass number `pass_index`.

        Args:
            consumed: Number of samples at the start of the pass to leave out, because they were used already.
        """

    @property
    def num_steps_completed(self) -> int:
        """Number of committed steps."""
        return self.num_steps_taken - self.num_open

    @property
    def is_mid_pass(self) -> bool:
        """True if the most recently started pass has batches left, or its last step is not committed yet."""
        return self._items is not None or self._to_resume is not None or self.num_open > 0

    def opened(self, item: ItemT, has_batch: bool) -> None:
        """Record that the batch of the item that was drawn last is about to be handed out.

        Args:
            item: The item.
            has_batch: False if this rank has no samples in the step.
        """
        self._num_steps_in_pass += item.is_first
        self.num_steps_taken += item.is_first
        self.num_open += item.is_first and has_batch
        if self._ends_pass:
            self._items = None  # the next call starts a new pass

    def commit(self) -> None:
        """Record that the last step is done. Its batches will not be drawn again."""
        self.num_open = 0

    def break_off(self) -> None:
        """Discard an interrupted step. The batches of the step will be drawn again, possibly on another rank."""
        if self.is_mid_pass:
            self.resume(self.pass_index, self.completed)
        self.num_steps_taken = self.num_steps_completed
        self._items, self.num_open = None, 0

    def resume(self, pass_index: int, consumed: int) -> None:
        """Let the next batch come from the given position in a pass.

        Args:
            pass_index: Index of the pass.
            consumed: Number of samples at the start of the pass that were used already.
        """
        self._items, self.pass_index, self._to_resume = None, pass_index, (pass_index, consumed)

    def items(
        self, check: Callable[[], None], is_one_pass: bool, looks_ahead: bool = False
    ) -> Iterator[tuple[ItemT, bool]]:
        """Yield items, pass after pass, and whether the pass ends with the item: False where that is unknown.

        An empty source ends the iteration.

        Args:
            check: Function that is called before the first item of the call and of every pass.
            is_one_pass: True to stop after the current pass, or after a whole new pass if the last one is complete.
            looks_ahead: True to draw the next item early, to learn whether a pass ends, where an item does not say so.
        """
        num_begun, just_opened = 0, False
        if self._items is not None:
            check()
        while True:
            if self._items is None:
                if is_one_pass and num_begun:
                    return
                self._items, self._ahead, just_opened = self._open(check), [], True
            if not self._ahead:
                self._ahead.append(next(self._items, None))
            item = self._ahead[0]  # keep the item in `_ahead` until it is yielded: drawing the next one may fail
            if item is None:
                self._items = None
                if just_opened:
                    return
                continue
            just_opened, is_last = False, item.is_last_of_pass
            is_unknown = is_last is None and (looks_ahead or self.looks_ahead)
            self._ahead = [next(self._items, None)] if is_unknown else []
            self._ends_pass = self._ahead[0] is None if is_unknown else bool(is_last)
            num_begun += item.is_first
            yield item, self._ends_pass

    def _open(self, check: Callable[[], None]) -> Iterator[ItemT]:
        if self._has_one_pass and self._has_begun:
            return iter(())
        self._has_begun = True
        check()
        if self._to_resume is not None:
            (self.pass_index, consumed), self._to_resume = self._to_resume, None
        else:
            self.pass_index, consumed = self._next_pass(), 0
        self._num_steps_in_pass = 0
        return self._begin_pass(consumed)
