"""Messages of ranks about a piece of work that they do together, which no rank waits for while it does it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from raysgd.connections.mesh.board import Board
from raysgd.connections.mesh.mesh import MeshBroken

_KEY = "raysgd/words"
_NUM_LOOKS = 2  # half a second apart


@dataclass
class _LastWord:
    key: str
    make: Callable[[], bytes]
    num_looks: int = 0


class RankStatements:
    """One rank's part: it says one thing in each piece of work, and hears what the others say.

    Args:
        rank: This rank.
        size: The number of all ranks.
        board: Where the words stand.
        interrupt: Ends all waiting for other ranks, and so breaks the group.

    Attributes:
        rank: The same.
        interrupt: The same.
    """

    def __init__(self, rank: int, size: int, board: Board, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.rank = rank
        self._size, self._board = size, board
        self._number = 0
        self._last: _LastWord | None = None
        board.on_idle = self._look

    def begin(self, hear: Callable[[bytes], None]) -> None:
        """Begin the next piece of work, as all ranks do.

        Args:
            hear: Called with each word of another rank, in another thread if that comes later.
        """
        self._number += 1
        self._board.forget(_KEY, but=self._key())  # each rank for itself: a message would wake all others
        self._board.watch(self._key(), hear)
        for word in self._heard().values():  # of ranks that were faster
            hear(word)

    def say(self, word: bytes) -> None:
        """Tell all ranks; a group that is broken hears nothing."""
        with suppress(MeshBroken):
            self._board.put(self._key(self.rank), word)

    def say_later(self, make: Callable[[], bytes]) -> None:
        """Tell all ranks what this makes if they go on with this piece of work for a while: they seldom do."""
        self._last = _LastWord(self._key(self.rank), make)

    def say_last(self) -> None:
        """Tell all ranks at once what was to be said later; from any thread."""
        if self._last is not None:
            with suppress(MeshBroken):
                self._board.put(self._last.key, self._last.make())

    def _look(self) -> None:
        """Called in another thread, now and then."""
        last = self._last
        if last is not None:
            last.num_looks += 1
            if last.num_looks == _NUM_LOOKS:
                self.say_last()

    def await_all(self, timeout_s: float) -> dict[int, bytes]:
        """Return the words of all other ranks, by rank; after that time, or in a broken group, those that came."""
        with suppress(MeshBroken):
            self._board.wait([self._key(rank) for rank in self._others], timeout_s)
        return self._heard()

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self.rank]

    def _heard(self) -> dict[int, bytes]:
        return {rank: self._board.get(key, 0.0) for rank in self._others if self._board.has([key := self._key(rank)])}

    def _key(self, rank: int | str = "") -> str:
        return f"{_KEY}/{self._number}/{rank}"
