"""Checksums of files in stores: at the end of files that raysgd makes, in a list beside those that users put there.

A seal is the XXH128 of what comes before it, written in blanks and tabs, which readers of JSON and of pickles skip. A
list is a sealed file `.raysgd-sums-*` in a folder, with the XXH128 of each file that one upload has put there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from raysgd.storage._trees import TEMPORARY

_LIST = f"{TEMPORARY}sums-"
_BLANKS = str.maketrans("01", " \t")


def _in_blanks(content: bytes) -> bytes:
    return "".join(f"{byte:08b}" for byte in content).translate(_BLANKS).encode()


_MARK = b"\n" + _in_blanks(b"raysgd:1")  # so that other files that end with blanks have no seal
_SEAL_BYTES = len(_MARK) + 8 * 16


def _new() -> Any:
    import xxhash

    return xxhash.xxh3_128()


class SentContent:
    """The content of a file, with its checksum once all of it was sent. Each attempt to send it begins at the start.

    Args:
        content: The same, without.
        sealed: Whether a seal follows.

    Attributes:
        checksum: That of what was sent, in hexadecimal digits.
    """

    def __init__(self, content: Callable[[], Iterator[bytes]], sealed: bool = False) -> None:
        self._content, self._sealed = content, sealed
        self.checksum = ""

    def __call__(self) -> Iterator[bytes]:
        total = _new()
        for piece in self._content():
            total.update(piece)
            yield piece
        self.checksum = total.hexdigest()
        if self._sealed:
            yield _MARK + _in_blanks(total.digest())


class ArrivingContent:
    """Adds up a file as it arrives, and compares it with its seal, or with what lists say."""

    def __init__(self) -> None:
        self._total = _new()  # without the end, which may be a seal
        self._end = b""

    def update(self, piece: bytes) -> None:
        """Adds what came next."""
        if len(piece) >= _SEAL_BYTES:
            self._total.update(self._end)
            self._total.update(memoryview(piece)[:-_SEAL_BYTES])
            self._end = piece[-_SEAL_BYTES:]
        else:
            end = self._end + piece
            self._total.update(end[:-_SEAL_BYTES])
            self._end = end[-_SEAL_BYTES:]

    def check(self, listed: Collection[str]) -> None:
        """Compares all of it. A seal counts more than a list: a file that has one was written later.

        Args:
            listed: Checksums that it may have; none if no list names it.

        Raises:
            OSError: It has another checksum.
        """
        if len(self._end) == _SEAL_BYTES and self._end.startswith(_MARK):
            is_right = _in_blanks(self._total.digest()) == self._end[len(_MARK) :]
        else:
            total = self._total.copy()
            total.update(self._end)
            is_right = not listed or total.hexdigest() in listed
        if not is_right:
            raise OSError("its content was altered: it has another checksum than when it was written")


# ------------------------------------------------------------------------------------------------------------ lists


def new_list_name() -> str:
    """The name of a list that no other upload uses."""
    return f"{_LIST}{secrets.token_hex(8)}"


def is_list(name: str) -> bool:
    """Return whether a file is a list, by its path."""
    return name.rpartition("/")[2].startswith(_LIST)


def list_of(checksums: Mapping[str, str]) -> bytes:
    """The content of a list."""
    return json.dumps(dict(checksums)).encode()


def listed_in(content: bytes) -> dict[str, str]:
    """Return what a list says.

    Raises:
        OSError: It is not one.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(checksum, str) for checksum in found.values()):
        raise OSError("it is not a list of checksums")
    return found
