"""Writes and reads `steps.bin`, the records of the steps of a run, and `steps.crc`, their checksums.

Each block of 256 records has a pair of checksums: of the block as it was before the last change, and after it. The pair
is written before the block. If the program is killed in between, the block still has one of the two. A block counts as
filled up with zeros, so a block of zeros, and one that no file has, have the checksum 0.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np

NO_NORM, NO_LOSS = -1.0, -1.0
STEPS = np.dtype([("loss", "<f8"), ("norm", "<f4"), ("weight", "<f4")])
Steps = np.ndarray[Any, np.dtype[Any]]

STEPS_FILE, CHECKS_FILE = "steps.bin", "steps.crc"
_CHECKSUM = np.dtype("<u4")
_Checksums = np.ndarray[Any, np.dtype[Any]]
_PAIR = 2 * _CHECKSUM.itemsize
_BLOCK = 256
_BYTES = _BLOCK * STEPS.itemsize
_OF_ZEROS = zlib.crc32(bytes(_BYTES))
_MOST_BYTES = 2**31


def read_steps(folder: Path) -> Steps:
    """Return the records in the folder of a journal. Earlier versions wrote no checksums.

    Raises:
        ValueError: A file is damaged or too large.
        FileNotFoundError: There is no file of records.
    """
    path = folder / STEPS_FILE
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"`{path}` is damaged: it has more than {_MOST_BYTES // STEPS.itemsize} steps.")
    content = path.read_bytes()
    steps = np.frombuffer(content[: len(content) // STEPS.itemsize * STEPS.itemsize], STEPS)
    checks = folder / CHECKS_FILE
    if checks.is_file():
        actual = _checksums(content)
        pairs = _pairs_of(checks.read_bytes(), len(actual))
        actual = np.pad(actual, (0, len(pairs) - len(actual)))
        damaged = np.flatnonzero((pairs != actual[:, None]).all(axis=1))
        if len(damaged):
            first = int(damaged[0]) * _BLOCK + 1
            raise ValueError(
                f"`{path}` is damaged: steps {first} to {first + _BLOCK - 1} do not have their checksum. Copy the "
                f"folder again, or delete `{CHECKS_FILE}` in it to read the steps without the check."
            )
    weights = steps["weight"]
    wrong = np.flatnonzero(~((weights >= 0) | (weights == NO_LOSS)))
    if len(wrong):
        raise ValueError(f"`{path}` is damaged: step {int(wrong[0]) + 1} has the weight {weights[wrong[0]]}.")
    return steps


def cut_steps(folder: Path, num_steps: int) -> None:
    """Remove the records of all steps after the first `num_steps`. Create the files if they do not exist.

    Raises:
        OSError: A file cannot be written.
    """
    end = num_steps * STEPS.itemsize
    start = end // _BYTES * _BYTES
    with _opened(folder / STEPS_FILE) as file:
        if not (folder / CHECKS_FILE).exists():  # an earlier version wrote the records
            actual = _checksums(_read(file, 0, _MOST_BYTES))
            with _opened(folder / CHECKS_FILE) as checks:
                _write(checks, 0, np.stack([actual, actual], axis=1).tobytes())
        if file.seek(0, io.SEEK_END) > end:
            before = _read(file, start, _BYTES)
            _note_change(folder, start // _BYTES, before, before[: end - start])
            file.truncate(end)
    with _opened(folder / CHECKS_FILE) as checks:
        checks.truncate(min(checks.seek(0, io.SEEK_END), -(-end // _BYTES) * _PAIR))


def write_steps(folder: Path, numbers: np.ndarray[Any, np.dtype[Any]], records: Steps) -> None:
    """Write the records of some steps. Records of other steps stay as they are.

    Args:
        folder: The folder of the journal.
        numbers: The numbers of the steps, in ascending order.
        records: Loss, norm and weight of each of these steps.

    Raises:
        OSError: A file cannot be written. The records are then unchanged.
    """
    places = numbers - 1
    block = int(places[0]) // _BLOCK
    num_bytes = (int(places[-1]) + 1 - block * _BLOCK) * STEPS.itemsize
    with _opened(folder / STEPS_FILE) as file:
        size = file.seek(0, io.SEEK_END)
        before = _read(file, block * _BYTES, -(-num_bytes // _BYTES) * _BYTES)
        after = bytearray(before.ljust(num_bytes, b"\0"))
        np.frombuffer(after, STEPS, len(after) // STEPS.itemsize)[places - block * _BLOCK] = records
        _note_change(folder, block, before, bytes(after))
        try:
            _write(file, block * _BYTES, after)
        except OSError:
            _write(file, block * _BYTES, before)  # which takes no room on a full disk
            file.truncate(size)
            raise


def _note_change(folder: Path, first: int, before: bytes, after: bytes) -> None:
    """Write the checksums of some blocks before they are changed. A block that is damaged keeps its checksums.

    Args:
        folder: The folder of the journal.
        first: Number of the first of these blocks.
        before: The content of the blocks.
        after: Their content after the change.
    """
    size = max(len(before), len(after))
    pair = [_checksums(content.ljust(size, b"\0")) for content in (before, after)]
    with _opened(folder / CHECKS_FILE) as checks:
        known = _pairs_of(_read(checks, first * _PAIR, len(pair[0]) * _PAIR), len(pair[0]))
        is_whole = (known == pair[0][:, None]).any(axis=1)
        _write(checks, first * _PAIR, np.where(is_whole[:, None], np.stack(pair, axis=1), known).tobytes())


def _opened(path: Path) -> io.FileIO:
    path.touch()
    return path.open("r+b", buffering=0)


def _read(file: io.FileIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _write(file: io.FileIO, start: int, content: bytes | bytearray) -> None:
    file.seek(start)
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _checksums(content: bytes) -> _Checksums:
    blocks = (content[at : at + _BYTES].ljust(_BYTES, b"\0") for at in range(0, len(content), _BYTES))
    return np.array([zlib.crc32(block) ^ _OF_ZEROS for block in blocks], _CHECKSUM)


def _pairs_of(content: bytes, num_blocks: int) -> _Checksums:
    """Return the pairs of checksums in the content of a file. A block without a pair has zeros."""
    known = np.frombuffer(content, _CHECKSUM, len(content) // _PAIR * 2).reshape(-1, 2)
    return np.concatenate([known, np.zeros((max(0, num_blocks - len(known)), 2), _CHECKSUM)])
