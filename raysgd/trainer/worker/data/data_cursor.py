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
from typing import Any

from raysgd.core.arrays.batch_plan import BatchPlan, PlannedBatch


class DataCursor(ABC):
    """Draws the batches of a source, pass after pass over the data, and remembers the position in the data.

    A subclass defines how samples are counted.

    Args:
        source: Object that supplies the batches, such as a wrapped data loader.
        next_pass: Function that is called when a new pass starts, and returns the index of the pass.
        has_one_pass: True if the source can be iterated through only once, by all ranks together. No second pass is
            then started.

    Attributes:
        pass_index: Index of the most recently started pass.
        num_steps_taken: Number of steps that were started, including steps in which this rank has no batch.
        num_open: Number of global batches that were started since the last committed step.
        looks_ahead: True to always draw the next batch early, to learn whether a pass ends, where a batch does not say
            so.
    """

    looks_ahead = False

    def __init__(self, source: Any, next_pass: Callable[[], int], has_one_pass: bool = False) -> None:
        self.source = source
        self._next_pass, self._has_one_pass, self._has_begun = next_pass, has_one_pass, False
        self._items: Iterator[PlannedBatch] | None = None  # batches of the open pass that were not drawn yet
        self._ahead: list[PlannedBatch | None] = []  # batches that were drawn but not yielded yet; None ends the pass
        self._to_resume: tuple[int, int] | None = None
        self._ends_pass = False  # True if the pass ends with the batch that was drawn last
        self.pass_index = self.num_steps_taken = self.num_open = self._num_steps_in_pass = 0

    @property
    @abstractmethod
    def completed(self) -> int:
        """Number of samples of the current pass that all ranks together have used in committed steps. 0 if unknown."""

    @abstractmethod
    def _begin_pass(self, consumed: int) -> Iterator[PlannedBatch]:
        """Return an iterator over the batches of pass number `pass_index`.

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

    def opened(self, plan: BatchPlan, has_batch: bool) -> None:
        """Record that the batch that was drawn last is about to be handed out.

        Args:
            plan: How the batch counts.
            has_batch: False if this rank has no samples in the step.
        """
        self._num_steps_in_pass += plan.starts_global_batch
        self.num_steps_taken += plan.starts_global_batch
        self.num_open += plan.starts_global_batch and has_batch
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

    def drawn(
        self, check: Callable[[], None], is_one_pass: bool, looks_ahead: bool = False
    ) -> Iterator[tuple[Any, BatchPlan, bool]]:
        """Yield batches, pass after pass, with their plans, and whether the pass ends: False where that is unknown.

        An empty source ends the iteration.

        Args:
            check: Function that is called before the first batch of the call and of every pass.
            is_one_pass: True to stop after the current pass, or after a whole new pass if the last one is complete.
            looks_ahead: True to draw the next batch early, to learn whether a pass ends, where a batch does not say so.
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
            coming = self._ahead[0]  # keep it in `_ahead` until it is yielded: drawing the next one may fail
            if coming is None:
                self._items = None
                if just_opened:
                    return
                continue
            just_opened, (batch, plan, is_last) = False, coming
            is_unknown = is_last is None and (looks_ahead or self.looks_ahead)
            self._ahead = [next(self._items, None)] if is_unknown else []
            self._ends_pass = self._ahead[0] is None if is_unknown else bool(is_last)
            num_begun += plan.starts_global_batch
            yield batch, plan, self._ends_pass

    def _open(self, check: Callable[[], None]) -> Iterator[PlannedBatch]:
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
