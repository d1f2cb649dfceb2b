"""Batches that were handed out and not trained on yet: whether it is known which one a step is for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

Terms = TypeVar("Terms")


class _HandedOut(Generic[Terms]):
    """A batch that no training has followed yet, and how it counts."""

    def __init__(self, terms: Terms, batch: Any) -> None:
        self.terms = terms
        self._parts: list[weakref.ref[Any]] = []
        _note_parts(batch, self._parts)

    @property
    def is_alive(self) -> bool:
        """True if user code can still train on it, or on a part of it."""
        return any(part() is not None for part in self._parts)

    def is_same_as(self, other: _HandedOut[Terms]) -> bool:
        """Tells whether both are one object, which a rank without another batch is given again."""
        return self.is_alive and [id(part()) for part in self._parts] == [id(part()) for part in other._parts]


class DrawnAhead(Generic[Terms]):
    """The batches that a loss may come from: the last one, and those right before it that user code still holds.

    A batch that was skipped is dropped, so it is not one of them, and neither is any before it. One that was copied
    is dropped, too; in that case there is more training at the end than batches.

    Attributes:
        is_batch_missing: Whether a batch was dropped that no training followed.
    """

    def __init__(self) -> None:
        self._handed_out: list[_HandedOut[Terms]] = []
        self.is_batch_missing = False

    def __bool__(self) -> bool:
        return bool(self._handed_out)

    def note(self, terms: Terms, batch: Any) -> None:
        """Notes that a batch is handed out."""
        new = _HandedOut(terms, batch)
        if self._handed_out:
            self._let_go()
            if self._handed_out[-1].is_same_as(new):
                self._handed_out.pop()
        self._handed_out.append(new)

    def use(self, is_alike: Callable[[Terms], bool]) -> list[Terms]:
        """Says that one of them is trained on.

        Args:
            is_alike: Whether it makes no difference if it is a batch of these terms or the last one.

        Returns:
            The terms of all of them, where it does make a difference; else nothing.
        """
        if len(self._handed_out) > 1:
            self._let_go()
            if not self._are_alike(is_alike):
                gc.collect()  # what only a cycle of references holds is not held
                self._let_go()
            if not self._are_alike(is_alike):
                return [each.terms for each in self._handed_out]
        if len(self._handed_out) == 1:
            self._handed_out = []
        return []

    def _let_go(self) -> None:
        waiting = self._handed_out
        first = len(waiting) - 1
        while first > 0 and waiting[first - 1].is_alive:
            first -= 1
        if first > 0:
            self.is_batch_missing = True
            del waiting[:first]

    def _are_alike(self, is_alike: Callable[[Terms], bool]) -> bool:
        return all(is_alike(each.terms) for each in self._handed_out)


def _note_parts(batch: Any, parts: list[weakref.ref[Any]]) -> None:
    if isinstance(batch, list | tuple):
        for part in batch:
            _note_parts(part, parts)
    elif isinstance(batch, Mapping):
        _note_parts(list(batch.values()), parts)
    else:
        with suppress(TypeError):  # numbers and text: nothing that anybody trains on
            parts.append(weakref.ref(batch))
