"""The members of zip archives that are neither compressed nor trusted: where they lie in the file.

The archives of this library, and those of `torch.save`, store their members as they are. So what is read can never be
larger than the file, and a file that says otherwise is refused before anything is allocated for it.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass

from raysgd._reading.strict_reading import require

_HEADER = struct.Struct("<26xHH")  # of a member: the lengths of its name, and of what follows that
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


def members(archive: memoryview) -> dict[str, ArchiveMember]:
    """Return the members of an archive by their names.

    Raises:
        DamagedFileError: Members are compressed, encrypted, overlap, or lie where no member can be.
        Exception: It is no archive.
    """
    with zipfile.ZipFile(_Bytes(archive)) as directory:
        entries, directory_start = directory.infolist(), directory.start_dir
    found: dict[str, ArchiveMember] = {}
    end_of_last = 0
    for entry in sorted(entries, key=lambda one: one.header_offset):
        member = _member(archive, entry)
        before, end_of_last = end_of_last, member.start + member.num_bytes
        require(before <= entry.header_offset and end_of_last <= directory_start, "its members overlap")
        require(entry.orig_filename not in found, "it has two members of one name")
        found[entry.orig_filename] = member
    return found


def _member(archive: memoryview, entry: zipfile.ZipInfo) -> ArchiveMember:
    """Return where the content of a member begins: behind its own header, which has its name too."""
    is_plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & _ENCRYPTED
    require(is_plain and entry.file_size == entry.compress_size, "it has members that are compressed or encrypted")
    num_name, num_extra = _HEADER.unpack_from(archive, entry.header_offset)
    name_at = entry.header_offset + _HEADER.size
    is_there = bytes(archive[entry.header_offset : entry.header_offset + 4]) == b"PK\3\4"
    name = archive[name_at : name_at + num_name]
    require(is_there and name == entry.orig_filename.encode(), "a member is not where its directory says")
    return ArchiveMember(name_at + num_name + num_extra, entry.file_size, entry.CRC)


class _Bytes(io.RawIOBase):
    """A file that is in memory already, without a copy of it."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        if begin + offset < 0:
            raise OSError("there is nothing before the beginning")  # as `zipfile` expects it of a short file
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, num_bytes: int = -1) -> bytes:
        end = len(self._content) if num_bytes is None or num_bytes < 0 else self._at + num_bytes
        part = bytes(self._content[self._at : end])
        self._at += len(part)
        return part
