"""The seal of a checkpoint file: its checksum, in the comment at the end of the archive. Torch and zip tools skip that.

The comment is `raysgd:1:xxh128:` and 32 hexadecimal digits. They are the XXH128 of the archive without the comment:
of the bytes before it, with zeros in the last two, which hold the comment's length. Other tools can verify it, see
docs/checkpoints.md; why this checksum: docs/adr/0061-xxh128-for-checkpoint-files.md.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import xxhash

MAX_BYTES = 128
"""No seal is longer."""

_PREFIX = "raysgd:1:xxh128:"
_COMMENT = re.compile(rf"{_PREFIX}([0-9a-f]+)\Z".encode())
_LENGTH_BYTES = 2


def new_checksum() -> xxhash.xxh3_128:
    """One in the making, of no bytes yet."""
    import xxhash

    return xxhash.xxh3_128()


@dataclass(frozen=True)
class Seal:
    """A checksum."""

    hexdigest: str

    @classmethod
    def at_end_of(cls, tail: bytes) -> Seal | None:
        """Returns the seal of a file with these last bytes; None if it has none."""
        found = _COMMENT.search(tail)
        if found is None:
            return None
        length = int.from_bytes(tail[: found.start()][-_LENGTH_BYTES:], "little")
        is_whole = length == len(found[0])
        return cls(found[1].decode()) if is_whole else None

    @property
    def comment(self) -> bytes:
        """The comment of the archive that holds it."""
        return f"{_PREFIX}{self.hexdigest}".encode()

    def num_sealed_bytes(self, num_bytes: int) -> int:
        """Return how many bytes of a file of `num_bytes` come before the comment and its length."""
        return num_bytes - len(self.comment) - _LENGTH_BYTES

    def fits(self, content: memoryview) -> bool:
        """Return whether the bytes of a file before the comment and its length have this checksum."""
        checksum = new_checksum()
        checksum.update(content[: self.num_sealed_bytes(len(content))])
        checksum.update(bytes(_LENGTH_BYTES))
        return checksum.hexdigest() == self.hexdigest

    def append_to(self, archive: IO[bytes]) -> None:
        """Makes this the comment of an archive that has none."""
        archive.seek(-_LENGTH_BYTES, os.SEEK_END)
        archive.write(len(self.comment).to_bytes(_LENGTH_BYTES, "little") + self.comment)
