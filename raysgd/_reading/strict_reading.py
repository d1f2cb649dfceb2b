"""Strict reading of checkpoint files that may come from anyone: their content, and the words of refusals."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Collection, Iterator
from typing import IO, Any

from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError

logger = logging.getLogger(__name__)


class DamagedFileError(ValueError):
    """The file contradicts itself, or is larger or deeper than a state may be."""


class NotPlainError(Exception):
    """The file needs more than plain data.

    Attributes:
        needed: What it needs.
    """

    def __init__(self, needed: str) -> None:
        super().__init__(needed)
        self.needed = needed


def require(holds: bool, finding: str) -> None:
    """Refuse a file.

    Raises:
        DamagedFileError: `holds` is not so. The message is `finding`.
    """
    if not holds:
        raise DamagedFileError(finding)


def content_of(file: IO[bytes], num_bytes: int, maps: bool) -> mmap.mmap | bytearray:
    """Return all of a file, in memory that can be written to: mapped if that is wanted and can be done, else read.

    Raises:
        DamagedFileError: It is shorter by now.
    """
    if maps:
        try:
            return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            logger.debug("reading a file that cannot be mapped: %s", error)
    file.seek(0)
    content = bytearray(num_bytes)
    fill(memoryview(content), file)
    return content


def fill(room: memoryview, file: IO[bytes]) -> None:
    """Read as many bytes of a file as there is room for.

    Raises:
        DamagedFileError: It has fewer.
    """
    while room:
        num_read = file.readinto(room)  # type: ignore[attr-defined]
        require(num_read > 0, "it is shorter than it says")
        room = room[num_read:]


@contextlib.contextmanager
def refusals_of(name: str, advice: str = "") -> Iterator[None]:
    """Turn what goes wrong while a file is read into the errors that users know; an `OSError` stays unchanged.

    Args:
        name: What errors call the file.
        advice: What to do about one that needs more than plain data.

    Raises:
        UnsafeCheckpointError: It needs more than plain data.
        CheckpointCorruptedError: It is damaged.
    """
    try:
        yield
    except OSError:
        raise
    except NotPlainError as error:
        text = f"`{name}` needs `{error.needed}` to be loaded, which can run code."
        raise UnsafeCheckpointError(f"{text} {advice}".rstrip()) from error
    except Exception as error:  # damaged bytes may say anything
        raise corrupted(name, f"it cannot be read ({in_short(error)})") from error


def corrupted(name: str, finding: str) -> CheckpointCorruptedError:
    """Return the error of a file that is not what was written."""
    return CheckpointCorruptedError(
        f"`{name}` is no intact checkpoint: {finding}. It was damaged, or not copied to its end. Copy it again from "
        "where it came from, or load an earlier checkpoint."
    )


def in_short(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def check_format(name: str, found: Any, newest: int) -> None:
    """Refuse a file of a later version of raysgd.

    Raises:
        ValueError: `found` is a later format than `newest`, or no number.
    """
    if not isinstance(found, int) or found > newest:
        raise ValueError(
            f"`{name}` is in checkpoint format {str(found)[:20]}; this version of raysgd knows formats up to {newest}. "
            "Upgrade raysgd to read it."
        )


def checked_state(loaded: Any, name: str, keys: Collection[str]) -> dict[str, Any]:
    """Return what was loaded, if it is a training state.

    Raises:
        ValueError: It is no dict, or lacks one of these keys.
    """
    hint = f"a training state, as a trainer's `state_dict()` returns it, has {list(keys)}."
    if not isinstance(loaded, dict):
        raise ValueError(f"`{name}` holds a `{type(loaded).__name__}`, no training state; {hint}")
    missing = [key for key in keys if key not in loaded]
    if missing:
        raise ValueError(f"`{name}` holds no training state: it lacks {missing}; {hint}")
    return loaded
