"""Batches that were drawn and not trained on yet. The one that was drawn last is the one that counts."""

from __future__ import annotations


class DrawnAhead:
    """Counts the batches that wait for their training, so that none counts as another one.

    Attributes:
        is_last_waiting: Whether the one that was drawn last does.
    """

    def __init__(self) -> None:
        self._num = 0
        self.is_last_waiting = False

    def __bool__(self) -> bool:
        return self._num > 0

    def draw(self) -> None:
        """Note that a batch is drawn."""
        self._num += 1
        self.is_last_waiting = True

    def use(self) -> None:
        """Note that the last batch is trained on, or left out; it counts once."""
        if self.is_last_waiting:
            self._num -= 1
            self.is_last_waiting = False
