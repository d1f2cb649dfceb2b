"""Things that are done once, such as a warning that would say the same on every batch."""

from __future__ import annotations

from collections.abc import Hashable


class Once:
    """Tells the first time from all others, for each key and from any thread.

    >>> once = Once()
    >>> once.is_first("weights"), once.is_first("weights"), once.is_first("accuracy")
    (True, False, True)
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, object] = {}

    def is_first(self, key: Hashable) -> bool:
        """Return whether this is the first call for `key`."""
        mark = object()
        return self._first.setdefault(key, mark) is mark  # one operation: of two threads one wins
