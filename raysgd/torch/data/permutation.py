"""A shuffled range that is computed where it is read, and never stored.

Opening one costs nothing, and so does reading it from the middle, however long it is. A number is written as row and
column of a table that is about square. In turn, one of the two is moved by a hash of the other, which can be undone:
so different numbers stay different (a Feistel network). The last row of the table may go past the end of the range.
What lands there is moved again until it is inside (cycle walking).

Why, and how the two ways to shuffle fit together: ADR 2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

_NUM_ROUNDS = 6
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_READ_AT_ONCE = 4096


@dataclass(frozen=True)
class Permutation(Sequence[int]):
    """The numbers from 0 to `length - 1`, each once, in an order that the seed decides.

    It is the same on every machine.

    Attributes:
        length: How many numbers there are.
        seed: What is hashed into the order.

    Examples:
        >>> numbers = Permutation(10, seed="7")
        >>> sorted(numbers) == list(range(10)), numbers[4:6] == [numbers[4], numbers[5]]
        (True, True)
        >>> len(Permutation(10**12, seed="7")[5 * 10**11 : 5 * 10**11 + 3])
        3
    """

    length: int
    seed: str

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        """Return what stands at a place, or at each place of a slice."""
        places = range(self.length)[index]
        if isinstance(places, int):
            return int(self.at(np.array([places], np.uint64))[0])
        found: list[int] = self.at(np.arange(places.start, places.stop, places.step).astype(np.uint64)).tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        """Iterate in order, some thousand numbers at a time."""
        for start in range(0, self.length, _READ_AT_ONCE):
            yield from self[start : start + _READ_AT_ONCE]

    def at(self, places: Numbers) -> Numbers:
        """Return what stands at each of these places, which must be from 0 to `length - 1`."""
        numbers = self._moved(places)
        while (outside := numbers >= self.length).any():
            numbers[outside] = self._moved(numbers[outside])
        return numbers

    def _moved(self, numbers: Numbers) -> Numbers:
        """One way through the network: of the whole table onto itself."""
        one, other = np.divmod(numbers, self._width)
        size, other_size = self._height, self._width
        for key in self._keys:
            one = (one + _hashed(other, key)) % size
            one, other, size, other_size = other, one, other_size, size
        return one * self._width + other

    @cached_property
    def _width(self) -> np.uint64:
        return np.uint64(max(1, math.isqrt(max(0, self.length - 1)) + 1))

    @cached_property
    def _height(self) -> np.uint64:
        return np.uint64(max(1, -(-self.length // int(self._width))))

    @cached_property
    def _keys(self) -> Numbers:
        digest = hashlib.blake2b(self.seed.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _hashed(numbers: Numbers, key: np.uint64) -> Numbers:
    """32 bits for each number; what goes past 64 bits on the way is dropped."""
    mixed = (numbers ^ key) * _FIRST
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _HALF
    return mixed
