"""Checkpoints in a worker that wait until the driver fetches them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class PendingCheckpoints:
    """Checkpoints in this worker that wait for the driver.

    The driver always fetches those of rank 0, so they are copied at once. A checkpoint that another rank reports is
    copied only if the driver asks for it because no lower rank has one; the function waits until that is decided.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: dict[int, Any] = {}
        self._open: set[int] = set()
        self._wanted: dict[int, Any] = {}
        self._num = 0

    def keep(self, copy: Any) -> int:
        """Keeps a copy until it is fetched; returns the token to fetch it with."""
        with self._changed:
            self._num += 1
            self._copies[self._num] = copy
            return self._num

    def announce(self) -> int:
        """Returns the token of a copy that is made only if the driver asks for it."""
        with self._changed:
            self._num += 1
            self._open.add(self._num)
            return self._num

    def settle(self, token: int, make_copy: Callable[[Any], Any]) -> None:
        """From the function: waits until the driver decides about an announced copy, and makes it if it is wanted.

        Args:
            token: What `announce` returned.
            make_copy: Makes it; gets what the driver said with `fetch`.
        """
        with self._changed:
            self._changed.wait_for(lambda: token in self._wanted or token not in self._open)
            if token not in self._open:
                return
            told = self._wanted[token]
        try:
            copy = make_copy(told)
        except BaseException:
            self.refuse(token)
            raise
        with self._changed:
            self._copies[token] = copy
            self._changed.notify_all()

    def refuse(self, token: int) -> None:
        """From another thread: the announced copy will not be fetched."""
        with self._changed:
            self._open.discard(token)
            self._changed.notify_all()

    def fetch(self, token: int, told: Any = None) -> Any:
        """Returns the copy of `token`, once. Called from another thread, while the function continues.

        Args:
            token: Which one.
            told: What the function has to know to make an announced one.

        Raises:
            KeyError: There is no such copy any more.
        """
        with self._changed:
            self._wanted[token] = told
            self._changed.notify_all()
            self._changed.wait_for(lambda: token in self._copies or token not in self._open)
            del self._wanted[token]
            self._open.discard(token)
            return self._copies.pop(token)

    def clear(self) -> None:
        """Drops all copies; they will not be fetched."""
        with self._changed:
            self._copies.clear()
            self._open.clear()
            self._changed.notify_all()
