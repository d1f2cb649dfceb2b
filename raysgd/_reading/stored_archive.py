"""The members of zip archives that are neither compressed nor trusted: where they lie in the file.

The archives of this library, and those of `torch.save`, store their members as they are. So what is read can never be
larger than the file, and a file that says otherwise is refused before anything is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raysgd._reading.strict_reading import require

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_MEMBER = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")
_IN_64_BITS = 0xFFFFFFFF
_EXTRA_OF_64_BITS = 1
_ENCRYPTED = 1


@dataclass(frozen=True)
class ArchiveMember:
    """The place of a member's content in the file."""

    start: int
    num_bytes: int
    checksum: int

    def of(self, archive: memoryview) -> memoryview:
        """Its content."""
        return archive[self.start : self.start + self.num_bytes]

    def checked(self, archive: memoryview) -> memoryview:
        """Its content, if that has its checksum.

        Raises:
            DamagedFileError: It has another one.
        """
        content = self.of(archive)
        require(zlib.crc32(content) == self.checksum, "a member does not have its checksum")
        return content


def members(archive: memoryview, num_comment_bytes: int = 0) -> dict[str, ArchiveMember]:
    """Return the members of an archive by their names.

    Raises:
        DamagedFileError: Members are compressed, encrypted, overlap, or lie where no member can be.
    """
    entries, directory_start = _directory(archive, len(archive) - num_comment_bytes - _END.size)
    found: dict[str, ArchiveMember] = {}
    end_of_last = 0
    for entry in sorted(entries, key=lambda one: one.start):
        member = _member(archive, entry)
        before, end_of_last = end_of_last, member.start + member.num_bytes
        require(before <= entry.start and end_of_last <= directory_start, "its members overlap")
        require(entry.name not in found, "it has two members of one name")
        found[entry.name] = member
    return found


@dataclass(frozen=True)
class _Entry:
    """An entry of the directory: `start` is that of the header in front of the member."""

    name: str
    start: int
    num_bytes: int
    checksum: int


def _directory(archive: memoryview, end: int) -> tuple[list[_Entry], int]:
    """The entries, and where the directory begins."""
    mark, _, _, _, count, size, start, _ = _unpacked(_END, archive, end)
    require(mark == b"PK\5\6", "it does not end as an archive does")
    locator_at = end - _LOCATOR_64.size
    if locator_at >= _END_64.size and bytes(_slice(archive, locator_at, 4)) == b"PK\6\7":
        end = locator_at - _END_64.size
        mark, _, _, _, _, _, _, count, size, start = _unpacked(_END_64, archive, end)
        is_right = mark == b"PK\6\6" and _unpacked(_LOCATOR_64, archive, locator_at)[2] == end
        require(is_right, "its end contradicts itself")
    require(start + size == end, "its directory is not where it should be")
    entries = list(_entries(_slice(archive, start, size)))
    require(len(entries) == count, "its directory has the wrong length")
    return entries, start


def _entries(directory: memoryview) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        fields = _unpacked(_ENTRY, directory, at)
        mark, _, _, flags, method, _, _, checksum, stored, size, num_name, num_extra, num_comment = fields[:13]
        is_plain = mark == b"PK\1\2" and not flags & _ENCRYPTED and method == 0
        require(is_plain, "it has members that are compressed or encrypted")
        at += _ENTRY.size
        name = _slice(directory, at, num_name)
        extra = _slice(directory, at + num_name, num_extra)
        size, stored, start = _widened(size, stored, fields[-1], extra)
        require(size == stored, "it has members that are compressed")
        yield _Entry(str(name, "utf-8"), start, size, checksum)
        at += num_name + num_extra + num_comment


def _widened(size: int, stored: int, start: int, extra: memoryview) -> tuple[int, int, int]:
    """The three numbers, those that need more than 32 bits from the field beside them."""
    wide, numbers = _wide_numbers(extra), (size, stored, start)
    require(len(wide) >= numbers.count(_IN_64_BITS), "a number in its directory is missing")
    left = iter(wide)
    size, stored, start = (next(left) if number == _IN_64_BITS else number for number in numbers)
    return size, stored, start


def _wide_numbers(extra: memoryview) -> tuple[int, ...]:
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, num_bytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA_OF_64_BITS:
            content = _slice(extra, at, num_bytes)
            return struct.unpack(f"<{num_bytes // 8}Q", content[: num_bytes // 8 * 8])
        at += num_bytes
    return ()


def _member(archive: memoryview, entry: _Entry) -> ArchiveMember:
    """Return where the content of a member begins: behind its own header, which has its name too."""
    fields = _unpacked(_MEMBER, archive, entry.start)
    num_name, num_extra = fields[-2:]
    name = _slice(archive, entry.start + _MEMBER.size, num_name)
    is_there = fields[0] == b"PK\3\4" and name == entry.name.encode()
    require(is_there, "a member is not where its directory says")
    return ArchiveMember(entry.start + _MEMBER.size + num_name + num_extra, entry.num_bytes, entry.checksum)


def _unpacked(form: struct.Struct, content: memoryview, at: int) -> tuple[Any, ...]:
    return form.unpack(_slice(content, at, form.size))


def _slice(content: memoryview, at: int, num_bytes: int) -> memoryview:
    require(0 <= at <= len(content) - num_bytes, "it is shorter than it says")
    return content[at : at + num_bytes]
