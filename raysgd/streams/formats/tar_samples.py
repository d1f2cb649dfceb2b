"""`TarStream`: samples in tar files, as WebDataset names them."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from raysgd.streams.formats.files import FileStream, StreamFile
from raysgd.streams.stream import from_row


class TarStream(FileStream):
    """Rows are dicts of bytes: of the files that follow each other in a tar file and have the same name up to a dot.

    `a/0.jpg` and `a/0.cls` become `{"__key__": "a/0", "jpg": b"...", "cls": b"..."}`; decode them with `map`. Tar files
    may be compressed. Arguments and errors are those of `FileStream`. The content of samples ahead of the position is
    passed over, and not read, where the file is not compressed.
    """

    endings = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

    def _rows(self, file: StreamFile, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        with file.folder.reading(file.name) as content, tarfile.open(fileobj=content, mode="r:*") as tar:
            samples = groupby(_members(tar), key=lambda member: _key_and_field(member.name)[0])
            for number, (key, members) in enumerate(from_row(samples, start), start):
                yield _sample(tar, key, members) if is_needed(number) else None


def _members(tar: Any) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # which would remember each of them
        if member.isreg():
            yield member
    # The library takes whatever it cannot read for the end, so a file that was cut off would be a shorter one.
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the file is cut off or damaged: it has no mark at its end")


def _key_and_field(name: str) -> tuple[str, str]:
    """Divide a name at the first dot of its last part.

    >>> _key_and_field("a.b/0.seg.png")
    ('a.b/0', 'seg.png')
    """
    folder, slash, last = name.rpartition("/")
    key, _, field = last.partition(".")
    return f"{folder}{slash}{key}", field


def _sample(tar: tarfile.TarFile, key: str, members: Iterator[tarfile.TarInfo]) -> dict[str, Any]:
    sample: dict[str, Any] = {"__key__": key}
    for member in members:
        field = _key_and_field(member.name)[1]
        if field in sample:
            raise ValueError(f"sample {key!r} has two files {field!r}: each sample of a tar file needs another name.")
        content = tar.extractfile(member)
        assert content is not None, "a regular file"
        sample[field] = content.read()
    return sample
