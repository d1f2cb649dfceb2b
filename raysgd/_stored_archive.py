"""Where the members of a zip archive lie, for archives that are neither compressed nor trusted.

The archives of this library, and those of `torch.save`, store their members as they are. So what is read can never be
larger than the file, and a file that says otherwise is refused before anything is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_MEMBER = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")
_IN_64_BITS = 0xFFFFFFFF
_EXTRA_OF_64_BITS = 1
_ENCRYPTED = 1


class ArchiveError(ValueError):
    """The archive is not one that was written as this library writes them."""


@dataclass(frozen=True)
class Member:
    """Where the content of a member lies in the file."""

    start: int
    num_bytes: int
    checksum: int

    def read(self, file: IO[bytes]) -> bytes:
        """Its content."""
        file.seek(self.start)
        content = file.read(self.num_bytes)
        if len(content) != self.num_bytes:
            raise ArchiveError("it ends inside a member")
        return content

    def read_checked(self, file: IO[bytes]) -> bytes:
        """Its content, if that has its checksum.

        Raises:
            ArchiveError: It has another one.
        """
        content = self.read(file)
        if zlib.crc32(content) != self.checksum:
            raise ArchiveError("a member does not have its checksum")
        return content


def members(file: IO[bytes], num_bytes: int, num_comment_bytes: int = 0) -> dict[str, Member]:
    """Reads the directory of an archive.

    Raises:
        ArchiveError: Members are compressed, encrypted, overlap, or lie where no member can be.
    """
    entries, directory_start = _directory(file, num_bytes - num_comment_bytes - _END.size)
    found: dict[str, Member] = {}
    end_of_last = 0
    for entry in sorted(entries, key=lambda one: one.start):
        member = _member(file, entry)
        if entry.start < end_of_last or member.start + member.num_bytes > directory_start:
            raise ArchiveError("its members overlap")
        if entry.name in found:
            raise ArchiveError("it has two members of one name")
        found[entry.name] = member
        end_of_last = member.start + member.num_bytes
    return found


@dataclass(frozen=True)
class _Entry:
    """What the directory says of a member: `start` is that of the header in front of it."""

    name: str
    start: int
    num_bytes: int
    checksum: int


def _directory(file: IO[bytes], end: int) -> tuple[list[_Entry], int]:
    """The entries, and where the directory begins."""
    mark, _, _, _, count, size, start, _ = _unpacked(_END, file, end)
    if mark != b"PK\5\6":
        raise ArchiveError("it does not end as an archive does")
    locator_at = end - _LOCATOR_64.size
    if locator_at >= _END_64.size and _read_at(file, locator_at, 4) == b"PK\6\7":
        end = locator_at - _END_64.size
        mark, _, _, _, _, _, _, count, size, start = _unpacked(_END_64, file, end)
        if mark != b"PK\6\6" or _unpacked(_LOCATOR_64, file, locator_at)[2] != end:
            raise ArchiveError("its end contradicts itself")
    if start + size != end:
        raise ArchiveError("its directory is not where it should be")
    entries = list(_entries(_read_at(file, start, size)))
    if len(entries) != count:
        raise ArchiveError("its directory has the wrong length")
    return entries, start


def _entries(directory: bytes) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        fields = _ENTRY.unpack(_slice(directory, at, _ENTRY.size))
        mark, _, _, flags, method, _, _, checksum, stored, size, num_name, num_extra, num_comment = fields[:13]
        if mark != b"PK\1\2" or flags & _ENCRYPTED or method != 0:
            raise ArchiveError("it has members that are compressed or encrypted")
        at += _ENTRY.size
        name = _slice(directory, at, num_name)
        extra = _slice(directory, at + num_name, num_extra)
        size, stored, start = _widened(size, stored, fields[-1], extra)
        if size != stored:
            raise ArchiveError("it has members that are compressed")
        yield _Entry(name.decode("utf-8"), start, size, checksum)
        at += num_name + num_extra + num_comment


def _widened(size: int, stored: int, start: int, extra: bytes) -> tuple[int, int, int]:
    """The three numbers, those that need more than 32 bits from the field beside them."""
    wide = iter(_wide_numbers(extra))
    try:
        size, stored, start = (next(wide) if number == _IN_64_BITS else number for number in (size, stored, start))
    except RuntimeError:  # what a generator makes of `StopIteration`
        raise ArchiveError("a number in its directory is missing") from None
    return size, stored, start


def _wide_numbers(extra: bytes) -> tuple[int, ...]:
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, num_bytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA_OF_64_BITS:
            content = _slice(extra, at, num_bytes)
            return struct.unpack(f"<{num_bytes // 8}Q", content[: num_bytes // 8 * 8])
        at += num_bytes
    return ()


def _member(file: IO[bytes], entry: _Entry) -> Member:
    """Where the content of a member begins: behind its own header, which has its name too."""
    fields = _unpacked(_MEMBER, file, entry.start)
    num_name, num_extra = fields[-2:]
    if fields[0] != b"PK\3\4" or _read_at(file, entry.start + _MEMBER.size, num_name) != entry.name.encode():
        raise ArchiveError("a member is not where its directory says")
    return Member(entry.start + _MEMBER.size + num_name + num_extra, entry.num_bytes, entry.checksum)


def _unpacked(form: struct.Struct, file: IO[bytes], at: int) -> tuple[Any, ...]:
    return form.unpack(_read_at(file, at, form.size))


def _read_at(file: IO[bytes], at: int, num_bytes: int) -> bytes:
    if at < 0:
        raise ArchiveError("it is shorter than it says")
    file.seek(at)
    return _slice(file.read(num_bytes), 0, num_bytes)


def _slice(content: bytes, at: int, num_bytes: int) -> bytes:
    part = content[at : at + num_bytes]
    if len(part) != num_bytes:
        raise ArchiveError("it is shorter than it says")
    return part
